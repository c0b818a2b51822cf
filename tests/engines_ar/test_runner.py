"""The mixin over what vLLM's two model runners leave behind a step.

V2 needs Triton, which this machine may not have: its state is laid out here by hand, in vLLM's own
classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState as StateV2
from vllm.v1.worker.gpu_model_runner import ExecuteModelState as StateV1

from omni_rt_workers.engines.vllm_ar.draws import Draws
from omni_rt_workers.engines.vllm_ar.rows import Keeper
from omni_rt_workers.engines.vllm_ar.worker import OmniARModelRunner

pytestmark = pytest.mark.model

WIDTH = 4
PADDING = 3  # rows of a step that belong to nobody


@dataclass
class Piece:
    """What a step computes of one request."""

    request: str
    start: int
    count: int
    is_new: bool = False


def row(request: str, position: int, layer: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(ord(request) * 1000 + position * 10 + layer))


def rows(pieces: list[Piece], layer: int) -> torch.Tensor:
    made = [row(p.request, p.start + at, layer) for p in pieces for at in range(p.count)]
    return torch.stack([*made, *[torch.full((WIDTH,), torch.nan)] * PADDING])


def filled(cls: Any, **values: Any) -> Any:
    """A struct of vLLM's with these fields set and all others None."""
    names = cls._fields if hasattr(cls, "_fields") else [one.name for one in fields(cls)]
    assert set(values) <= set(names)
    return cls(**{**dict.fromkeys(names), **values})


def scheduled(pieces: list[Piece], ended: set[str]) -> Any:
    new = [
        filled(NewRequestData, req_id=p.request, num_computed_tokens=p.start)
        for p in pieces
        if p.is_new
    ]
    old = [p for p in pieces if not p.is_new]
    cached = filled(
        CachedRequestData,
        req_ids=[p.request for p in old],
        num_computed_tokens=[p.start for p in old],
    )
    return filled(
        SchedulerOutput,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={p.request: p.count for p in pieces},
        total_num_scheduled_tokens=sum(p.count for p in pieces),
        finished_req_ids=ended,
        has_structured_output_requests=False,
    )


class Runner:
    """One of vLLM's model runners, as far as the mixin looks at it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.device = torch.device("cuda")  # so that no generator is touched
        self.execute_model_state: Any = None
        if version == 1:
            self.requests: dict[str, Any] = {}
            self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, generators={})
        else:
            self.req_states = SimpleNamespace(req_id_to_index={"a": 0, "b": 3})

    def run(self, pieces: list[Piece]) -> None:
        order = pieces[::-1]  # both runners put a batch in an order of their own
        hidden, aux = rows(order, layer=0), [rows(order, layer=1)]
        ids = [p.request for p in order]
        if self.version == 1:
            self.input_batch = SimpleNamespace(
                req_ids=[*ids, "left over"], num_reqs=len(ids), generators={}
            )
            self.execute_model_state = filled(StateV1, hidden_states=hidden, aux_hidden_states=aux)
            return
        starts = np.cumsum([0, *[p.count for p in order]])
        batch = filled(InputBatch, req_ids=ids, num_reqs=len(ids), query_start_loc_np=starts)
        self.execute_model_state = filled(
            StateV2, input_batch=batch, hidden_states=hidden, aux_hidden_states=aux
        )


class Base:
    """Stands for vLLM's worker."""

    model_runner: Runner

    def execute_model(self, scheduler_output: Any) -> None:
        if self.pieces:
            self.model_runner.run(self.pieces)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.model_runner.execute_model_state = None
        ids = [p.request for p in self.pieces]
        index = {request: at for at, request in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index)

    pieces: list[Piece]


class Worker(OmniARModelRunner, Base):
    def __init__(self, version: int, *, aux: bool = False, pooled: bool = False) -> None:
        self.model_runner = Runner(version)
        self.device = torch.device("cpu")
        self.is_driver_worker = True
        self._watched, self._draws, self._keeper = {}, Draws(), Keeper()
        self._places = {"hidden": 0} if aux else {}
        self._pooled = {} if pooled else None

    def step(self, *pieces: Piece, ended: tuple[str, ...] = ()) -> Any:
        self.pieces = list(pieces)
        out = self.execute_model(scheduled(self.pieces, set(ended)))
        return self.sample_tokens(None) if out is None else out

    def taken(self, request: str) -> list[list[float]]:
        (parts,) = self.take_rows([(request, "hidden")])
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)]).tolist()


def expected(request: str, first: int, end: int, layer: int = 0) -> list[list[float]]:
    return [row(request, position, layer).tolist() for position in range(first, end)]


@pytest.fixture(params=[1, 2], ids=["V1", "V2"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("aux", [False, True])
def test_rows_are_cut_by_request_whatever_their_order(version: int, aux: bool) -> None:
    worker = Worker(version, aux=aux)
    worker.watch_rows("a", "hidden", 2, 100)
    worker.watch_rows("c", "hidden", 0, 4)
    worker.step(Piece("a", 0, 3, is_new=True), Piece("b", 7, 1), Piece("c", 0, 3, is_new=True))
    worker.step(Piece("c", 3, 2), Piece("a", 3, 1))
    assert worker.taken("a") == expected("a", 2, 4, layer=int(aux))
    assert worker.taken("c") == expected("c", 0, 4, layer=int(aux))


def test_rows_of_a_preempted_request_are_kept_once(version: int) -> None:
    worker = Worker(version)
    worker.watch_rows("a", "hidden", 0, 100)
    worker.step(Piece("a", 0, 5, is_new=True))
    worker.step(Piece("a", 5, 1))
    # V2 forgets a preempted request and is sent it as a new one, reply and all.
    worker.step(Piece("a", 0, 4, is_new=version == 2))
    worker.step(Piece("a", 4, 4))
    assert worker.taken("a") == expected("a", 0, 8)


def test_a_step_of_nothing_keeps_nothing(version: int) -> None:
    worker = Worker(version, pooled=True)
    worker.watch_rows("a", "hidden", 0, 100)
    worker.step(Piece("a", 0, 2, is_new=True))
    worker.step(ended=("b",))
    assert worker.taken("a") == expected("a", 0, 2)


def test_the_pooler_output_has_the_rows_of_each_request(version: int) -> None:
    worker = Worker(version, pooled=True)
    worker.pieces = [Piece("a", 4, 2), Piece("b", 0, 3, is_new=True)]
    out = worker.execute_model(scheduled(worker.pieces, set()), None)
    assert out.req_ids == ["a", "b"]
    found = [part.tolist() for part in out.pooler_output]
    assert found == [expected("a", 4, 6), expected("b", 0, 3)]


def test_with_grammars_the_pooler_output_comes_with_the_tokens(version: int) -> None:
    worker = Worker(version, pooled=True)
    worker.pieces = [Piece("a", 4, 2)]
    step = scheduled(worker.pieces, set())
    step.has_structured_output_requests = True
    assert worker.execute_model(step) is None
    out = worker.sample_tokens("grammars")
    assert [part.tolist() for part in out.pooler_output] == [expected("a", 4, 6)]


def test_settling_a_failed_step_takes_back_what_was_half_done(version: int) -> None:
    worker = Worker(version)
    worker.watch_rows("a", "hidden", 0, 100)
    if version == 1:
        worker.model_runner.requests = {"a": None, "b": None}
    worker.step(Piece("a", 0, 5, is_new=True))
    worker.execute_model(scheduled([Piece("a", 5, 1)], set()))
    known, complaint = worker.settle({"a": (3, 1)})
    assert (sorted(known), complaint) == (["a", "b"], None)
    assert worker.model_runner.execute_model_state is None
    assert worker.taken("a") == expected("a", 0, 3)
    assert worker.held_requests() == (2, 1)


def test_what_settling_raises_is_an_answer() -> None:
    worker = Worker(2)
    del worker.model_runner.req_states
    known, complaint = worker.settle({})
    assert known == []
    assert complaint is not None
    assert complaint.startswith("AttributeError")
