"""The main process's mind: every event goes in here, everything to do comes out as `Effects`.

Synchronous, without I/O and without a clock of its own: `AsyncOmni` drives it with sockets and
processes, the simulation with virtual time and injected faults.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterable

from omni_rt.config import PipelineConfig
from omni_rt.errors import (
    Cancelled,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    ProtocolError,
    StageUnavailable,
    from_wire,
)
from omni_rt.graph import Graph
from omni_rt.request import Done, Progress, Request
from omni_rt.runtime.admission import Admission
from omni_rt.runtime.arenas import Arenas
from omni_rt.runtime.effects import Delivery, Effects
from omni_rt.runtime.flow import Flow, Run, RunState, startable, streams
from omni_rt.runtime.ledger import BlockKey, Ledger, key_of, leased
from omni_rt.runtime.links import Links
from omni_rt.runtime.pace import Pace
from omni_rt.runtime.pressure import Pressure
from omni_rt.runtime.recovery import Recovery
from omni_rt.runtime.stage import Stage
from omni_rt.runtime.supervisor import Supervisor, Worker
from omni_rt.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Chunk,
    Crashed,
    Failed,
    Feed,
    Finished,
    Hello,
    Loading,
    Offered,
    OnDevice,
    Ping,
    Pong,
    Probed,
    Ready,
    Released,
    Stalled,
    Step,
    StepProgress,
    Submit,
    TextPiece,
    ToMain,
)

log = logging.getLogger(__name__)

_COUNTERS = (
    "accepted",
    "finished",
    "failed",
    "cancelled",
    "overloaded",
    "deadline_exceeded",
    "retried",
    "dropped",  # messages about attempts that were over
    "given_up",  # kept inputs freed under memory pressure
)


class Core:
    def __init__(self, config: PipelineConfig, graph: Graph) -> None:
        self.graph = graph
        self.supervisor = Supervisor(config)
        self.ledger = Ledger()
        self.flows: dict[str, Flow] = {}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        slots: dict[str, list[int]] = {}
        for worker in self.supervisor.workers:
            for stage in worker.stages:
                slots.setdefault(stage, []).append(worker.slot)
        self.stages = {
            name: Stage(name, slots[name], stage.max_batch, stage.queue)
            for name, stage in config.stages.items()
        }
        self.admission = Admission(config, graph, self.stages, self.supervisor)
        self.pace = Pace(config, self.stages)
        self.arenas = Arenas(self.ledger, self.supervisor)
        self.links = Links(config, graph, self.supervisor.workers, self.arenas)
        self.pressure = Pressure(self.flows, self.ledger)
        self.recovery = Recovery(
            self.flows,
            self.stages,
            self.ledger,
            self.arenas,
            self.counters,
            self._queue,
            self._end,
        )
        self._order = itertools.count()
        self._deadlines: list[tuple[float, str]] = []
        self._ping = itertools.count(1)
        self.closing = False

    # ---- life of the workers

    def start(self, now: float) -> Effects:
        return self.on_time(now)

    def spawned(self, worker: Worker, arena_bytes: int, now: float) -> None:
        """The caller is about to start a process in the slot, with an arena of that size."""
        self.supervisor.spawned(worker, now)
        self.arenas.add(worker, arena_bytes)

    def on_exit(self, identity: str, error: str | None, now: float) -> Effects:
        """The process of that identity is gone; `error` is its own last words."""
        fx = Effects(status_changed=True)
        worker = self.supervisor.find(identity)
        if worker is None:
            return fx
        worker.error = worker.error or error
        self.supervisor.exited(worker, now)
        for name in worker.stages:
            self.stages[name].lost(identity)
        self.pressure.lost(worker.stages)
        self.links.ended(fx, worker)  # first: nobody waits for the dead one's reads any more
        self.arenas.free(fx, self.ledger.drop(identity))
        self.arenas.retire(worker)
        self.recovery.died(fx, worker, identity)
        if worker.down:
            self._fail_stranded(fx, now)
        self.arenas.close_retired(fx)
        return self._settled(fx, now)

    def on_time(self, now: float) -> Effects:
        """Whatever is due: starts, kills, pings, deadlines."""
        fx = Effects()
        due = self.supervisor.due(now)
        fx.spawn += due.spawn
        fx.kill += due.kill
        self.pressure.report(now)
        if due.waited_out:
            self._fail_stranded(fx, now)
        for request_id, overloaded in self.pace.expired(now).items():
            self._end(fx, self.flows[request_id], overloaded)
        for worker in due.ping:
            fx.to(worker.identity).append(Ping(next(self._ping)))
        while self._deadlines and self._deadlines[0][0] <= now:
            flow = self.flows.get(heapq.heappop(self._deadlines)[1])
            if flow is not None:
                self.counters["deadline_exceeded"] += 1
                limit = (flow.deadline or now) - flow.submitted_at
                error = DeadlineExceeded(
                    f"the request was not finished within {limit:g} s", request=flow.id
                )
                self._end(fx, flow, error)
        return self._settled(fx, now)

    def next_time(self) -> float | None:
        parts = (self.supervisor.next_time(), self.pressure.next_time(), self.pace.next_time())
        times = [time for time in parts if time is not None]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min(times, default=None)

    # ---- life of the requests

    def submit(self, request: Request, request_id: str, seed: int, now: float) -> Effects:
        """Accept a request. Raises `BadRequest`, `StageUnavailable` or `Overloaded`."""
        if self.closing:
            raise StageUnavailable("the runtime is closing")
        try:
            plan = self.admission.check(request)
            self.pace.check(plan, request.playback, now)
        except Overloaded:
            self.counters["overloaded"] += 1
            raise
        self.counters["accepted"] += 1
        flow = Flow(request_id, request, plan, seed, next(self._order), now)
        self.flows[flow.id] = flow
        limit = self.admission.deadline_s(request)
        if limit is not None:
            flow.deadline = now + limit
            heapq.heappush(self._deadlines, (flow.deadline, flow.id))
        for stage in plan.stages:
            self.stages[stage].members.add(flow.id)
        if self.pace.enter(flow.id, plan, request.playback, now):
            self._begin(flow)
        return self._settled(Effects(), now)

    def _begin(self, flow: Flow) -> None:
        for run in flow.entries():
            self._queue(flow, run)

    def cancel(self, request_id: str, why: str, now: float) -> Effects:
        """End a request at the next step boundary of every stage. Unknown ids do nothing."""
        fx = Effects()
        flow = self.flows.get(request_id)
        if flow is not None:
            self.counters["cancelled"] += 1
            self._end(fx, flow, Cancelled(why, request=flow.id))
        return self._settled(fx, now)

    def taken(self, request_id: str, key: BlockKey, now: float) -> Effects:
        """The client has copied a delivered block."""
        fx = Effects()
        if self.ledger.release(key, client_of(request_id)):
            self.arenas.free(fx, [key])
        self.arenas.close_retired(fx)
        return self._settled(fx, now)

    def client_gone(self, request_id: str, now: float) -> Effects:
        """The client will take nothing more: all it was lent comes back."""
        fx = Effects()
        self.arenas.free(fx, self.ledger.drop(client_of(request_id)))
        self.arenas.close_retired(fx)
        return self._settled(fx, now)

    # ---- messages of the workers

    def on_messages(self, identity: str, messages: Iterable[ToMain], now: float) -> Effects:
        fx = Effects()
        worker = self.supervisor.find(identity)
        if worker is None:  # of a process that was declared dead
            self.counters["dropped"] += 1
            return fx
        self.supervisor.heard(worker, now)
        for message in messages:
            self._on_message(fx, worker, message, now)
        self.arenas.close_retired(fx)
        return self._settled(fx, now)

    def on_garbage(self, identity: str, what: str, now: float) -> Effects:
        """A frame that is no message: the worker is broken or not ours."""
        fx = Effects()
        worker = self.supervisor.find(identity)
        if worker is not None:
            worker.error = f"it sent a frame that is no message: {what}"
            fx.kill.append(worker)
        return fx

    def _on_message(self, fx: Effects, worker: Worker, message: ToMain, now: float) -> None:
        match message:
            case Step():
                self._on_step(fx, worker, message, now)
            case Released():
                freed = [k for k in message.blocks if self.ledger.release(k, worker.identity)]
                self.arenas.free(fx, freed)
            case Stalled():
                if message.request in self.flows:
                    self.pressure.stalled(message, now)
            case Pong():
                worker.counters = message.counters
            case Loading():
                worker.phase[message.stage] = (message.phase, message.fraction)
                fx.status_changed = True
            case Ready():
                self._on_ready(fx, worker, message)
            case Hello():
                self._on_hello(fx, worker, message)
            case OnDevice():
                self.links.on_device(worker, message)
            case Offered():
                self.links.offered(worker, message)
            case Probed():
                self.links.probed(worker, message)
                fx.status_changed = True
            case Crashed():
                worker.error = f"stage {message.stage}: {message.message}"
                log.error("stage %s crashed: %s", message.stage, message.message)

    def _on_hello(self, fx: Effects, worker: Worker, message: Hello) -> None:
        worker.pid = message.pid
        fx.status_changed = True
        if message.version != PROTOCOL_VERSION:
            worker.error = (
                f"it speaks protocol {message.version}, main speaks {PROTOCOL_VERSION}: "
                "two installations of omni-rt are mixed"
            )
            fx.kill.append(worker)

    def _on_ready(self, fx: Effects, worker: Worker, message: Ready) -> None:
        fx.status_changed = True
        try:
            self.admission.check_ports(message.stage, message.ports)
        except OmniError as error:
            worker.error = str(error)
            worker.ever_ready = False  # the file is wrong: starting again would not help
            fx.kill.append(worker)
            return
        self.stages[message.stage].ports = message.ports
        for note in message.ports.notes:
            log.info("stage %s: %s", message.stage, note)
        if self.supervisor.loaded(worker, message.stage):
            self.links.started(worker)

    def _on_step(self, fx: Effects, worker: Worker, step: Step, now: float) -> None:
        stalled = bool(self.pressure)
        self.pace.stepped(step, worker.identity, now)
        for item in step.items:
            flow = self.flows.get(item.request)
            run = flow.current(step.stage, item.attempt) if flow else None
            if flow is None or run is None or run.identity != worker.identity:
                self._drop(fx, item)
                continue
            if stalled:
                self.pressure.moved(step.stage, item.request)
            try:
                match item:
                    case Chunk():
                        self._on_chunk(fx, flow, run, item, now)
                    case Finished():
                        self._on_finished(fx, worker, flow, run, item, now)
                    case StepProgress():
                        progress = Progress(run.stage, item.step, item.total)
                        fx.deliver.append(Delivery(flow.id, "", progress))
                    case Failed():
                        self._on_failed(fx, flow, run, item)
            except ProtocolError as error:
                self._end(fx, flow, error)

    def _drop(self, fx: Effects, item: object) -> None:
        """A message about an attempt that is over. What it lends is given back at once."""
        self.counters["dropped"] += 1
        if isinstance(item, Chunk) and (ref := leased(item.data)):
            self.arenas.free(fx, [key_of(ref)])

    def _on_chunk(self, fx: Effects, flow: Flow, run: Run, chunk: Chunk, now: float) -> None:
        edges = run.targets.get(chunk.port, ())
        names = run.outputs.get(chunk.port, ())
        ref = None if isinstance(chunk.data, TextPiece) else leased(chunk.data)
        if ref is not None:
            holders = [flow.id] * len(edges) + [client_of(flow.id)] * len(names)
            if not self.ledger.book(key_of(ref), holders):
                self.arenas.free(fx, [key_of(ref)])
        flow.check_order(run, chunk)
        if chunk.seq == 0:
            flow.first_output_s.setdefault(run.stage, now - flow.submitted_at)
        for name in names:
            run.reached = True
            fx.deliver.append(Delivery(flow.id, name, chunk))
        for edge in edges:
            target = flow.runs[edge.target]
            port = target.inputs[edge.target_port]
            port.take(chunk.data)
            if edge.stream is not None:
                port.ended = chunk.last
                if target.state is RunState.RUNNING:
                    self._feed(fx, flow, target, edge.target_port)
                elif startable(target):
                    self._queue(flow, target)

    def _on_finished(
        self, fx: Effects, worker: Worker, flow: Flow, run: Run, message: Finished, now: float
    ) -> None:
        self.supervisor.served(worker)
        flow.finish(run, message, now)
        self._leave(fx, flow, run)
        self._advance(fx, flow, run, message.facts)
        if flow.over:
            self.counters["finished"] += 1
            self._end(fx, flow, None)

    def _on_failed(self, fx: Effects, flow: Flow, run: Run, message: Failed) -> None:
        error = from_wire(
            message.kind,
            message.message,
            request=flow.id,
            stage=run.stage,
            param=message.param,
            detail=message.detail,
        )
        self._end(fx, flow, error)

    # ---- moving on

    def _queue(self, flow: Flow, run: Run) -> None:
        run.state = RunState.QUEUED
        self.stages[run.stage].push(flow.id, flow.request.priority, flow.order)

    def _advance(self, fx: Effects, flow: Flow, run: Run, facts: tuple[str, ...]) -> None:
        """`run` is over: what waited for it can be queued, is skipped, or hears that it ended."""
        for ready in flow.close_inputs(run, facts):
            if flow.skips(ready):
                ready.state = RunState.SKIPPED
                self._leave(fx, flow, ready)
                self._advance(fx, flow, ready, ())
            else:
                self._queue(flow, ready)
        for edge in run.out_edges:
            target = flow.runs[edge.target]
            if edge.stream is not None and target.state is RunState.RUNNING:
                self._feed(fx, flow, target, edge.target_port)

    def _leave(self, fx: Effects, flow: Flow, run: Run) -> None:
        """The request is through a stage: its place and its kept inputs come back."""
        stage = self.stages[run.stage]
        stage.discard(flow.id)
        stage.members.discard(flow.id)
        self.recovery.give_up(fx, flow, run)

    def _open(self, worker: Worker) -> None:
        """The worker has loaded and can be given work."""
        for name in worker.stages:
            for replica in self.stages[name].replicas:
                if replica.slot == worker.slot:
                    replica.identity = worker.identity

    def _dispatch(self, fx: Effects) -> None:
        """Give waiting requests to replicas that have room."""
        for stage in self.stages.values():
            while taken := stage.next_run():
                request_id, replica = taken
                flow = self.flows[request_id]
                run = flow.runs[stage.name]
                assert replica.identity is not None
                self._submit(fx, flow, run, replica.identity)

    def _submit(self, fx: Effects, flow: Flow, run: Run, identity: str) -> None:
        attempt = flow.start(run, identity)
        open_ports = streams(run)
        whole = {
            name: port.pieces
            for name, port in run.inputs.items()
            if name not in open_ports and not port.absent
        }
        for pieces in whole.values():
            for piece in pieces:
                self.arenas.lend(fx, piece, identity)
        message = Submit(
            run.stage,
            flow.id,
            attempt,
            self.admission.values(flow.request, run, flow.seed),
            whole,
            open_ports,
            self.admission.params(flow.request, run.stage),
            self.links.carry(
                flow.plan, run.stage, identity, self.admission.emits(flow.plan, run.stage)
            ),
            flow.request.priority,
            flow.deadline,
        )
        fx.to(identity).append(message)
        for name in open_ports:
            self._feed(fx, flow, run, name)

    def _feed(self, fx: Effects, flow: Flow, run: Run, name: str) -> None:
        """Forward what has arrived for a streamed input of a running run, and its end."""
        port = run.inputs[name]
        out = fx.to(run.identity)
        while port.sent < len(port.pieces):
            piece = port.pieces[port.sent]
            last = port.ended and port.sent + 1 == len(port.pieces)
            self.arenas.lend(fx, piece, run.identity)
            out.append(Feed(run.stage, flow.id, run.attempt, name, port.sent, piece, last))
            port.sent += 1
            port.told_end = last
        if port.keeps_in_vain:
            self.recovery.unkeep(fx, flow, list(port.kept()))
            port.given_up = port.sent
        if port.ended and not port.told_end:
            out.append(Feed(run.stage, flow.id, run.attempt, name, port.sent, None, last=True))
            port.told_end = True

    # ---- the end of a request

    def _end(self, fx: Effects, flow: Flow, error: OmniError | None) -> None:
        """Give back all that the request holds, once, whatever its outcome."""
        del self.flows[flow.id]
        self.pace.leave(flow.id)
        for run in flow.runs.values():
            if run.state is RunState.RUNNING:
                fx.to(run.identity).append(Abort(run.stage, flow.id, run.attempt))
            stage = self.stages[run.stage]
            stage.discard(flow.id)
            stage.members.discard(flow.id)
        self.pressure.ended(flow.id)
        self.arenas.free(fx, self.ledger.drop(flow.id))
        if error is not None and not isinstance(error, Cancelled | DeadlineExceeded):
            self.counters["failed"] += 1
        reason = "length" if flow.reason == "length" else "stop"
        times = (flow.stage_s, flow.first_output_s)
        done = Done(reason, flow.usage(), flow.seed, *times)  # type: ignore[arg-type]
        fx.deliver.append(Delivery(flow.id, "", error or done))

    def _fail_stranded(self, fx: Effects, now: float) -> None:
        """Requests that need a stage that is down, or away for too long, end at once."""
        for flow in list(self.flows.values()):
            for run in flow.runs.values():
                if not run.over and (error := self.admission.unavailable(run.stage)):
                    self._end(fx, flow, error)
                    break

    # ---- memory

    def _relieve(self, fx: Effects) -> None:
        """Stages wait for room: give kept inputs up, oldest first, and break fan-in deadlocks."""
        for arenas in list(self.pressure.arenas()):
            if kept := self.pressure.kept_only(arenas):
                self.counters["given_up"] += 1
                self.recovery.give_up(fx, *kept)
            elif preempted := self.pressure.to_preempt(arenas):
                self.counters["given_up"] += 1
                self.recovery.redo(fx, *preempted)

    def _settled(self, fx: Effects, now: float) -> Effects:
        """After every event: queues move as far as they can."""
        for link in self.links.take_broken():
            self.recovery.unreadable(fx, link)
        for worker in self.links.to_open(fx):
            self._open(worker)
        if self.pressure:
            self._relieve(fx)
        for request_id in self.pace.let_in():
            self._begin(self.flows[request_id])
        self._dispatch(fx)
        while self._deadlines and self._deadlines[0][1] not in self.flows:
            heapq.heappop(self._deadlines)
        return fx


def client_of(request_id: str) -> str:
    """The holder of blocks that were delivered to a request's client."""
    return f"client:{request_id}"
