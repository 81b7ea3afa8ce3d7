"""A step that an optimizer has made, taken back where it should not have been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ampctl.distributed.shard import local
from ampctl.engine.updater import Updater


class Rewind:
    """Take back a step that an optimizer has made, without the host knowing whether it must.

    :meth:`mark` before the step, :meth:`restore` with ``found_inf`` after it. Parameters and every
    tensor in the optimizer's state and groups are kept; where a step makes new state or changes a
    number that is no tensor, the host has to look.
    """

    def __init__(self, updater: Updater) -> None:
        self._optimizer = updater.optimizer
        self._parameters = updater.parameters
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []

    @torch.no_grad()
    def mark(self) -> None:
        """Remember parameters, state and groups as they are."""
        state = self._optimizer.state
        self._states = [(p, dict(state[p]) if p in state else {}) for p in self._parameters]
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        mappings = (*self._groups, *(kept for _, kept in self._states))
        values = (v for kept in mappings for v in kept.values() if isinstance(v, Tensor))
        now = [local(each.detach()) for each in (*self._parameters, *values)]
        if [tensor.data_ptr() for tensor in now] != [t.data_ptr() for t, _ in self._kept]:
            self._kept = [(tensor, tensor.clone()) for tensor in now]
            return
        for tensor, copy in self._kept:
            copy.copy_(tensor)

    @torch.no_grad()
    def restore(self, found_inf: Tensor) -> None:
        """Put back what was remembered where ``found_inf`` (a float scalar) is not 0."""
        bad = {}
        for device in {tensor.device for tensor, _ in self._kept}:
            bad[device] = found_inf.to(device).bool()  # sync: where state is kept on the host
        for tensor, copy in self._kept:
            torch.where(bad[tensor.device], copy, tensor, out=tensor)
        state, groups = self._optimizer.state, self._optimizer.param_groups
        pairs = [*zip(groups, self._groups, strict=True)]
        pairs += [(state.get(parameter, {}), kept) for parameter, kept in self._states]
        if all(_is_same(now, kept) for now, kept in pairs):
            return
        if found_inf.item():  # sync: its first step, or numbers that the host keeps
            for group, kept in zip(groups, self._groups, strict=True):
                group.clear()
                group.update(kept)
            for parameter, kept in self._states:
                state.pop(parameter, None)
                if kept:
                    state[parameter] = kept


def _is_same(state: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    return state.keys() == kept.keys() and all(
        state[name] is value or (not isinstance(value, Tensor) and state[name] == value)
        for name, value in kept.items()
    )
