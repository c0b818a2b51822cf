"""The machine that the pools are tested on refuses what a real one would punish later."""

from __future__ import annotations

import pytest

from omni_rt.errors import OmniError
from tests.dataplane.device_world import Buffer
from tests.dataplane.fake_driver import POISON, FakeDriver, FakeMachine, Misuse

N = 64


class Pair:
    """A writer on A and a reader on `device` with one allocation between them."""

    def __init__(self, machine: FakeMachine, device: str = "A") -> None:
        self.machine = machine
        self.writer, self.reader = machine.process("writer"), machine.process("reader")
        self.memory = self.writer.allocate("A", N)
        self.opened = self.reader.open(device, self.writer.export("A", self.memory))
        self.writes, self.reads = self.writer.new_stream("A"), self.reader.new_stream(device)
        self.event, self.their_event = _event(self.writer, self.reader, device)
        self.source, self.target = Buffer(b"x" * N), Buffer(bytes(N))

    def write(self) -> None:
        self.writer.copy(self.memory, self.source.address, N, self.writes)

    def read(self) -> None:
        self.reader.copy(self.target.address, self.opened, N, self.reads)


def _event(owner: FakeDriver, other: FakeDriver, device: str) -> tuple[int, int]:
    event = owner.create_event("A")
    return event, other.open_event(device, owner.export_event("A", event))


@pytest.fixture
def pair() -> Pair:
    return Pair(FakeMachine())


def test_nothing_happens_before_its_stream_is_advanced(pair: Pair) -> None:
    pair.write()
    pair.writer.record(pair.event, pair.writes)
    pair.reader.wait(pair.their_event, pair.reads)
    pair.read()
    assert not pair.machine._ready(pair.reads), "the reader's stream waits"
    assert pair.target.bytes == bytes(N)
    pair.machine.drain()
    assert pair.target.bytes == b"x" * N


def test_memory_that_nobody_wrote_is_poison(pair: Pair) -> None:
    pair.read()
    pair.machine.drain()
    assert pair.target.bytes == bytes([POISON]) * N


def test_a_read_that_did_not_wait_is_refused_even_if_it_comes_late(pair: Pair) -> None:
    pair.write()
    pair.machine.drain()
    with pytest.raises(Misuse, match="read while it may still be written"):
        pair.read()


def test_a_wait_for_an_event_recorded_later_orders_nothing(pair: Pair) -> None:
    pair.write()
    pair.reader.wait(pair.their_event, pair.reads)
    pair.writer.record(pair.event, pair.writes)
    with pytest.raises(Misuse, match="read while"):
        pair.read()


def test_reuse_before_the_readers_event_is_refused(pair: Pair) -> None:
    pair.write()
    pair.writer.record(pair.event, pair.writes)
    pair.reader.wait(pair.their_event, pair.reads)
    pair.read()
    pair.machine.drain()
    with pytest.raises(Misuse, match="written while it may still be read"):
        pair.write()
    done, their_done = _event(pair.writer, pair.reader, "A")
    pair.reader.record(their_done, pair.reads)
    pair.writer.wait(done, pair.writes)
    pair.write()


def test_what_the_host_saw_finished_needs_no_event(pair: Pair) -> None:
    other = pair.writer.new_stream("A")
    pair.write()
    pair.writer.synchronize(pair.writes)
    pair.writer.copy(pair.memory, pair.source.address, N, other)


def test_a_handle_is_opened_once_and_not_at_home(pair: Pair) -> None:
    handle = pair.writer.export("A", pair.memory)
    with pytest.raises(OmniError, match="open in this process already"):
        pair.reader.open("A", handle)
    with pytest.raises(OmniError, match="open in this process already"):
        pair.writer.open("A", handle)
    with pytest.raises(OmniError, match="where it was made"):
        pair.writer.open_event("A", pair.writer.export_event("A", pair.event))


def test_use_after_close_is_refused(pair: Pair) -> None:
    pair.reader.close("A", pair.opened)
    with pytest.raises(Misuse, match="after close"):
        pair.read()
    with pytest.raises(Misuse, match="after close"):
        pair.reader.close("A", pair.opened)


def test_memory_cannot_go_while_it_is_used(pair: Pair) -> None:
    with pytest.raises(Misuse, match="have it open"):
        pair.writer.free("A", pair.memory)
    pair.read()
    with pytest.raises(Misuse, match="still to use it"):
        pair.reader.close("A", pair.opened)


def test_addresses_streams_and_events_are_a_process_s_own(pair: Pair) -> None:
    with pytest.raises(Misuse, match="address of another process"):
        pair.reader.copy(pair.target.address, pair.memory, N, pair.reads)
    with pytest.raises(Misuse, match="another process's"):
        pair.reader.copy(pair.target.address, pair.opened, N, pair.writes)
    with pytest.raises(Misuse, match="another process's"):
        pair.reader.record(pair.event, pair.reads)


def test_a_dead_exporter_takes_its_memory_along(pair: Pair) -> None:
    pair.write()
    pair.writer.record(pair.event, pair.writes)
    pair.reader.wait(pair.their_event, pair.reads)
    pair.machine.kill("writer")
    assert pair.machine.doomed() == {"reader"}
    with pytest.raises(OmniError, match="is gone"):
        pair.read()
    with pytest.raises(Misuse, match="wait for what will never be"):
        pair.machine.drain()


def test_peers_are_what_the_matrix_says() -> None:
    machine = FakeMachine(("A", "B", "C"), peers=[("B", "A")])
    assert Pair(machine, "B").reader.can_peer("B", "A")
    with pytest.raises(OmniError, match="C cannot read the memory of A"):
        Pair(machine, "C")
