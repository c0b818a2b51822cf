"""One request on its way through the stages: which stage is next, what it has, what it gave.

Plain and synchronous: events come in, changes of state and what to do come out. `Core` does the
book-keeping that concerns more than one request (queues, leases, workers).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_rt.errors import ProtocolError
from omni_rt.graph import Edge, Plan
from omni_rt.request import Request
from omni_rt.runtime.ledger import Leased, leased
from omni_rt.wire.messages import Chunk, Finished, Payload, TextPiece

Piece = Payload | TextPiece


# Bytes of a streamed input that a running request keeps for a redo. A stream beyond it gives all
# of it up: its blocks are used again at once, while they are warm in the caches.
KEPT_STREAM_BYTES = 32 << 20


class RunState(enum.Enum):
    WAITING = "waiting"  # for its inputs
    QUEUED = "queued"  # in the stage's queue
    RUNNING = "running"  # in a worker
    DONE = "done"
    SKIPPED = "skipped"  # no condition on the way to it held


@dataclass(slots=True)
class InPort:
    """What has arrived for one input of a run, kept until the run is done, for a redo."""

    edge: Edge
    pieces: list[Piece] = field(default_factory=list)
    ended: bool = False
    absent: bool = False  # the edge's condition did not hold
    sent: int = 0  # pieces forwarded to the present attempt
    told_end: bool = False  # the present attempt knows that it has ended
    given_up: int = 0  # pieces no longer kept: with any, a redo must start at the producer
    kept_bytes: int = 0  # of a stream, in blocks

    def take(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if self.edge.stream is not None and (ref := leased(piece)):
            self.kept_bytes += ref.nbytes

    @property
    def keeps_in_vain(self) -> bool:
        """Whether keeping more is of no use for a redo, or more than a request may keep."""
        return self.given_up > 0 or self.kept_bytes > KEPT_STREAM_BYTES

    def kept(self) -> Iterator[Leased]:
        """The leased refs that the request still keeps for a redo."""
        for piece in self.pieces[self.given_up :]:
            if ref := leased(piece):
                yield ref


@dataclass(slots=True, eq=False)
class Run:
    """One stage's work for one request."""

    stage: str
    inputs: dict[str, InPort]
    out_edges: list[Edge]
    outputs: dict[str, list[str]]  # port -> the request's outputs that show it
    state: RunState = RunState.WAITING
    attempt: int = 0
    identity: str = ""  # of the worker, while RUNNING
    expected: dict[str, int] = field(default_factory=dict)  # next seq by output port
    ended_ports: set[str] = field(default_factory=set)
    usage: dict[str, int] = field(default_factory=dict)
    reached: bool = False  # something of it has reached the client: it cannot be redone
    targets: dict[str, list[Edge]] = field(default_factory=dict)  # out_edges by port

    def __post_init__(self) -> None:
        for edge in self.out_edges:
            self.targets.setdefault(edge.source_port, []).append(edge)

    @property
    def active(self) -> bool:
        return self.state in (RunState.QUEUED, RunState.RUNNING)

    @property
    def over(self) -> bool:
        return self.state in (RunState.DONE, RunState.SKIPPED)

    def kept(self) -> Iterator[Leased]:
        """The leased refs among its inputs that the request still keeps."""
        for port in self.inputs.values():
            yield from port.kept()


class Flow:
    """The state of one accepted request."""

    def __init__(
        self, request_id: str, request: Request, plan: Plan, seed: int, order: int, now: float
    ) -> None:
        self.id = request_id
        self.request = request
        self.plan = plan
        self.seed = seed
        self.order = order
        self.submitted_at = now
        self.deadline: float | None = None
        self.attempts = 0  # submits so far, over all stages
        self.deaths = 0  # workers that died while they worked on it
        self.stage_s: dict[str, float] = {}  # from submission to the end of each stage
        self.first_output_s: dict[str, float] = {}  # and to its first output
        self.reason = "stop"
        shown: dict[str, dict[str, list[str]]] = {}
        for name, (stage, port) in plan.outputs.items():
            shown.setdefault(stage, {}).setdefault(port, []).append(name)
        self.runs: dict[str, Run] = {
            stage: Run(
                stage,
                {e.target_port: InPort(e) for e in plan.edges if e.target == stage},
                [e for e in plan.edges if e.source == stage],
                shown.get(stage, {}),
            )
            for stage in plan.stages
        }

    def __repr__(self) -> str:
        states = " ".join(f"{run.stage}={run.state.value}" for run in self.runs.values())
        return f"<Flow {self.id} {states}>"

    @property
    def over(self) -> bool:
        return all(run.over for run in self.runs.values())

    def entries(self) -> list[Run]:
        return [run for run in self.runs.values() if not run.inputs]

    def current(self, stage: str, attempt: int) -> Run | None:
        """The run that a worker's message is about, unless that attempt is over."""
        run = self.runs.get(stage)
        if run is None or run.attempt != attempt or run.state is not RunState.RUNNING:
            return None
        return run

    def start(self, run: Run, identity: str) -> int:
        """A worker takes the run; the number of the attempt."""
        self.attempts += 1
        run.attempt = self.attempts
        run.state = RunState.RUNNING
        run.identity = identity
        run.expected.clear()
        run.ended_ports.clear()
        for port in run.inputs.values():
            port.sent, port.told_end = 0, False
        return run.attempt

    def usage(self) -> dict[str, int]:
        """The sum over the stages."""
        total: dict[str, int] = {}
        for run in self.runs.values():
            for name, value in run.usage.items():
                total[name] = total.get(name, 0) + value
        return total

    def check_order(self, run: Run, chunk: Chunk) -> None:
        expected = run.expected.get(chunk.port, 0)
        if chunk.seq != expected or chunk.port in run.ended_ports:
            raise ProtocolError(
                f"chunk {chunk.seq} of {run.stage}.{chunk.port} came where {expected} was due",
                request=self.id,
                stage=run.stage,
            )
        run.expected[chunk.port] = expected + 1
        if chunk.last:
            run.ended_ports.add(chunk.port)

    def finish(self, run: Run, message: Finished, now: float) -> None:
        run.state = RunState.DONE
        run.identity = ""
        self.stage_s[run.stage] = now - self.submitted_at
        if message.reason == "length":
            self.reason = "length"
        run.usage = message.usage

    def close_inputs(self, run: Run, facts: tuple[str, ...]) -> list[Run]:
        """The run is over: its edges end. The runs that can now be queued."""
        return [
            ready
            for edge in run.out_edges
            if (ready := self._close(edge, holds(edge.when, facts) and run.state is RunState.DONE))
        ]

    def _close(self, edge: Edge, present: bool) -> Run | None:
        target = self.runs[edge.target]
        port = target.inputs[edge.target_port]
        port.ended = True
        port.absent = not present
        return target if startable(target) else None

    def skips(self, run: Run) -> bool:
        """Whether the run, which is startable, has nothing to work on."""
        return bool(run.inputs) and all(port.absent for port in run.inputs.values())

    def redo(self, lost: set[str]) -> set[str] | None:
        """The stages that must run again when the work of `lost` is lost; None: it is too late.

        It grows downstream, where what came out of a lost run has been consumed, and upstream,
        where inputs are no longer kept. Too late is when a part of it has reached the client.
        """
        again = set(lost)
        frontier = list(lost)
        while frontier:
            run = self.runs[frontier.pop()]
            for stage in self._dragged_along(run):
                if stage not in again:
                    again.add(stage)
                    frontier.append(stage)
        if any(self.runs[stage].reached for stage in again):
            return None
        return again

    def _dragged_along(self, run: Run) -> Iterator[str]:
        for port in run.inputs.values():
            if port.given_up:
                yield port.edge.source
        for edge in run.out_edges:
            target = self.runs[edge.target]
            if target.state in (RunState.RUNNING, RunState.DONE, RunState.SKIPPED):
                yield target.stage

    def reset(self, again: set[str]) -> list[Leased]:
        """Put the runs of `again` back to where their inputs allow. The refs no longer kept."""
        dropped: list[Leased] = []
        for run in self.runs.values():
            for port in run.inputs.values():
                if port.edge.source in again:
                    dropped += port.kept()
                    run.inputs[port.edge.target_port] = InPort(port.edge)
                    if run.active or run.stage in again:
                        run.state = RunState.WAITING
            if run.stage in again:
                run.state = RunState.WAITING
                run.identity = ""
                run.expected.clear()
                run.ended_ports.clear()
        return dropped


def startable(run: Run) -> bool:
    """Whether a waiting run has all it needs: whole inputs whole, streamed ones begun."""
    if run.state is not RunState.WAITING:
        return False
    return all(port.ended or _begun(port) for port in run.inputs.values())


def streams(run: Run) -> tuple[str, ...]:
    """The inputs of which feeds will follow a submit."""
    return tuple(name for name, port in run.inputs.items() if port.edge.stream and not port.absent)


def holds(when: str | None, facts: tuple[str, ...]) -> bool:
    """Whether an edge's condition holds, given what its producer reported."""
    if when is None:
        return True
    name = when.removeprefix("not ").strip()
    return (name in facts) != when.startswith("not ")


def _begun(port: InPort) -> bool:
    return port.edge.stream is not None and len(port.pieces) >= max(1, port.edge.stream.first)
