"""An edge between two workers on devices: outbox, pool, inputs and loop, on the fake machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from omni_rt.errors import OmniError, StaleRef
from omni_rt.wire.arena import TABLE_BYTES, Arena
from omni_rt.wire.messages import (
    PROTOCOL_VERSION,
    AttachPool,
    Chunk,
    Detach,
    Emit,
    Free,
    Offered,
    OnDevice,
    Payload,
    Ports,
    Probed,
    ReaderGone,
    StageSpec,
    Step,
    ToMain,
    Transport,
    WorkerSpec,
)
from omni_rt.wire.tensors import Block, DeviceBlock, Inline
from omni_rt_workers.cuda.pool import GRANULE_BYTES, DevicePool
from omni_rt_workers.device import open_memory
from omni_rt_workers.engine import Task
from omni_rt_workers.inputs import Lease, TaskInputs
from omni_rt_workers.loop import Loop
from omni_rt_workers.memory import Memory
from omni_rt_workers.outbox import StageOutbox
from tests.dataplane.fake_driver import FakeMachine

SLOT = GRANULE_BYTES // 4
INLINE = 256
SMALL = 4096  # an arena that holds none of these payloads


class Edge:
    """A writer on A with a pool of three slots and the probe's, a reader on B, a peer of A."""

    def __init__(
        self,
        *,
        eager: bool = True,
        credits: dict[str, int] | None = None,
        arena_bytes: int = 4 * GRANULE_BYTES,
    ) -> None:
        self.machine = FakeMachine(("A", "B"), peers=[("B", "A")])
        self.driver = self.machine.process("writer", eager=eager)
        self.reader_driver = self.machine.process("reader", eager=eager)
        arena = Arena.create(1, arena_bytes + TABLE_BYTES)
        self.pool = DevicePool(
            self.driver, 9, "A", GRANULE_BYTES, readers=1, epoch=1, slot_bytes=SLOT,
            table=arena.view(arena_bytes, TABLE_BYTES),
        )  # fmt: skip
        self.writer = Memory(arena, 1, self.driver, "A", self.pool, table=arena_bytes)
        self.out = StageOutbox("writer", self.writer, credits or {}, INLINE)
        self.reader = Memory(Arena.create(2, 4096), 1, self.reader_driver, "B")
        self.reader.attach(Arena.attach(1, os.dup(arena.fd), arena_bytes, writable=False))
        self.reader.attach_pool(self.writer.offer(0).attach)
        self.released: list[Lease] = []

    def task(self, transport: Transport = "cuda") -> Task:
        emit = {"hidden": Emit("hidden", transport, False, True)}
        return Task("r", 1, {}, TaskInputs(self.writer, {}, (), {}, []), {}, emit, 0)

    def payloads(self) -> list[Any]:
        return [item.data for item in self.out.take_items() if isinstance(item, Chunk)]

    def inputs(self, *refs: Payload) -> TaskInputs:
        return TaskInputs(self.reader, {"x": list(refs)}, (), {}, self.released)

    def free_released(self) -> None:
        for lease in self.released:
            assert self.out.freed(lease)
        self.released.clear()
        self.out.flush_waiting()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        assert (self.machine.allocations, self.machine.mappings) == ({}, {})
        assert (self.driver.live_events, self.reader_driver.live_events) == (0, 0)


@pytest.fixture
def edge() -> Iterator[Edge]:
    edge = Edge()
    yield edge
    edge.close()


def _full(value: float, count: int = SLOT // 2) -> torch.Tensor:
    return torch.full((2, count // 2), value, dtype=torch.bfloat16)


def test_a_tensor_crosses_on_the_device(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(1.5))
    (ref,) = edge.payloads()
    assert isinstance(ref, DeviceBlock)
    assert edge.writer.writer.in_use_bytes == 0
    inputs = edge.inputs(ref)
    first, again = inputs.tensors("x")[0], inputs.tensors("x")[0]
    assert torch.equal(first, _full(1.5))
    assert first.data_ptr() == again.data_ptr()
    inputs.release_all()
    assert edge.released == [(9, ref.offset, ref.generation)]
    edge.free_released()
    assert edge.pool.in_use_bytes == 0


def test_what_is_reserved_is_the_pools_memory(edge: Edge) -> None:
    task = edge.task()
    place = edge.out.reserve(task, "hidden", (SLOT,), "uint8")
    edge.out.publish(task, "hidden")
    (ref,) = edge.payloads()
    assert place.data_ptr() == edge.pool.memory.data_ptr() + ref.offset
    edge.inputs(ref).release_all()
    edge.free_released()


def test_small_tensors_travel_in_the_message(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", torch.ones(4))
    (ref,) = edge.payloads()
    assert isinstance(ref, Inline)


def test_bytes_and_what_the_pool_cannot_hold_go_through_the_arena(edge: Edge) -> None:
    task = edge.task()
    edge.out.put_bytes(task, "hidden", bytes(1000))
    edge.out.put(task, "hidden", torch.zeros(GRANULE_BYTES + 1, dtype=torch.uint8))
    first, second = edge.payloads()
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert edge.pool.in_use_bytes == 0
    for ref in (first, second):
        assert edge.out.freed((ref.arena, ref.offset, ref.generation))


def test_without_a_pool_the_edge_goes_through_the_arena() -> None:
    memory = Memory(Arena.create(1, 1 << 20), 1)
    out = StageOutbox("writer", memory, {}, INLINE)
    emit = {"hidden": Emit("hidden", "cuda", False, True)}
    task = Task("r", 1, {}, TaskInputs(memory, {}, (), {}, []), {}, emit, 0)
    out.put(task, "hidden", _full(2.0, 1000))
    (item,) = out.take_items()
    assert isinstance(item, Chunk)
    assert isinstance(item.data, Block)
    memory.close()


def test_a_full_pool_is_no_reason_to_wait_while_the_arena_has_room(edge: Edge) -> None:
    task = edge.task()
    for value in range(5):
        edge.out.put(task, "hidden", _full(value))
    assert not task.held
    refs = edge.payloads()
    assert [type(ref) for ref in refs] == [DeviceBlock] * 3 + [Block] * 2
    for ref in refs[:3]:
        assert edge.out.freed((ref.pool, ref.offset, ref.generation))
    for ref in refs[3:]:
        assert edge.out.freed((ref.arena, ref.offset, ref.generation))


def test_what_finds_no_room_at_all_waits_and_follows_in_order() -> None:
    edge = Edge(arena_bytes=SMALL)
    task = edge.task()
    for value in range(7):
        edge.out.put(task, "hidden", _full(value))
    assert task.held
    (stall,) = edge.out.take_stalls()
    assert (stall.wanted_bytes, stall.free_bytes) == (SLOT, 0)
    seen = []
    while refs := edge.payloads():
        for ref in refs:
            assert isinstance(ref, DeviceBlock)
            inputs = edge.inputs(ref)
            seen.append(float(inputs.tensors("x")[0][0, 0]))
            inputs.release_all()
        edge.free_released()
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert not task.held
    assert edge.pool.in_use_bytes == 0
    edge.close()


def test_credits_are_counted_on_the_device_too() -> None:
    edge = Edge(credits={"hidden": 1}, arena_bytes=SMALL)
    task = edge.task()
    edge.out.put(task, "hidden", _full(0))
    assert not task.held
    edge.out.put(task, "hidden", _full(1))
    assert task.held
    edge.out.forget(task)
    for ref in edge.payloads():
        assert edge.out.freed((ref.pool, ref.offset, ref.generation))
    assert edge.pool.in_use_bytes == 0
    edge.close()


@pytest.mark.parametrize("end", ["forget", "finish"])
def test_an_open_reservation_on_the_device_ends_with_its_task(edge: Edge, end: str) -> None:
    task = edge.task()
    edge.out.reserve(task, "hidden", (SLOT,), "uint8")
    assert edge.pool.in_use_bytes == SLOT
    if end == "forget":
        edge.out.forget(task)
    else:
        edge.out.finish(task)
    assert edge.pool.in_use_bytes == 0


class _Channel:
    def __init__(self) -> None:
        self.sent: list[ToMain] = []

    def receive(self, *, block: bool) -> list[Any]:
        return []

    def send(self, messages: Sequence[ToMain]) -> None:
        self.sent += messages

    def close(self) -> None: ...


def _stage(name: str) -> StageSpec:
    return StageSpec(
        name=name,
        engine="simulated",
        model=None,
        part=None,
        device="cuda:0",
        max_batch=1,
        options={},
        sampling={},
        credits={},
    )


class _Idle:
    """An engine that has nothing to do."""

    idle = True

    def load(self, say: Any) -> Ports:
        return Ports((), (), (), 1)

    def memory(self) -> dict[str, int]:
        return {}


class _Late:
    """An edge whose device does what it was given when it is told to; the writer's loop runs it.

    The pool is full of blocks that were read and given back, and one more output waits.
    """

    def __init__(self) -> None:
        self.edge = edge = Edge(eager=False, arena_bytes=SMALL)
        self.channel = _Channel()
        self.loop = Loop(self.channel, edge.writer, lambda message: None)

        def make(spec: StageSpec, out: Any) -> Any:
            edge.out = out
            return _Idle()

        self.loop.load(_stage("writer"), make, {}, INLINE)
        edge.machine.drain()
        self.task = edge.task()
        for _ in range(3):
            edge.out.reserve(self.task, "hidden", (SLOT,), "uint8")
            edge.out.publish(self.task, "hidden")
        inputs = edge.inputs(*edge.payloads())
        assert len(inputs.tensors("x")) == 3
        inputs.release_all()
        self.loop.take(Free(edge.released.copy()))
        edge.out.put(self.task, "hidden", _full(4))
        assert edge.payloads() == []
        assert self.task.held

    def turn(self) -> list[Any]:
        """The chunks that left in one turn of the loop."""
        self.channel.sent.clear()
        self.loop.turn(block=False)
        steps = [message for message in self.channel.sent if isinstance(message, Step)]
        return [item.data for step in steps for item in step.items if isinstance(item, Chunk)]

    def close(self) -> None:
        self.edge.out.forget(self.task)
        self.edge.machine.drain()
        self.edge.writer.close()


def test_a_lease_is_given_back_while_the_device_still_reads() -> None:
    late = _Late()
    assert not late.loop.idle, "nobody will send a message when the device has done its work"
    assert late.turn() == []
    late.edge.machine.drain()
    (ref,) = late.turn()
    assert isinstance(ref, DeviceBlock)
    assert late.loop.idle
    assert late.edge.out.freed((ref.pool, ref.offset, ref.generation))
    late.edge.reader.close()
    late.close()


def test_a_reader_that_dies_with_work_before_it_holds_nobody() -> None:
    late = _Late()
    late.edge.machine.kill("reader")
    assert late.turn() == []
    assert not late.edge.machine.doomed(), "no stream of the writer's waits for the dead"
    late.loop.take(ReaderGone(0))
    (ref,) = late.turn()
    assert isinstance(ref, DeviceBlock)
    offers = [message for message in late.channel.sent if isinstance(message, Offered)]
    assert [offer.reader for offer in offers] == [0], "with new events, for who comes next"
    assert late.edge.out.freed((ref.pool, ref.offset, ref.generation))
    late.close()


def test_two_tasks_of_one_worker_hold_a_block_each_for_itself(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(3))
    (ref,) = edge.payloads()
    first, second = edge.inputs(ref), edge.inputs(ref)
    first.tensors("x")
    second.tensors("x")
    first.release("x", 1)
    assert torch.equal(second.tensors("x")[0], _full(3))
    second.release_all()
    assert edge.released == [(9, ref.offset, ref.generation)] * 2
    assert edge.out.freed(edge.released.pop())


def test_a_stage_of_the_same_worker_reads_the_pool_too(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(3))
    (ref,) = edge.payloads()
    mine = TaskInputs(edge.writer, {"x": [ref]}, (), {}, edge.released)
    theirs = edge.inputs(ref)
    assert torch.equal(mine.tensors("x")[0], theirs.tensors("x")[0])
    mine.release_all()
    theirs.release_all()
    assert edge.released == [(9, ref.offset, ref.generation)] * 2
    assert edge.out.freed(edge.released.pop())
    assert edge.pool.in_use_bytes == 0


def test_an_unread_block_can_be_given_back(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(3))
    edge.inputs(*edge.payloads()).release_all()
    edge.free_released()
    assert edge.pool.in_use_bytes == 0


def test_the_loop_attaches_tries_and_detaches_pools(edge: Edge) -> None:
    edge.reader.detach(9)
    channel = _Channel()
    loop = Loop(channel, edge.reader, lambda message: None)
    edge.out.put(edge.task(), "hidden", _full(3))
    (ref,) = edge.payloads()
    with pytest.raises(StaleRef, match="pool 9 is not attached"):
        edge.inputs(ref).tensors("x")
    loop.take(edge.writer.offer(0).attach)
    loop.turn(block=False)
    (probed,) = channel.sent
    assert isinstance(probed, Probed)
    assert (probed.pool, probed.problem) == (9, None)
    assert torch.equal(edge.inputs(ref).tensors("x")[0], _full(3))
    loop.take(Detach(9))
    assert edge.reader_driver.live_events == 0
    assert edge.out.freed((9, ref.offset, ref.generation))


def test_a_pool_that_cannot_be_read_is_an_answer_and_no_crash(edge: Edge) -> None:
    memory = Memory(Arena.create(3, 4096), 1)
    channel = _Channel()
    loop = Loop(channel, memory, lambda message: None)
    loop.take(edge.writer.offer(0).attach)
    loop.turn(block=False)
    (probed,) = channel.sent
    assert isinstance(probed, Probed)
    assert probed.problem == "pool 9 cannot be read here: this worker has no device"
    memory.close()


def test_a_block_that_was_used_again_while_it_was_lent_fails_its_reader(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(3))
    (ref,) = edge.payloads()
    inputs = edge.inputs(ref)
    inputs.tensors("x")
    assert edge.out.freed((9, ref.offset, ref.generation))  # nobody should have
    edge.out.put(edge.task(), "hidden", _full(4))
    with pytest.raises(StaleRef, match="is gone"):
        inputs.release("x", 1)
    assert edge.released == [(9, ref.offset, ref.generation)]
    with pytest.raises(StaleRef, match="is gone"):
        edge.inputs(ref).tensors("x")
    for later in edge.payloads():
        assert edge.out.freed((9, later.offset, later.generation))


def test_a_block_on_the_device_can_be_read_as_bytes(edge: Edge) -> None:
    edge.out.put(edge.task(), "hidden", _full(3))
    inputs = edge.inputs(*edge.payloads())
    assert bytes(inputs.views("x")[0]) == _full(3).view(torch.uint8).numpy().tobytes()
    inputs.release_all()
    edge.free_released()


def test_credit_counts_whole_slots() -> None:
    edge = Edge(credits={"hidden": 3 * SMALL // 4}, arena_bytes=SMALL)  # two slots of three
    task = edge.task()
    for _ in range(3):
        edge.out.put(task, "hidden", torch.zeros(SMALL, dtype=torch.uint8))
    refs = edge.payloads()
    assert len(refs) == 2
    assert task.held
    edge.out.forget(task)
    for ref in refs:
        assert edge.out.freed((ref.pool, ref.offset, ref.generation))
    edge.close()


def test_a_worker_whose_device_refuses_goes_on_without_a_pool() -> None:
    spec = WorkerSpec(
        version=PROTOCOL_VERSION, identity="writer.0.1", epoch=1, main_pid=1,
        die_with_thread=False, arena=1, arena_bytes=65536 + TABLE_BYTES, inline_limit_bytes=INLINE,
        stages=(), device="cuda:3", pool=9, pool_bytes=1 << 20, pool_readers=2, table=65536,
    )  # fmt: skip
    machine = FakeMachine(("A",))
    arena = Arena.create(1, spec.arena_bytes)
    memory, told = open_memory(spec, arena, lambda: machine.process("writer"))
    assert memory.pool is None
    assert memory.writer.capacity_bytes == 65536
    assert told == [OnDevice("", (), "there is no device cuda:3: this process sees 1")]
    there = msgspec.structs.replace(spec, device="cuda:0")
    memory, told = open_memory(there, arena, lambda: machine.process("writer", eager=True))
    assert memory.pool is not None
    assert told[0] == OnDevice("A", ("A",))
    assert [offer.reader for offer in told[1:] if isinstance(offer, Offered)] == [0, 1]
    memory.close()


def test_a_worker_without_a_device_refuses_a_pool() -> None:
    memory = Memory(Arena.create(1, 4096), 1)
    with pytest.raises(OmniError, match="this worker has no device"):
        memory.attach_pool(AttachPool(9, 1, "A", b"", []))
    memory.close()
