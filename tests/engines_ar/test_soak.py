"""Aborts leave nothing behind and disturb nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from . import soak
from .fakes import Loaded, loaded

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    """Prompts take several steps, and memory is short: requests are preempted."""
    vllm = {
        "worker_cls": "tests.engines_ar.workers.CountingWorker",
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 24,
        "max_model_len": 128,
    }
    hidden = {"layer": -1, "rows": "all"}
    with loaded(folder, max_batch=16, hidden=hidden, vllm=vllm) as made:
        yield made


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_survivors_are_what_they_are_without_aborts(one: Loaded, count: int) -> None:
    given = soak.plans(count, seed=count)
    wanted = soak.run(one, given, disturbed=False)
    assert len(wanted.digests) == count
    report = soak.run(one, given, disturbed=True)
    assert report.aborted > count // 6
    assert report.held > count // 10
    assert one.engine.core.call_worker("count_resumed") > 0
    assert len(report.digests) == count - report.aborted
    assert [n for n, found in report.digests.items() if found != wanted.digests[n]] == []
    assert one.leftovers == {}
    assert not one.out.said
    if count >= 1000:  # before, vLLM's libraries still meet shapes that they make plans for
        assert report.rss_mb[-1] - wanted.rss_mb[-1] < 4
