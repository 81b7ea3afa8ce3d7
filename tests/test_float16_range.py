"""How scaled gradients lie in the range of float16: the share that is lost, and the largest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ampctl.amp import gradients
from ampctl.doctor.trace import Operation, Trace

TINY = 2.0**-24


def by_hand(groups: list[list[Tensor]]) -> tuple[float, float]:
    """The definition, value by value."""
    values = [abs(v) for group in groups for g in group for v in g.double().flatten().tolist()]
    return sum(v < TINY for v in values) / len(values), max(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_share_and_the_largest_value_are_those_of_the_definition(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(300).uniform_(-30, 10, generator=generator)
    values = (torch.exp2(exponents) * torch.randn(300, generator=generator)).to(dtype)
    edge = torch.tensor([TINY, -TINY, TINY / 2, 0.0, -0.0]).to(dtype)
    groups = [[values[:200].view(20, 10).t(), edge], [values[200:].clone()]]
    lost, largest = gradients.float16_range(groups)
    assert lost.dtype == largest.dtype == torch.float32
    share, top = by_hand(groups)
    assert 0 < share < 1
    assert lost.item() == pytest.approx(share, rel=1e-6)
    assert largest.item() == top


def test_gradients_are_read_and_left_as_they_are() -> None:
    groups = [[torch.tensor([-3.0, 1e-9])], [torch.full((2**18 + 1,), -2.0)]]
    before = [[g.clone() for g in group] for group in groups]
    gradients.float16_range(groups)
    for group, kept in zip(groups, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, kept, strict=True))


def test_more_values_than_one_block_holds_are_all_counted() -> None:
    sizes = (100, 2**17, 2**18, 1, 3 * 2**18 + 5, 2**18 - 1)
    parts = [torch.zeros(size) for size in sizes] + [torch.ones(2**19)]
    parts[4][-1] = -5.0
    lost, largest = gradients.float16_range([parts])
    assert lost.item() == pytest.approx((sum(sizes) - 1) / (sum(sizes) + 2**19), rel=1e-6)
    assert largest.item() == 5.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_shows_in_the_largest(value: float) -> None:
    _, largest = gradients.float16_range([[torch.tensor([1.0, value])], [torch.ones(2)]])
    assert str(largest.item()) == str(value)


@pytest.mark.parametrize(("device", "most"), [("cpu", 2**18), ("meta", 2**24)])
def test_a_block_is_as_large_as_the_cache_of_a_core_or_as_a_queue_wants(
    device: str, most: int
) -> None:
    for sizes, blocks in (((8, 8), 1), ((most // 2, most // 2), 1), ((most, 8), 2)):
        seen: list[Operation] = []
        with Trace(seen.append):
            gradients.float16_range([[torch.empty(size, device=device) for size in sizes]])
        assert sum(operation.name == "cat" for operation in seen) == blocks, sizes


def test_no_block_is_longer_than_the_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_CACHED_ELEMENTS", 4)
    seen: list[Operation] = []
    with Trace(seen.append):
        gradients.float16_range([[torch.ones(size) for size in (2, 3, 2, 3)]])
    assert [each.output.numel() for each in seen if each.name == "cat"] == [2, 3, 2, 3]


def test_figures_of_several_devices_are_moved_to_the_first() -> None:
    groups = [[torch.ones(2, device="meta")], [torch.ones(3)]]
    for measure, figures in ((gradients.total_norm, 1), (gradients.float16_range, 2)):
        seen: list[Operation] = []
        with Trace(seen.append):
            measure(groups)
        moved = [each.output.device.type for each in seen if each.name == "_to_copy"]
        assert moved == ["meta"] * figures
