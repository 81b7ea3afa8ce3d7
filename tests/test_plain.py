"""Copies of state in plain types, and the search for what is not finite."""

from __future__ import annotations

import enum
import io
import threading
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ampctl.errors import CheckpointError
from ampctl.state_dict import host_memory
from ampctl.state_dict.copies import copied_tensors, nonfinite, snapshot
from ampctl.state_dict.host_memory import HostMemory


class Colour(enum.Enum):
    RED = "red"


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_ck4_what_users_put_into_state_loads_with_weights_only():
    Pair = namedtuple("Pair", "a b")
    state = {
        "score": np.float64(0.5),
        "count": np.int32(3),
        "flag": np.bool_(True),
        "wide": np.longdouble(0.25),
        "array": np.arange(6).reshape(2, 3)[:, ::-1],
        "rng": np.random.RandomState(0).get_state(),
        "generator": np.random.default_rng(0).bit_generator.state,
        "path": Path("a/b"),
        "colour": Colour.RED,
        "ordered": OrderedDict(x=1),
        "default": defaultdict(list, y=[1, 2]),
        "pair": Pair(1, (2.0, b"3")),
        "names": {"b", "a"},
        np.int64(7): None,
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
    }
    copy = through_a_file(snapshot(state))
    assert copy["score"] == 0.5
    assert type(copy["score"]) is float
    assert (copy["count"], copy["flag"], copy["wide"]) == (3, True, 0.25)
    assert copy["array"].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert np.array_equal(copy["rng"][1].numpy(), state["rng"][1])
    assert copy["generator"] == state["generator"]
    assert (copy["path"], copy["colour"], copy["names"]) == ("a/b", "red", ["a", "b"])
    assert type(copy["ordered"]) is dict
    assert copy["default"] == {"y": [1, 2]}
    assert copy["pair"] == (1, (2.0, b"3"))
    assert copy[7] is None
    assert (copy["dtype"], copy["size"]) == (torch.bfloat16, torch.Size([1, 2]))


@pytest.mark.parametrize(
    ("culprit", "name"),
    [
        (threading.Lock(), "lock"),
        (lambda: None, "function"),
        (np.array([object()]), "NumPy array of object"),
        ({(1, 2): 3}, "dict key of type tuple"),
        ({1, "a"}, "a set whose elements have no order"),
        (torch.empty(2, device="meta"), "tensor without memory"),
        (torch.nn.LazyLinear(2).weight, "tensor without memory"),
    ],
)
def test_ck4_what_cannot_be_saved_is_named_with_its_path(culprit, name):
    with pytest.raises(CheckpointError, match=rf"optimizer\.state\.0\.cache.*{name}"):
        snapshot({"state": [{"cache": culprit}]}, "optimizer")


def test_a_copy_shares_nothing_with_the_original():
    weight = torch.nn.Parameter(torch.ones(3))
    copy = snapshot({"weight": weight, "list": [1]})
    with torch.no_grad():
        weight.fill_(2.0)
    assert copy["weight"].tolist() == [1.0, 1.0, 1.0]
    assert not copy["weight"].requires_grad
    assert type(copy["weight"]) is torch.Tensor


def test_a_view_of_a_large_storage_is_saved_alone():
    base = torch.arange(1000.0)
    state = {"row": base[10:20], "strided": base[::100], "wide": base[:2].expand(5, 2)}
    for name, copy in snapshot(state).items():
        assert torch.equal(copy, state[name])
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()


def test_tied_weights_stay_tied_in_the_copy_and_the_file():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    copy = snapshot(model.state_dict())
    assert copy["0.weight"] is copy["1.weight"]
    loaded = through_a_file(copy)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def test_views_of_one_memory_that_differ_are_not_one_tensor():
    z = torch.randn(3, dtype=torch.complex64)
    copy = snapshot(
        {"z": z, "conj": z.conj(), "t": z.imag, "n": z.conj().imag, "int": torch.empty(0)}
    )
    for name, expected in {"z": z, "conj": z.conj(), "t": z.imag, "n": -z.imag}.items():
        assert torch.equal(copy[name], expected)
    square = torch.randn(2, 2)
    copy = snapshot([square, square.T])
    assert torch.equal(copy[0], copy[1].T)


def test_channels_last_state_keeps_its_strides():
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert through_a_file(snapshot(weight)).stride() == weight.stride()


def test_sparse_tensors_are_copied():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through_a_file(snapshot(sparse)).to_dense(), torch.eye(3))


def test_nonfinite_names_each_tensor_with_a_nan_or_an_infinity():
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf"), 1.0])
    both = torch.tensor([float("inf"), float("-inf")])  # of which the sum is NaN
    state = {
        "model": {"bn.running_mean": nan, "ok": torch.ones(2), "count": torch.tensor(3)},
        "optimizer": {"state": {0: {"exp_avg": inf.half()}, 1: [both.bfloat16()]}},
        "ema": (
            torch.tensor([1j * float("inf")]),
            torch.tensor([float("nan")], dtype=torch.float8_e4m3fn),
        ),
        "best": float("inf"),
        "empty": torch.empty(0),
        "sparse": nan.to_sparse(),
    }
    assert nonfinite(state, "all") == [
        "all.model.bn.running_mean",
        "all.optimizer.state.0.exp_avg",
        "all.optimizer.state.1.0",
        "all.ema.0",
        "all.ema.1",
        "all.sparse",
    ]


def test_large_finite_values_are_finite_although_their_sum_is_not():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert nonfinite({"w": torch.full((100,), torch.finfo(dtype).max, dtype=dtype)}) == []


def test_host_memory_is_used_again_where_it_fits():
    memory = HostMemory()
    state = {
        "large": torch.randn(300, 1000),
        "image": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "wide": torch.randn(2).expand(5, 2),
        "half": torch.randn(7).bfloat16(),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 2),
    }
    state["tied"] = state["large"]
    before: dict[str, int] = {}
    for turn in range(3):
        copy = snapshot(state, memory=memory)
        assert copy["tied"] is copy["large"]
        for name, value in state.items():
            assert torch.equal(copy[name], value), (turn, name)
            assert copy[name].untyped_storage().nbytes() == value.numel() * value.element_size()
            assert copy[name].data_ptr() != value.data_ptr() or not value.numel()
        assert copy["image"].stride() == state["image"].stride()
        places = {name: copy[name].data_ptr() for name in ("large", "image", "wide", "half")}
        assert places == before or not before
        before = places
        for name in ("large", "image", "half"):
            state[name].add_(1)
    # What is of another kind gets a place of its own, and what is gone gives its own back.
    state["large"] = state["large"].double()
    state["image"] = state["image"].contiguous()
    del state["half"], state["tied"]
    copy = snapshot(state, memory=memory)
    for name, value in state.items():
        assert torch.equal(copy[name], value)
        assert copy[name].dtype == value.dtype
    assert copy["image"].stride() == state["image"].stride()
    assert through_a_file(copy).keys() == state.keys()
    assert "half" not in memory._held


def test_memory_that_was_made_before_is_that_of_the_first_copy():
    memory = HostMemory()
    state = {"large": torch.randn(300, 1000), "half": torch.randn(7).bfloat16()}
    state["tied"] = state["large"]
    assert not memory.is_prepared
    memory.prepare(copied_tensors(state))
    assert memory.is_prepared
    copy = snapshot({**state, "later": torch.ones(3)}, memory=memory)
    assert memory.is_prepared
    assert copy["tied"] is copy["large"]
    for name, value in state.items():
        assert torch.equal(copy[name], value)


def test_memory_that_cannot_be_made_before_is_left_to_the_copy(monkeypatch: pytest.MonkeyPatch):
    def refused(value: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    memory, state = HostMemory(), {"large": torch.randn(300, 1000)}
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_room", refused)
        memory.prepare(copied_tensors(state))
        with pytest.raises(MemoryError):
            snapshot(state, memory=memory)
    assert torch.equal(snapshot(state, memory=memory)["large"], state["large"])
