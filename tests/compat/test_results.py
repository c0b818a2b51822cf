"""Results are made by the type of what came out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from omni_rt.compat import EngineOutput, MultimodalOutputProcessor, RequestOutput
from omni_rt.request import Data, Done, Image, Output, Text

TEXT = (Text("Here ", (1,)), Text("is.", (2, 3)))
IMAGE = Image(b"png", "image/png", 8, 8, 4)
LATENTS = Data(b"1234", "float32", (1,), "stage_1_latents")
HIDDEN = Data(b"1234", "float32", (1,), "stage_0_hidden")
DONE = Done("length", {"completion_tokens": 3}, 4, {"stage_0": 0.5})


def process(*items: Output) -> RequestOutput:
    (result,) = MultimodalOutputProcessor().process_outputs([EngineOutput("7", "ask", items)])
    return result


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        (TEXT, "text"),
        ((*TEXT, HIDDEN), "text"),
        ((IMAGE,), "image"),
        ((IMAGE, LATENTS), "image"),
        ((*TEXT, IMAGE), "text+image"),
        ((LATENTS,), "latents"),
        ((HIDDEN,), "pooling"),
        ((), "text"),
    ],
)
def test_the_type_is_found_by_what_there_is(items: tuple[Output, ...], kind: str) -> None:
    assert process(*items).output_type == kind


def test_a_result_holds_all_that_came() -> None:
    result = process(*TEXT, HIDDEN, IMAGE, LATENTS, DONE)
    assert result.request_id == "7"
    assert result.prompt == "ask"
    (reply,) = result.outputs
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("Here is.", [1, 2, 3], "length")
    assert result.images == [IMAGE]
    assert result.latents == LATENTS
    assert result.pooled[0] == HIDDEN
    assert (result.seed, result.usage["completion_tokens"]) == (4, 3)


def test_replies_are_kept_apart() -> None:
    pieces = [Text("b", index=1), Text("a", finish_reason="stop"), Text("c", index=1)]
    result = process(*pieces, DONE)
    assert [(one.text, one.finish_reason) for one in result.outputs] == [
        ("a", "stop"),
        ("bc", "length"),
    ]


def test_vllms_core_outputs_fall_back_to_the_pooled_tensor() -> None:
    tensor = object()
    pooled = SimpleNamespace(request_id="p", new_token_ids=[], pooling_output=tensor)
    tokens = SimpleNamespace(request_id="t", new_token_ids=[5, 6], pooling_output=None)
    first, second = MultimodalOutputProcessor().process_outputs([pooled, tokens])
    assert (first.output_type, first.pooled) == ("pooling", [tensor])
    assert (second.output_type, second.outputs[0].token_ids) == ("text", [5, 6])


def test_a_handler_of_ones_own_is_called_and_a_missing_one_is_told() -> None:
    processor = MultimodalOutputProcessor()
    output = EngineOutput("7", output_type="depth", pooling_output=3)
    with pytest.raises(ValueError, match="no handler for outputs of type 'depth'"):
        processor.process_outputs([output])
    processor.register_handler("depth", lambda o, result: result.pooled.append(o.pooling_output))
    assert processor.process_outputs([output])[0].pooled == [3]
