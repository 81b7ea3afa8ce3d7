"""Whether the weights that an optimizer trains are changed by anything but its step.

The first steps of a process are looked at; the host waits for none of it. What a finding means is
for ``doctor.moved`` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ampctl.amp.precision import has_float64
from ampctl.distributed.shard import local
from ampctl.errors import UsageError, first_of
from ampctl.torch_private import times_written

_LOOKED_AT = 3
"""How many steps are."""


class Untouched:
    """Look on while a task and its model compute a loss; see :meth:`around`."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._left = _LOOKED_AT
        self._is_looking = False
        self._moved: Tensor | None = None

    def begin(self) -> None:
        """Begin with a step, if it is one of the first."""
        self._is_looking, self._moved = self._left > 0, None
        self._left -= self._is_looking

    def end(self) -> Tensor | None:
        """End with the step; return what :meth:`name` reads, or None if nobody looked."""
        self._is_looking = False
        return self._moved

    def name(self, moved: float) -> str | None:
        """Return the name of the first parameter that was changed, if one was."""
        names = self._names([self._parameters[-int(moved)]]) if moved else []
        return names[0] if names else None

    def around(self) -> AbstractContextManager[None]:
        """Look at weights and gradients before and after what runs inside.

        Raises UsageError if parameters have another dtype afterwards, or gradients are others: only
        backward passes of ampctl make and drop them.
        """
        return self._looking() if self._is_looking and self._parameters else nullcontext()

    def around_backward(self) -> AbstractContextManager[None]:
        """Look at weights before and after a backward pass, whose hooks may step by themselves."""
        return self._weights() if self._is_looking and self._parameters else nullcontext()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        gradients = self._gradients()
        dtypes = [parameter.dtype for parameter in self._parameters]
        with self._weights():
            yield
            self._require_own(gradients, dtypes)

    def _require_own(
        self, gradients: Sequence[tuple[Tensor | None, int]], dtypes: Sequence[torch.dtype]
    ) -> None:
        pairs = zip(self._parameters, dtypes, strict=True)
        cast = [parameter for parameter, dtype in pairs if parameter.dtype is not dtype]
        if cast:
            raise UsageError(
                "task: the task or the model casts parameters itself: "
                f"{first_of(self._names(cast))} to {cast[0].dtype}. Leave their dtype, and set "
                "amp.dtype"
            )
        touched = [
            parameter
            for parameter, was, now in zip(
                self._parameters, gradients, self._gradients(), strict=True
            )
            if was[0] is not now[0] or was[1] != now[1]
        ]
        if touched:
            raise UsageError(
                "task: the task or the model changes gradients itself, of "
                f"{first_of(self._names(touched))}. A task returns its loss, and ampctl makes the "
                "step: leave out backward(), zero_grad() and step()"
            )

    @contextmanager
    def _weights(self) -> Iterator[None]:
        before = figures(self._parameters)
        yield
        after = figures(self._parameters)
        same = (after == before) | (after.isnan() & before.isnan())
        # Counted from the end, so that 0 is none and the largest is the first.
        places = torch.arange(len(same), 0, -1, device=same.device)
        moved = (places * ~same.all(dim=1)).amax().float()
        self._moved = moved if self._moved is None else torch.maximum(self._moved, moved)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        every = (parameter.grad for parameter in self._parameters)
        return [(each, -1 if each is None else times_written(each)) for each in every]

    def _names(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        wanted = set(map(id, parameters))
        return [name for name, each in self._model.named_parameters() if id(each) in wanted]


@torch.no_grad()
def figures(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum and the norm of each parameter, which hardly any change leaves as they are."""
    device = parameters[0].device
    dtype = torch.float64 if has_float64(device) else torch.float32
    figures = []
    for parameter in parameters:
        value = local(parameter.detach())
        value = torch.view_as_real(value) if value.is_complex() else value
        pair = (value.sum(dtype=dtype), torch.linalg.vector_norm(value, dtype=dtype))
        figures.append(torch.stack(pair).to(device))
    return torch.stack(figures)
