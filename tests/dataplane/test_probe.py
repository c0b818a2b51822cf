"""By which way an edge's tensors cross: each is tried for real, the first that works is taken."""

from __future__ import annotations

import itertools

import pytest

from omni_rt.errors import OmniError
from omni_rt.wire.arena import Arena, BlockReader, BlockWriter
from omni_rt.wire.tensors import Block, DeviceBlock
from omni_rt_workers.cuda.pool import DevicePool
from omni_rt_workers.cuda.probe import (
    PROBE_BYTES,
    address_of,
    offer_block,
    offer_device,
    take_block,
    take_device,
    take_pinned,
)
from omni_rt_workers.cuda.reader import DevicePoolReader
from omni_rt_workers.cuda.route import Attempt, End, Facts, Route, RouteChoice, routes
from tests.dataplane.fake_driver import FakeMachine

SEED = 5


def _facts(
    there: str, device: str | None, *, peer: bool = True, pin: bool = True, arena: bool = True
) -> Facts:
    return Facts(End("writer", "A"), End(there, device), peer, pin, arena)


# ---- the decision


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (_facts("writer", "A"), [Route.LOCAL]),
        (_facts("painter", "A"), [Route.DEVICE, Route.PINNED, Route.SHARED, Route.INLINE]),
        (_facts("painter", "B"), [Route.PEER, Route.PINNED, Route.SHARED, Route.INLINE]),
        (_facts("painter", "B", peer=False), [Route.PINNED, Route.SHARED, Route.INLINE]),
        (_facts("painter", "B", peer=False, pin=False), [Route.SHARED, Route.INLINE]),
        (_facts("painter", None), [Route.SHARED, Route.INLINE]),
        (_facts("painter", "B", arena=False), [Route.PEER, Route.INLINE]),
        (_facts("painter", None, arena=False), [Route.INLINE]),
    ],
)
def test_the_ways_that_come_into_question(facts: Facts, expected: list[Route]) -> None:
    assert routes(facts) == expected


def test_the_first_way_that_works_is_taken_and_the_others_are_named() -> None:
    choice = RouteChoice("writer.hidden -> painter", _facts("painter", "B"))
    tried = []
    for attempt in (Attempt("no IPC here"), Attempt("memlock"), Attempt(took_s=0.0004)):
        tried.append(choice.next)
        choice.tried(attempt)
    assert tried == [Route.PEER, Route.PINNED, Route.SHARED]
    assert (choice.chosen, choice.next) == (Route.SHARED, None)
    assert str(choice) == (
        "writer.hidden -> painter: shared memory, 0.4 ms for 1 MiB "
        "(not device memory of a peer: no IPC here; not pinned shared memory: memlock)"
    )


def test_what_is_certain_is_not_tried() -> None:
    local = RouteChoice("a -> b", _facts("writer", "A"))
    assert (local.chosen, local.next) == (Route.LOCAL, None)
    assert str(local) == "a -> b: same process"
    last = RouteChoice("a -> b", _facts("painter", None))
    last.tried(Attempt("sealed memory is forbidden"))
    assert (last.chosen, last.next) == (Route.INLINE, None)


# ---- the attempts


class Ends:
    """A producer on A, a consumer on `device`, everything between them that the machine allows."""

    def __init__(self, machine: FakeMachine, device: str) -> None:
        self.machine, self.device = machine, device
        self.producer, self.consumer = machine.process("writer"), machine.process("painter")
        self.writes, self.reads = self.producer.new_stream("A"), self.consumer.new_stream(device)
        self.pool = DevicePool(self.producer, 1, "A", 2 << 20, readers=1, epoch=1)
        self.arena = Arena.create(2, 2 << 20)
        self.writer, self.reader = BlockWriter(self.arena, 1), BlockReader(self.arena)

    def facts(self) -> Facts:
        can_peer = self.consumer.can_peer(self.device, "A")
        return Facts(End("writer", "A"), End("painter", self.device), can_peer, can_pin=True)

    def attempt(self, route: Route) -> Attempt:
        try:
            if route in (Route.DEVICE, Route.PEER):
                return self.attempt_device()
            offer = offer_block(self.writer, 2, SEED)
            assert isinstance(offer.ref, Block)
            try:
                return self.take(route, offer.ref)
            finally:
                offer.take_back()
        except OmniError as error:
            return Attempt(str(error))

    def attempt_device(self) -> Attempt:
        clock = itertools.count().__next__
        reader = DevicePoolReader.attach(self.consumer, self.pool.attachment(0), self.device)
        offer = offer_device(self.pool, self.producer, self.writes, SEED)
        assert isinstance(offer.ref, DeviceBlock)
        got = take_device(reader, self.consumer, self.reads, offer.ref, SEED, clock)
        reader.close()
        offer.take_back()
        return got

    def take(self, route: Route, ref: Block) -> Attempt:
        clock = itertools.count().__next__
        if route is Route.SHARED:
            return take_block(self.reader, ref, SEED, clock)
        whole = address_of(self.arena.view(0, self.arena.size_bytes))
        self.consumer.pin(whole, self.arena.size_bytes)
        try:
            return take_pinned(
                self.reader, self.consumer, self.device, self.reads, ref, SEED, clock
            )
        finally:
            self.consumer.unpin(whole)

    def close(self) -> None:
        assert (self.pool.in_use_bytes, self.consumer.pinned) == (0, {})
        self.pool.close()
        self.arena.close()
        assert (self.machine.allocations, self.producer.live_events) == ({}, 0)


@pytest.mark.parametrize(
    ("device", "peers", "route"),
    [
        ("A", [], Route.DEVICE),
        ("B", [("B", "A")], Route.PEER),
        ("B", [], Route.PINNED),
        ("A", [], Route.SHARED),
    ],
)
def test_every_way_carries_the_bytes(
    device: str, peers: list[tuple[str, str]], route: Route
) -> None:
    ends = Ends(FakeMachine(("A", "B"), peers), device)
    assert ends.attempt(route) == Attempt(took_s=1)
    ends.close()


def test_down_the_chain_to_what_works() -> None:
    ends = Ends(FakeMachine(("A", "B"), can_pin=False), "B")
    choice = RouteChoice("writer.hidden -> painter", ends.facts())
    while route := choice.next:
        choice.tried(ends.attempt(route))
    assert choice.chosen is Route.SHARED
    assert "not pinned shared memory: this machine pins no memory" in str(choice)
    ends.close()


def test_a_peer_that_cannot_be_read_after_all_is_an_answer_and_no_crash() -> None:
    attempt = Ends(FakeMachine(("A", "B")), "B").attempt(Route.PEER)
    assert attempt.problem == "device B cannot read the memory of A"


@pytest.mark.parametrize("route", [Route.DEVICE, Route.SHARED, Route.PINNED])
def test_a_wrong_byte_is_found(route: Route) -> None:
    ends = Ends(FakeMachine(), "A")
    if route is Route.DEVICE:
        reader = DevicePoolReader.attach(ends.consumer, ends.pool.attachment(0), "A")
        offer = offer_device(ends.pool, ends.producer, ends.writes, SEED)
        assert isinstance(offer.ref, DeviceBlock)
        ends.machine.drain()
        next(iter(ends.machine.allocations.values())).data[PROBE_BYTES - 1] ^= 1
        attempt = take_device(reader, ends.consumer, ends.reads, offer.ref, SEED)
    else:
        offer = offer_block(ends.writer, 2, SEED)
        assert isinstance(offer.ref, Block)
        ends.arena.view(offer.ref.offset + 77, 1)[0] ^= 1
        attempt = ends.take(route, offer.ref)
    assert attempt.problem
    assert attempt.problem.startswith("other bytes arrived than were sent")
