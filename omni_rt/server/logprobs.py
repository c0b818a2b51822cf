"""Log-probabilities as OpenAI has them: `logprobs` of a choice, whole or of a delta."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from omni_rt.request import Text


class Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Token(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Top]


class Logprobs(msgspec.Struct):
    content: list[Token]


def logprobs_of(texts: Iterable[Text]) -> Logprobs | None:
    """None if none were asked for."""
    tokens = [
        Token(
            one.token,
            one.logprob,
            list(one.token.encode()),
            [Top(top.token, top.logprob, list(top.token.encode())) for top in one.top],
        )
        for text in texts
        for one in text.logprobs
    ]
    return Logprobs(tokens) if tokens else None
