"""The bundled writer, if it is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni_rt import errors

from .conftest import greedy_reply
from .fakes import Loaded, loaded, task

SHAPES = Path(errors.__file__).parent / "demo" / "shapes"
PROMPT = "draw a red circle above a blue square"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not (SHAPES / "writer" / "model.safetensors").is_file(), reason="no bundled writer"
    ),
]


@pytest.fixture(scope="module")
def one() -> Iterator[Loaded]:
    hidden = {"layer": -2, "rows": "all"}
    with loaded(SHAPES, part="writer", hidden=hidden, facts={"image": "<|image|>"}) as made:
        yield made


@pytest.fixture(scope="module")
def writer() -> Any:
    return AutoModelForCausalLM.from_pretrained(SHAPES / "writer", dtype=torch.float32).eval()


def test_a_drawing_equals_transformers(one: Loaded, writer: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHAPES / "writer")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    (said,) = one.run(task(PROMPT, max_tokens=24, ignore_eos=True, want=("tokens", "hidden")))
    assert said.tokens == greedy_reply(writer, ids, 24)
    with torch.no_grad():
        out = writer(torch.tensor([[*ids, *said.tokens[:-1]]]), output_hidden_states=True)
    assert torch.allclose(said.tensor("hidden"), out.hidden_states[-2][0], rtol=0, atol=1e-4)


def test_a_drawing_is_announced_by_a_fact(one: Loaded) -> None:
    drawing, talk = one.run(task(PROMPT, want=("text",)), task("hello", want=("text",)))
    assert (drawing.reason, drawing.facts) == ("stop", ("image",))
    assert (talk.reason, talk.facts) == ("stop", ())
    assert "<|" not in drawing.text + talk.text
