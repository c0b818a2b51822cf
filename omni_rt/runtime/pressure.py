"""Stages that wait for room: what can be given up for them, and what is said about long waits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from omni_rt.runtime.flow import Flow, Run, RunState
from omni_rt.runtime.ledger import Ledger, key_of
from omni_rt.wire.messages import Stalled

log = logging.getLogger(__name__)

# A wait for room that lasts longer is worth a line in the log.
_REPORT_S = 5.0


@dataclass(slots=True)
class Stall:
    """An output port of a request that waits for room."""

    port: str
    memory: int  # id of the arena or pool
    report_at: float
    reported: bool = False


class Pressure:
    """Who waits for room. Decides what to give up; `Core` does it."""

    def __init__(self, flows: Mapping[str, Flow], ledger: Ledger) -> None:
        self._flows = flows
        self._ledger = ledger
        self._stalls: dict[str, dict[str, Stall]] = {}  # by stage and request

    def __bool__(self) -> bool:
        return any(self._stalls.values())

    def __repr__(self) -> str:
        return f"<Pressure {self._stalls}>"

    def stalled(self, message: Stalled, now: float) -> None:
        stall = Stall(message.port, message.memory, now + _REPORT_S)
        self._stalls.setdefault(message.stage, {})[message.request] = stall

    def moved(self, stage: str, request: str) -> None:
        """Something of the request came out of the stage: it has found room."""
        if waiting := self._stalls.get(stage):
            waiting.pop(request, None)

    def ended(self, request: str) -> None:
        for waiting in self._stalls.values():
            waiting.pop(request, None)

    def lost(self, stages: Iterable[str]) -> None:
        """The process of these stages is gone, and with it what waited there."""
        for stage in stages:
            self._stalls.pop(stage, None)

    def arenas(self) -> Iterator[set[int]]:
        """For each stage that waits, the arenas and pools in which it waits for room."""
        for waiting in self._stalls.values():
            if waiting:
                yield {stall.memory for stall in waiting.values()}

    def kept_only(self, arenas: set[int]) -> tuple[Flow, Run] | None:
        """The oldest running request of which blocks there are only kept for a redo."""
        for flow in self._flows.values():  # in order of submission
            for run in flow.runs.values():
                if run.state is not RunState.RUNNING:
                    continue
                mine = [key for ref in run.kept() if (key := key_of(ref))[0] in arenas]
                if mine and all(set(self._ledger.holders(key)) <= {flow.id} for key in mine):
                    return flow, run
        return None

    def to_preempt(self, arenas: set[int]) -> tuple[Flow, set[str]] | None:
        """If every block there is kept by runs that wait for other inputs (the deadlock of a
        fan-in), the youngest request that can give its own back, and the stages it must redo.

        Only then: a block that a worker, a queue or a client holds comes back by itself. The
        oldest request is never chosen, so there is progress.
        """
        holders = self._waiting_holders(arenas)
        if holders is None:
            return None
        oldest = min((flow.order for flow in self._flows.values()), default=0)
        young = [self._flows[r] for r in holders if self._flows[r].order != oldest]
        for flow in sorted(young, key=lambda flow: -flow.order):
            again = flow.redo(holders[flow.id])
            if again is not None:
                return flow, again
        return None

    def report(self, now: float) -> None:
        """Say which ports wait for long, and who holds what they wait for."""
        for stage, waiting in self._stalls.items():
            for request, stall in waiting.items():
                if not stall.reported and now >= stall.report_at:
                    stall.reported = True
                    self._say(stage, request, stall)

    def next_time(self) -> float | None:
        """When `report` is to be asked next."""
        times = [
            stall.report_at
            for waiting in self._stalls.values()
            for stall in waiting.values()
            if not stall.reported
        ]
        return min(times, default=None)

    def _say(self, stage: str, request: str, stall: Stall) -> None:
        keys = list(self._ledger.blocks(stall.memory))
        holders = Counter(holder for key in keys for holder in self._ledger.holders(key))
        log.warning(
            "request %s: %s.%s has waited %g s for room; %d blocks are held by: %s",
            request,
            stage,
            stall.port,
            _REPORT_S,
            len(keys),
            ", ".join(f"{holder} ({count})" for holder, count in holders.most_common(5)),
        )

    def _waiting_holders(self, arenas: set[int]) -> dict[str, set[str]] | None:
        """Requests that keep blocks there, with the stages that made them; None if some block
        is not merely kept by a run that waits."""
        holders: dict[str, set[str]] = {}
        for flow in self._flows.values():
            for run in flow.runs.values():
                for port in run.inputs.values():
                    for ref in port.kept():
                        if key_of(ref)[0] not in arenas:
                            continue
                        if run.state is not RunState.WAITING:
                            return None
                        holders.setdefault(flow.id, set()).add(port.edge.source)
        keys = [key for arena in arenas for key in self._ledger.blocks(arena)]
        if any(set(self._ledger.holders(key)) - set(holders) for key in keys):
            return None
        return holders
