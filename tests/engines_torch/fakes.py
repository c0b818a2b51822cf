"""Modules for tests, a recording outbox, and an engine over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_rt.errors import BadRequest
from omni_rt.wire.messages import Emit, ParamSpec, StageSpec
from omni_rt_workers.engine import Task
from omni_rt_workers.engines.torch_module.engine import TorchEngine
from omni_rt_workers.module import Job, Module, Outputs, Setup, Window
from tests.doubles import GivenInputs, NoOutbox

RATE = 16_000


class Recorder(NoOutbox):
    """What came out, by request."""

    def __init__(self) -> None:
        self.given: dict[Task, list[tuple[str, torch.Tensor, bool]]] = {}
        self.metas: list[dict[str, Any] | None] = []
        self.ends: dict[Task, str | BaseException] = {}
        self.usage: dict[Task, dict[str, int]] = {}

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        self.given.setdefault(task, []).append((port, tensor.clone(), last))

    def put_bytes(
        self,
        task: Task,
        port: str,
        data: bytes | bytearray | memoryview,
        *,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.metas.append(meta)
        samples = torch.frombuffer(bytearray(data), dtype=torch.int16) if data else torch.empty(0)
        self.given.setdefault(task, []).append((port, samples.clone(), last))

    def finish(
        self,
        task: Task,
        reason: str = "stop",
        usage: dict[str, int] | None = None,
        facts: tuple[str, ...] = (),
    ) -> None:
        self.ends[task] = reason
        self.usage[task] = usage or {}

    def fail(self, task: Task, error: BaseException) -> None:
        self.ends[task] = error


class Desk:
    """An engine over a module, and its client's side."""

    def __init__(
        self, module: str, *, max_batch: int = 8, model: str | None = None, **options: Any
    ):
        spec = StageSpec(
            name="stage",
            engine="torch",
            model=model,
            part=None,
            device="cpu",
            max_batch=max_batch,
            options={"module": module, "options": options},
            sampling={},
            credits={},
        )
        self.out = Recorder()
        self.engine = TorchEngine(spec, self.out)
        self.ports = self.engine.load(lambda phase, fraction: None)
        self._count = 0

    def add(
        self,
        whole: dict[str, torch.Tensor] | None = None,
        streams: tuple[str, ...] = (),
        *,
        want: tuple[str, ...] = ("out",),
        encode: bool = False,
        seed: int = 0,
        priority: int = 0,
        **params: Any,
    ) -> Task:
        self._count += 1
        emit = {port: Emit(port, "shm", encode, True) for port in want}
        inputs = GivenInputs(whole or {}, streams)
        values = {"seed": seed}
        task = Task(f"r{self._count}", 1, values, inputs, params, emit, priority)
        self.engine.add(task)
        return task

    def feed(self, task: Task, *chunks: torch.Tensor, end: bool = False, port: str = "x") -> None:
        inputs = task.inputs
        assert isinstance(inputs, GivenInputs)
        for chunk in chunks:
            inputs.chunks[port].append(chunk)
            self.engine.feed(task, port)
        if end:
            inputs.open.discard(port)
            self.engine.feed(task, port)

    def run(self, limit: int = 1000) -> int:
        """Step until there is nothing to do; the number of steps."""
        steps = 0
        while not self.engine.idle:
            assert steps < limit
            self.engine.step()
            steps += 1
        return steps

    def got(self, task: Task, port: str = "out") -> torch.Tensor:
        return torch.cat([tensor for name, tensor, _ in self.out.given[task] if name == port])

    def error(self, task: Task) -> BaseException:
        error = self.out.ends[task]
        assert isinstance(error, BaseException)
        return error


class Sums(Module):
    """For each new row the sum of it, two rows before and one after. Cannot bear -1."""

    inputs = {"x": Window(first=2, chunk=3, left=2, right=1, whole=20)}
    outputs = {"out": "tensor"}
    params = (ParamSpec("scale", "int"),)
    batches: list[int] = []

    def __init__(self, setup: Setup) -> None:
        self.batches = []

    def add(self, job: Job) -> None:
        if job.params.get("scale") == 0:
            raise BadRequest("nothing would be left", param="scale")

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        self.batches.append(len(jobs))
        if any(job.piece is None or (job.piece.rows < 0).any() for job in jobs):
            raise ValueError("a negative row")
        return [{"out": self._sums(job)} for job in jobs]

    def _sums(self, job: Job) -> torch.Tensor:
        piece = job.piece
        assert piece is not None
        padded = torch.zeros(2 + piece.new + 1, dtype=piece.rows.dtype)
        at = 2 - piece.left
        padded[at : at + len(piece.rows)] = piece.rows
        scale: int = job.params.get("scale", 1)
        sums: torch.Tensor = padded.unfold(0, 4, 1).sum(1) * scale
        return sums


class Steps(Module):
    """Takes as many steps as its input says; jobs of all shapes fit each other."""

    inputs = {"x": None}
    outputs = {"out": "tensor"}

    def add(self, job: Job) -> None:
        job.state = int(job.inputs["x"].sum())

    def key(self, job: Job) -> int:
        return 0

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        for job in jobs:
            job.state -= 1
        return [None if job.state else {"out": job.inputs["x"]} for job in jobs]


class Draw(Module):
    """Noise of the request's seed, as sound."""

    outputs = {"out": "audio"}
    sample_rate = RATE

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        return [{"out": torch.randn(100, generator=_generator(job.seed))} for job in jobs]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Lost(Module):
    """Its device has been lost."""

    outputs = {"out": "tensor"}

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        raise torch.AcceleratorError("device-side assert triggered")


class Odd(Module):
    """Gives what it does not declare."""

    outputs = {"out": "tensor"}

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        return [{"oud": torch.zeros(1)} for _ in jobs]
