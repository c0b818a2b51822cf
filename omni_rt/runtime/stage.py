"""One stage as main sees it: the requests that wait for it and the replicas that take them."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from omni_rt.wire.messages import Ports


@dataclass(slots=True)
class Replica:
    """A place where the stage runs: a worker slot. `identity` is None while nobody lives there."""

    slot: int  # index of the worker slot in the supervisor
    identity: str | None = None
    running: set[str] = field(default_factory=set)  # request ids


class Stage:
    """Decides which request goes to which replica next.

    Requests wait here rather than in the workers, in order of priority and then of submission: a
    cancelled or late one costs nothing and a retried one keeps its place.
    """

    def __init__(self, name: str, slots: list[int], max_batch: int, queue: int) -> None:
        self.name = name
        self.queue_limit = queue
        self.replicas = [Replica(slot) for slot in slots]
        self.ports: Ports | None = None  # known once a replica has loaded
        self.members: set[str] = set()  # live requests that need the stage and are not through it
        self.max_batch = max_batch
        self._heap: list[tuple[int, int, int, str]] = []
        self._waiting: set[str] = set()
        self._ticket = itertools.count()

    def __repr__(self) -> str:
        return f"<Stage {self.name} {len(self._waiting)} waiting, {self.running} running>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(replica.running) for replica in self.replicas)

    @property
    def slots(self) -> int:
        """Requests that one replica takes at once."""
        return self.ports.slots if self.ports else self.max_batch

    @property
    def full(self) -> bool:
        """Whether another request would have to wait behind more than `queue` others."""
        return len(self.members) >= self.queue_limit + self.slots * len(self.replicas)

    def push(self, request: str, priority: int, order: int) -> None:
        """Queue a request; `order` is that of its submission, so a retry keeps its place."""
        self._waiting.add(request)
        heapq.heappush(self._heap, (-priority, order, next(self._ticket), request))

    def discard(self, request: str) -> None:
        """The request waits or runs here no longer."""
        self._waiting.discard(request)
        for replica in self.replicas:
            replica.running.discard(request)

    def next_run(self) -> tuple[str, Replica] | None:
        """Take the first waiting request for the least loaded replica, or None."""
        replica = self._free_replica()
        if replica is None:
            return None
        while self._heap:
            request = heapq.heappop(self._heap)[3]
            if request in self._waiting:
                self._waiting.discard(request)
                replica.running.add(request)
                return request, replica
        return None

    def lost(self, identity: str) -> None:
        for replica in self.replicas:
            if replica.identity == identity:
                replica.identity = None
                replica.running.clear()

    def _free_replica(self) -> Replica | None:
        if not self._waiting:
            return None
        free = [r for r in self.replicas if r.identity and len(r.running) < self.slots]
        return min(free, key=lambda r: len(r.running), default=None)
