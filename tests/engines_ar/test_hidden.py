"""The port `hidden` against transformers' `output_hidden_states`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .fakes import Loaded, Said, loaded, prompts, task

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

WANT = ("tokens", "hidden")


@dataclass(frozen=True)
class Case:
    layer: int
    rows: str
    preempted: bool = False
    vllm: tuple[tuple[str, Any], ...] = ()


CASES = {
    "after the final norm": Case(-1, "all"),
    "last layer's input": Case(-2, "reply"),
    "embedding": Case(0, "prompt"),
    "chunked prefill": Case(-1, "all", vllm=(("max_num_batched_tokens", 16),)),
    "preemption": Case(
        -2,
        "all",
        preempted=True,
        vllm=(("num_gpu_blocks_override", 7), ("max_model_len", 128)),
    ),
}


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Case, Loaded]]:
    case: Case = request.param
    vllm = {"worker_cls": "tests.engines_ar.workers.CountingWorker", **dict(case.vllm)}
    hidden = {"layer": case.layer, "rows": case.rows}
    with loaded(folder, hidden=hidden, vllm=vllm) as made:
        yield case, made


def expected(case: Case, reference: Any, ids: list[int], said: Said) -> torch.Tensor:
    """Rows of all positions that were computed on: the last token was not."""
    with torch.no_grad():
        out = reference(torch.tensor([[*ids, *said.tokens[:-1]]]), output_hidden_states=True)
    rows: torch.Tensor = out.hidden_states[case.layer][0]
    first, end = {"all": (0, None), "reply": (len(ids), None), "prompt": (0, len(ids))}[case.rows]
    return rows[first:end]


def close(said: Said, wanted: torch.Tensor) -> bool:
    got = said.tensor("hidden")
    assert got.shape == wanted.shape
    return torch.allclose(got, wanted, rtol=0, atol=2e-5)


def test_rows_equal_transformers_alone(served: tuple[Case, Loaded], reference: Any) -> None:
    case, one = served
    ids = prompts(1, 50, 50)[0]
    (said,) = one.run(task(ids, max_tokens=10, ignore_eos=True, want=WANT))
    assert len(said.chunks["hidden"]) == 1
    assert close(said, expected(case, reference, ids, said))


def test_rows_equal_transformers_in_a_batch(served: tuple[Case, Loaded], reference: Any) -> None:
    case, one = served
    given = prompts(8, 10, 60)
    new = 50 if case.preempted else 12
    tasks = [
        task(ids, max_tokens=new, ignore_eos=True, want=WANT, stream=number % 2 == 0)
        for number, ids in enumerate(given)
    ]
    replies = one.run(*tasks, join_at=(0, 0, 0, 1, 2, 3, 5, 8))
    for ids, said in zip(given, replies, strict=True):
        assert close(said, expected(case, reference, ids, said))
    assert (one.engine.core.call_worker("count_resumed") > 0) == case.preempted
    assert one.leftovers == {}


def test_rows_are_whole_when_the_prompt_was_seen_before(
    served: tuple[Case, Loaded], reference: Any
) -> None:
    case, one = served
    ids = prompts(1, 100, 100, seed=9)[0]
    for want in (("tokens",), WANT):
        (said,) = one.run(task(ids, max_tokens=3, ignore_eos=True, want=want))
    assert close(said, expected(case, reference, ids, said))


def test_streamed_rows_come_as_they_are_made(served: tuple[Case, Loaded]) -> None:
    case, one = served
    ids = prompts(1, 40, 40)[0]
    (said,) = one.run(task(ids, max_tokens=6, ignore_eos=True, want=WANT, stream=True))
    sizes = [len(chunk) for chunk in said.chunks["hidden"]]
    assert sizes == {"all": [40, 1, 1, 1, 1, 1], "reply": [1] * 5, "prompt": [40]}[case.rows]


def test_a_reply_of_one_token_has_no_rows_of_its_own(served: tuple[Case, Loaded]) -> None:
    case, one = served
    ids = prompts(1, 40, 40)[0]
    for stream in (False, True):
        (said,) = one.run(task(ids, max_tokens=1, ignore_eos=True, want=WANT, stream=stream))
        assert said.tensor("hidden").shape == (0 if case.rows == "reply" else 40, 64)


def test_rows_are_kept_only_for_requests_that_asked(served: tuple[Case, Loaded]) -> None:
    _, one = served
    first, second = prompts(2, 20, 20)
    one.engine.add(task(first, max_tokens=8, ignore_eos=True, want=WANT))
    one.engine.add(task(second, max_tokens=8, ignore_eos=True, want=("tokens",)))
    for _ in range(4):
        one.engine.step()
    assert one.leftovers["requests in the worker"] == 2
    assert one.leftovers["requests with rows"] == 1
    one.run()
    assert one.leftovers == {}
