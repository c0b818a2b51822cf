"""A recording outbox, and a way to drive an engine as the worker's loop does."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omni_rt.wire.messages import Emit, Ports, StageSpec, TextPiece
from omni_rt_workers.engine import Engine, Task
from omni_rt_workers.engines import vllm_ar
from omni_rt_workers.engines.vllm_ar.engine import AREngine
from tests.doubles import NoOutbox


class NoInputs:
    def tensors(self, port: str) -> list[torch.Tensor]:
        return []

    def views(self, port: str) -> list[memoryview]:
        return []

    def texts(self, port: str) -> list[str]:
        return []

    def ports(self) -> list[str]:
        return []

    def count(self, port: str) -> int:
        return 0

    def ended(self, port: str) -> bool:
        return True

    def release(self, port: str, count: int) -> None:
        pass


@dataclass
class Said:
    """All that came out for one request."""

    texts: list[str] = field(default_factory=list)
    pieces: list[TextPiece] = field(default_factory=list)
    metas: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    text_tokens: list[int] = field(default_factory=list)
    chunks: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    ended_ports: set[str] = field(default_factory=set)
    reserved: dict[str, torch.Tensor] = field(default_factory=dict)
    reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.tensor("tokens").tolist()
        return tokens

    def tensor(self, port: str) -> torch.Tensor:
        assert port in self.ended_ports
        return torch.cat(self.chunks[port])

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None


class RecordingOutbox(NoOutbox):
    def __init__(self) -> None:
        self.said: dict[str, Said] = defaultdict(Said)

    def _of(self, task: Task, port: str) -> Said:
        said = self.said[task.request]
        assert port in task.emit
        assert not said.ended
        assert port not in said.ended_ports
        return said

    def text(self, task: Task, text: str, tokens: tuple[int, ...] = ()) -> None:
        self.piece(task, TextPiece(text, tokens))

    def piece(self, task: Task, piece: TextPiece) -> None:
        said = self._of(task, "text")
        said.pieces.append(piece)
        said.texts.append(piece.text)
        said.text_tokens += piece.tokens

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.reserve(task, port, tuple(tensor.shape), dtype).copy_(tensor)
        self.publish(task, port, last=last)

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        said = self._of(task, port)
        said.reserved[port] = torch.empty(shape, dtype=getattr(torch, dtype))
        return said.reserved[port]

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        said = self._of(task, port)
        said.chunks[port].append(said.reserved.pop(port))
        if meta is not None:
            said.metas.setdefault(port, []).append(meta)
        said.ended_ports |= {port} if last else set()

    def finish(
        self,
        task: Task,
        reason: str = "stop",
        usage: dict[str, int] | None = None,
        facts: tuple[str, ...] = (),
    ) -> None:
        said = self.said[task.request]
        assert not said.ended
        said.reason, said.usage, said.facts = reason, usage or {}, facts

    def fail(self, task: Task, error: BaseException) -> None:
        assert not self.said[task.request].ended
        self.said[task.request].error = error


@dataclass
class Loaded:
    engine: AREngine
    out: RecordingOutbox
    ports: Ports
    phases: list[str]

    def run(self, *tasks: Task, join_at: tuple[int, ...] = (), steps: int = 2000) -> list[Said]:
        """Step until idle; task i is added before step `join_at[i]` (0 if not given)."""
        waiting = list(zip([*join_at, *[0] * (len(tasks) - len(join_at))], tasks, strict=True))
        for step in range(steps):
            for entry in [one for one in waiting if one[0] <= step]:
                waiting.remove(entry)
                self.engine.add(entry[1])
            if self.engine.idle and not waiting:
                return [self.out.said[task.request] for task in tasks]
            self.engine.step()
        raise AssertionError(f"not idle after {steps} steps")

    @property
    def leftovers(self) -> dict[str, int]:
        """What is left of requests in vLLM, as far as there is something."""
        return {what: number for what, number in self.engine.core.leftovers.items() if number}


@contextmanager
def loaded(model: Path, **spec: Any) -> Iterator[Loaded]:
    out, phases = RecordingOutbox(), list[str]()
    engine = vllm_ar.make(stage(model, **spec), out)
    assert isinstance(engine, AREngine)
    ports = load(engine, phases)
    yield Loaded(engine, out, ports, phases)
    engine.close()


def load(engine: Engine, phases: list[str]) -> Ports:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM looks at deprecated names of torch while it starts
        return engine.load(lambda phase, fraction: phases.append(phase))


def stage(
    model: Path | None,
    *,
    part: str | None = None,
    max_batch: int = 8,
    sampling: dict[str, Any] | None = None,
    ports: tuple[str, ...] = (),
    **options: Any,
) -> StageSpec:
    return StageSpec(
        name="writer",
        engine="vllm",
        model=None if model is None else str(model),
        part=part,
        device="cpu",
        max_batch=max_batch,
        options=options,
        sampling=sampling or {},
        credits=dict.fromkeys(ports, 1 << 20),
    )


_numbers = iter(range(10**9))


def task(
    values: dict[str, Any] | list[int] | str,
    *,
    want: tuple[str, ...] = ("text", "tokens"),
    stream: bool = False,
    priority: int = 0,
    **params: Any,
) -> Task:
    """A greedy request unless `temperature` is given."""
    if isinstance(values, list):
        values = {"prompt_token_ids": values}
    if isinstance(values, str):
        values = {"prompt": values}
    return Task(
        request=f"r{next(_numbers)}",
        attempt=0,
        values=values,
        inputs=NoInputs(),
        params={"temperature": 0, **params},
        emit={port: Emit(port, "shm", False, stream) for port in want},
        priority=priority,
    )


def prompts(count: int, low: int, high: int, seed: int = 1) -> list[list[int]]:
    """Random token ids, `low` to `high` of them, none special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]


Greedy = Callable[[list[int], int], list[int]]
