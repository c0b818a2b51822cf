"""`omni-rt serve`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from omni_rt.cli.display import LoadingDisplay
from omni_rt.config import PipelineConfig, bundled, load_pipeline
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.runtime.status import Status
from omni_rt.server.serve import bind, serve


def serve_command(config: Path | None, host: str, port: int) -> int:
    return serve_pipeline(load_pipeline(config or bundled()), host, port)


def serve_pipeline(pipeline: PipelineConfig, host: str, port: int) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("omni_rt.runtime.process").setLevel(logging.WARNING)
    sock = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{sock.getsockname()[1]}"
    print(f"omni-rt: {pipeline.name} is loading, {url}/health says how far", file=sys.stderr)
    display = LoadingDisplay()

    def watch(omni: AsyncOmni) -> None:
        display.watch(omni)

        def greet(status: Status) -> None:
            if status.state == "ready":
                for name, edge in status.edges.items():
                    shown = f"{name} crosses by {edge.transport}: {edge.about}"
                    print(f"omni-rt: {shown}", file=sys.stderr)
                _greet(url, pipeline.name)
                unwatch()

        unwatch = omni.watch(greet)

    try:
        return serve(pipeline, sock, watch)
    finally:
        display.close()


def _greet(url: str, name: str) -> None:
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "hello"}}]}}'
    print(f"omni-rt: serves {name} on {url}; try:", file=sys.stderr)
    print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
