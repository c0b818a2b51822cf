"""The device driver over NVIDIA's own bindings (`cuda-bindings`, in the extra `cuda`).

Memory comes from cudaMalloc and not from torch's allocator: that one cannot share what lies in
expandable segments, and keeps what it shared until every reader has counted down in a file.
Not used here: cuMemCreate with a descriptor to pass on, whose memory outlives its exporter.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omni_rt.errors import OmniError
from omni_rt_workers.cuda.driver import Address, Event, Stream

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64  # of memory and of event handles: CUDA_IPC_HANDLE_SIZE
# A stream is its device's number and, in the lower bits, the runtime's handle.
_HANDLE_BITS = 64
_HANDLE_MASK = (1 << _HANDLE_BITS) - 1


class CudaDriver:
    """`DeviceDriver` of this process. Raises `OmniError` where there is no device to use."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise OmniError(
                f"device pools need the package cuda-bindings: {error}",
                hint="pip install 'omni-rt[cuda]'",
            ) from error
        self._rt: Any = runtime
        self._events: dict[Event, Any] = {}  # address of the handle -> the bindings' object
        self._opened: dict[Address, bytes] = {}
        count = self._do("cudaGetDeviceCount")
        self._numbers = {self._uuid(number): number for number in range(count)}

    def devices(self) -> list[str]:
        return list(self._numbers)

    def can_peer(self, device: str, other: str) -> bool:
        if device == other:
            return True
        number, peer = self._number(device), self._number(other)
        return bool(self._do("cudaDeviceCanAccessPeer", number, peer))

    # ---- memory

    def allocate(self, device: str, nbytes: int) -> Address:
        with self._on(device):
            return int(self._do("cudaMalloc", nbytes))

    def free(self, device: str, address: Address) -> None:
        with self._on(device):
            self._do("cudaFree", address)

    def export(self, device: str, address: Address) -> bytes:
        with self._on(device):
            handle = self._do("cudaIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, device: str, handle: bytes) -> Address:
        if handle in self._opened.values():
            raise OmniError("the device memory of this handle is open in this process already")
        theirs = self._handle(self._rt.cudaIpcMemHandle_t(), handle)
        flags = self._rt.cudaIpcMemLazyEnablePeerAccess  # the only one there is
        with self._on(device):
            address = int(self._do("cudaIpcOpenMemHandle", theirs, flags))
        self._opened[address] = handle
        return address

    def close(self, device: str, address: Address) -> None:
        del self._opened[address]
        with self._on(device):
            self._do("cudaIpcCloseMemHandle", address)

    # ---- events

    def create_event(self, device: str) -> Event:
        rt = self._rt
        with self._on(device):
            flags = rt.cudaEventDisableTiming | rt.cudaEventInterprocess
            return self._keep(self._do("cudaEventCreateWithFlags", flags))

    def export_event(self, device: str, event: Event) -> bytes:
        with self._on(device):
            handle = self._do("cudaIpcGetEventHandle", self._events[event])
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_event(self, device: str, handle: bytes) -> Event:
        theirs = self._handle(self._rt.cudaIpcEventHandle_t(), handle)
        with self._on(device):
            return self._keep(self._do("cudaIpcOpenEventHandle", theirs))

    def destroy_event(self, event: Event) -> None:
        self._do("cudaEventDestroy", self._events.pop(event))

    # ---- work

    def current_stream(self, device: str) -> Stream:
        import torch

        number = self._number(device)
        return number << _HANDLE_BITS | int(torch.cuda.current_stream(number).cuda_stream)

    def record(self, event: Event, stream: Stream) -> None:
        with self._at(stream) as handle:
            self._do("cudaEventRecord", self._events[event], handle)

    def wait(self, event: Event, stream: Stream) -> None:
        with self._at(stream) as handle:
            self._do("cudaStreamWaitEvent", handle, self._events[event], 0)

    def done(self, event: Event) -> bool:
        (code,) = self._rt.cudaEventQuery(self._events[event])
        if code == self._rt.cudaError_t.cudaErrorNotReady:
            return False
        self._check("cudaEventQuery", code)
        return True

    def copy(self, target: Address, source: Address, nbytes: int, stream: Stream) -> None:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault  # told by the addresses
        with self._at(stream) as handle:
            self._do("cudaMemcpyAsync", target, source, nbytes, kind, handle)

    def synchronize(self, stream: Stream) -> None:
        with self._at(stream) as handle:
            self._do("cudaStreamSynchronize", handle)

    def tensor(self, device: str, address: Address, nbytes: int) -> torch.Tensor:
        import torch

        return torch.as_tensor(_Memory(address, nbytes), device=f"cuda:{self._number(device)}")

    # ---- inside

    def _do(self, name: str, *arguments: Any) -> Any:
        """Call the runtime; the value it gives, if any."""
        code, *values = getattr(self._rt, name)(*arguments)
        self._check(name, code)
        return values[0] if values else None

    def _check(self, name: str, code: Any) -> None:
        if code != self._rt.cudaError_t.cudaSuccess:
            _, text = self._rt.cudaGetErrorString(code)
            raise OmniError(f"{name} failed: {text.decode()} ({code.name})", hint=_HINTS.get(name))

    def _number(self, device: str) -> int:
        try:
            return self._numbers[device]
        except KeyError:
            shown = ", ".join(self._numbers) or "none"
            raise OmniError(
                f"this process cannot see device {device}; it sees: {shown}",
                hint="let CUDA_VISIBLE_DEVICES name the devices of both ends",
            ) from None

    def _uuid(self, number: int) -> str:
        raw = self._do("cudaGetDeviceProperties", number).uuid.bytes
        digits = bytes(raw)[:16].hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return "GPU-" + "-".join(parts)

    @contextlib.contextmanager
    def _on(self, device: str) -> Iterator[None]:
        """Allocations and events belong to the current device; torch's must not change."""
        with self._on_number(self._number(device)):
            yield

    @contextlib.contextmanager
    def _at(self, stream: Stream) -> Iterator[int]:
        """The stream's handle, on its device: handle 0 is each device's default stream."""
        with self._on_number(stream >> _HANDLE_BITS):
            yield stream & _HANDLE_MASK

    @contextlib.contextmanager
    def _on_number(self, number: int) -> Iterator[None]:
        before = self._do("cudaGetDevice")
        if number != before:
            self._do("cudaSetDevice", number)
        try:
            yield
        finally:
            if number != before:
                self._do("cudaSetDevice", before)

    def _keep(self, event: Any) -> Event:
        number = int(event)
        self._events[number] = event
        return number

    def _handle(self, empty: Any, handle: bytes) -> Any:
        if len(handle) != HANDLE_BYTES:
            raise OmniError(f"a handle of {len(handle)} bytes is none of CUDA's")
        ctypes.memmove(empty.getPtr(), handle, HANDLE_BYTES)
        return empty


class _Memory:
    """Device memory as others describe it to torch."""

    def __init__(self, address: Address, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_HINTS = {
    "cudaMalloc": "lower the stage's `pool`, or its share of the device's memory",
    "cudaIpcOpenMemHandle": "both ends must be in one IPC namespace (--ipc=host) on one driver",
    "cudaIpcGetMemHandle": "this device has no IPC: tensors must cross in shared memory",
}
