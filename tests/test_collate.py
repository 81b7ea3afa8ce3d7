"""Samples that form no batch are named, and ``data.collate_fn`` makes a batch of any."""

from __future__ import annotations

import datetime
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ampctl.data.collate import Collate
from ampctl.data.loader import EvalData, MapData
from ampctl.data.order import Order
from ampctl.data.stream import StreamData
from ampctl.doctor.check import check_recipe
from ampctl.errors import UsageError
from ampctl.recipe import trust
from ampctl.recipe.load import load_recipe
from ampctl.recipe.own_code import as_text
from ampctl.run import worker

X = torch.zeros(3)
RECIPE = """
name: ragged
model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: test_collate.Ragged}
  batch_size: 8
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: float32}
train: {max_epochs: 1, device: cpu}
"""


class Odd:
    """What torch cannot collate."""


class Ragged(Dataset[Any]):
    """Sample 5 is longer than the others."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3 + (index == 5),), float(index)), torch.tensor([float(index)])


class RaggedStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Ragged()[i] for i in range(8))


def cut(samples: list[Any], length: int = 3) -> tuple[Tensor, Tensor]:
    return torch.stack([x[:length] for x, _ in samples]), torch.stack([y for _, y in samples])


def nothing(samples: list[Any]) -> None:
    pass


def fails(samples: list[Any]) -> Any:
    raise ZeroDivisionError("nothing to share")


class Cut:
    def __init__(self, length: int = 3) -> None:
        self.length = length

    def __call__(self, samples: list[Any]) -> Any:
        return cut(samples, self.length)


class NoFunction:
    pass


FORMS = {
    "size": (X, torch.zeros(4), r"at \[0\], sample 0 is float32 \[3\], sample 5 is float32 \[4\]"),
    "array": (np.zeros(3), np.zeros((1, 3)), r"NumPy float64 \[3\], sample 5 .* \[1, 3\]"),
    "none": (X, None, r"sample 5 is None"),
    "all none": (None, None, r"at \[0\], sample 0 is None"),
    "keys": ({"a": X, "b": 1}, {"a": X}, r"a dict of 'a', 'b', sample 5 is a dict of 'a'"),
    "inner": ({"a": [X, 1]}, {"a": [X[:2], 1]}, r"at \[0\]\['a'\]\[0\], .* float32 \[2\]"),
    "lengths": ((X, 1), (X, 1, 2), r"a tuple of 2, sample 5 is a tuple of 3"),
    "text": (1, "one", r"sample 0 is a number, sample 5 is a str"),
    "objects": (np.array([None]), np.array([None]), r"sample 0 is NumPy object \[1\]"),
    "date": (datetime.date(2026, 1, 1),) * 2 + (r"sample 0 is a datetime.date",),
    "odd": (Odd(), Odd(), r"sample 0 is a test_collate.Odd"),
    "boxes": (
        {"boxes": torch.zeros(2, 4)},
        {"boxes": torch.zeros(0, 4)},
        r"\['boxes'\], sample 0 is float32 \[2, 4\], sample 5 is float32 \[0, 4\]",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_d2_samples_that_form_no_batch_are_named_with_their_forms(form: str) -> None:
    usual, other, said = FORMS[form]
    # A number that is whole in one sample and not in another is no difference.
    samples = [(usual, 1), (other, 0.5), (usual, 2)]
    with pytest.raises(UsageError, match=said) as found:
        Collate(Ragged(), None, "data.train")(samples, (0, 5, 2))
    assert f"{found.value}".startswith("data.train: samples of Ragged cannot form a batch: ")
    assert '"data.collate_fn={_target_: my_data.collate}"' in f"{found.value}"


@pytest.mark.parametrize("workers", [0, 1])
def test_d2_the_indices_are_those_of_the_data_set_in_workers_evaluation_and_streams(
    workers: int,
) -> None:
    settings: Any = {"seed": 0, "num_workers": workers}
    sources: list[Any] = [
        MapData(Ragged(), Order(8, 8, 8, seed=3), num_workers=workers),
        EvalData(Ragged(), 8, **settings, pin_memory=False),
        StreamData(RaggedStream(), batch_size=8, micro_batch_size=8, **settings),
    ]
    for source in sources:
        batches = iter(source) if isinstance(source, EvalData) else source.windows(0, 0)
        with (
            closing(source),
            pytest.raises(UsageError, match=r"sample 5 is float32 \[4\]"),
        ):
            next(batches)


@pytest.fixture
def _recipe(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE)


def checked(*overrides: str) -> Any:
    return check_recipe(load_recipe("r.yaml", overrides))


@pytest.mark.usefixtures("_recipe")
def test_d2_train_and_check_end_in_words() -> None:
    with pytest.raises(UsageError, match="cannot form a batch"):
        checked()
    with pytest.raises(UsageError, match="cannot form a batch"):
        worker.train(load_recipe("r.yaml", []), run_dir=Path("run"), resume=False, quiet=True)


@pytest.mark.usefixtures("_recipe")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["cut", "cut, length: 3", "Cut", "Cut, length: 3"])
@pytest.mark.parametrize("data", ["Ragged", "RaggedStream"])
def test_d2_a_function_or_a_class_of_the_recipe_makes_the_batches(
    kind: str, workers: int, data: str
) -> None:
    facts = checked(
        f"data.collate_fn={{_target_: test_collate.{kind}}}",
        f"data.train._target_=test_collate.{data}",
        "data.eval={_target_: test_collate.Ragged}",
        f"data.num_workers={workers}",
        "data.micro_batch_size=3",
    )
    assert facts["verdict"] == "ready to train"


@pytest.mark.usefixtures("_recipe")
@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("test_collate.nothing", r"data.collate_fn: returned None for samples "),
        ("test_collate.cut, lenth: 3", r"data.collate_fn.lenth: .* did you mean length\?"),
        ("test_collate.NoFunction", r"gave a NoFunction, which cannot be called"),
        ("test_collate.cuts", r"data.collate_fn._target_: .* did you mean test_collate.cut\?"),
        ("test_collate.X", r"X is a Tensor, which cannot be called"),
        ("torch.zeros", r"data.collate_fn: no batch of samples .*: TypeError"),
    ],
)
def test_d2_a_collate_function_that_is_none_is_told(block: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){said}"):
        checked(f"data.collate_fn={{_target_: {block}}}")


@pytest.mark.usefixtures("_recipe")
@pytest.mark.parametrize("workers", [0, 1])
def test_d2_a_fault_of_ones_own_collate_function_shows_its_line(workers: int) -> None:
    with pytest.raises(ZeroDivisionError) as found:
        checked("data.collate_fn={_target_: test_collate.fails}", f"data.num_workers={workers}")
    text = as_text(found.value)
    assert 'raise ZeroDivisionError("nothing to share")' in text
    assert "in data.collate_fn, of samples " in text


@pytest.mark.usefixtures("_recipe")
def test_d2_a_strangers_collate_function_needs_trust() -> None:
    loaded = load_recipe("r.yaml", ["data.collate_fn={_target_: test_collate.cut}"])
    assert any(
        line.startswith("data.collate_fn: test_collate.cut") for line in trust.foreign(loaded)
    )


def test_d2_the_recipes_function_goes_before_the_data_sets_own() -> None:
    class Own(Ragged):
        def collate_fn(self, samples: list[Any]) -> str:
            return "own"

    samples = [Ragged()[0], Ragged()[1]]
    assert Collate(Own(), None, "data.train")(samples, (0, 1)) == "own"
    assert len(Collate(Own(), cut, "data.train")(samples, (0, 1))) == 2
