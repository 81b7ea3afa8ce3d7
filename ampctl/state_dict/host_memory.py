"""Host memory that copies of a state are made in, kept from one checkpoint to the next."""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ampctl.distributed.env import use_device
from ampctl.distributed.shard import is_sharded, local

_PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as page-locked for every device."""


class HostMemory:
    """Host memory for copies of a state, kept from one to the next, which then needs no new pages.

    A copy that was made in it is gone once the next one begins. `prepare` makes it before the first
    one, of whose time new pages would be two thirds. What comes from CUDA and XPU goes
    to page-locked ("pinned") memory, into which these devices copy by themselves.
    Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()
        self._maker: threading.Thread | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether it is there, or being made."""
        return self._maker is not None or bool(self._held)

    def prepare(self, wanted: Mapping[str, Tensor]) -> None:
        """Begin to make the memory for a copy of some tensors, in a thread of its own."""
        self._maker = threading.Thread(target=self._make, args=(wanted,), name="host memory")
        self._maker.start()

    def _make(self, wanted: Mapping[str, Tensor]) -> None:
        for path, value in wanted.items():
            try:
                host = _room(value)
            except (RuntimeError, MemoryError):  # there is not enough: for the copy to say
                return
            if not _is_locked(value):
                stored = local(host).untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(stored).numpy()[:: mmap.PAGESIZE] = 0
            self._held[path] = host

    def copy(self, path: str, value: Tensor) -> Tensor:
        """Return a dense copy of a tensor (or this rank's part), complete once `settle` was called.

        A sharded one stays sharded.
        """
        if self._maker is not None:
            self._maker.join()
            self._maker = None
        host = self._held.pop(path, None)
        if host is None or not _are_alike(host, value):
            host = _room(value)
        local(host).copy_(local(value), non_blocking=_is_locked(value))
        self._used[path] = host
        if _is_locked(value):
            self._devices.add(value.device)
        return host

    def settle(self) -> None:
        """Wait for the copies that were begun, and give back what none of them needed."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)  # sync: at saves
        self._held, self._used, self._devices = self._used, {}, set()


def _is_locked(value: Tensor) -> bool:
    """Return whether a copy of a tensor goes to page-locked memory."""
    return value.device.type in ("cuda", "xpu")


def _room(value: Tensor) -> Tensor:
    """Return a host tensor to copy another one to."""
    if value.device.type == "xpu":
        return torch.empty_like(value, device="cpu", pin_memory=True)
    part = torch.empty_like(local(value), device="meta")
    if not part.numel():
        return torch.empty_like(value, device="cpu")
    # NumPy asks for huge pages, and half of the time of a first copy goes into small ones.
    memory = np.empty(part.nbytes, np.uint8)
    if value.device.type == "cuda":
        use_device(value.device)
        page_lock(memory)
    stored = torch.from_numpy(memory).view(part.dtype).as_strided(part.shape, part.stride())
    if not is_sharded(value):
        return stored
    host = torch.empty_like(value, device="cpu")
    local(host).set_(stored)  # type: ignore[call-overload]
    return host


def page_lock(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Lock the pages of an array for CUDA, until the array is gone.

    torch's own page-locked memory comes in blocks of powers of two, which its allocator never gives
    back: for a state it takes up to twice the room. Where CUDA refuses, a warning tells so, and
    copies into the memory hold up the host. Source: cudaHostRegister in
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """
    cudart, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    result = cudart.cudaHostRegister(address, memory.nbytes, _PORTABLE)
    if result != cudart.cudaError.success:
        why = cudart.cudaGetErrorString(result)
        message = f"CUDA cannot lock memory for checkpoints ({why}): saves take longer"
        warnings.warn(message, stacklevel=1)
        return
    unlock = weakref.finalize(memory, cudart.cudaHostUnregister, address)
    unlock.atexit = False  # the process gives all of it back by itself


def _are_alike(host: Tensor, value: Tensor) -> bool:
    """Return whether a host tensor is what a copy of another tensor needs."""
    own, other = local(host), torch.empty_like(local(value), device="meta")
    return (
        type(host) is type(value)
        and host.shape == value.shape
        and (own.dtype, own.shape, own.stride()) == (other.dtype, other.shape, other.stride())
    )
