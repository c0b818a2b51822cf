"""Devices of simulated workers: the fake machine, on virtual time, with faults of its own.

What an engine reads and writes is done at once, since it does so on this very memory. What a reader
has still to read when it gives a block back is done later: its event comes late, or never if it
dies. A dead process's memory stays readable until main hears of the death, and is poison then.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from omni_rt.errors import OmniError
from omni_rt.wire.messages import Feed, Submit, ToWorker
from omni_rt.wire.tensors import DeviceBlock
from omni_rt_workers.cuda.driver import Address, Event, Stream
from omni_rt_workers.engine import Outbox, Task
from tests.dataplane.fake_driver import FakeDriver, FakeMachine, _Record

if TYPE_CHECKING:
    from tests.simulation.virtual import VirtualLoop

DEVICES = ("A", "B", "C")
GRANULE_BYTES = 1024
SLOT_BYTES = 512


class Devices:
    """All devices of one run, and how often something is wrong with them."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        pairs = [(a, b) for a in DEVICES for b in DEVICES if a != b]
        self.machine = FakeMachine(DEVICES, [pair for pair in pairs if rng.random() < 0.8])
        self.refuse = rng.choice([0.0, 0.0, 0.0, 0.3])  # per pool that is opened
        self.absent = rng.choice([0.0, 0.0, 0.0, 0.2])  # per process: no driver
        self.late_s = rng.choice([0.0, 0.001, 0.05])
        self.blocks = 0  # that were handed to a reader

    def driver(self, name: str) -> FakeDriver:
        if self.rng.random() < self.absent:
            raise OmniError("the driver is not there")
        return Driver(self, name)


class Driver(FakeDriver):
    def __init__(self, devices: Devices, name: str) -> None:
        super().__init__(devices.machine, name, eager=True)
        self._devices = devices
        self._theirs: set[Event] = set()

    def open(self, device: str, handle: bytes) -> Address:
        if self._devices.rng.random() < self._devices.refuse:
            raise OmniError("this machine opens no handle today")
        return super().open(device, handle)

    def open_event(self, device: str, handle: bytes) -> Event:
        event = super().open_event(device, handle)
        self._theirs.add(event)
        return event

    def record(self, event: Event, stream: Stream) -> None:
        if event not in self._theirs or not self._devices.late_s:
            super().record(event, stream)
            return
        record = self._event(event).last = _Record({})
        devices = self._devices

        def come() -> None:
            record.done = stream in devices.machine.streams  # else the process is dead

        devices.loop.call_later(devices.rng.uniform(0, devices.late_s), come)


class DeviceOutbox:
    """The outbox of an engine that makes tensors where it would make bytes."""

    def __init__(self, out: Outbox) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def put_bytes(self, task: Task, port: str, data: bytes, **more: Any) -> None:
        if port in task.emit and task.emit[port].transport == "cuda":
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._out.put(task, port, tensor, last=more.get("last", False))
        else:
            self._out.put_bytes(task, port, data, **more)


def device_blocks(message: ToWorker) -> list[DeviceBlock]:
    """What a message lends of device memory."""
    if isinstance(message, Submit):
        pieces = [piece for port in message.tensors.values() for piece in port]
    else:
        pieces = [message.data] if isinstance(message, Feed) and message.data else []
    return [piece for piece in pieces if isinstance(piece, DeviceBlock)]
