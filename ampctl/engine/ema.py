"""The weights that evaluations use, where they are not those that are trained: an average of them.

It is ours (EMA), moved by applied updates only, or one that the optimizers keep themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import torch_private
from ampctl.distributed.shard import is_sharded, local, regather
from ampctl.engine.boundary import Boundary

_MOST_AT_ONCE = 1 << 24
"""So many values are moved at once, or a single larger tensor: each needs room for a difference."""


class WeightAverage:
    """Keep ``average = decay * average + (1 - decay) * weights`` over applied updates.

    Floating and complex parameters are averaged in their own dtype; buffers are not: an evaluation
    uses the model's own. Source: Polyak and Juditsky 1992; https://arxiv.org/abs/1803.05407 for
    networks.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
        self._weights: list[Tensor] = [
            p for p in model.parameters() if p.is_floating_point() or p.is_complex()
        ]
        self._average = [weight.detach().clone() for weight in self._weights]
        self._is_applied = False
        self._place = {id(weight): place for place, weight in enumerate(self._weights)}

    @torch.no_grad()
    def update(self, found_inf: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """Move the average towards the present weights, unless ``found_inf`` says it is a skip.

        ``found_inf`` is a scalar on the device, so that the host need not wait: a weight of 0
        leaves the average as it is. ``parameters``: only those that one of several optimizers has.
        """
        weights, averages = self._weights, self._average
        if parameters is not None:
            places = [self._place[id(p)] for p in parameters if id(p) in self._place]
            weights = [weights[place] for place in places]
            averages = [averages[place] for place in places]
        if not weights:
            return
        share = (1.0 - self.decay) * (1.0 - found_inf)
        for some, theirs in _alike([_part(w) for w in weights], [_part(a) for a in averages]):
            weight: Any = share.to(some[0].dtype)
            if _is_one_pass(weight):  # the stub has numbers only
                torch_private.foreach_lerp_(theirs, some, [weight] * len(some))
            else:
                moved = torch_private.foreach_sub(some, theirs)
                torch_private.foreach_mul_(moved, weight)
                torch_private.foreach_add_(theirs, moved)

    @contextmanager
    def applied(self, boundary: Boundary) -> Iterator[None]:
        """Give the model the averaged weights inside, and its own back afterwards."""
        with boundary.changing():
            self._swap()
        try:
            yield
        finally:
            with boundary.changing():
                self._swap()

    def take_back(self) -> None:
        """Give the model its own weights back, whatever goes on with the averaged ones."""
        if self._is_applied:
            self._swap()

    def _swap(self) -> None:
        self._is_applied = not self._is_applied
        for weight, average in zip(self._weights, self._average, strict=True):
            if is_sharded(weight):  # whoever gathers the parts knows their memory
                mine, other = local(weight.detach()), local(average)
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                weight.data, average.data = average.data, weight.data
        regather(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict of the bare model that holds the averaged weights."""
        self._swap()
        try:
            # The tensors inside keep pointing at the averaged data: detach before the swap back. A
            # sharded one's data goes back, so it is copied.
            return {
                name: (value.clone() if is_sharded(value) else value).detach()
                if isinstance(value, Tensor)
                else value
                for name, value in self._model.state_dict().items()
            }
        finally:
            self._swap()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the averaged weights from a state dict of the bare model; names must agree."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._place:
                self._average[self._place[id(parameter)]].copy_(state[name])


def _alike(
    weights: Sequence[Tensor], averages: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Divide weights and averages into lists of one dtype, none of them much above the bound."""
    lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    sizes: dict[torch.dtype, int] = {}
    for weight, average in zip(weights, averages, strict=True):
        dtype = weight.dtype
        some, theirs = lists.setdefault(dtype, ([], []))
        some.append(weight)
        theirs.append(average)
        sizes[dtype] = sizes.get(dtype, 0) + weight.numel()
        if sizes[dtype] >= _MOST_AT_ONCE:
            yield lists.pop(dtype)
            del sizes[dtype]
    yield from lists.values()


def _is_one_pass(weight: Tensor) -> bool:
    """Return whether a lerp with this weight is the cheapest: one pass over the memory.

    Where the weight is on an accelerator, a lerp takes a kernel a tensor, and three operations of
    many tensors take a kernel each.
    """
    return weight.is_cpu


class OptimizerAverage:
    """The weights of optimizers that train at one point and are evaluated at another.

    They have methods ``train`` and ``eval``, which move the weights from one to the other, as
    schedule-free ones do (https://arxiv.org/abs/2405.15682). On the way there and back weights may
    be rounded; here training goes on from the very bits that it had. Used as `WeightAverage` is.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._kept: list[Tensor] = []
        for optimizer in optimizers:
            optimizer.train()

    def update(self, found_inf: Tensor, parameters: Sequence[Tensor] | None = None) -> None:
        """Do nothing: the optimizers move their average as they step."""

    @contextmanager
    def applied(self, boundary: Boundary) -> Iterator[None]:
        """Give the model the weights for evaluation inside, and those of training afterwards."""
        with boundary.changing():
            self._apply()
        try:
            yield
        finally:
            with boundary.changing():
                self.take_back()

    def _apply(self) -> None:
        self._kept = [each.clone() for each in self._trained()]
        for optimizer in self._optimizers:
            optimizer.eval()
        regather(self._model)

    def take_back(self) -> None:
        """Give the model its weights of training back, if it has not got them."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        for optimizer in self._optimizers:
            optimizer.train()
        for weight, value in zip(self._trained(), kept, strict=True):
            weight.copy_(value)
        regather(self._model)

    def _trained(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [local(each.detach()) for group in groups for each in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict of the bare model that holds the weights for evaluation."""
        self._apply()
        try:
            state = self._model.state_dict()
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
        finally:
            self.take_back()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: it follows from the weights and from what the optimizers hold."""


Average = WeightAverage | OptimizerAverage


def keeps_average(optimizer: Any) -> bool:
    """Return whether an optimizer moves the weights for evaluations, and back for training."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _part(value: Tensor) -> Tensor:
    """Return what this rank has of a tensor; a complex one as its real and imaginary parts."""
    value = local(value)
    return torch.view_as_real(value) if value.is_complex() else value
