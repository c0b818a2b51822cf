"""What is done again when a worker is gone, or its memory cannot be read any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_rt.errors import StageFailed
from omni_rt.runtime.arenas import Arenas
from omni_rt.runtime.effects import Effects
from omni_rt.runtime.flow import Flow, InPort, Run, RunState, startable
from omni_rt.runtime.ledger import Leased, Ledger, key_of, leased
from omni_rt.runtime.links import Link
from omni_rt.runtime.stage import Stage
from omni_rt.runtime.supervisor import Worker
from omni_rt.wire.messages import Abort
from omni_rt.wire.tensors import DeviceBlock, Local

# Workers that may die under one request before it is taken for the cause and failed.
_MAX_DEATHS = 2


End = Callable[[Effects, Flow, StageFailed], None]
Queue = Callable[[Flow, Run], None]


class Recovery:
    def __init__(
        self,
        flows: Mapping[str, Flow],
        stages: Mapping[str, Stage],
        ledger: Ledger,
        arenas: Arenas,
        counters: dict[str, int],
        queue: Queue,
        end: End,
    ) -> None:
        self._flows = flows
        self._stages = stages
        self._ledger = ledger
        self._arenas = arenas
        self._counters = counters
        self._queue = queue
        self._end = end

    def died(self, fx: Effects, worker: Worker, identity: str) -> None:
        """The worker is gone, with the objects and the device memory that it kept."""
        for flow in list(self._flows.values()):
            lost = {run.stage for run in flow.runs.values() if _runs_in(run, identity)}
            lost |= self._unreadable(fx, flow, worker)
            if lost:
                flow.deaths += 1
                self._again(
                    fx,
                    flow,
                    lost,
                    f"the process of stage {min(lost)} died while it "
                    f"worked on the request ({worker.error or 'no last words'})",
                )

    def unreadable(self, fx: Effects, link: Link) -> None:
        """The link's consumer cannot read what lies in the pool of its producer, or will lie there
        when those have stepped who were told to write to it."""
        for flow in list(self._flows.values()):
            lost = self._unreadable(fx, flow, link.producer, link.consumer.stages)
            lost |= {
                edge.source
                for run in flow.runs.values()
                for edge in run.out_edges
                if str(edge) in link.edges and _runs_in(run, link.producer.identity)
            }
            if lost:
                here, there = link.producer.name, link.consumer.name
                self._again(fx, flow, lost, f"{there} could not read the device memory of {here}")

    def redo(self, fx: Effects, flow: Flow, again: set[str]) -> None:
        queued = [run for run in flow.runs.values() if run.state is RunState.QUEUED]
        for run in flow.runs.values():
            stage = self._stages[run.stage]
            if run.stage in again:
                if run.state is RunState.RUNNING:  # aborting in a dead worker does nothing
                    fx.to(run.identity).append(Abort(run.stage, flow.id, run.attempt))
                stage.discard(flow.id)
                stage.members.add(flow.id)
        self.unkeep(fx, flow, flow.reset(again))
        for run in queued:
            if run.state is RunState.WAITING:
                self._stages[run.stage].discard(flow.id)
        for run in flow.runs.values():
            if run.state is RunState.WAITING and startable(run):
                self._queue(flow, run)

    def give_up(self, fx: Effects, flow: Flow, run: Run) -> None:
        """Keep a run's inputs no longer: a redo starts further upstream."""
        self.unkeep(fx, flow, list(run.kept()))
        for port in run.inputs.values():
            if any(leased(piece) for piece in port.pieces):
                port.given_up = len(port.pieces)

    def unkeep(self, fx: Effects, flow: Flow, refs: list[Leased]) -> None:
        keys = [key_of(ref) for ref in refs]
        self._arenas.free(fx, [key for key in keys if self._ledger.release(key, flow.id)])

    # ---- inside

    def _unreadable(
        self, fx: Effects, flow: Flow, worker: Worker, stages: tuple[str, ...] | None = None
    ) -> set[str]:
        """The runs that still need what lies in the worker's own memory. Nobody keeps it there."""
        lost: set[str] = set()
        for run in flow.runs.values():
            if run.over or (stages is not None and run.stage not in stages):
                continue
            inside = [
                (port, at, piece)
                for port in run.inputs.values()
                for at, piece in enumerate(port.pieces)
                if _lies_in(piece, worker, objects=stages is None)
            ]
            if any(self._needs(run, port, at, piece) for port, at, piece in inside):
                lost.add(run.stage)
            if inside:
                self.give_up(fx, flow, run)
        return lost

    def _needs(self, run: Run, port: InPort, at: int, piece: object) -> bool:
        """Unless it is through with it: has read it and given it back."""
        ref = leased(piece)
        assert ref is not None
        is_sent = port.edge.stream is None or at < port.sent
        if run.state is RunState.RUNNING and is_sent:
            return run.identity in self._ledger.holders(key_of(ref))
        return True

    def _again(self, fx: Effects, flow: Flow, lost: set[str], why: str) -> None:
        again = flow.redo(lost)
        if again is None or flow.deaths > _MAX_DEATHS:
            times = f"this happened {flow.deaths} times"
            also = "part of its answer had been sent" if again is None else times
            stage = min(lost)
            text = f"{why} and it was not tried again: {also}"
            self._end(fx, flow, StageFailed(text, request=flow.id, stage=stage))
        else:
            self._counters["retried"] += 1
            self.redo(fx, flow, again)


def _runs_in(run: Run, identity: str) -> bool:
    return run.state is RunState.RUNNING and run.identity == identity


def _lies_in(piece: object, worker: Worker, *, objects: bool) -> bool:
    """Whether the piece is in the worker's device pool or, with `objects`, one of its objects."""
    if isinstance(piece, DeviceBlock):
        return piece.pool == worker.pool
    return objects and isinstance(piece, Local) and piece.arena == worker.arena
