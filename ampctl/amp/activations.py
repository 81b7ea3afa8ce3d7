"""How near the outputs of a model's modules come to the largest number of float16."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle


class Peaks:
    """The largest absolute value in what each module puts out, while the context is open.

    Only of float16 outputs, and only if ``active``: it reads every one of them once, so it is for
    the steps that are logged. Nothing is read back to the host.
    """

    def __init__(self, *, active: bool) -> None:
        self.modules: list[nn.Module] = []
        self._active = active
        self._peaks: list[Tensor] = []
        self._seen: deque[ref[Tensor]] = deque(maxlen=4)  # kept alive, they would cost memory
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Peaks:
        if self._active:
            self._handle = register_module_forward_hook(self._look)
        return self

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float16:
                continue
            # What a container hands on is its last part's, and was looked at there.
            if tensor.numel() and not any(tensor is seen() for seen in self._seen):
                self._seen.append(ref(tensor))
                self.modules.append(module)
                self._peaks.append(torch.linalg.vector_norm(tensor.detach(), float("inf")).float())

    def figures(self) -> dict[str, Tensor]:
        """Return the largest of all peaks, and whose it is as a place in ``modules``."""
        if not self._peaks:
            return {}
        peaks = torch.stack(self._peaks)
        return {"activation": peaks.amax(), "activation_at": peaks.argmax().float()}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
