"""A recording outbox, given inputs, and a way to run an engine to its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from PIL import Image

from omni_rt.wire.messages import Emit, StageSpec
from omni_rt_workers.engine import Task
from omni_rt_workers.engines import diffusers_dit
from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine
from tests.doubles import Given, GivenInputs, NoOutbox


@dataclass
class Said:
    """All that came out for one request."""

    order: list[str] = field(default_factory=list)  # ports, as they came
    images: list[Image.Image] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: dict[str, Any] | None = None
    progress: list[tuple[int, int]] = field(default_factory=list)
    usage: dict[str, int] | None = None
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.usage is not None or self.error is not None


class RecordingOutbox(NoOutbox):
    def __init__(self) -> None:
        self.said: dict[str, Said] = defaultdict(Said)
        self.hold_after: set[str] = set()  # ports whose output finds no room to follow

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        assert last
        self.said[task.request].order.append(port)
        self.said[task.request].tensors[port] = tensor.clone()
        task.held = port in self.hold_after

    def put_bytes(
        self,
        task: Task,
        port: str,
        data: bytes | bytearray | memoryview,
        *,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        said = self.said[task.request]
        said.order.append(port)
        said.images.append(Image.open(BytesIO(data)))
        said.meta = meta

    def progress(self, task: Task, step: int, total: int) -> None:
        self.said[task.request].progress.append((step, total))

    def finish(
        self,
        task: Task,
        reason: str = "stop",
        usage: dict[str, int] | None = None,
        facts: tuple[str, ...] = (),
    ) -> None:
        assert not self.said[task.request].ended
        self.said[task.request].usage = usage or {}

    def fail(self, task: Task, error: BaseException) -> None:
        assert not self.said[task.request].ended
        self.said[task.request].error = error


def stage(model: str | None, *, max_batch: int = 8, **options: Any) -> StageSpec:
    return StageSpec(
        name="painter",
        engine="diffusers",
        model=model,
        part=None,
        device="cpu",
        max_batch=max_batch,
        options=options,
        sampling={},
        credits={},
    )


def task(
    name: str,
    inputs: Given,
    params: dict[str, Any],
    *,
    seed: int | None = 0,
    want: tuple[str, ...] = ("image",),
    encode: bool = True,
    priority: int = 0,
) -> Task:
    return Task(
        request=name,
        attempt=0,
        values={} if seed is None else {"seed": seed},
        inputs=GivenInputs(inputs),
        params=params,
        emit={port: Emit(port, "shm", encode and port == "image", False) for port in want},
        priority=priority,
    )


def loaded(spec: StageSpec, out: RecordingOutbox) -> DiTEngine:
    engine = diffusers_dit.make(spec, out)
    assert isinstance(engine, DiTEngine)
    engine.load(lambda phase, fraction: None)
    return engine


def run(engine: DiTEngine, *tasks: Task, join_at: tuple[int, ...] = ()) -> None:
    """Step until idle; task i is added before step `join_at[i]` (0 if not given)."""
    at = [*join_at, *[0] * (len(tasks) - len(join_at))]
    step = 0
    while not engine.idle or step <= max(at, default=0):
        for one, when in zip(tasks, at, strict=True):
            if when == step:
                engine.add(one)
        engine.step()
        assert not torch.is_grad_enabled()
        step += 1


def difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest, relative to the reference's largest value."""
    assert result.shape == reference.shape
    return ((result - reference).abs().max() / reference.abs().max()).item()
