"""`omni-rt serve`: the port first, then the pipeline, then an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
import uvloop

from omni_rt.config import PipelineConfig
from omni_rt.errors import OmniError
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.server.app import create_app

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """The public socket, ours alone. Raises `OmniError` if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        raise OmniError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="stop what uses the port, or choose another with --port" if taken else None,
        ) from error
    return sock


def serve(config: PipelineConfig, sock: socket.socket, watch: Callable[[AsyncOmni], None]) -> int:
    """Serve until a signal comes. Returns the exit status.

    `watch` is called with the runtime before it starts, to show its progress.
    """
    return uvloop.run(_Serving(config, sock, watch).run())


class _Serving:
    def __init__(
        self, config: PipelineConfig, sock: socket.socket, watch: Callable[[AsyncOmni], None]
    ) -> None:
        self._config = config
        self._sock = sock
        self._watch = watch
        self._stop = asyncio.Event()

    async def run(self) -> int:
        omni = AsyncOmni(self._config)
        self._watch(omni)
        server = _Server(
            uvicorn.Config(
                create_app(omni),
                log_config=None,
                access_log=False,
                lifespan="off",
                date_header=False,  # set once a second; ours is set with each response
                timeout_graceful_shutdown=1,
            )
        )
        async with self._signals():
            serving = asyncio.create_task(server.serve([self._sock]))
            stopping = asyncio.create_task(self._stop.wait())
            status = await self._run(omni, serving, stopping)
            await omni.close(self._config.shutdown_s if status == 0 else 0)
            server.stop()
            stopping.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
        return status

    async def _run(
        self, omni: AsyncOmni, serving: asyncio.Task[None], stopping: asyncio.Task[bool]
    ) -> int:
        await omni.start()
        loading = asyncio.create_task(omni.ready())
        await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and (error := loading.exception()):
            log.error("%s", error)
            if not isinstance(error, OmniError):
                raise error
            return 1
        loading.cancel()
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        return 0

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """The first SIGTERM or SIGINT ends in order, the second at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._stop.is_set():
            os._exit(1)  # the workers die with us
        log.info("stopping; a second signal stops at once")
        self._stop.set()


class _Server(uvicorn.Server):
    """uvicorn, which leaves the signals to us and waits to be stopped instead of looking."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        await self._stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield
