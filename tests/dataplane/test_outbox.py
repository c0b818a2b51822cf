"""What engines put out and take in: credits, holding, in-place writing, leases that come back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from omni_rt.errors import ProtocolError, StaleRef
from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import (
    Chunk,
    Emit,
    Failed,
    Finished,
    Payload,
    Ports,
    StageSpec,
    Step,
    Submit,
    TextPiece,
    ToMain,
    ToWorker,
    Transport,
)
from omni_rt.wire.tensors import Block, Inline, Local
from omni_rt_workers.engine import Outbox, Say, Task
from omni_rt_workers.inputs import Lease, TaskInputs
from omni_rt_workers.loop import Loop
from omni_rt_workers.memory import Memory
from omni_rt_workers.outbox import StageOutbox
from omni_rt_workers.tensors import as_tensor

ARENA = 1 << 20
INLINE = 256
ROW = 100_000  # bytes of one payload in these tests: ten fit the arena


class Desk:
    """An outbox over a real arena, and main's side of it."""

    def __init__(self, credits: dict[str, int] | None = None, arena_id: int = 1) -> None:
        self.arena = Arena.create(arena_id, ARENA)
        self.memory = Memory(self.arena, epoch=1)
        self.out = StageOutbox("painter", self.memory, credits or {}, INLINE)

    def task(self, name: str = "r", **transports: Transport) -> Task:
        ports = transports or {"latents": "shm"}
        emit = {port: Emit(port, kind, False, True) for port, kind in ports.items()}
        return Task(name, 1, {}, TaskInputs(self.memory, {}, (), {}, []), {}, emit, 0)

    def sent(self) -> list[Any]:
        return self.out.take_items()

    def payloads(self) -> list[Any]:
        return [item.data for item in self.sent() if isinstance(item, Chunk)]

    def free(self, ref: Block) -> None:
        assert self.out.freed((ref.arena, ref.offset, ref.generation))
        self.out.flush_waiting()

    def read(self, *refs: Payload, released: list[Lease] | None = None) -> TaskInputs:
        return TaskInputs(
            self.memory, {"x": list(refs)}, (), {}, [] if released is None else released
        )

    @property
    def in_use(self) -> int:
        return self.memory.writer.in_use_bytes


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.memory.close()


@pytest.fixture
def tight() -> Iterator[Desk]:
    """The port `latents` may lend two payloads, `image` one."""
    desk = Desk({"latents": 2 * ROW, "image": ROW})
    yield desk
    desk.memory.close()


def _row(value: int) -> torch.Tensor:
    return torch.full((ROW,), value, dtype=torch.uint8)


# ---- the way of a tensor


def test_a_small_tensor_travels_in_the_message(desk: Desk) -> None:
    desk.out.put(desk.task(), "latents", torch.arange(4.0).reshape(2, 2))
    (ref,) = desk.payloads()
    assert ref == Inline("float32", (2, 2), torch.arange(4.0).numpy().tobytes())
    assert desk.read(ref).tensors("x")[0].tolist() == [[0, 1], [2, 3]]
    assert desk.in_use == 0


def test_a_larger_tensor_is_copied_once_into_the_arena(desk: Desk) -> None:
    desk.out.put(desk.task(), "latents", _row(7))
    (ref,) = desk.payloads()
    assert isinstance(ref, Block)
    got, again = desk.read(ref).tensors("x")[0], desk.read(ref).tensors("x")[0]
    assert torch.equal(got, _row(7))
    assert got.data_ptr() == again.data_ptr() == _address(desk.memory, ref)


def test_a_tensor_that_is_not_contiguous_arrives_as_it_looks(desk: Desk) -> None:
    wide = torch.arange(300.0).reshape(3, 100).T
    desk.out.put(desk.task(), "latents", wide)
    assert torch.equal(desk.read(*desk.payloads()).tensors("x")[0], wide)


def test_what_is_reserved_is_written_in_place(desk: Desk) -> None:
    task = desk.task()
    place = desk.out.reserve(task, "latents", (ROW,), "uint8")
    torch.add(_row(1), _row(2), out=place)
    desk.out.publish(task, "latents", last=True, meta={"seed": 3})
    (chunk,) = desk.sent()
    assert (chunk.seq, chunk.last, chunk.meta) == (0, True, {"seed": 3})
    assert place.data_ptr() == _address(desk.memory, chunk.data)
    assert torch.equal(desk.read(chunk.data).tensors("x")[0], _row(3))


def test_a_port_that_nobody_wants_costs_nothing(desk: Desk) -> None:
    desk.out.put(desk.task(), "image", _row(1))
    desk.out.put_bytes(desk.task(), "image", bytes(ROW))
    desk.out.text(desk.task(), "hello")
    assert (desk.sent(), desk.in_use) == ([], 0)


def test_raw_bytes_of_any_format_are_bytes(desk: Desk) -> None:
    samples = memoryview(bytearray(4000)).cast("I")
    desk.out.put_bytes(desk.task(), "latents", samples, last=True)
    (ref,) = desk.payloads()
    assert (ref.dtype, ref.shape) == ("uint8", (4000,))
    assert bytes(desk.read(ref).views("x")[0]) == bytes(4000)


# ---- local


def test_a_local_ref_is_the_object_itself(desk: Desk) -> None:
    task = desk.task(hidden="local")
    made = desk.out.reserve(task, "hidden", (300,), "float32")
    desk.out.publish(task, "hidden")
    (ref,) = desk.payloads()
    assert isinstance(ref, Local)
    assert desk.read(ref).tensors("x")[0].data_ptr() == made.data_ptr()
    assert desk.in_use == 0


def test_a_local_tensor_is_not_changed_by_its_maker_afterwards(desk: Desk) -> None:
    mine = _row(1)
    desk.out.put(desk.task(hidden="local"), "hidden", mine)
    mine.fill_(2)
    assert torch.equal(desk.read(*desk.payloads()).tensors("x")[0], _row(1))


def test_local_bytes_can_be_read_as_bytes_and_as_one_tensor(desk: Desk) -> None:
    desk.out.put_bytes(desk.task(audio="local"), "audio", b"abc" * 1000)
    (ref,) = desk.payloads()
    inputs = desk.read(ref)
    assert bytes(inputs.views("x")[0]) == b"abc" * 1000
    assert inputs.tensors("x")[0].data_ptr() == inputs.tensors("x")[0].data_ptr()


def test_a_dropped_local_ref_is_stale(desk: Desk) -> None:
    desk.out.put(desk.task(hidden="local"), "hidden", _row(1))
    (ref,) = desk.payloads()
    desk.memory.drop(ref.offset)
    with pytest.raises(StaleRef):
        desk.read(ref).tensors("x")


# ---- leases


def test_every_consumer_gives_the_block_back_for_itself(desk: Desk) -> None:
    desk.out.put(desk.task(), "latents", _row(4))
    (ref,) = desk.payloads()
    released: list[Lease] = []
    for inputs in [desk.read(ref, released=released) for _ in range(3)]:
        assert torch.equal(inputs.tensors("x")[0], _row(4))
        inputs.release_all()
        inputs.release_all()
    assert released == [(1, ref.offset, ref.generation)] * 3
    desk.free(ref)
    assert desk.in_use == 0
    assert not desk.out.freed((ref.arena, ref.offset, ref.generation))


def test_released_chunks_are_out_of_sight_and_still_counted(desk: Desk) -> None:
    task, released = desk.task(), list[Lease]()
    inputs = TaskInputs(desk.memory, {}, ("x",), {}, released)
    for value in range(3):
        desk.out.put(task, "latents", _row(value))
    refs = desk.payloads()
    for seq, ref in enumerate(refs):
        inputs.feed("x", seq, ref, last=False)
    inputs.release("x", 2)
    assert released == [(1, ref.offset, ref.generation) for ref in refs[:2]]
    assert [int(tensor[0]) for tensor in inputs.tensors("x")] == [2]
    assert (inputs.count("x"), inputs.ended("x")) == (3, False)
    inputs.feed("x", 3, None, last=True)
    assert (inputs.count("x"), inputs.ended("x")) == (3, True)
    inputs.release_all()
    assert len(released) == 3


def test_a_chunk_out_of_order_is_refused(desk: Desk) -> None:
    inputs = TaskInputs(desk.memory, {}, ("x",), {}, [])
    with pytest.raises(ProtocolError, match="chunk 1 of input 'x' came where 0 was due"):
        inputs.feed("x", 1, TextPiece("a"), last=False)


def test_a_block_reused_while_it_was_lent_is_found_at_the_release(desk: Desk) -> None:
    task, released = desk.task(), list[Lease]()
    desk.out.put(task, "latents", _row(1))
    desk.out.put(task, "latents", _row(2))
    refs = desk.payloads()
    inputs = desk.read(*refs, released=released)
    inputs.tensors("x")
    desk.free(refs[0])
    desk.out.put(task, "latents", _row(3))
    with pytest.raises(StaleRef):
        inputs.release("x", 2)
    assert len(released) == 2, "the good block behind it must come back too"


def test_at_the_end_of_a_task_a_reused_block_is_logged_and_stops_nobody(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[Lease] = []
    desk.out.put(desk.task(), "latents", _row(1))
    (ref,) = desk.payloads()
    inputs = desk.read(ref, released=released)
    desk.free(ref)
    inputs.release_all()
    assert released == [(1, ref.offset, ref.generation)]
    assert "input 'x' was overwritten while it was lent" in caplog.text


def test_a_detached_arena_is_stale_but_its_tensors_stay(desk: Desk) -> None:
    other = Desk(arena_id=2)
    other.out.put(other.task(), "latents", _row(9))
    (ref,) = other.payloads()
    arena = Arena.attach(2, os.dup(other.arena.fd), ARENA, writable=False)
    desk.memory.attach(arena)
    tensor = desk.read(ref).tensors("x")[0]
    desk.memory.detach(2)
    other.memory.close()
    assert torch.equal(tensor, _row(9))
    with pytest.raises(StaleRef, match="arena 2 is not attached"):
        desk.read(ref).tensors("x")


# ---- credits, holding


def test_a_port_without_credit_holds_its_task_and_stalls_once(tight: Desk) -> None:
    task = tight.task()
    for value in range(4):
        tight.out.put(task, "latents", _row(value))
    assert len(tight.payloads()) == 2
    assert task.held
    (stall,) = tight.out.take_stalls()
    assert (stall.stage, stall.request, stall.port) == ("painter", "r", "latents")
    assert (stall.wanted_bytes, stall.free_bytes) == (ROW, ARENA - tight.in_use)


def test_credits_are_a_ports_own(tight: Desk) -> None:
    first, second = tight.task("a"), tight.task("b", image="shm")
    for value in range(3):
        tight.out.put(first, "latents", _row(value))
    tight.out.put(second, "image", _row(9))
    assert (first.held, second.held) == (True, False)
    assert len(tight.payloads()) == 3


def test_what_is_reserved_counts_before_it_is_published(tight: Desk) -> None:
    tasks = [tight.task(name) for name in "abc"]
    for task in tasks:
        tight.out.reserve(task, "latents", (ROW,), "uint8").fill_(1)
    for task in tasks:
        tight.out.publish(task, "latents")
    assert [task.held for task in tasks] == [False, False, True]


def test_one_payload_larger_than_the_credit_may_be_under_way() -> None:
    desk = Desk({"latents": 10})
    task = desk.task()
    desk.out.put(task, "latents", _row(1))
    assert not task.held
    desk.out.put(task, "latents", _row(2))
    assert task.held
    desk.free(desk.payloads()[0])
    assert not task.held
    desk.memory.close()


def test_held_output_follows_in_order_as_room_comes_back(tight: Desk) -> None:
    task = tight.task(latents="shm", text="shm", hidden="local")
    tight.out.put(task, "latents", _row(0))
    tight.out.put(task, "latents", _row(1))
    tight.out.put(task, "latents", _row(2))
    tight.out.text(task, "two")
    tight.out.put_bytes(task, "hidden", b"small")
    tight.out.put(task, "hidden", _row(2), last=True)
    tight.out.put(task, "latents", _row(3), last=True)
    tight.out.progress(task, 3, 3)
    tight.out.finish(task)
    items = tight.sent()
    assert [item.seq for item in items] == [0, 1]
    tight.free(items[0].data)
    assert task.held
    second = tight.sent()
    tight.free(items[1].data)
    items += second + tight.sent()
    assert not task.held
    assert [type(item).__name__ for item in items[-2:]] == ["StepProgress", "Finished"]
    chunks = [item for item in items if isinstance(item, Chunk)]
    for port, count in {"latents": 4, "text": 1, "hidden": 2}.items():
        assert [chunk.seq for chunk in chunks if chunk.port == port] == list(range(count))
    ports = [chunk.port for chunk in chunks[2:]]
    assert ports == ["latents", "text", "hidden", "hidden", "latents"]
    for value, chunk in enumerate(chunk for chunk in chunks[2:] if chunk.port == "latents"):
        assert int(tight.read(chunk.data).tensors("x")[0][0]) == value + 2


def test_a_full_arena_holds_one_and_the_others_go_on(desk: Desk) -> None:
    big, small = desk.task("big"), desk.task("small")
    desk.out.put(small, "latents", _row(0))
    desk.out.put_bytes(big, "latents", bytes(ARENA - ROW // 2))
    assert (big.held, small.held) == (True, False)
    desk.out.put(small, "latents", _row(1))
    assert not small.held
    for ref in desk.payloads():
        desk.free(ref)
    assert not big.held
    assert [len(desk.read(ref).views("x")[0]) for ref in desk.payloads()] == [ARENA - ROW // 2]


def test_a_held_task_that_is_forgotten_sends_nothing_and_leaves_nothing(tight: Desk) -> None:
    task = tight.task(latents="shm", image="shm", hidden="local")
    in_place = tight.out.reserve(task, "image", (ROW,), "uint8")
    for value in range(3):
        tight.out.put(task, "latents", _row(value))
    in_place.fill_(9)
    tight.out.publish(task, "image")
    tight.out.put(task, "hidden", _row(4))
    sent = tight.payloads()
    assert len(sent) == 2
    tight.out.forget(task)
    for ref in sent:
        tight.free(ref)
    assert (tight.sent(), tight.in_use, tight.out.waiting) == ([], 0, 0)
    with pytest.raises(StaleRef):
        tight.memory.kept(Local(1, 1, 1, "uint8", (ROW,)))


def test_output_that_waits_goes_with_an_abort_that_comes_after_the_end(tight: Desk) -> None:
    task, other = tight.task("r"), tight.task("other")
    for value in range(3):
        tight.out.put(task, "latents", _row(value))
    tight.out.finish(task)
    tight.out.put(other, "latents", _row(9))
    assert (tight.out.waiting, len(tight.payloads())) == (2, 2)
    tight.out.forget_ended("r", attempt=2)
    assert tight.out.waiting == 2
    tight.out.forget_ended("r", attempt=1)
    assert tight.out.waiting == 1, "the other one's output waits on"


@pytest.mark.parametrize("end", ["forget", "finish", "fail"])
def test_an_open_reservation_ends_with_its_task(tight: Desk, end: str) -> None:
    for _ in range(3):
        task = tight.task()
        tight.out.reserve(task, "latents", (2 * ROW,), "uint8")
        assert tight.in_use > 2 * ROW
        if end == "forget":
            tight.out.forget(task)
        elif end == "finish":
            tight.out.finish(task)
        else:
            tight.out.fail(task, ValueError("no"))
        assert tight.in_use == 0


def test_reserving_a_port_again_gives_the_first_place_back(desk: Desk) -> None:
    task = desk.task()
    desk.out.reserve(task, "latents", (ROW,), "uint8")
    desk.out.reserve(task, "latents", (ROW,), "uint8")
    desk.out.publish(task, "latents")
    (ref,) = desk.payloads()
    desk.free(ref)
    assert desk.in_use == 0


# ---- a payload larger than the arena


def test_a_payload_larger_than_the_arena_fails_its_task_and_says_what_to_raise(desk: Desk) -> None:
    task, other = desk.task("r"), desk.task("other")
    other_place = desk.out.reserve(other, "latents", (ROW,), "uint8")
    place = desk.out.reserve(task, "latents", (2 * ARENA,), "uint8")
    place.fill_(1)
    desk.out.publish(task, "latents")
    desk.out.put(task, "latents", _row(1))
    desk.out.finish(task)
    other_place.fill_(5)
    desk.out.publish(other, "latents")
    first, second = desk.sent()
    assert isinstance(first, Failed)
    assert (first.request, first.kind) == ("r", "stage_failed")
    assert f"{2 * ARENA} bytes does not fit" in first.message
    assert "raise stages.painter.arena" in first.message
    assert second.request == "other"
    assert torch.equal(desk.read(second.data).tensors("x")[0], _row(5))
    assert (desk.out.overflowed, desk.out.ended) == ([task], [])


def test_what_an_overflowed_task_had_in_hand_comes_back(tight: Desk) -> None:
    task = tight.task(latents="shm", image="shm")
    tight.out.reserve(task, "image", (ROW,), "uint8")
    for value in range(3):
        tight.out.put(task, "latents", _row(value))
    tight.out.put_bytes(task, "latents", bytes(2 * ARENA))
    tight.out.publish(task, "image")
    tight.out.forget(task)
    for ref in tight.payloads():
        tight.free(ref)
    assert (tight.in_use, tight.out.waiting) == (0, 0)


class _Wasteful:
    """An engine whose every task puts out what `sizes` says, and which may fail after it."""

    def __init__(self, out: Outbox, sizes: dict[str, int], *, fails: bool) -> None:
        self.out, self.sizes, self.fails = out, sizes, fails
        self.tasks: list[Task] = []

    def load(self, say: Say) -> Ports:
        return Ports((), (), (), 8)

    def add(self, task: Task) -> None:
        self.tasks.append(task)

    def feed(self, task: Task, port: str) -> None: ...

    def abort(self, task: Task) -> None:
        self.tasks.remove(task)  # raises for a task that is not there any more

    def step(self) -> None:
        for task in list(self.tasks):
            self.out.put_bytes(task, "latents", bytes(self.sizes[task.request]))
        if self.fails:
            raise ValueError("the step broke")
        for task in [task for task in self.tasks if self.sizes[task.request] < ARENA]:
            self.tasks.remove(task)
            self.out.finish(task)

    @property
    def idle(self) -> bool:
        return not self.tasks

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class _Channel:
    def __init__(self) -> None:
        self.coming: list[ToWorker] = []
        self.said: list[ToMain] = []

    def receive(self, *, block: bool) -> list[ToWorker]:
        coming, self.coming = self.coming, []
        return coming

    def send(self, messages: Sequence[ToMain]) -> None:
        self.said += messages

    def close(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_in_the_loop_an_overflow_ends_one_task_once(desk: Desk, fails: bool) -> None:
    channel, sizes = _Channel(), {"good": 1000, "large": 2 * ARENA}
    loop = Loop(channel, desk.memory, lambda message: None)
    spec = StageSpec(
        name="painter", engine="x", model=None, part=None, device="cpu", max_batch=8,
        options={}, sampling={}, credits={},
    )  # fmt: skip
    loop.load(spec, lambda _, out: _Wasteful(out, sizes, fails=fails), {}, INLINE)
    emit = (Emit("latents", "shm", False, True),)
    for request in sizes:
        channel.coming.append(Submit("painter", request, 0, {}, {}, (), {}, emit, 0))
    loop.turn(block=False)
    assert loop.idle
    (step,) = [said for said in channel.said if isinstance(said, Step)]
    ends = {item.request: item for item in step.items if isinstance(item, Finished | Failed)}
    assert isinstance(ends["good"], Failed if fails else Finished)
    assert isinstance(ends["large"], Failed)
    assert "raise stages.painter.arena" in ends["large"].message
    assert len(ends) == len([i for i in step.items if isinstance(i, Finished | Failed)])


def _address(memory: Memory, ref: Block) -> int:
    return as_tensor(memory.view(ref), "uint8", (ref.nbytes,)).data_ptr()
