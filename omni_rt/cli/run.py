"""`omni-rt run`: one request, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from omni_rt.cli.display import LoadingDisplay
from omni_rt.config import PipelineConfig, bundled, load_pipeline
from omni_rt.errors import BadRequest, OmniError
from omni_rt.request import Audio, Data, Done, Image, Progress, Request, Text
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.wav import wav


def run_command(
    prompt: str, config: Path | None, output: Path | None, seed: int | None, params: list[str]
) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    pipeline = load_pipeline(config or bundled())
    _check(prompt, output)
    request = Request(prompt=prompt, seed=seed, params=dict(map(_param, params)))
    try:
        uvloop.run(_run(pipeline, request, output))
    except KeyboardInterrupt:
        return 130
    return 0


def _check(prompt: str, output: Path | None) -> None:
    """What would otherwise come to light only after everything has loaded."""
    if not prompt.strip():
        raise BadRequest("the prompt is empty", param="prompt")
    if output is not None and output.is_dir():
        raise BadRequest(f"{output} is a folder, not a file", param="output")
    if output is not None and not output.parent.is_dir():
        raise BadRequest(f"there is no folder {output.parent}", param="output")


def _param(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON if it is some, else as a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise BadRequest(f"--param wants NAME=VALUE, got '{text}'", param="param")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


async def _run(pipeline: PipelineConfig, request: Request, output: Path | None) -> None:
    omni = AsyncOmni(pipeline)
    loading = LoadingDisplay()
    loading.watch(omni)
    async with omni:
        loading.close()
        async with omni.submit(request) as stream:
            sounds: dict[str, list[Audio]] = {}
            with _StepBars() as bars:
                async for item in stream:
                    if isinstance(item, Progress):
                        bars.show(item)
                    elif isinstance(item, Audio):
                        sounds.setdefault(item.output, []).append(item)
                    else:
                        await asyncio.to_thread(_show, item, output)
            for pieces in sounds.values():
                await asyncio.to_thread(_write_sound, pieces, output)


def _show(item: Text | Image | Data | Done, output: Path | None) -> None:
    if isinstance(item, Text):
        print(item.text, end="", flush=True)
    elif isinstance(item, Image):
        path = _path(item.output, output, ".png")
        _write(path, item.data)
        print(f"\n{path}: {item.width}x{item.height}, seed {item.seed}")
    elif isinstance(item, Data):
        print(f"\n{item.output}: {item.dtype} {item.shape}, {len(item.data)} bytes")
    else:
        print(file=sys.stdout)


def _write_sound(pieces: list[Audio], output: Path | None) -> None:
    path = _path(pieces[0].output, output, ".wav")
    pcm, rate = b"".join(piece.data for piece in pieces), pieces[0].sample_rate
    _write(path, wav(pcm, rate))
    print(f"{path}: {len(pcm) / 2 / rate:.2f} s at {rate} Hz")


def _path(name: str, output: Path | None, suffix: str) -> Path:
    """The file that was named; one beside it if that is named for a medium of the other kind."""
    if output is None:
        return Path(name + suffix)
    is_wav = output.suffix.lower() == ".wav"
    return output if is_wav == (suffix == ".wav") else output.with_suffix(suffix)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OmniError(f"cannot write {path}: {error.strerror}") from error


class _StepBars:
    """A bar per stage that reports steps, on a terminal."""

    def __init__(self) -> None:
        self._bars = Bars(
            TextColumn("{task.fields[stage]:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _StepBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, item: Progress) -> None:
        if item.stage not in self._tasks:
            self._tasks[item.stage] = self._bars.add_task("", total=item.total, stage=item.stage)
        self._bars.update(self._tasks[item.stage], completed=item.step)
