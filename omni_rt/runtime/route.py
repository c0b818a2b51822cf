"""By which way an edge's tensors cross: decided from facts, and from what was tried.

Nothing is tried here. Whoever can reach both ends asks for `next`, has it tried and says how it
went; the text of the choice is what users read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """Best first. The value is what users read."""

    LOCAL = "same process"
    DEVICE = "device memory"
    PEER = "device memory of a peer"
    SHARED = "shared memory"

    def __repr__(self) -> str:
        return f"<Route {self.name}>"


# Nothing to try: the object itself, and the arena that carries whatever is not on a device.
_CERTAIN = (Route.LOCAL, Route.SHARED)


@dataclass(frozen=True, slots=True)
class End:
    """Where a stage of the edge runs."""

    worker: str
    device: str  # UUID; "": tensors can lie in ordinary memory only
    problem: str | None = None  # why there is no device


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an edge before anything is tried."""

    producer: End
    consumer: End
    can_peer: bool = False  # the consumer's device can read the producer's


def routes(facts: Facts) -> list[Route]:
    """The ways that come into question, best first. The last one is certain."""
    here, there = facts.producer, facts.consumer
    if here.worker == there.worker:
        return [Route.LOCAL]
    if not here.device or not there.device:
        return [Route.SHARED]
    if here.device == there.device:
        return [Route.DEVICE, Route.SHARED]
    return [Route.PEER, Route.SHARED] if facts.can_peer else [Route.SHARED]


class RouteChoice:
    """The choice for one edge, from the first attempt to the last."""

    def __init__(self, edge: str, facts: Facts) -> None:
        self.edge = edge
        self._left = routes(facts)
        self._why: list[str] = []
        self._took_s: float | None = None
        self._worked = False
        for end in (facts.producer, facts.consumer):
            if end.problem:
                self._why.append(f"{end.worker} has no device pool: {end.problem}")
        if not self._why and facts.producer.device and self._left == [Route.SHARED]:
            self._why.append("the consumer's device cannot read the memory of the producer's")

    @property
    def chosen(self) -> Route | None:
        route = self._left[0]
        return route if self._worked or route in _CERTAIN else None

    @property
    def next(self) -> Route | None:
        """What to try now; None if the choice is made."""
        return None if self.chosen else self._left[0]

    @property
    def on_device(self) -> bool:
        """Whether the way that is chosen, or is to be tried next, is on a device."""
        return self._left[0] in (Route.DEVICE, Route.PEER)

    def tried(self, problem: str | None, took_s: float | None) -> None:
        """How the first way left went. One that fails is out, and the reason is kept."""
        if problem is None:
            self._worked, self._took_s = True, took_s
        else:
            failed = self._left.pop(0)
            self._why.append(f"not {failed.value}: {problem}")
            self._worked, self._took_s = False, None

    @property
    def outcome(self) -> str:
        """The choice and why: "shared memory (not device memory: no IPC here)"."""
        return self._say("")

    @property
    def text(self) -> str:
        """The same, with how long it took."""
        return self._say("" if self._took_s is None else f", probed in {self._took_s * 1e3:.1f} ms")

    def _say(self, took: str) -> str:
        shown = self.chosen.value if self.chosen else "not known yet"
        return f"{shown}{took}" + (f" ({'; '.join(self._why)})" if self._why else "")

    def __str__(self) -> str:
        return f"{self.edge}: {self.text}"
