"""What a GPU would be asked to do, seen on a CPU: recorded calls and fake CUDA tensors."""

from __future__ import annotations

import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem
from torch.utils._python_dispatch import TorchDispatchMode

from ampctl.amp.precision import set_accuracy
from ampctl.checkpoint import background_save
from ampctl.checkpoint.background_save import BackgroundSave
from ampctl.data.move import to_device
from ampctl.distributed.env import use_device
from ampctl.engine.ema import WeightAverage
from ampctl.recipe.schema import AmpConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_e1_the_thread_that_writes_takes_the_device_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, torch.device]] = []

    def noted(device: torch.device) -> None:
        taken.append((threading.current_thread().name, device))

    monkeypatch.setattr(background_save, "use_device", noted)
    third = torch.device("cuda:3")
    writer = BackgroundSave(True, third)
    writer.start(lambda: None)
    writer.close()
    assert taken == [("checkpoint_0", third)]


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 0)])
def test_e1_the_device_of_a_rank_becomes_that_of_a_thread(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    use_device(torch.device(device))
    use_device(CPU)
    assert taken == [index]


def test_e1_parts_are_written_without_copies_ahead_over_a_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ampctl.checkpoint import sharded

    made: list[dict[str, Any]] = []

    class Noted(filesystem.FileSystemWriter):
        def __init__(self, path: Path, **options: Any) -> None:
            made.append(options)
            super().__init__(path, **options)

    class Alone:
        rank, group = 0, None

        def of_first(self, value: Any) -> Any:
            return value

        def gather(self, value: Any) -> list[Any]:
            return [value]

    monkeypatch.setattr(filesystem, "FileSystemWriter", Noted)
    shards = {"model.weight": torch.arange(6.0)}
    written = sharded._write_parts(tmp_path / "x.dist", tmp_path / "parts", shards, Alone())  # type: ignore[arg-type]
    assert [options["per_thread_copy_ahead"] for options in made] == [0]
    assert len(written) == 2


class Moves:
    """A batch with a ``to`` of its own."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Moves:
        self.asked.append({"device": device, "non_blocking": non_blocking})
        return self


class TakesAnything(Moves):
    def to(self, *args: Any, **options: Any) -> Moves:
        return super().to(*args, **options)


class TakesADevice(Moves):
    def to(self, device: torch.device) -> Moves:  # type: ignore[override]
        return super().to(device)


class Encoding(UserDict[str, Tensor]):
    """A mapping with a ``to`` that comes by way of ``__getattr__``, as some libraries write it."""

    def __getattr__(self, name: str) -> Any:
        if name == "to":
            return lambda device: self
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("kind", "waits"), [(Moves, False), (TakesAnything, False), (TakesADevice, True)]
)
def test_e2_a_batch_that_moves_itself_is_asked_not_to_wait(kind: type[Moves], waits: bool) -> None:
    batch = kind()
    assert to_device({"inside": [batch]}, CPU)["inside"] == [batch]
    assert batch.asked == [{"device": CPU, "non_blocking": not waits}]


def test_e2_a_batch_whose_method_does_not_tell_its_arguments_moves_too() -> None:
    batch = Encoding(a=torch.ones(2))
    assert to_device(batch, CPU) is batch


class Recorded(TorchDispatchMode):
    """Notes the operations that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_e4_the_average_of_many_weights_takes_three_kernels_on_a_gpu() -> None:
    with FakeTensorMode():
        with CUDA:
            model = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))
            model.append(nn.Linear(2, 2, dtype=torch.float64))
        average = WeightAverage(model, 0.9)
        with Recorded() as recorded:
            average.update(torch.zeros((), device=CUDA))
    moves = [name for name in recorded.operations if "foreach" in name]
    assert len(moves) == 3 * 2, recorded.operations  # of each dtype
    assert len(recorded.operations) < 20, recorded.operations


@pytest.mark.parametrize(("most", "pieces"), [(10, 3), (6, 5)])
def test_e4_a_large_model_is_averaged_in_pieces(
    most: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampctl.engine.ema._MOST_AT_ONCE", most)
    with FakeTensorMode():
        with CUDA:
            model = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        with Recorded() as recorded:
            WeightAverage(model, 0.9).update(torch.zeros((), device=CUDA))
    moves = [name for name in recorded.operations if "foreach" in name]
    assert len(moves) == 3 * pieces, moves  # of 30 values, 12 or 6 at most in one piece


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_e4_both_ways_of_averaging_give_the_same(
    skipped: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages = []
    for is_cpu in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.complex64))
        average = WeightAverage(model, 0.7)
        before = {name: value.clone() for name, value in average.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        with monkeypatch.context() as patch:
            patch.setattr("ampctl.engine.ema._is_one_pass", lambda _, answer=is_cpu: answer)
            average.update(torch.tensor(skipped))
        averages.append(average.state_dict())
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value)
        assert torch.equal(value, before[name]) == bool(skipped), name


@pytest.mark.parametrize(("wanted", "tf32"), [("highest", False), ("high", True)])
def test_e8_convolutions_are_computed_as_precisely_as_products(wanted: Any, tf32: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = not tf32
        set_accuracy(AmpConfig(matmul_precision=wanted))
        assert torch.backends.cudnn.allow_tf32 == tf32
        assert torch.get_float32_matmul_precision() == wanted
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
