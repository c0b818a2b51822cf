"""Simulated workers: the product's own worker loop, memory and outbox, stepped on virtual time.

Only the process, the socket and the sleeping are simulated. Faults come from a seeded `Fate`.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from omni_rt.runtime.process import OnExit
from omni_rt.wire.arena import Arena
from omni_rt.wire.channel import OnGarbage, OnMessages
from omni_rt.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    AttachPool,
    Failed,
    Hello,
    Loading,
    StageSpec,
    Step,
    ToMain,
    ToWorker,
    WorkerSpec,
)
from omni_rt_workers.device import open_memory
from omni_rt_workers.engine import Engine, Outbox
from omni_rt_workers.engines.simulated import SimulatedEngine
from omni_rt_workers.loop import Loop
from omni_rt_workers.memory import Memory
from tests.simulation.devices import (
    GRANULE_BYTES,
    SLOT_BYTES,
    DeviceOutbox,
    Devices,
    device_blocks,
)
from tests.simulation.virtual import VirtualLoop

_TO_WORKER = msgspec.msgpack.Decoder(list[ToWorker])
_TO_MAIN = msgspec.msgpack.Decoder(list[ToMain])
_INLINE_LIMIT = 24  # so that small payloads take both roads


@dataclass
class Fate:
    """How often what goes wrong, drawn from the seed."""

    rng: random.Random
    die: float = 0.0  # per boundary: before a turn, after its step, after its answer
    stall: float = 0.0  # per turn: never answers again
    slow: float = 0.0  # per turn: the step takes 30 times as long
    latency_s: float = 0.0005
    deaths: int = 0
    stalls: int = 0
    max_deaths: int = 3

    def dies(self) -> bool:
        if self.deaths < self.max_deaths and self.rng.random() < self.die:
            self.deaths += 1
            return True
        return False

    def stalls_now(self) -> bool:
        if self.stalls < 1 and self.rng.random() < self.stall:
            self.stalls += 1
            return True
        return False

    def delay(self) -> float:
        return self.rng.uniform(0, 2 * self.latency_s)


@dataclass
class World:
    """All that is outside main: the wire and the worker processes. Channel and launcher at once."""

    loop: VirtualLoop
    fate: Fate
    workers: dict[str, SimWorker] = field(default_factory=dict)
    ever: list[SimWorker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    devices: Devices | None = None
    _on_messages: OnMessages | None = None
    _clock: dict[str, float] = field(default_factory=dict)  # last delivery, by direction
    _next_pid: int = 1000

    # ---- Channel

    def open(self, identity: str) -> socket.socket:
        return socket.socket(socket.AF_UNIX)  # nothing goes through it

    def forget(self, identity: str) -> None:
        return None

    def watch(self, on_messages: OnMessages, on_garbage: OnGarbage) -> None:
        self._on_messages = on_messages

    def send(self, identity: str, messages: Sequence[ToWorker]) -> bool:
        worker = self.workers.get(identity)
        if worker is None:
            return False
        decoded = _TO_WORKER.decode(msgspec.msgpack.encode(messages))
        self._deliver(f"to {identity}", lambda: worker.deliver(decoded))
        return True

    def close(self) -> None:
        for worker in list(self.workers.values()):
            self.problems.append(f"{worker.identity} outlived main")

    # ---- Launcher

    def launch(
        self, spec: WorkerSpec, arena: Arena, channel: socket.socket, on_exit: OnExit
    ) -> SimWorker:
        self._next_pid += 1
        worker = SimWorker(self, spec, arena, on_exit, self._next_pid)
        self.workers[spec.identity] = worker
        self.ever.append(worker)
        return worker

    # ---- the wire

    def to_main(self, identity: str, messages: Sequence[ToMain], after: float = 0.0) -> None:
        decoded = _TO_MAIN.decode(msgspec.msgpack.encode(list(messages)))

        def arrive() -> None:
            assert self._on_messages is not None
            self._on_messages(identity, decoded)

        self._deliver(f"from {identity}", arrive, after)

    def _deliver(self, direction: str, arrive: object, after: float = 0.0) -> None:
        at = max(
            self.loop.time() + after + self.fate.delay(), self._clock.get(direction, 0.0) + 1e-7
        )
        self._clock[direction] = at
        self.loop.call_at(at, arrive)  # type: ignore[arg-type]


class SimWorker:
    """One worker process: `Handle` for main, the real `Loop` inside."""

    def __init__(
        self, world: World, spec: WorkerSpec, arena: Arena, on_exit: OnExit, pid: int
    ) -> None:
        self.identity = spec.identity
        self.pid = pid
        self._world = world
        self._on_exit = on_exit
        self._spec = spec
        self._inbox: list[ToWorker] = []
        self._outgoing: list[ToMain] = []
        self._handed: list[Arena] = []
        self._spent_s = 0.0
        self._busy = True
        self._stuck = False
        self.alive = True
        mine = Arena.attach(arena.id, os.dup(arena.fd), arena.size_bytes, writable=True)
        self.memory, told = self._open_memory(mine)
        self._pools: set[int] = set()  # that main has handed over
        self.worker_loop = Loop(self, self.memory, self._attach, self._time)
        self.send([Hello(PROTOCOL_VERSION, pid), *told])
        self.send([Loading(spec.stages[0].name, "loading weights", 0.0)])
        self._post()
        world.loop.call_later(world.fate.rng.uniform(0.01, 0.3), self._load)

    def _open_memory(self, arena: Arena) -> tuple[Memory, list[ToMain]]:
        devices = self._world.devices
        if devices is None:
            return Memory(arena, self._spec.epoch), []
        return open_memory(
            self._spec,
            arena,
            lambda: devices.driver(self.identity),
            granule_bytes=GRANULE_BYTES,
            slot_bytes=SLOT_BYTES,
        )

    # ---- Handle

    def attach(self, arena: Arena) -> None:
        self._handed.append(
            Arena.attach(arena.id, os.dup(arena.fd), arena.size_bytes, writable=False)
        )

    def kill(self) -> None:
        self._world.loop.call_later(self._world.fate.delay(), self.die)

    def die(self) -> None:
        if self.alive:
            self._gone("killed by SIGKILL")

    def _gone(self, words: str | None) -> None:
        self.alive = False
        self._world.workers.pop(self.identity, None)
        for arena in self._handed:
            arena.close()
        self.memory.pool = None  # a process that ends closes nothing on the device
        self.memory._pools.clear()
        self.memory.close()
        delay = self._world.fate.delay()  # frames under way may be read before or after this
        self._world.loop.call_later(delay, self._heard_of, words)

    def _heard_of(self, words: str | None) -> None:
        if self._world.devices is not None:
            self._world.devices.machine.kill(self.identity)
        self._on_exit(self.identity, words)

    # ---- WorkerChannel

    def receive(self, *, block: bool) -> list[ToWorker]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def send(self, messages: Sequence[ToMain]) -> None:
        self._outgoing += messages
        items = [item for m in messages if isinstance(m, Step) for item in m.items]
        stale = [item for item in items if isinstance(item, Failed) and item.kind == "stale_ref"]
        self._world.problems += [f"{self.identity}: {item.message}" for item in stale]

    def close(self) -> None:
        return None

    # ---- running

    def deliver(self, messages: list[ToWorker]) -> None:
        """A frame of main's has arrived."""
        if self.alive and not self._stuck:
            self._look_at(messages)
            self._inbox += messages
            self._wake()

    def _look_at(self, messages: list[ToWorker]) -> None:
        for message in messages:
            if isinstance(message, AttachPool):
                self._pools.add(message.pool)
            for block in device_blocks(message):
                assert self._world.devices is not None
                self._world.devices.blocks += 1
                if block.pool not in self._pools and block.pool != self._spec.pool:
                    self._world.problems.append(f"{self.identity} was lent {block} unread")

    def _attach(self, message: Attach) -> None:
        arena = self._handed.pop(0)
        assert arena.id == message.arena
        self.memory.attach(arena)

    def _load(self) -> None:
        if not self.alive:
            return
        for stage in self._spec.stages:
            self.worker_loop.load(stage, self._make, {}, _INLINE_LIMIT)
        self._busy = False
        self._post()
        self._wake()

    def _make(self, spec: StageSpec, out: Outbox) -> Engine:
        if self.memory.pool is not None:
            out = DeviceOutbox(out)  # type: ignore[assignment]
        return SimulatedEngine(spec, out, self._work)

    def _time(self) -> float:
        return self._world.loop.time() + self._spent_s

    def _work(self, seconds: float) -> None:
        self._spent_s += seconds

    def _wake(self) -> None:
        if not self._busy and (self._inbox or not self.worker_loop.idle):
            self._busy = True
            self._world.loop.call_soon(self._turn)

    def _turn(self) -> None:
        fate = self._world.fate
        if not self.alive:
            return
        if fate.dies():
            self.die()
            return
        if fate.stalls_now():
            self._stuck = True
            return
        self._spent_s = 0.0
        self.worker_loop.turn(block=False)
        if self.worker_loop._drains:  # it asks the device again and again
            self._spent_s = max(self._spent_s, 1e-4)
        if fate.rng.random() < fate.slow:
            self._spent_s *= 30
        if fate.dies():  # the step was done, its answer is lost
            self._outgoing.clear()
            self.die()
            return
        self._world.loop.call_later(self._spent_s, self._answer)

    def _answer(self) -> None:
        if not self.alive:
            return
        self._post()
        if self.worker_loop.stopping:
            self.worker_loop.close()
            self._gone(None)
        elif self._world.fate.dies():
            self.die()
        else:
            self._busy = False
            self._wake()

    def _post(self) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._world.to_main(self.identity, outgoing)

    # ---- what must be left: nothing

    def leftovers(self) -> list[str]:
        loop = self.worker_loop
        found = [
            f"{self.identity}: stage {name} still holds {list(stage.tasks)}"
            for name, stage in loop._stages.items()
            if stage.tasks
        ]
        used = self.memory.writer.in_use_bytes
        if used:
            found.append(f"{self.identity}: {used} bytes of its arena are still lent out")
        pool = self.memory.pool
        if pool is not None and (pool.in_use_bytes, len(pool)) != (0, 1):  # the probe's noise stays
            found.append(f"{self.identity}: {pool!r}, {len(pool)} blocks")
        if self.memory._objects:
            found.append(f"{self.identity}: {len(self.memory._objects)} local objects are kept")
        for name, stage in loop._stages.items():
            if stage.outbox._books or stage.outbox._lent:
                found.append(f"{self.identity}: the outbox of {name} is not empty")
        return found
