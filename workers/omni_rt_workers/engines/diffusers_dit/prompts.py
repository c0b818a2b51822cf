"""Embeddings of prompts, kept so that a prompt that comes again needs no text encoder."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from omni_rt_workers.engines.diffusers_dit.cache import DiTCacheManager

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def remember(shell: Any, cache: DiTCacheManager, *, exact: bool) -> None:
    """Have `shell.encode_prompt` answer out of `cache` what it has answered before.

    An exact request shares with exact ones only: others may have been encoded in a batch.
    """
    encode = getattr(shell, "encode_prompt", None)
    if encode is not None:
        vars(shell)["encode_prompt"] = _remembering(shell, encode, cache, exact)


def _remembering(
    shell: Any, encode: Callable[..., Any], cache: DiTCacheManager, exact: bool
) -> Callable[..., Any]:
    signature = inspect.signature(encode)

    @functools.wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        asked = _plain(signature.bind(*args, **kwargs).arguments)
        if asked is None:
            return encode(*args, **kwargs)  # with tensors or pictures: nothing to know it by
        key = (exact, asked, _state(shell))
        kept = cache.get(key)
        if kept is not None and kept.whole:
            return _copied(kept.value)
        value = encode(*args, **kwargs)
        if _plain_result(value):
            kept = _Kept(value)
            cache.put(key, kept, kept.size_bytes)
        return value

    return encode_prompt


class _Kept:
    """What `encode_prompt` gave: tensors in memory of their own, in tuples and lists."""

    def __init__(self, value: Any) -> None:
        self.value = _compact(value)
        tensors = list(_tensors(self.value))
        self.size_bytes = sum(one.untyped_storage().nbytes() for one in tensors)
        self._versions = [one._version for one in tensors]

    @property
    def whole(self) -> bool:
        """Whether nobody has written into the tensors that were handed out."""
        return [one._version for one in _tensors(self.value)] == self._versions


def _state(shell: Any) -> Hashable:
    """What a pipeline has noted of the request in itself and may look at: guidance, clip skip."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(shell).items())
        if name.startswith("_") and isinstance(value, _PLAIN)
    )


def _plain(value: Any) -> Hashable | None:
    """A key for an argument made of numbers, texts and flags; None for anything else."""
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else (type(value).__name__, *parts)
    if isinstance(value, dict):
        return _plain([part for pair in value.items() for part in pair])
    return None


def _plain_result(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_plain_result(part) for part in value)
    return isinstance(value, torch.Tensor | type(None))


def _compact(value: Any) -> Any:
    """The same without what tensors hold beyond themselves, as slices of a batch do."""
    if isinstance(value, torch.Tensor):
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    return type(value)(_compact(part) for part in value) if value is not None else None


def _copied(value: Any) -> Any:
    """Containers of its own, since the receiver may change them; the same tensors."""
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for part in value:
            yield from _tensors(part)
