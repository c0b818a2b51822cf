"""Whether one process can read the other's pool: tried for real, byte by byte."""

from __future__ import annotations

import itertools

import pytest

from omni_rt.errors import OmniError
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.cuda.probe import PROBE_BYTES, Attempt, offer_device, take_device
from omni_rt_workers.cuda.reader import DevicePoolReader
from tests.dataplane.fake_driver import FakeMachine

POOL_BYTES = 4 << 20


class Ends:
    """A producer on A, a consumer on `device`, everything between them that the machine allows."""

    def __init__(self, machine: FakeMachine, device: str) -> None:
        self.machine, self.device = machine, device
        self.producer, self.consumer = machine.process("writer"), machine.process("painter")
        self.writes, self.reads = self.producer.new_stream("A"), self.consumer.new_stream(device)
        self.pool = DevicePool(self.producer, 1, "A", POOL_BYTES, readers=1, epoch=1)
        self.ref = offer_device(self.pool, self.producer, self.writes)

    def attempt(self) -> Attempt:
        clock = itertools.count().__next__
        table = memoryview(self.pool.table).cast("B")
        attach = self.pool.attachment(0)
        reader = DevicePoolReader.attach(self.consumer, attach, self.device, table)
        got = take_device(reader, self.consumer, self.reads, self.ref, clock)
        reader.close()
        return got

    def close(self) -> None:
        assert self.pool.in_use_bytes == 0
        self.pool.close()
        assert (self.machine.allocations, self.producer.live_events) == ({}, 0)


@pytest.mark.parametrize(("device", "peers"), [("A", []), ("B", [("B", "A")])])
def test_the_noise_arrives_as_often_as_it_is_read(
    device: str, peers: list[tuple[str, str]]
) -> None:
    ends = Ends(FakeMachine(("A", "B"), peers), device)
    assert ends.attempt() == Attempt(took_s=1)
    assert ends.attempt() == Attempt(took_s=1)
    ends.close()


def test_the_noise_takes_no_room_from_blocks() -> None:
    ends = Ends(FakeMachine(), "A")
    assert ends.pool.capacity_bytes == POOL_BYTES - PROBE_BYTES
    place = ends.pool.reserve(ends.pool.capacity_bytes, ends.writes)
    assert place is not None
    ends.pool.free(place.offset, place.generation)
    ends.machine.drain()
    ends.close()


def test_a_peer_that_cannot_be_read_says_so() -> None:
    ends = Ends(FakeMachine(("A", "B")), "B")
    with pytest.raises(OmniError, match="device B cannot read the memory of A"):
        ends.attempt()


def test_a_wrong_byte_is_found() -> None:
    ends = Ends(FakeMachine(), "A")
    next(iter(ends.machine.allocations.values())).data[PROBE_BYTES - 1] ^= 1
    attempt = ends.attempt()
    assert attempt.problem
    assert attempt.problem.startswith("other bytes arrived than were sent")
