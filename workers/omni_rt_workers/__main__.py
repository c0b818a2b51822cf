"""The worker process: `python -P -m omni_rt_workers LIFELINE CHANNEL`, started by main only."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys

from omni_rt.errors import ConfigError, OmniError
from omni_rt.wire.channel import SocketWorkerChannel
from omni_rt.wire.messages import PROTOCOL_VERSION, Attach, Hello, Loading, StageSpec, WorkerSpec
from omni_rt_workers.device import open_memory
from omni_rt_workers.engines import registry
from omni_rt_workers.inputs import Reshape
from omni_rt_workers.lifeline import Lifeline
from omni_rt_workers.loop import Loop, crashed


def main() -> int:
    # Ctrl-C and a service manager's SIGTERM reach every process; ending is main's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    lifeline = Lifeline(int(sys.argv[1]))
    spec, arena = lifeline.receive_spec()
    lifeline.die_with_main(spec)
    channel = SocketWorkerChannel(int(sys.argv[2]))
    channel.send([Hello(PROTOCOL_VERSION, os.getpid())])
    memory, told = open_memory(spec, arena)
    channel.send(told)

    def attach(message: Attach) -> None:
        memory.attach(lifeline.receive_arena(message))

    loop = Loop(channel, memory, attach)
    channel.send([Loading(stage.name, "touching memory", 0.0) for stage in spec.stages])
    try:
        arena.populate(write=True)
    except OmniError as error:
        channel.send(crashed(spec.stages[0].name, error))
        channel.close()
        return 1
    for stage in spec.stages:
        if not _load(loop, channel, spec, stage):
            return 1
    try:
        loop.run()
    except BaseException as error:
        channel.send(crashed(spec.stages[0].name, error))
        channel.close()
        raise
    loop.close()
    channel.close()
    return 0


def _load(loop: Loop, channel: SocketWorkerChannel, spec: WorkerSpec, stage: StageSpec) -> bool:
    try:
        make = registry.find(stage.engine)
        loop.load(stage, make, _via(stage), spec.inline_limit_bytes)
    except Exception as error:
        # What is said on purpose is one line; where anything else came from must be seen.
        whole = None if isinstance(error, OmniError) else error
        logging.error("stage %s cannot load: %s", stage.name, error, exc_info=whole)
        channel.send(crashed(stage.name, error))
        channel.close()
        return False
    return True


def _via(stage: StageSpec) -> dict[str, Reshape]:
    """The reshaping functions of the stage's incoming edges, by input port."""
    return {port: _function(name) for port, name in stage.options.get("via", {}).items()}


def _function(path: str) -> Reshape:
    module, _, name = path.partition(":")
    try:
        function: Reshape = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"via: cannot find '{path}': {error}") from error
    return function


if __name__ == "__main__":
    # Without this, threads of libraries could keep a finished worker alive.
    code = 1
    try:
        code = main()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        if sys.exc_info()[0] is None:
            os._exit(code)
