"""The worker's loop: take what arrived, step, send what came out. The same for every engine."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_rt.errors import OmniError
from omni_rt.wire.channel import WorkerChannel
from omni_rt.wire.messages import (
    Abort,
    Attach,
    AttachPool,
    Crashed,
    Detach,
    Feed,
    Free,
    Loading,
    Ping,
    Pong,
    Probed,
    ReaderGone,
    Ready,
    Released,
    StageSpec,
    Step,
    StepItem,
    Stop,
    Submit,
    ToMain,
    ToWorker,
)
from omni_rt_workers.cuda.probe import Attempt
from omni_rt_workers.engine import Engine, EngineBroken, MakeEngine, Task
from omni_rt_workers.inputs import Lease, Reshape, TaskInputs
from omni_rt_workers.memory import Memory
from omni_rt_workers.outbox import StageOutbox, emits

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HostedStage:
    """One stage in this process: its engine and the tasks the engine holds."""

    spec: StageSpec
    engine: Engine
    outbox: StageOutbox
    via: dict[str, Reshape]
    tasks: dict[str, Task] = field(default_factory=dict)  # by request id
    step_s: float = 0.0  # of the steps that have not been told of: those without output are silent
    steps: int = 0
    batch: int = 0
    new: int = 0  # requests that were added since then


class Loop:
    """Drives the engines of one worker. One thread; all happens between two steps or in one."""

    def __init__(
        self,
        channel: WorkerChannel,
        memory: Memory,
        attach: Callable[[Attach], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._attach = attach  # receives the arena's descriptor and maps it
        self._clock = clock
        self._stages: dict[str, HostedStage] = {}
        self._released: list[Lease] = []
        self._extra: list[ToMain] = []
        self.stopping = False
        self.counters = dict.fromkeys(("steps", "aborted", "dropped", "stalls"), 0)

    # ---- start

    def load(
        self, spec: StageSpec, make: MakeEngine, via: dict[str, Reshape], inline_limit: int
    ) -> None:
        """Build and load one stage's engine; says `Loading` and `Ready`. Raises what it raises."""

        def say(phase: str, fraction: float) -> None:
            self._channel.send([Loading(spec.name, phase, fraction)])

        outbox = StageOutbox(spec.name, self._memory, spec.credits, inline_limit)
        engine = make(spec, outbox)
        ports = engine.load(say)
        self._stages[spec.name] = HostedStage(spec, engine, outbox, via)
        self._channel.send([Ready(spec.name, ports, engine.memory())])

    # ---- run

    def run(self) -> None:
        # What has been loaded stays: the garbage collector need not look through it again.
        gc.collect()
        gc.freeze()
        while not self.stopping:
            self.turn(block=self.idle)

    @property
    def idle(self) -> bool:
        return all(stage.engine.idle for stage in self._stages.values()) and not self._drains

    @property
    def _drains(self) -> bool:
        """Whether something waits for room that comes when the device has done its work: nobody
        sends a message then, so the loop goes on asking (and still hears of a reader's death)."""
        pool = self._memory.pool
        return (
            pool is not None
            and pool.draining
            and any(stage.outbox.waiting for stage in self._stages.values())
        )

    def turn(self, *, block: bool) -> None:
        """One turn: take what arrived, let every stage that can step, send what came out.

        Each step's output leaves before the next step begins, and so does what the messages alone
        brought about: leases given back, chunks that have found room, answers to pings.
        """
        for message in self._channel.receive(block=block):
            self.take(message)
        if self._drains:
            self._flush_waiting()
        self._flush()
        for stage in self._stages.values():
            if not stage.engine.idle:
                self._step(stage)
                self._flush()

    def take(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Feed():
                self._feed(message)
            case Abort():
                self._abort(message)
            case Free():
                self._free(message)
            case Attach():
                self._attach(message)
            case Detach():
                self._memory.detach(message.arena)
            case AttachPool():
                self._attach_pool(message)
            case ReaderGone():
                self._reader_gone(message)
            case Ping():
                self._extra.append(Pong(message.number, self._count()))
            case Stop():
                self.stopping = True

    def close(self) -> None:
        for stage in self._stages.values():
            for task in list(stage.tasks.values()):
                with contextlib.suppress(Exception):
                    stage.engine.abort(task)
            stage.engine.close()

    # ---- messages

    def _submit(self, message: Submit) -> None:
        stage = self._stages[message.stage]
        inputs = TaskInputs(
            self._memory, message.tensors, message.streams, stage.via, self._released
        )
        params = {**stage.spec.sampling, **message.params}
        task = Task(
            message.request,
            message.attempt,
            message.values,
            inputs,
            params,
            emits(message.emit),
            message.priority,
            deadline=message.deadline,
        )
        old = stage.tasks.get(message.request)
        if old is not None:  # a retry overtook the abort of its first attempt
            self._drop(stage, old)
        stage.tasks[message.request] = task
        stage.new += 1
        try:
            stage.engine.add(task)
        except EngineBroken:
            raise
        except Exception as error:
            stage.outbox.fail(task, error)
            self._settle(stage)

    def _feed(self, message: Feed) -> None:
        stage = self._stages[message.stage]
        task = stage.tasks.get(message.request)
        if task is None or task.attempt != message.attempt:
            self.counters["dropped"] += 1
            self._give_back(message)
            return
        inputs = _own(task)
        try:
            inputs.feed(message.port, message.seq, message.data, message.last)
            stage.engine.feed(task, message.port)
        except EngineBroken:
            raise
        except Exception as error:
            stage.outbox.fail(task, error)
            with contextlib.suppress(Exception):
                stage.engine.abort(task)
            self._settle(stage)

    def _give_back(self, message: Feed) -> None:
        """A chunk for a task that is gone: the lease that came with it must not be lost."""
        if message.data is not None:
            stray = TaskInputs(self._memory, {}, (message.port,), {}, self._released)
            stray.feed(message.port, 0, message.data, last=True)
            stray.release_all()

    def _abort(self, message: Abort) -> None:
        stage = self._stages[message.stage]
        task = stage.tasks.get(message.request)
        if task is None or task.attempt != message.attempt:
            self.counters["dropped"] += 1
            stage.outbox.forget_ended(message.request, message.attempt)
            return
        self.counters["aborted"] += 1
        self._drop(stage, task)

    def _drop(self, stage: HostedStage, task: Task) -> None:
        stage.engine.abort(task)
        stage.outbox.forget(task)
        self._release(stage, task)

    def _free(self, message: Free) -> None:
        for block in message.blocks:
            arena, offset, generation = block
            if arena == self._memory.arena_id and generation == offset:
                self._memory.drop(offset)  # a `local` object: its key is its generation
            elif not any(stage.outbox.freed(block) for stage in self._stages.values()):
                self.counters["dropped"] += 1
        self._flush_waiting()

    def _flush_waiting(self) -> None:
        for stage in self._stages.values():
            stage.outbox.flush_waiting()

    def _attach_pool(self, message: AttachPool) -> None:
        try:
            self._memory.attach_pool(message)
            attempt = self._memory.probe(message)
        except OmniError as error:
            attempt = Attempt(str(error))
        self._extra.append(Probed(message.pool, attempt.problem, attempt.took_s))

    def _reader_gone(self, message: ReaderGone) -> None:
        assert self._memory.pool is not None
        self._memory.pool.reader_died(message.reader)
        self._extra.append(self._memory.offer(message.reader))
        self._flush_waiting()

    # ---- stepping

    def _step(self, stage: HostedStage) -> None:
        started = self._clock()
        stage.batch = max(stage.batch, len(stage.tasks))
        self.counters["steps"] += 1
        try:
            stage.engine.step()
        except EngineBroken:
            raise
        except Exception as error:
            self._fail_step(stage, error)
        self._settle(stage)
        stage.step_s += self._clock() - started
        stage.steps += 1

    def _fail_step(self, stage: HostedStage, error: Exception) -> None:
        """The step's error belongs to the tasks that were in it; the stage itself goes on."""
        log.exception("stage %s: a step failed", stage.spec.name)
        ended = {*stage.outbox.ended, *stage.outbox.overflowed}
        for task in [task for task in stage.tasks.values() if task not in ended]:
            stage.engine.abort(task)
            stage.outbox.fail(task, error)

    def _settle(self, stage: HostedStage) -> None:
        """Give back what ended tasks were lent."""
        for task in stage.outbox.overflowed:
            stage.engine.abort(task)
            stage.outbox.forget(task)
            self._release(stage, task)
        stage.outbox.overflowed.clear()
        for task in stage.outbox.ended:
            self._release(stage, task)
        stage.outbox.ended.clear()

    def _release(self, stage: HostedStage, task: Task) -> None:
        if stage.tasks.get(task.request) is task:
            del stage.tasks[task.request]
        _own(task).release_all()

    def _flush(self) -> None:
        """Send all there is to say, in one frame."""
        out: list[ToMain] = []
        for stage in self._stages.values():
            if items := stage.outbox.take_items():
                out.append(_told(stage, items))
            if stalls := stage.outbox.take_stalls():
                self.counters["stalls"] += len(stalls)
                out += stalls
        if self._extra:
            out += self._extra
            self._extra.clear()
        if self._released:
            out.append(Released(self._released.copy()))
            self._released.clear()
        if out:
            self._channel.send(out)

    def _count(self) -> dict[str, int]:
        return {
            **self.counters,
            "tasks": sum(len(stage.tasks) for stage in self._stages.values()),
            "waiting": sum(stage.outbox.waiting for stage in self._stages.values()),
            "arena_bytes_in_use": self._memory.writer.in_use_bytes,
            "pool_bytes_in_use": self._memory.pool.in_use_bytes if self._memory.pool else 0,
        }


def _told(stage: HostedStage, items: list[StepItem]) -> Step:
    """What came out, with the steps that have not been told of."""
    new = stage.new if stage.steps else 0
    step = Step(stage.spec.name, items, stage.step_s, stage.batch, stage.steps, new)
    stage.step_s, stage.batch, stage.steps = 0.0, 0, 0
    stage.new -= new
    return step


def crashed(stage: str, error: BaseException) -> Sequence[ToMain]:
    """The last word of a worker that cannot go on."""
    kind = "" if isinstance(error, OmniError) else f"{type(error).__name__}: "
    detail = "".join(traceback.format_exception(error))[-8000:]
    return [Crashed(stage, f"{kind}{error}", detail)]


def _own(task: Task) -> TaskInputs:
    inputs = task.inputs
    assert isinstance(inputs, TaskInputs)
    return inputs
