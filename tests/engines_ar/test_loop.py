"""The engine under the worker's own loop, its output in a real arena."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import (
    Abort,
    Chunk,
    Emit,
    Failed,
    Finished,
    Free,
    Ready,
    Step,
    Submit,
    TextPiece,
    ToMain,
    ToWorker,
)
from omni_rt.wire.tensors import INLINE_LIMIT_BYTES, Block, Inline
from omni_rt_workers.engines import vllm_ar
from omni_rt_workers.loop import Loop
from omni_rt_workers.memory import Memory
from omni_rt_workers.tensors import as_tensor

from .fakes import prompts, stage

if TYPE_CHECKING:
    from pathlib import Path

    from omni_rt_workers.engine import Engine, Outbox

    from .fakes import Greedy

pytestmark = pytest.mark.model

CREDIT_BYTES = 20_000  # of hidden states: less than two of the streamed prompts below


@dataclass
class Channel:
    """What main would say, and what it would hear."""

    coming: deque[ToWorker] = field(default_factory=deque)
    said: list[ToMain] = field(default_factory=list)

    def receive(self, *, block: bool) -> list[ToWorker]:
        assert self.coming or not block, "the worker would sleep for ever"
        came = list(self.coming)
        self.coming.clear()
        return came

    def send(self, messages: Sequence[ToMain]) -> None:
        self.said += messages

    def close(self) -> None: ...


@dataclass
class Worker:
    loop: Loop
    channel: Channel
    memory: Memory

    def run(self, *messages: ToWorker) -> list[Any]:
        """All items of the steps until the worker would sleep."""
        self.channel.said.clear()
        self.channel.coming.extend(messages)
        self.loop.turn(block=False)
        while not self.loop.idle:
            self.loop.turn(block=False)
        return [item for m in self.channel.said if isinstance(m, Step) for item in m.items]

    def read(self, payload: Any) -> torch.Tensor:
        assert isinstance(payload, Block | Inline)
        view = self.memory.view(payload)
        return as_tensor(view, payload.dtype, payload.shape).clone()


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Worker]:
    arena = Arena.create(1, 1 << 20)
    memory = Memory(arena, epoch=1)
    channel = Channel()

    def no_arena(message: Any) -> None:
        raise NotImplementedError

    def make(spec: Any, out: Outbox) -> Engine:
        return vllm_ar.make(spec, out)

    loop = Loop(channel, memory, no_arena)
    spec = stage(folder, hidden={"layer": -2, "rows": "all"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.load(replace(spec, credits={"hidden": CREDIT_BYTES}), make, {}, INLINE_LIMIT_BYTES)
    assert isinstance(channel.said[-1], Ready)
    yield Worker(loop, channel, memory)
    loop.close()


def submit(request: str, ids: list[int], *, stream: bool, ports: tuple[str, ...]) -> Submit:
    return Submit(
        stage="writer",
        request=request,
        attempt=0,
        values={"prompt_token_ids": ids, "seed": 1},
        tensors={},
        streams=(),
        params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        emit=tuple(Emit(port, "shm", False, stream) for port in ports),
        priority=0,
    )


def expected(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out = reference(torch.tensor([ids]), output_hidden_states=True)
    rows: torch.Tensor = out.hidden_states[-2][0]
    return rows


def free(*chunks: Chunk) -> Free:
    blocks = [chunk.data for chunk in chunks if isinstance(chunk.data, Block)]
    return Free([(block.arena, block.offset, block.generation) for block in blocks])


def test_hidden_states_lie_in_the_arena(worker: Worker, reference: Any, greedy: Greedy) -> None:
    ids = prompts(1, 60, 60)[0]
    ports = ("text", "tokens", "hidden")
    text, tokens, hidden, end = worker.run(submit("a", ids, stream=False, ports=ports))
    assert isinstance(text.data, TextPiece)
    assert worker.read(tokens.data).tolist() == greedy(ids, 8)
    assert (isinstance(hidden.data, Block), hidden.last) == (True, True)
    rows = worker.read(hidden.data)
    assert torch.allclose(rows, expected(reference, [*ids, *greedy(ids, 7)]), rtol=0, atol=2e-5)
    assert isinstance(end, Finished)
    worker.run(free(hidden))
    assert worker.memory.writer.in_use_bytes == 0


def test_a_request_without_room_waits_and_goes_on_when_blocks_are_freed(
    worker: Worker, reference: Any, greedy: Greedy
) -> None:
    given = prompts(2, 60, 60, seed=2)
    ports = ("tokens", "hidden")
    items = worker.run(
        submit("first", given[0], stream=True, ports=ports),
        submit("second", given[1], stream=True, ports=ports),
    )
    assert [item.request for item in items if isinstance(item, Finished)] == ["first"]
    large = [item for item in items if isinstance(getattr(item, "data", None), Block)]
    assert [item.request for item in large] == ["first"]
    items += worker.run(free(*large))
    for name, ids in zip(("first", "second"), given, strict=True):
        rows = [one for one in items if isinstance(one, Chunk) and one.request == name]
        rows = [one for one in rows if one.port == "hidden"]
        assert [one.seq for one in rows] == list(range(8))
        if name == "second":  # the blocks of the first are gone
            got = torch.cat([worker.read(one.data) for one in rows])
            wanted = expected(reference, [*ids, *greedy(ids, 7)])
            assert torch.allclose(got, wanted, rtol=0, atol=2e-5)
    assert [item.request for item in items if isinstance(item, Finished)] == ["first", "second"]
    worker.run(free(*[one for one in items if isinstance(one, Chunk) and one.request == "second"]))
    assert worker.memory.writer.in_use_bytes == 0


def test_a_refused_request_fails_alone(worker: Worker) -> None:
    ids = prompts(1, 10, 10)[0]
    items = worker.run(
        submit("long", [1] * 600, stream=False, ports=("text",)),
        submit("good", ids, stream=False, ports=("text",)),
    )
    failed = next(item for item in items if isinstance(item, Failed))
    assert (failed.request, failed.kind) == ("long", "bad_request")
    assert [item.request for item in items if isinstance(item, Finished)] == ["good"]


def test_an_abort_under_the_loop_leaves_nothing(worker: Worker) -> None:
    ids = prompts(1, 40, 40)[0]
    worker.channel.coming.append(submit("gone", ids, stream=False, ports=("tokens", "hidden")))
    worker.loop.turn(block=False)
    items = worker.run(Abort("writer", "gone", 0))
    assert items == []
    assert worker.loop.idle
    assert worker.memory.writer.in_use_bytes == 0
