"""A sample that is named anywhere is named as the data set counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_ddp import RECIPE, TESTS, Samples, events, ranks

from ampctl.doctor.check import check_recipe
from ampctl.errors import NumericsError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE)


def train(*changes: str) -> None:
    loaded = load_recipe("recipe.yaml", changes)
    worker.train(loaded, run_dir=Path("d"), resume=False, quiet=True)


class Sorted(Samples):
    """Collates its samples in another order."""

    def collate_fn(self, samples: Any) -> Any:
        x, y, index = zip(*reversed(samples), strict=True)
        return torch.stack(x), torch.stack(y), torch.tensor(index)


@pytest.mark.parametrize("micro", [8, 2])
@pytest.mark.parametrize("bad", [5, 17])
@pytest.mark.parametrize("workers", [0, 1])
def test_d11_a_sample_is_named_as_the_data_set_counts_it(
    micro: int, bad: int, workers: int
) -> None:
    options = (f"data.train.bad=[{bad}]", f"data.micro_batch_size={micro}", "amp.nonfinite=stop")
    with pytest.raises(NumericsError, match=rf"counted from 0 in data.train, its samples {bad}\)"):
        train(*options, f"data.num_workers={workers}")
    assert f"its samples {bad})" in events("d", "diagnosis")[-1]["cause"]


def test_d11_where_rows_may_be_in_another_order_all_that_may_be_meant_are_named() -> None:
    data = "data.train={_target_: test_sample_names.Sorted, size: 22, bad: [9]}"
    told = r"among its samples 8, 9\)"
    with pytest.raises(NumericsError, match=told):
        train(data, "data.shuffle=false", "data.micro_batch_size=2", "amp.nonfinite=stop")


def test_d11_of_a_stream_its_place_is_told_after_a_resume_too() -> None:
    stream = ("data.train={_target_: test_sample_names.BadStream, size: 22, bad: [13]}",)
    options = (*stream, "scheduler=null", "amp.nonfinite=stop", "train.max_steps=1")
    train(*options, "train.max_epochs=null")
    with pytest.raises(NumericsError, match=r"counted from 0 in data.train, its samples 13\)"):
        worker.resume(Path("d"), ["train.max_steps=5"], run_dir=None, trusted=True, quiet=True)


class BadStream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream with a state, so that a resume need not read what was read."""

    def __init__(self, size: int, bad: Any) -> None:
        self.samples, self.place = Samples(size, tuple(bad)), 0

    def __iter__(self) -> Any:
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_d11_check_names_it_too() -> None:
    bad = ("data.train.bad=[3]", "data.shuffle=false", "data.micro_batch_size=2")
    with pytest.raises(NumericsError, match=r"its samples 3\)"):
        check_recipe(load_recipe("recipe.yaml", bad))


def test_d11_each_rank_names_its_own() -> None:
    bad = ("data.train.bad=[13]", "amp.nonfinite=stop", "data.micro_batch_size=1")
    with pytest.raises(Exception, match=r"(?s)its samples 13\).*on rank \d"):
        ranks(2, "d", *bad)
