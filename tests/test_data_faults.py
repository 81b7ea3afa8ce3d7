"""A fault of the data is told alike by the training process and by its data workers."""

from __future__ import annotations

import pickle
import re
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from ampctl.data.loader import EvalData, MapData
from ampctl.data.order import Order
from ampctl.data.stream import StreamData
from ampctl.doctor.check import check_recipe
from ampctl.errors import AmpctlError, Problem, RecipeError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.own_code import as_text
from ampctl.run import worker

pytestmark = pytest.mark.usefixtures("deadline")  # a lost fault is waited for without end
EVERY = (0, 1, 2)


class NotPickled(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def stop() -> None:
    next(iter(()))


def full() -> None:
    raise OSError(28, "No space left on device")


def memory() -> None:
    raise MemoryError("10 GiB")


def cancelled() -> None:
    raise CancelledError


def refused() -> None:
    raise RecipeError([Problem("r.yaml:1", "a", "is wrong"), Problem("", "b", "too", "mend it")])


def odd() -> None:
    raise NotPickled(1, 2)


def nothing() -> None:
    raise LookupError


RAISED: dict[str, Callable[[], Any]] = {
    "StopIteration": stop,
    "sys.exit": lambda: sys.exit("no such folder"),
    "sys.exit(0)": lambda: sys.exit(0),
    "the disk": full,
    "memory": memory,
    "a task given up": cancelled,
    "words": refused,
    "an error that pickle cannot carry": odd,
    "no message": nothing,
    "a library's line": lambda: torch.zeros(2)[9],
    "a name": lambda: {}["x"],
}


class Fails(Dataset[Any]):
    """Sample 5 cannot be read."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            RAISED[self.fault]()
        return torch.full((2,), float(index))


class FailsAtOnce(Fails):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class FailsInAStream(IterableDataset[Any]):
    def __init__(self, fault: str) -> None:
        self.samples = Fails(fault)

    def __iter__(self) -> Iterator[Any]:
        for index in range(9):
            yield self.samples[index]


def read(dataset: Any, workers: int) -> None:
    if isinstance(dataset, IterableDataset):
        sizes = {"batch_size": 3, "micro_batch_size": 3, "seed": 0, "num_workers": workers}
        data: Any = StreamData(dataset, **sizes)
    else:
        order = Order(len(dataset), 3, 3, seed=0, shuffle=False)
        data = MapData(dataset, order, num_workers=workers)
    try:
        for _ in data.windows(0, 0):
            pass
    finally:
        data.close()


def raised(dataset: Any, workers: int) -> BaseException:
    try:
        read(dataset, workers)
    except BaseException as error:
        return error
    raise AssertionError("it was read")


def outcome(dataset: Any, workers: int) -> tuple[Any, ...]:
    """What a user sees, but for which worker it was."""
    error = raised(dataset, workers)
    in_words = isinstance(error, AmpctlError)
    said = f"{error}" if in_words else as_text(error)
    said = re.sub(r"  \(in data worker \d+\)\n", "", said)
    said = re.sub(r" \(which pickle cannot carry: .*\)", "", said)
    said = re.sub(r"RuntimeError: NotPickled", "test_data_faults.NotPickled", said)
    # Of this test itself, which is somebody's own file too.
    said = re.sub(
        r'\A.*?(?=File "[^"]*test_data_faults\.py", line \d+, in __getitem)', "", said, flags=re.S
    )
    problems = error.problems if isinstance(error, RecipeError) else ()
    return in_words and type(error), getattr(error, "exit_code", 1), problems, said


@pytest.mark.parametrize("fault", RAISED)
@pytest.mark.parametrize("kind", [Fails, FailsAtOnce, FailsInAStream])
def test_d1_a_fault_is_told_alike_with_and_without_workers(fault: str, kind: Any) -> None:
    told = [outcome(kind(fault), workers) for workers in EVERY]
    assert told[0] == told[1] == told[2]
    said = told[0][-1]
    if fault != "words":
        assert "test_data_faults.py" in said
    if "sys.exit" in fault:
        assert "was called in the midst of it" in said
    if fault not in ("words", "memory") and kind is not FailsInAStream:
        assert "reading sample 5 of data.train" in said


def test_d1_an_index_out_of_range_is_told_in_words_by_workers_too() -> None:
    dataset: Any = Subset(torch.utils.data.TensorDataset(torch.zeros(4, 2)), [0, 1, 99999, 2])
    told = [outcome(dataset, workers) for workers in EVERY]
    assert told[0] == told[1] == told[2]
    assert told[0][:2] == (RecipeError, 2)
    assert told[0][-1].startswith("data.train: reading sample 2 failed: IndexError: ")
    data = EvalData(dataset, 4, seed=0, num_workers=1, pin_memory=False)
    with pytest.raises(UsageError, match=r"data\.eval: reading sample 2 failed"):
        list(data)
    data.close()


def test_d1_a_recipes_problems_survive_another_process() -> None:
    error = RecipeError([Problem("r.yaml:3", "model", "is wrong"), Problem("", "b", "too", "so")])
    error.add_note("on the way")
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, f"{again}", again.__notes__) == (
        error.problems,
        f"{error}",
        ["on the way"],
    )


class Given(Dataset[Any]):
    """Sample 5 is what is given."""

    def __init__(self, value: Any, usual: Any = None) -> None:
        self.value, self.usual = value, torch.zeros(3) if usual is None else usual

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return self.value if index == 5 else self.usual


@pytest.mark.parametrize("how", ["lambda", "gradient"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_dl1_what_a_worker_cannot_send_is_told(how: str, is_stream: bool) -> None:
    def value() -> Any:
        if how == "lambda":
            return {"x": [torch.zeros(2), lambda: None]}
        return torch.ones(2, requires_grad=True) * 2

    class Own(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return index

        def collate_fn(self, samples: list[Any]) -> Any:
            return value()

    class OwnStream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (value() for _ in range(3))

    dataset: Any = OwnStream() if is_stream else Own()
    with pytest.raises(UsageError, match="a data worker cannot send its batch"):
        read(dataset, 1)


@pytest.mark.parametrize("workers", EVERY)
def test_d2_an_image_of_pil_gets_its_remedy(workers: int) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    for dataset in (Given(image), Given(image, image), Given((image, 1), (image, 1))):
        with pytest.raises(UsageError, match=r"PIL\.Image.*(?s:.*)v2\.ToImage"):
            read(dataset, workers)


RECIPE = """
name: odd
model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: test_data_faults.Pairs, value: float64}
  batch_size: 9
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: float32}
train: {max_epochs: 1, device: cpu}
"""


class Pairs(Given):
    def __init__(self, value: str) -> None:
        x = torch.zeros(4) if value == "longer" else torch.zeros(3, dtype=torch.float64)
        super().__init__((x, torch.zeros(1)), (torch.zeros(3), torch.zeros(1)))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("value", "micro", "form"),
    [("float64", 9, r"float64 \[3\]"), ("float64", 2, "float64"), ("longer", 1, r"float32 \[4\]")],
)
def test_d11_a_sample_of_another_form_that_torch_takes_is_named(
    value: str, micro: int, form: str
) -> None:
    Path("r.yaml").write_text(RECIPE)
    changes = [f"data.train.value={value}", f"data.micro_batch_size={micro}"]
    with pytest.raises(UsageError, match=rf"of data\.train, at \[0\], .*sample 5 is {form}"):
        check_recipe(load_recipe("r.yaml", changes))
    for workers in (0, 1):  # in a worker torch would cast it
        again = load_recipe("r.yaml", [*changes, f"data.num_workers={workers}"])
        with pytest.raises(UsageError, match=rf"sample 5 is {form}"):
            worker.train(again, run_dir=Path(f"run-{workers}"), resume=False, quiet=True)
