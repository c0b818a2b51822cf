"""A machine with devices, in ordinary memory, that does everything as late as it may.

Copies, records and waits lie in their stream until somebody advances it, so a reader that forgot to
wait sees poison. It also knows, from the calls alone, which access is ordered before which other
(vector clocks): one that is not, raises `Misuse` at the call, whatever the timing. Messages between
processes order nothing on the device, as in the real one.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from omni_rt.errors import OmniError
from omni_rt_workers.cuda.driver import Address, Event, Stream

POISON = 0xA5
_DEVICE_SPACE = 1 << 56  # no address of ordinary memory lies there

Clock = dict[Stream, int]  # how much of each stream comes before


class Misuse(AssertionError):
    """The device was used in a way that is undefined, or reads the wrong bytes, on a real one."""


@dataclass(eq=False)
class _Access:
    start: int
    end: int
    stream: Stream
    tick: int
    write: bool


@dataclass(eq=False)
class _Allocation:
    owner: str
    device: str
    data: bytearray
    alive: bool = True
    mapped: set[str] = field(default_factory=set)  # processes that have it open
    accesses: list[_Access] = field(default_factory=list)


@dataclass(eq=False)
class _Record:
    clock: Clock
    done: bool = False
    lost: bool = False  # its process died before it came to it


@dataclass(eq=False)
class _EventState:
    owner: str
    last: _Record | None = None


@dataclass(eq=False)
class _Copy:
    target: Address
    source: Address
    nbytes: int


@dataclass(eq=False)
class _Wait:
    record: _Record


@dataclass(eq=False)
class _StreamState:
    process: str
    device: str
    weight: int = 1  # how often it is its turn, against others
    work: deque[_Copy | _Wait | _Record] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)


class FakeMachine:
    """`peers` are the pairs (reader, owner) of devices that can read each other's memory."""

    def __init__(
        self,
        devices: Collection[str] = ("A",),
        peers: Collection[tuple[str, str]] = (),
    ) -> None:
        self.devices = list(devices)
        self.peers = set(peers)
        self.numbers = itertools.count(1)
        self.allocations: dict[bytes, _Allocation] = {}  # by handle
        self.exported_events: dict[bytes, _EventState] = {}
        self.streams: dict[Stream, _StreamState] = {}
        self.mappings: dict[Address, tuple[str, _Allocation]] = {}  # base -> process, memory

    def process(self, name: str, *, eager: bool = False) -> FakeDriver:
        return FakeDriver(self, name, eager=eager)

    # ---- time

    def step(self, rng: random.Random | None = None) -> bool:
        """One piece of work of one stream, the first that can go on or a random one.

        False if none can.
        """
        ready = [stream for stream in self.streams if self._ready(stream)]
        if not ready:
            return False
        weights = [self.streams[stream].weight for stream in ready]
        self.advance(rng.choices(ready, weights)[0] if rng else ready[0])
        return True

    def advance(self, stream: Stream) -> None:
        work = self.streams[stream].work.popleft()
        if isinstance(work, _Record):
            work.done = True
        elif isinstance(work, _Copy):
            self._apply(work)

    def drain(self) -> None:
        """Do all that is left, everywhere. Raises `Misuse` if streams wait for ever."""
        while self.step():
            pass
        stuck = [number for number, stream in self.streams.items() if stream.work]
        if stuck:
            raise Misuse(f"streams {stuck} wait for what will never be")

    def kill(self, name: str) -> None:
        """The process is gone, mid-copy: its work is not done, its memory holds anything."""
        for number, stream in list(self.streams.items()):
            if stream.process == name:
                for work in self.streams.pop(number).work:
                    if isinstance(work, _Record):
                        work.lost = True
                for allocation in self.allocations.values():
                    allocation.accesses = [a for a in allocation.accesses if a.stream != number]
        for handle, allocation in list(self.allocations.items()):
            allocation.mapped.discard(name)
            if allocation.owner == name:
                allocation.alive = False
                allocation.data[:] = bytes([POISON]) * len(allocation.data)
                del self.allocations[handle]
        self.mappings = {a: m for a, m in self.mappings.items() if m[0] != name}

    def doomed(self) -> set[str]:
        """Processes with a stream that waits for what a dead one did not come to do."""
        return {
            stream.process
            for stream in self.streams.values()
            if any(isinstance(work, _Wait) and work.record.lost for work in stream.work)
        }

    # ---- inside

    def _ready(self, stream: Stream) -> bool:
        work = self.streams[stream].work
        return bool(work) and (not isinstance(work[0], _Wait) or work[0].record.done)

    def locate(self, address: Address) -> tuple[_Allocation, int] | None:
        """The device memory there; None for ordinary memory."""
        if address < _DEVICE_SPACE:
            return None
        base = address >> 40 << 40
        if base not in self.mappings:
            raise Misuse("use after close: nothing is mapped there")
        return self.mappings[base][1], address - base

    def _apply(self, copy: _Copy) -> None:
        source, target = self.locate(copy.source), self.locate(copy.target)
        if source is None:
            data = ctypes.string_at(copy.source, copy.nbytes)
        else:
            data = bytes(source[0].data[source[1] : source[1] + copy.nbytes])
        if target is None:
            ctypes.memmove(copy.target, data, copy.nbytes)
        else:
            target[0].data[target[1] : target[1] + copy.nbytes] = data


class FakeDriver:
    """`DeviceDriver` of one process. With `eager`, each call is carried out at once."""

    def __init__(self, machine: FakeMachine, name: str, *, eager: bool = False) -> None:
        self._machine = machine
        self._name = name
        self._eager = eager
        self._events: dict[Event, _EventState] = {}
        self._current: dict[str, Stream] = {}
        self._host: Clock = {}  # what this process has seen finished
        self.opens = 0  # memory handles opened, ever
        self.created_events = 0

    def devices(self) -> list[str]:
        return list(self._machine.devices)

    def can_peer(self, device: str, other: str) -> bool:
        return device == other or (device, other) in self._machine.peers

    @property
    def live_events(self) -> int:
        return len(self._events)

    # ---- memory

    def allocate(self, device: str, nbytes: int) -> Address:
        allocation = _Allocation(self._name, device, bytearray([POISON]) * nbytes)
        address = self._map(allocation)
        self._machine.allocations[b"memory %d" % address] = allocation
        return address

    def free(self, device: str, address: Address) -> None:
        allocation = self._mapped(address)
        if allocation.mapped:
            raise Misuse(f"freed while {allocation.mapped} have it open")
        allocation.alive = False
        self._refuse_work_on(allocation)
        del self._machine.mappings[address]
        self._machine.allocations.pop(b"memory %d" % address)

    def export(self, device: str, address: Address) -> bytes:
        self._mapped(address)
        return b"memory %d" % address

    def open(self, device: str, handle: bytes) -> Address:
        allocation = self._machine.allocations.get(handle)
        if allocation is None:
            raise OmniError("nobody has memory of this handle")
        if allocation.owner == self._name or self._name in allocation.mapped:
            raise OmniError("the device memory of this handle is open in this process already")
        if not self.can_peer(device, allocation.device):
            raise OmniError(f"device {device} cannot read the memory of {allocation.device}")
        self.opens += 1
        allocation.mapped.add(self._name)
        return self._map(allocation)

    def close(self, device: str, address: Address) -> None:
        allocation = self._mapped(address)
        self._refuse_work_on(allocation)
        allocation.mapped.discard(self._name)
        del self._machine.mappings[address]

    def _map(self, allocation: _Allocation) -> Address:
        address = _DEVICE_SPACE + (next(self._machine.numbers) << 40)
        self._machine.mappings[address] = (self._name, allocation)
        return address

    def _mapped(self, address: Address) -> _Allocation:
        owner, allocation = self._machine.mappings.get(address, (None, None))
        if owner != self._name or allocation is None:
            raise Misuse("use after close, or of another process's address")
        return allocation

    def _refuse_work_on(self, allocation: _Allocation) -> None:
        """Of this process: a stream that has still to read or write it."""
        for stream in self._machine.streams.values():
            copies = [work for work in stream.work if isinstance(work, _Copy)]
            for address in [a for c in copies for a in (c.target, c.source) if a >= _DEVICE_SPACE]:
                found = self._machine.locate(address)
                if stream.process == self._name and found and found[0] is allocation:
                    raise Misuse("closed while a stream has still to use it")

    # ---- events

    def create_event(self, device: str) -> Event:
        self.created_events += 1
        return self._keep(_EventState(self._name))

    def export_event(self, device: str, event: Event) -> bytes:
        handle = b"event %d" % event
        self._machine.exported_events[handle] = self._event(event)
        return handle

    def open_event(self, device: str, handle: bytes) -> Event:
        state = self._machine.exported_events[handle]
        if state.owner == self._name:
            raise OmniError("an event cannot be opened where it was made")
        return self._keep(state)

    def destroy_event(self, event: Event) -> None:
        self._event(event)
        del self._events[event]

    def _keep(self, state: _EventState) -> Event:
        event = next(self._machine.numbers)
        self._events[event] = state
        return event

    def _event(self, event: Event) -> _EventState:
        if event not in self._events:
            raise Misuse(f"event {event} is not there, or another process's")
        return self._events[event]

    # ---- work

    def new_stream(self, device: str, weight: int = 1) -> Stream:
        stream = next(self._machine.numbers)
        self._machine.streams[stream] = _StreamState(self._name, device, weight)
        return stream

    def current_stream(self, device: str) -> Stream:
        if device not in self._current:
            self._current[device] = self.new_stream(device)
        return self._current[device]

    def record(self, event: Event, stream: Stream) -> None:
        state = self._tick(stream)
        record = self._event(event).last = _Record(dict(state.clock))
        self._add(stream, record)

    def wait(self, event: Event, stream: Stream) -> None:
        record = self._event(event).last
        if record is not None:
            state = self._tick(stream)
            _merge(state.clock, record.clock)
            self._add(stream, _Wait(record))

    def done(self, event: Event) -> bool:
        record = self._event(event).last
        if record is not None and record.done:
            _merge(self._host, record.clock)
        return record is None or record.done

    def copy(self, target: Address, source: Address, nbytes: int, stream: Stream) -> None:
        self._tick(stream)
        self._access(source, nbytes, stream, write=False)
        self._access(target, nbytes, stream, write=True)
        self._add(stream, _Copy(target, source, nbytes))

    def synchronize(self, stream: Stream) -> None:
        state = self._machine.streams[stream]
        while state.work:
            if not self._machine.step():
                raise Misuse(f"stream {stream} waits for what will never be")
        _merge(self._host, state.clock)

    def tensor(self, device: str, address: Address, nbytes: int) -> torch.Tensor:
        allocation = self._mapped(address)
        return torch.frombuffer(memoryview(allocation.data)[:nbytes], dtype=torch.uint8)

    def _add(self, stream: Stream, work: _Copy | _Wait | _Record) -> None:
        self._machine.streams[stream].work.append(work)
        if self._eager:
            self.synchronize(stream)

    def _tick(self, stream: Stream) -> _StreamState:
        state = self._machine.streams.get(stream)
        if state is None or state.process != self._name:
            raise Misuse(f"stream {stream} is another process's")
        _merge(state.clock, self._host)
        state.clock[stream] = state.clock.get(stream, 0) + 1
        return state

    def _access(self, address: Address, nbytes: int, stream: Stream, *, write: bool) -> None:
        """Raise `Misuse` if an access that touches the same bytes is not ordered before."""
        found = self._machine.locate(address)
        if found is None:
            return
        allocation, start = found
        if self._machine.mappings[address - start][0] != self._name:
            raise Misuse("an address of another process")
        if not allocation.alive:
            raise OmniError("the process that owns this memory is gone")
        end = start + nbytes
        if end > len(allocation.data):
            raise Misuse("past the end of the allocation")
        clock = self._machine.streams[stream].clock
        kept = []
        for other in allocation.accesses:
            ordered = other.tick <= clock.get(other.stream, 0)
            touches = other.start < end and start < other.end
            if touches and (write or other.write) and not ordered:
                done = "written" if other.write else "read"
                raise Misuse(f"{'written' if write else 'read'} while it may still be {done}")
            inside = start <= other.start and other.end <= end
            if not (write and ordered and inside):  # else this write stands for it
                kept.append(other)
        kept.append(_Access(start, end, stream, clock[stream], write))
        allocation.accesses = kept


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)
