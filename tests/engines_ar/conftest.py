from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from . import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .fakes import Greedy, Loaded


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nothing_stays(one: Loaded) -> Iterator[None]:
    """After each test the module's engine holds nothing of it."""
    yield
    assert one.engine.idle
    assert one.leftovers == {}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a chat template."""
    return tiny.save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def greedy(reference: Any) -> Greedy:
    """transformers' greedy reply to token ids, without an end."""
    return lambda ids, count: greedy_reply(reference, ids, count)


def greedy_reply(model: Any, ids: list[int], count: int) -> list[int]:
    """Past the end token: `generate` would suppress it instead of going on after it."""
    reply: list[int] = []
    new, cache = ids, None
    with torch.no_grad():
        while len(reply) < count:
            out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            new, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
            reply += new
    return reply
