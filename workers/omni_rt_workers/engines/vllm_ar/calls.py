"""Calls of tools in a reply's text, found by vLLM's tool parsers."""

from __future__ import annotations

import logging
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from omni_rt.errors import ConfigError, nearest
from omni_rt.request import CallPiece

log = logging.getLogger(__name__)


def parser_named(name: str, stage: str) -> Any:
    """vLLM's parser class. Raises `ConfigError` for a name that there is not."""
    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise ConfigError(
            f"stage '{stage}': vLLM has no tool parser '{name}'",
            stage=stage,
            hint=nearest(name, ToolParserManager.list_registered()),
        ) from error


class Calls:
    """One reply's text on its way through a parser."""

    def __init__(self, parser: Any, tokenizer: Any, tools: list[Any], *, stream: bool) -> None:
        """`tools` are OpenAI's. Raises `ValueError` for such that it cannot be."""
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], tools=tools, tool_choice="auto"
        )
        self._parser = parser(tokenizer, request.tools)
        self._request = self._parser.adjust_request(request)
        self._stream = stream
        self._text = ""
        self._tokens: list[int] = []
        self.called = False

    @property
    def special_tokens(self) -> bool:
        """Whether the parser reads special tokens, which text otherwise leaves out."""
        return not self._request.skip_special_tokens

    def take(
        self, text: str, tokens: list[int], *, ended: bool
    ) -> tuple[str, tuple[CallPiece, ...]]:
        """The next text and the tokens it was made of -> what of it is text, and pieces of calls.

        Where the text is not streamed, it is taken whole.
        """
        said, pieces = self._next(text, tokens) if self._stream else self._whole(text)
        if self._stream and ended and self.called:
            rest = self._parser.get_remaining_unstreamed_args()
            pieces += [CallPiece(len(self._parser.prev_tool_call_arr) - 1, arguments=rest)][
                : bool(rest)
            ]
        self.called |= bool(pieces)
        return said, tuple(pieces)

    def _whole(self, text: str) -> tuple[str, list[CallPiece]]:
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        pieces = [
            CallPiece(at, call.id, call.function.name, call.function.arguments)
            for at, call in enumerate(found.tool_calls)
        ]
        return found.content or "", pieces

    def _next(self, text: str, tokens: list[int]) -> tuple[str, list[CallPiece]]:
        before, seen = self._text, self._tokens
        self._text, self._tokens = before + text, seen + tokens
        delta = self._parser.extract_tool_calls_streaming(
            before, self._text, text, seen, self._tokens, tokens, self._request
        )
        if delta is None:
            return "", []
        pieces = [
            CallPiece(
                call.index,
                call.id or "",
                (call.function and call.function.name) or "",
                (call.function and call.function.arguments) or "",
            )
            for call in delta.tool_calls or ()
        ]
        return delta.content or "", pieces
