"""`AsyncOmni`: a pipeline as an asyncio object. The I/O around `Core`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from omni_rt.config import PipelineConfig, load_pipeline
from omni_rt.errors import OmniError, StageUnavailable
from omni_rt.graph import Graph
from omni_rt.request import Output, Request
from omni_rt.runtime.core import Core
from omni_rt.runtime.effects import Effects
from omni_rt.runtime.process import Handle, Launcher, ProcessLauncher
from omni_rt.runtime.spec import gpu_count, shared_size, worker_spec
from omni_rt.runtime.status import StageStatus, Status, status_of
from omni_rt.runtime.stream import Mailbox, Stream
from omni_rt.runtime.supervisor import Worker, WorkerState
from omni_rt.wire.arena import Arena, BlockReader
from omni_rt.wire.channel import Channel, SocketChannel
from omni_rt.wire.messages import Attach, Stop, ToMain, ToWorker
from omni_rt.wire.tensors import Block

__all__ = ["AsyncOmni", "Omni", "StageStatus", "Status", "Stream"]

log = logging.getLogger(__name__)

# How long a worker that was asked to stop may take before it is killed.
_STOP_S = 2.0
_MAX_SEED = 2**31 - 1


class AsyncOmni:
    """A running pipeline: starts its workers, takes requests, ends without a trace.

    Runs on the caller's own loop, installs no signal handler and starts no thread. Use it as an
    async context manager, or call `start`, `ready` and `close`. `channel` and `launcher` are for
    tests.
    """

    def __init__(
        self,
        config: PipelineConfig | str | Path,
        *,
        channel: Channel | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.config = config if isinstance(config, PipelineConfig) else load_pipeline(config)
        self._graph = Graph.from_config(self.config)
        gpu_count()  # looks at files: here, and not on the loop
        self._core = Core(self.config, self._graph)
        self._channel = channel
        self._launcher = launcher or ProcessLauncher()
        self._handles: dict[str, Handle] = {}
        self._arenas: dict[int, Arena] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._watchers: list[Callable[[Status], None]] = []
        self._waiters: list[asyncio.Future[None]] = []  # woken after every event
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when the timer is set for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.close(0)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(0)

    async def start(self) -> None:
        """Spawn all workers, in parallel; returns at once. See `ready` and `watch`."""
        self._loop = asyncio.get_running_loop()
        if self._channel is None:
            self._channel = SocketChannel()
        self._channel.watch(self._on_messages, self._on_garbage)
        self._apply(self._core.start(self._now()))

    async def ready(self) -> None:
        """Wait until every stage is ready.

        Raises `StageUnavailable` with the worker's own last words if one cannot load.
        """
        await self._until(lambda: self.status().state != "loading")
        for worker in self._core.supervisor.workers:
            if worker.state is WorkerState.FAILED:
                raise StageUnavailable(
                    f"stage {', '.join(worker.stages)} cannot load: {worker.error}",
                    stage=worker.stages[0],
                )

    async def close(self, timeout_s: float | None = None) -> None:
        """End in order: let running requests finish for up to `timeout_s`, cancel the rest, stop
        the workers, kill those that do not stop. Afterwards nothing is left. Default time limit:
        `shutdown_s` of the pipeline."""
        if self._closed or self._channel is None:
            return
        self._core.closing = True
        self._notify()
        limit = self.config.shutdown_s if timeout_s is None else timeout_s
        if limit > 0:
            await self._until(lambda: not self._core.flows, limit)
        for request_id in list(self._core.flows):
            self._apply(self._core.cancel(request_id, "the runtime was closed", self._now()))
        await self._stop_workers()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._channel.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    async def _stop_workers(self) -> None:
        self._core.supervisor.stopping = True
        for worker in self._core.supervisor.workers:
            handle = self._handles.get(worker.identity)
            if handle is None:
                continue
            if worker.state is not WorkerState.READY or not self._send(worker.identity, [Stop()]):
                handle.kill()
        await self._until(lambda: not self._handles, _STOP_S)
        for handle in self._handles.values():
            handle.kill()
        await self._until(lambda: not self._handles)

    # ---- requests

    def submit(self, request: Request) -> Stream:
        """Accept a request and start it. The stream gives its outputs as they come.

        Raises at once: `BadRequest`, `Overloaded` (a queue is full), `StageUnavailable` (a stage
        that it needs is loading or down).
        """
        assert self._loop is not None, "start() comes first"
        request_id = secrets.token_hex(8)
        seed = secrets.randbelow(_MAX_SEED) if request.seed is None else request.seed
        effects = self._core.submit(request, request_id, seed, self._now())
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._apply(effects)
        return Stream(request_id, self, mailbox, self._soon)

    async def generate(self, requests: Iterable[Request]) -> list[list[Output]]:
        """Run requests at the same time; the outputs of each, in the order of the requests.

        Raises the first error after all have ended.
        """

        async def one(request: Request) -> list[Output]:
            async with self.submit(request) as stream:
                return [output async for output in stream]

        results = await asyncio.gather(*map(one, requests), return_exceptions=True)
        given: list[list[Output]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            given.append(result)
        return given

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; it ends with `Cancelled`. False if there is none of that id."""
        known = request_id in self._core.flows
        if known:
            self._apply(self._core.cancel(request_id, "the request was cancelled", self._now()))
        return known

    def kinds(self) -> dict[str, str]:
        """What each output of the pipeline is: "text", "image", ... Known once it has loaded."""
        kinds: dict[str, str] = {}
        for name, (stage, port) in self._graph.outputs.items():
            ports = self._core.stages[stage].ports
            for spec in ports.outputs if ports else ():
                if spec.name == port:
                    kinds[name] = spec.kind
        return kinds

    def transports(self) -> dict[str, str]:
        """How each edge's large tensors cross: `local` (same process), `cuda` (in device memory)
        or `shm` (in shared memory)."""
        return {name: edge.transport for name, edge in self.status().edges.items()}

    # ---- status

    def status(self) -> Status:
        return status_of(self._core, self.config)

    def watch(self, callback: Callable[[Status], None]) -> Callable[[], None]:
        """Call back at each change of a stage's state. Returns what ends it."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback) if callback in self._watchers else None

    def worker_counters(self) -> dict[str, dict[str, int]]:
        """What each worker counted, as of its last heartbeat."""
        return {w.identity: dict(w.counters) for w in self._core.supervisor.workers}

    # ---- what streams ask for

    def read_block(self, request_id: str, ref: Block) -> bytes:
        arena = self._arenas.get(ref.arena)
        if arena is None:
            raise OmniError(f"arena {ref.arena} is gone", request=request_id)
        data = bytes(BlockReader(arena).open(ref.offset, ref.generation, ref.nbytes))
        key = (ref.arena, ref.offset, ref.generation)
        self._apply(self._core.taken(request_id, key, self._now()))
        return data

    def client_gone(self, request_id: str) -> None:
        if self._closed:
            return
        self.cancel(request_id)
        self._mailboxes.pop(request_id, None)
        self._apply(self._core.client_gone(request_id, self._now()))

    # ---- events

    def _on_messages(self, identity: str, messages: list[ToMain]) -> None:
        self._apply(self._core.on_messages(identity, messages, self._now()))

    def _on_garbage(self, identity: str, what: str) -> None:
        self._apply(self._core.on_garbage(identity, what, self._now()))

    def _on_exit(self, identity: str, last_words: str | None) -> None:
        assert self._channel is not None
        self._handles.pop(identity, None)
        self._channel.forget(identity)
        if last_words and not self._core.closing:
            log.error("worker %s died: %s", identity, last_words)
        self._apply(self._core.on_exit(identity, last_words, self._now()))

    def _on_timer(self) -> None:
        self._timer = self._due = None
        self._apply(self._core.on_time(self._now()))

    # ---- effects

    def _apply(self, effects: Effects) -> None:
        for worker in effects.spawn:
            self._spawn(worker)
        for identity, messages in effects.send.items():
            if messages:
                self._send(identity, messages)
        for delivery in effects.deliver:
            mailbox = self._mailboxes.get(delivery.request)
            if mailbox is not None:
                mailbox.push(delivery)
        for worker in effects.kill:
            if handle := self._handles.get(worker.identity):
                log.error("worker %s is killed: %s", worker.identity, worker.error)
                handle.kill()
        for arena_id in effects.close_arenas:
            if arena := self._arenas.pop(arena_id, None):
                arena.close()
        if effects.status_changed or effects.spawn:
            self._notify()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._arm()

    def _spawn(self, worker: Worker) -> None:
        assert self._channel is not None
        size = shared_size(self.config, worker)
        self._core.spawned(worker, size, self._now())
        try:
            arena = self._arenas[worker.arena] = Arena.create(worker.arena, size)
            spec = worker_spec(
                self.config,
                self._graph,
                worker,
                os.getpid(),
                on_main_thread=threading.current_thread() is threading.main_thread(),
            )
            with self._channel.open(worker.identity) as theirs:
                handle = self._launcher.launch(spec, arena, theirs, self._on_exit)
        except (OSError, OmniError) as error:
            assert self._loop is not None
            self._loop.call_soon(self._on_exit, worker.identity, f"cannot be started: {error}")
            return
        self._handles[worker.identity] = handle

    def _send(self, identity: str, messages: Iterable[ToWorker]) -> bool:
        assert self._channel is not None
        messages = list(messages)
        handle = self._handles.get(identity)
        if handle is None:
            return False
        for message in messages:
            if isinstance(message, Attach):
                handle.attach(self._arenas[message.arena])
        return self._channel.send(identity, messages)

    def _arm(self) -> None:
        """One timer, for the next thing that is due."""
        assert self._loop is not None
        due = None if self._closed else self._core.next_time()
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due is None else self._loop.call_at(due, self._on_timer)

    def _notify(self) -> None:
        if self._watchers:
            status = self.status()
            for callback in list(self._watchers):
                callback(status)

    async def _until(self, condition: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait until the condition holds after some event, or the time is over."""
        assert self._loop is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    waiter: asyncio.Future[None] = self._loop.create_future()
                    self._waiters.append(waiter)
                    await waiter

    def _soon(self, callback: Callable[[str], None], request_id: str) -> None:
        """Call back on the loop, from wherever the garbage collector runs."""
        if not self._closed and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, request_id)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()


class Omni:
    """The same for programs without a loop: `with Omni(config) as omni: omni.generate(...)`."""

    def __init__(self, config: PipelineConfig | str | Path) -> None:
        self._omni = AsyncOmni(config)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._omni.__aenter__())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._runner.run(self._omni.close(0))
        finally:
            self._runner.close()

    def generate(self, requests: Request | Iterable[Request]) -> list[list[Output]]:
        """`AsyncOmni.generate`; a request alone counts as a list of one."""
        wanted = [requests] if isinstance(requests, Request) else list(requests)
        return self._runner.run(self._omni.generate(wanted))
