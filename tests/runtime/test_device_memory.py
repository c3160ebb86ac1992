"""Memory of a GPU of another process, as far as this can be tested without a GPU. See tests/gpu/test_rings.py."""

from __future__ import annotations

import ctypes
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.platforms.device_memory import HANDLE_BYTES, DeviceMemory, _loaded

ADDRESS, NUM_BYTES = 4096, 1000


class Driver:
    """The CUDA driver."""

    def cuMemGetAddressRange_v2(self, base: None, size: Any, address: ctypes.c_void_p) -> int:
        size._obj.value = NUM_BYTES
        return 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no call reach CUDA. Returns their names."""
    made = list[str]()

    def run(self: DeviceMemory, name: str, *arguments: Any) -> None:
        made.append(name)
        if name == "cudaIpcOpenMemHandle":
            arguments[0]._obj.value = ADDRESS

    monkeypatch.setattr(DeviceMemory, "__init__", lambda self: setattr(self, "_device", torch.device("cuda", 0)))
    monkeypatch.setattr(DeviceMemory, "_driver", Driver(), raising=False)
    monkeypatch.setattr(DeviceMemory, "_run", run)
    return made


class There:
    """A tensor at the address of the memory."""

    def data_ptr(self) -> int:
        return ADDRESS


def test_memory_that_torch_has_copied_is_closed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so with memory of another GPU that the process sees. Later writes would not be seen."""

    def copied(self: DeviceMemory, address: ctypes.c_void_p, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes)

    monkeypatch.setattr(DeviceMemory, "_tensor", copied)
    with pytest.raises(OSError, match="another device than cuda:0") as caught:
        DeviceMemory().open(bytes(HANDLE_BYTES), NUM_BYTES)  # type: ignore[call-arg]
    assert caught.value.errno == errno.EXDEV
    assert calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


def test_memory_that_torch_refuses_is_closed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: DeviceMemory, address: ctypes.c_void_p, num_bytes: int) -> Tensor:
        raise RuntimeError("the pointer is not registered")

    monkeypatch.setattr(DeviceMemory, "_tensor", refused)
    with pytest.raises(OSError, match="not registered"):
        DeviceMemory().open(bytes(HANDLE_BYTES), NUM_BYTES)  # type: ignore[call-arg]
    assert calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


def test_memory_is_open_until_it_is_closed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "_tensor", lambda self, address, num_bytes: There())
    memory = DeviceMemory()  # type: ignore[call-arg]
    with pytest.raises(OSError, match="1000 bytes, not 1001"):
        memory.open(bytes(HANDLE_BYTES), NUM_BYTES + 1)
    assert memory.open(bytes(HANDLE_BYTES), NUM_BYTES).data_ptr() == ADDRESS
    assert calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaIpcOpenMemHandle"]


def test_a_library_is_found_in_a_folder_with_spaces(tmp_path: Path) -> None:
    import _ctypes

    folder = tmp_path / "my  folder"
    folder.mkdir()
    path = folder / "libcopied.so.1"
    shutil.copy(_ctypes.__file__, path)
    loaded = ctypes.CDLL(str(path))
    assert _loaded("libcopied.so")._handle == loaded._handle
    with pytest.raises(OSError, match="not loaded"):
        _loaded("libmissing.so")
