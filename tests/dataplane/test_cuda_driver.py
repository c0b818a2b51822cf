"""The driver over CUDA's bindings, as far as it goes without a device: errors, handles, devices."""

from __future__ import annotations

import ctypes
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from omni_rt.errors import OmniError
from omni_rt_workers.cuda.runtime import HANDLE_BYTES, CudaDriver


class _Code(Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 600


class _Handle:
    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class _Runtime(ModuleType):
    """The shape of `cuda.bindings.runtime`: each call gives (code, *values)."""

    cudaError_t = _Code
    cudaIpcMemHandle_t = cudaIpcEventHandle_t = _Handle
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaIpcMemLazyEnablePeerAccess, cudaEventDisableTiming, cudaEventInterprocess = 1, 2, 4

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.current = 0
        self.said: list[tuple[Any, ...]] = []
        self.ready = True

    def cudaGetErrorString(self, code: _Code) -> tuple[_Code, bytes]:
        return _Code.cudaSuccess, b"out of memory"

    def cudaGetDeviceCount(self) -> tuple[_Code, int]:
        return _Code.cudaSuccess, 2

    def cudaGetDeviceProperties(self, number: int) -> tuple[_Code, Any]:
        return _Code.cudaSuccess, SimpleNamespace(uuid=SimpleNamespace(bytes=bytes([number]) * 16))

    def cudaGetDevice(self) -> tuple[_Code, int]:
        return _Code.cudaSuccess, self.current

    def cudaSetDevice(self, number: int) -> tuple[_Code]:
        self.current = number
        return (_Code.cudaSuccess,)

    def cudaMalloc(self, nbytes: int) -> tuple[_Code, int | None]:
        self.said.append(("cudaMalloc", nbytes, self.current))
        if nbytes > 1000:
            return _Code.cudaErrorMemoryAllocation, None
        return _Code.cudaSuccess, 0x1000

    def cudaIpcGetMemHandle(self, address: int) -> tuple[_Code, _Handle]:
        handle = _Handle()
        ctypes.memmove(handle.getPtr(), b"\0h" * (HANDLE_BYTES // 2), HANDLE_BYTES)
        return _Code.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle: _Handle, flags: int) -> tuple[_Code, int]:
        self.said.append(("cudaIpcOpenMemHandle", handle.data.raw, flags, self.current))
        return _Code.cudaSuccess, 0x2000

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[_Code]:
        return (_Code.cudaSuccess,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[_Code, int]:
        self.said.append(("cudaEventCreateWithFlags", flags))
        return _Code.cudaSuccess, 77

    def cudaEventRecord(self, event: int, stream: int) -> tuple[_Code]:
        self.said.append(("cudaEventRecord", event, stream, self.current))
        return (_Code.cudaSuccess,)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[_Code]:
        self.said.append(("cudaStreamWaitEvent", stream, event, self.current))
        return (_Code.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[_Code]:
        self.said.append(("cudaStreamSynchronize", stream, self.current))
        return (_Code.cudaSuccess,)

    def cudaMemcpyAsync(
        self, target: int, source: int, nbytes: int, kind: int, stream: int
    ) -> tuple[_Code]:
        self.said.append(("cudaMemcpyAsync", stream, self.current))
        return (_Code.cudaSuccess,)

    def cudaEventQuery(self, event: int) -> tuple[_Code]:
        return (_Code.cudaSuccess if self.ready else _Code.cudaErrorNotReady,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    runtime, bindings = _Runtime(), ModuleType("cuda.bindings")
    bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return runtime


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(OmniError, match="cuda-bindings") as caught:
        CudaDriver()
    assert caught.value.hint == "pip install 'omni-rt[cuda]'"


def test_a_refusal_says_which_call_why_and_what_to_do(runtime: _Runtime) -> None:
    driver = CudaDriver()
    with pytest.raises(OmniError) as caught:
        driver.allocate(driver.devices()[0], 2000)
    assert str(caught.value).startswith(
        "cudaMalloc failed: out of memory (cudaErrorMemoryAllocation). lower the stage's `pool`"
    )


def test_devices_go_by_uuid_and_the_current_one_stays(runtime: _Runtime) -> None:
    driver = CudaDriver()
    second = "GPU-01010101-0101-0101-0101-010101010101"
    assert driver.devices()[1] == second
    driver.allocate(second, 10)
    assert runtime.said == [("cudaMalloc", 10, 1)]
    with pytest.raises(OmniError):
        driver.allocate(second, 2000)
    assert runtime.current == 0
    with pytest.raises(
        OmniError, match=r"cannot see device GPU-x; it sees: GPU-0000.*CUDA_VISIBLE"
    ):
        driver.allocate("GPU-x", 10)


def test_a_handle_travels_as_its_bytes_and_is_opened_once(runtime: _Runtime) -> None:
    driver = CudaDriver()
    device = driver.devices()[0]
    handle = driver.export(device, driver.allocate(device, 10))
    assert handle == b"\0h" * (HANDLE_BYTES // 2)
    address = driver.open(device, handle)
    assert runtime.said[-1] == ("cudaIpcOpenMemHandle", handle, 1, 0)
    with pytest.raises(OmniError, match="open in this process already"):
        driver.open(device, handle)
    driver.close(device, address)
    driver.open(device, handle)
    with pytest.raises(OmniError, match="handle of 3 bytes"):
        driver.open(device, b"abc")


def test_events_are_for_other_processes_and_can_be_asked(runtime: _Runtime) -> None:
    driver = CudaDriver()
    event = driver.create_event(driver.devices()[0])
    assert runtime.said == [("cudaEventCreateWithFlags", 2 | 4)]
    assert driver.done(event)
    runtime.ready = False
    assert not driver.done(event)


@pytest.mark.parametrize("handle", [0, 0x7F00_0000_1000])  # 0: each device's default stream
def test_work_goes_to_the_streams_own_device_whichever_is_current(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch, handle: int
) -> None:
    driver = CudaDriver()
    second = driver.devices()[1]
    current = SimpleNamespace(cuda_stream=handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: current)
    stream = driver.current_stream(second)
    assert stream != driver.current_stream(driver.devices()[0])
    event = driver.create_event(second)
    runtime.said.clear()
    driver.record(event, stream)
    driver.wait(event, stream)
    driver.copy(1, 2, 3, stream)
    driver.synchronize(stream)
    assert runtime.said == [
        ("cudaEventRecord", 77, handle, 1),
        ("cudaStreamWaitEvent", handle, 77, 1),
        ("cudaMemcpyAsync", handle, 1),
        ("cudaStreamSynchronize", handle, 1),
    ]
    assert runtime.current == 0
