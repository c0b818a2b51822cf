"""Results by vLLM's names, made of what the stages gave, whatever kind it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omni_rt.errors import nearest
from omni_rt.request import Data, Done, Image, Output, Text

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """All that one request got from a stage, or from several."""

    request_id: str
    prompt: str | None = None
    items: tuple[Output, ...] = ()
    pooling_output: Any = None  # a tensor, for a result of nothing else
    output_type: str | None = None  # default: by what is there


@dataclass(slots=True)
class CompletionOutput:
    """One reply."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one request."""

    request_id: str
    prompt: str | None
    output_type: str  # "text", "image", "text+image", "latents" or "pooling"
    outputs: list[CompletionOutput] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    latents: Data | None = None
    pooled: list[Any] = field(default_factory=list)  # `Data` of other ports, or vLLM's tensor
    seed: int | None = None
    usage: dict[str, int] = field(default_factory=dict)
    stage_s: dict[str, float] = field(default_factory=dict)
    finished: bool = True


Handler = Callable[[EngineOutput, RequestOutput], None]  # fills the result


class MultimodalOutputProcessor:
    """Makes results of outputs, each by the handler of its type; others can be registered."""

    def __init__(self) -> None:
        self.output_handlers: dict[str, Handler] = {
            "image": _add_images,
            "text+image": _add_text_and_images,
            "latents": _add_latents,
            "text": _add_text,
            "pooling": _add_pooled,
        }

    def register_handler(self, output_type: str, handler: Handler) -> None:
        self.output_handlers[output_type] = handler

    def process_outputs(self, engine_core_outputs: Iterable[Any]) -> list[RequestOutput]:
        """Takes `EngineOutput`s and vLLM's `EngineCoreOutput`s.

        Raises `ValueError` for an `output_type` without a handler.
        """
        outputs = [
            one if isinstance(one, EngineOutput) else _of_vllm(one) for one in engine_core_outputs
        ]
        return [self._process(one) for one in outputs]

    def _process(self, output: EngineOutput) -> RequestOutput:
        kind = output.output_type or output_type_of(output)
        if kind not in self.output_handlers:
            known = nearest(kind, self.output_handlers)
            raise ValueError(f"there is no handler for outputs of type '{kind}'; {known}")
        result = RequestOutput(output.request_id, output.prompt, kind)
        self.output_handlers[kind](output, result)
        for done in _of(Done, output):
            result.seed, result.usage, result.stage_s = done.seed, done.usage, done.stage_s
        return result


def output_type_of(output: EngineOutput) -> str:
    """By what there is: pictures and text before latents, and tensors as the last resort."""
    text = any(one.text or one.tokens or one.calls for one in _of(Text, output))
    if any(_of(Image, output)):
        return "text+image" if text else "image"
    if any(map(_is_latents, _of(Data, output))):
        return "latents"
    tensors = output.pooling_output is not None or any(_of(Data, output))
    return "pooling" if tensors and not text else "text"


def _add_text(output: EngineOutput, result: RequestOutput) -> None:
    replies: dict[int, CompletionOutput] = {}
    for piece in _of(Text, output):
        reply = replies.setdefault(piece.index, CompletionOutput(piece.index))
        reply.text += piece.text
        reply.token_ids += piece.tokens
        reply.finish_reason = piece.finish_reason or reply.finish_reason
    for done in _of(Done, output):
        for reply in replies.values():
            reply.finish_reason = reply.finish_reason or done.finish_reason
    result.outputs = [replies[index] for index in sorted(replies)]
    _add_pooled(output, result)


def _add_images(output: EngineOutput, result: RequestOutput) -> None:
    result.images = list(_of(Image, output))
    _add_latents(output, result)


def _add_text_and_images(output: EngineOutput, result: RequestOutput) -> None:
    _add_text(output, result)
    _add_images(output, result)


def _add_latents(output: EngineOutput, result: RequestOutput) -> None:
    result.latents = next(filter(_is_latents, _of(Data, output)), None)
    _add_pooled(output, result)


def _add_pooled(output: EngineOutput, result: RequestOutput) -> None:
    result.pooled = [one for one in _of(Data, output) if not _is_latents(one)]
    if output.pooling_output is not None:
        result.pooled.append(output.pooling_output)


def _is_latents(data: Data) -> bool:
    return data.output.endswith("latents")


def _of(kind: type[_T], output: EngineOutput) -> list[_T]:
    return [item for item in output.items if isinstance(item, kind)]


def _of_vllm(output: Any) -> EngineOutput:
    """Token ids and the pooled tensor of an `EngineCoreOutput`; text is the detokenizer's."""
    tokens = tuple(output.new_token_ids or ())
    reason = getattr(output, "finish_reason", None)
    piece = Text("", tokens, finish_reason=None if reason is None else str(reason))
    items = (piece,) if tokens else ()
    return EngineOutput(output.request_id, None, items, output.pooling_output)
