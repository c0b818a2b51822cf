"""Who lives: worker slots, their starts, deaths, back-off, heartbeats and watchdogs.

Death comes from the operating system (a pidfd), not from here; heartbeats only find hangs. All
decisions are plain values; the caller spawns, kills and pings.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from omni_rt.config import PipelineConfig, RestartConfig

# A loop that asks this much later than it was told to was blocked, or did not run.
_LATE_S = 1.0


class WorkerState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    BACKOFF = "backoff"  # dead, to be started again at `next_start`
    FAILED = "failed"  # could not load at the first start: not tried again
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Worker:
    """One worker slot: a process, or the place where one will be again."""

    slot: int
    name: str
    replica: int
    stages: tuple[str, ...]
    restart: RestartConfig
    state: WorkerState = WorkerState.BACKOFF
    epoch: int = 0
    identity: str = ""
    pid: int | None = None
    arena: int = 0
    pool: int = 0  # its device pool; 0: it has none
    device: str = ""  # "cuda:N", if tensors leave it or come to it on a device
    readers: int = 0  # workers that may read its pool
    ready_stages: set[str] = field(default_factory=set)
    phase: dict[str, tuple[str, float]] = field(default_factory=dict)  # by stage, while loading
    attached: set[int] = field(default_factory=set)  # arenas and pools of others it has mapped
    last_heard: float = 0.0
    pinged_at: float = 0.0
    next_start: float = 0.0
    died_at: float | None = None  # since then it is not ready
    waited_out: bool = False  # longer than requests wait for it
    deaths_in_row: int = 0
    restarts: int = 0
    ever_ready: bool = False
    killed: bool = False  # sent SIGKILL; its exit is on the way
    error: str | None = None  # its own last words
    counters: dict[str, int] = field(default_factory=dict)  # from its last Pong

    def __repr__(self) -> str:
        return f"<Worker {self.identity or self.name} {self.state.value}>"

    @property
    def down(self) -> bool:
        """Died too often in a row: requests that need it are refused, starts go on slowly."""
        return self.state is WorkerState.FAILED or self.deaths_in_row >= self.restart.max_deaths

    @property
    def alive(self) -> bool:
        return self.state in (WorkerState.LOADING, WorkerState.READY)


@dataclass(slots=True)
class Due:
    """What is to be done now."""

    spawn: list[Worker] = field(default_factory=list)
    kill: list[Worker] = field(default_factory=list)  # `error` says why
    ping: list[Worker] = field(default_factory=list)
    waited_out: bool = False  # requests have waited long enough for a worker that is gone


class Supervisor:
    def __init__(self, config: PipelineConfig) -> None:
        self._heartbeat_s = config.heartbeat_s
        self._stall_s = config.stall_s
        self._load_stall_s = config.load_stall_s
        self.workers = _slots(config)
        self._by_identity: dict[str, Worker] = {}
        self.stopping = False
        self._asked_for: float | None = None  # when `due` should have been asked

    def __repr__(self) -> str:
        return f"<Supervisor {self.workers}>"

    def find(self, identity: str) -> Worker | None:
        """The worker of that identity, if it is the living one of its slot."""
        return self._by_identity.get(identity)

    def spawned(self, worker: Worker, now: float) -> str:
        """A new process is about to be started in the slot; its identity."""
        worker.epoch += 1
        worker.identity = f"{worker.name}.{worker.replica}.{worker.epoch}"
        worker.state = WorkerState.LOADING
        worker.pid = None
        worker.killed = False
        worker.ready_stages.clear()
        worker.phase = dict.fromkeys(worker.stages, ("starting", 0.0))
        worker.attached = set()
        worker.last_heard = worker.pinged_at = now
        self._by_identity[worker.identity] = worker
        return worker.identity

    def heard(self, worker: Worker, now: float) -> None:
        worker.last_heard = now

    def loaded(self, worker: Worker, stage: str) -> bool:
        """A stage is ready. True if with it the whole worker is."""
        worker.ready_stages.add(stage)
        worker.phase[stage] = ("ready", 1.0)
        if worker.ready_stages != set(worker.stages):
            return False
        worker.state = WorkerState.READY
        worker.ever_ready = True
        worker.error = None
        worker.died_at = None
        worker.waited_out = False
        return True

    def served(self, worker: Worker) -> None:
        """The worker finished a request: its deaths are forgiven."""
        worker.deaths_in_row = 0

    def exited(self, worker: Worker, now: float) -> None:
        """The worker's process is gone. Decides whether and when it is started again."""
        self._by_identity.pop(worker.identity, None)
        worker.pid = None
        worker.ready_stages.clear()
        if self.stopping:
            worker.state = WorkerState.STOPPED
        elif not worker.ever_ready:
            worker.state = WorkerState.FAILED
        else:
            worker.state = WorkerState.BACKOFF
            backoff = worker.restart.backoff_s * 2**worker.deaths_in_row
            worker.next_start = now + min(backoff, worker.restart.backoff_max_s)
            worker.died_at = now if worker.died_at is None else worker.died_at
            worker.deaths_in_row += 1
            worker.restarts += 1

    def due(self, now: float) -> Due:
        due = Due()
        if self.stopping:
            return due
        if self._asked_for is not None and now - self._asked_for > _LATE_S:
            self._forgive(now)
        for worker in self.workers:
            over = _wait_over(worker)
            if over is not None and over <= now:
                worker.waited_out = due.waited_out = True
            if worker.state is WorkerState.BACKOFF and worker.next_start <= now:
                due.spawn.append(worker)
            elif worker.killed:
                continue
            elif worker.state is WorkerState.LOADING:
                if now >= worker.last_heard + self._load_stall_s:
                    self._kill(worker, f"no sign of life for {self._load_stall_s:g} s", due)
            elif worker.state is WorkerState.READY:
                self._check_ready(worker, now, due)
        return due

    def next_time(self) -> float | None:
        """When `due` is to be asked next."""
        if self.stopping:
            return None
        times = [over for worker in self.workers if (over := _wait_over(worker)) is not None]
        for worker in self.workers:
            if worker.state is WorkerState.BACKOFF:
                times.append(worker.next_start)
            elif worker.killed:
                continue
            elif worker.state is WorkerState.LOADING:
                times.append(worker.last_heard + self._load_stall_s)
            elif worker.state is WorkerState.READY:
                times.append(self._next_check(worker))
        self._asked_for = min(times, default=None)
        return self._asked_for

    def _forgive(self, now: float) -> None:
        """Main itself was held up: answers may lie unread, so silence means nothing yet."""
        for worker in self.workers:
            if worker.alive:
                worker.last_heard = now

    def _check_ready(self, worker: Worker, now: float, due: Due) -> None:
        if _unanswered(worker):
            if now >= worker.pinged_at + self._stall_s:
                self._kill(worker, f"did not answer for {self._stall_s:g} s", due)
        elif now >= worker.pinged_at + self._heartbeat_s:
            worker.pinged_at = now
            due.ping.append(worker)

    def _kill(self, worker: Worker, reason: str, due: Due) -> None:
        worker.killed = True
        worker.error = reason
        due.kill.append(worker)

    def _next_check(self, worker: Worker) -> float:
        return worker.pinged_at + (self._stall_s if _unanswered(worker) else self._heartbeat_s)


def _wait_over(worker: Worker) -> float | None:
    """When requests have waited long enough for a worker that is gone, if that is still to come."""
    if worker.died_at is None or worker.waited_out:
        return None
    return worker.died_at + worker.restart.wait_s


def _unanswered(worker: Worker) -> bool:
    """A ping is out. A worker answers between two steps, so this bounds the length of a step."""
    return worker.pinged_at > worker.last_heard


def _slots(config: PipelineConfig) -> list[Worker]:
    """One slot per replica of each worker; a stage without `worker:` has one of its own name."""
    groups: dict[str, list[str]] = {}
    for name, stage in config.stages.items():
        groups.setdefault(stage.worker or name, []).append(name)
    workers: list[Worker] = []
    for name, stages in groups.items():
        first = config.stages[stages[0]]
        workers += [
            Worker(len(workers) + k, name, k, tuple(stages), first.restart)
            for k in range(first.replicas)
        ]
    return workers
