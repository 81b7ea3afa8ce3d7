"""Memory for copies of CUDA tensors, seen without a GPU: what CUDA is asked to lock and unlock."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ampctl.state_dict import host_memory
from ampctl.state_dict.host_memory import page_lock


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a CUDA runtime that does nothing; it refuses what is larger than a megabyte."""
    noted: list[tuple[Any, ...]] = []

    def register(address: int, size: int, flags: int) -> int:
        noted.append(("lock", address, size))
        return 2 if size > 2**20 else 0

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: noted.append(("unlock", address)),
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {code}",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return noted


def test_e5_as_many_bytes_are_locked_as_the_state_has_and_unlocked_when_it_goes(
    calls: list[tuple[Any, ...]],
) -> None:
    memory = np.empty(3 * 2**18 + 1, np.uint8)
    address = memory.ctypes.data
    page_lock(memory)
    assert calls == [("lock", address, 3 * 2**18 + 1)]  # torch's own would be 2**20
    tensor = torch.from_numpy(memory).view(torch.uint8).as_strided((2, 3), (3, 1))
    del memory
    gc.collect()
    assert len(calls) == 1, "it is unlocked under a tensor that lies in it"
    del tensor
    gc.collect()
    assert calls[1:] == [("unlock", address)]


def test_e5_memory_that_cuda_does_not_lock_is_told_and_used(calls: list[tuple[Any, ...]]) -> None:
    memory = np.empty(2**20 + 1, np.uint8)
    with pytest.warns(UserWarning, match=r"cannot lock memory for checkpoints \(error 2\)"):
        page_lock(memory)
    del memory
    gc.collect()
    assert [name for name, *_ in calls] == ["lock"]


def test_e5_nothing_is_locked_for_a_tensor_without_values(calls: list[tuple[Any, ...]]) -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(0, 5, device="cuda:0")
    assert host_memory._room(value).shape == (0, 5)
    assert calls == []


def test_the_room_of_a_cuda_tensor_has_its_strides_and_is_locked(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(host_memory, "use_device", devices.append)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        value = torch.empty(4, 3, 5, 5, device="cuda:0").to(memory_format=torch.channels_last)
    room = host_memory._room(value)
    assert (room.device.type, room.dtype, room.shape) == ("cpu", value.dtype, value.shape)
    assert room.stride() == value.stride()
    assert calls == [("lock", room.data_ptr(), value.nbytes)]
    assert devices == [value.device], "a thread without a device opens a context on device 0"
