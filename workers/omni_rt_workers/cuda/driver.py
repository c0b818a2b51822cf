"""What is asked of a device, and no more: the real one and the tests' one look alike.

Devices go by UUID, since two processes need not number them alike. Addresses, streams and events
are this process's; a stream says which device it is on, also a device's default one. Calls that
take a stream return at once; the work is done in the stream's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Address = int
Stream = int
Event = int


class DeviceDriver(Protocol):
    """All raise `OmniError` if the device refuses."""

    def devices(self) -> list[str]:
        """UUIDs of the devices this process may use, in its own order."""
        ...

    def can_peer(self, device: str, other: str) -> bool:
        """Whether `device` can read the memory of `other`."""
        ...

    # ---- memory

    def allocate(self, device: str, nbytes: int) -> Address:
        """Memory of its own, whose handle exposes no one else's: `nbytes` in whole granules."""
        ...

    def free(self, device: str, address: Address) -> None: ...

    def export(self, device: str, address: Address) -> bytes:
        """The handle under which another process can open an allocation."""
        ...

    def open(self, device: str, handle: bytes) -> Address:
        """Map another process's allocation into `device`. Once for each handle and process."""
        ...

    def close(self, device: str, address: Address) -> None: ...

    # ---- events, for other processes too

    def create_event(self, device: str) -> Event: ...

    def export_event(self, device: str, event: Event) -> bytes: ...

    def open_event(self, device: str, handle: bytes) -> Event:
        """Another process's event, to be recorded and waited for on streams of `device`."""
        ...

    def destroy_event(self, event: Event) -> None: ...

    # ---- work

    def current_stream(self, device: str) -> Stream:
        """Where the engine's own work goes."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event now stands for all that the stream was given so far."""
        ...

    def wait(self, event: Event, stream: Stream) -> None:
        """What the stream is given from now on comes after what the event stands for now.

        An event that was never recorded stands for nothing.
        """
        ...

    def done(self, event: Event) -> bool:
        """Whether all that the event stands for is done already, as seen from here."""
        ...

    def copy(self, target: Address, source: Address, nbytes: int, stream: Stream) -> None:
        """Between any two places of this process: devices, mapped pools, ordinary memory."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Wait here until the stream has nothing left to do."""
        ...

    def tensor(self, device: str, address: Address, nbytes: int) -> torch.Tensor:
        """The memory as a uint8 tensor, which does not own it."""
        ...
