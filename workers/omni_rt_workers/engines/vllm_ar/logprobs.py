"""Log-probabilities of a reply's tokens: as values for clients, and as rows of numbers."""

from __future__ import annotations

from typing import Any

import torch

from omni_rt.request import TokenLogprob, TopLogprob


def told(token: int, step: dict[int, Any], top: int) -> TokenLogprob:
    """`step` has vLLM's `Logprob`s at the token's place, by token id."""
    one = step[token]
    likeliest = [TopLogprob(_text(step[id]), id, step[id].logprob) for id in _top(step, top)]
    return TokenLogprob(_text(one), token, one.logprob, tuple(likeliest))


def row(token: int, step: dict[int, Any], top: int) -> torch.Tensor:
    """[1 + top, 2] float32: (token id, logprob) of the token itself, then of the likeliest."""
    ids = [token, *_top(step, top)]
    return torch.tensor([[float(id), step[id].logprob] for id in ids], dtype=torch.float32)


def _top(step: dict[int, Any], top: int) -> list[int]:
    ranked = sorted(step, key=lambda id: step[id].rank)
    return ranked[:top]


def _text(one: Any) -> str:
    return one.decoded_token or ""
