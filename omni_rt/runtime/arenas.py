"""Which worker writes which arena and pool, who has mapped it, and when it can go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from omni_rt.runtime.effects import Effects
from omni_rt.runtime.ledger import BlockKey, Ledger, key_of, leased
from omni_rt.runtime.supervisor import Supervisor, Worker
from omni_rt.wire.messages import Attach, Detach, Free
from omni_rt.wire.tensors import Block


class Arenas:
    """The arenas and device pools of all workers: both have ids from one range of numbers. One
    whose writer has died goes with its last lease."""

    def __init__(self, ledger: Ledger, supervisor: Supervisor) -> None:
        self._ledger = ledger
        self._supervisor = supervisor
        self._sizes: dict[int, int] = {}
        self._owner: dict[int, str] = {}  # identity of the living writer
        self._retired: set[int] = set()  # the writer is gone
        self._next = itertools.count(1)

    def add(self, worker: Worker, size_bytes: int) -> None:
        """A worker is about to start and gets a new arena."""
        worker.arena = next(self._next)
        self._sizes[worker.arena] = size_bytes
        self._owner[worker.arena] = worker.identity
        worker.pool = 0
        if worker.readers:
            worker.pool = next(self._next)
            self._owner[worker.pool] = worker.identity

    def retire(self, worker: Worker) -> None:
        """The worker is gone; what others still read stays."""
        for memory in (worker.arena, worker.pool):
            if self._owner.pop(memory, None):
                self._retired.add(memory)

    def free(self, fx: Effects, keys: Iterable[BlockKey]) -> None:
        """Tell the producers of blocks that nobody holds any more."""
        by_owner: dict[str, list[BlockKey]] = {}
        for key in keys:
            owner = self._owner.get(key[0])
            if owner is not None:
                by_owner.setdefault(owner, []).append(key)
        for owner, blocks in by_owner.items():
            fx.to(owner).append(Free(blocks))

    def lend(self, fx: Effects, piece: object, identity: str) -> None:
        """A worker is about to be sent `piece`: it holds its block, and must have it mapped."""
        ref = leased(piece)
        if ref is None:
            return
        self._ledger.lend(key_of(ref), identity)
        worker = self._supervisor.find(identity)
        if worker and isinstance(ref, Block):  # a pool has been handed over by `Links`
            self.attach(fx, worker, ref.arena)

    def attach(self, fx: Effects, worker: Worker, arena: int) -> None:
        """Have the worker map an arena, unless it has, or writes it."""
        if arena != worker.arena and arena not in worker.attached:
            worker.attached.add(arena)
            fx.to(worker.identity).append(Attach(arena, self._sizes[arena]))

    def close_retired(self, fx: Effects) -> None:
        """Let go of the memory of dead workers in which nothing is lent any more."""
        idle = [memory for memory in self._retired if not self._ledger.busy(memory)]
        for arena in sorted(idle, reverse=True):  # a pool before the arena that has its table
            self._retired.discard(arena)
            if self._sizes.pop(arena, None):
                fx.close_arenas.append(arena)
            for worker in self._supervisor.workers:
                if arena in worker.attached:
                    worker.attached.discard(arena)
                    fx.to(worker.identity).append(Detach(arena))
