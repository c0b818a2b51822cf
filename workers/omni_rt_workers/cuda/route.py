"""By which way an edge's tensors cross: decided from facts, and from what was tried.

Nothing is tried here. Whoever can reach both ends asks for `next`, tries it (probe.py) and says how
it went, until `chosen` is there; the text of it is shown at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """Best first. The value is what users read."""

    LOCAL = "same process"
    DEVICE = "device memory"
    PEER = "device memory of a peer"
    PINNED = "pinned shared memory"
    SHARED = "shared memory"
    INLINE = "in the message"

    def __repr__(self) -> str:
        return f"<Route {self.name}>"


# Nothing to try: the object itself, and the message that carries everything else too.
_CERTAIN = (Route.LOCAL, Route.INLINE)


@dataclass(frozen=True, slots=True)
class End:
    """Where a stage of the edge runs."""

    worker: str
    device: str | None  # UUID; None: tensors lie in ordinary memory


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an edge before anything is tried."""

    producer: End
    consumer: End
    can_peer: bool = False  # the consumer's device can read the producer's
    can_pin: bool = False  # the driver can pin shared memory in this container
    has_arena: bool = True


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one transfer of `PROBE_BYTES` went."""

    problem: str | None = None  # None: every byte arrived
    took_s: float | None = None


def routes(facts: Facts) -> list[Route]:
    """The ways that come into question, best first. The last one is certain."""
    here, there = facts.producer, facts.consumer
    if here.worker == there.worker:
        return [Route.LOCAL]
    on_devices = here.device is not None and there.device is not None
    possible = {
        Route.DEVICE: on_devices and here.device == there.device,
        Route.PEER: on_devices and here.device != there.device and facts.can_peer,
        Route.PINNED: on_devices and facts.has_arena and facts.can_pin,
        Route.SHARED: facts.has_arena,
        Route.INLINE: True,
    }
    return [route for route, is_possible in possible.items() if is_possible]


class RouteChoice:
    """The choice for one edge, from the first attempt to the last."""

    def __init__(self, edge: str, facts: Facts) -> None:
        self.edge = edge
        self.chosen: Route | None = None
        self._left = routes(facts)
        self._failed: list[tuple[Route, str]] = []
        self._took_s: float | None = None
        self._settle()

    @property
    def next(self) -> Route | None:
        """What to try now; None if the choice is made."""
        return None if self.chosen else self._left[0]

    def tried(self, attempt: Attempt) -> None:
        """How `next` went. A way that fails is out for good, and the reason is kept."""
        route = self._left.pop(0)
        if attempt.problem is None:
            self.chosen, self._took_s = route, attempt.took_s
        else:
            self._failed.append((route, attempt.problem))
            self._settle()

    def _settle(self) -> None:
        if self._left[0] in _CERTAIN:
            self.chosen = self._left[0]

    def __str__(self) -> str:
        """One line: "writer.hidden -> painter: shared memory, 0.4 ms for 1 MiB (not ...: why)"."""
        shown = self.chosen.value if self.chosen else "not known yet"
        if self._took_s is not None:
            shown += f", {self._took_s * 1e3:.1f} ms for 1 MiB"
        if self._failed:
            why = "; ".join(f"not {route.value}: {problem}" for route, problem in self._failed)
            shown += f" ({why})"
        return f"{self.edge}: {shown}"
