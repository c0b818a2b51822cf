"""Tensors that are kept between requests, within a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["prompt_embeds"]
Strategy = Literal["fifo", "lru"]


@dataclass(frozen=True, slots=True)
class DiTCacheConfig:
    """What is kept, how much of it, and what goes first when there is too much."""

    cache_tensors: tuple[Kind, ...] = ("prompt_embeds",)
    max_cache_size: int = 256 << 20  # bytes
    cache_strategy: Strategy = "fifo"  # the oldest goes first; lru: the one not used for longest
    enable_optimization: bool = True  # False: nothing is kept

    def keeps(self, kind: Kind) -> bool:
        return self.enable_optimization and kind in self.cache_tensors and self.max_cache_size > 0


@dataclass(slots=True)
class CacheCounts:
    """Since the start."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class DiTCacheManager:
    """Values by key, whose bytes, as their owner tells them, never exceed the limit together."""

    def __init__(self, config: DiTCacheConfig) -> None:
        self.config = config
        self.counts = CacheCounts()
        self.used_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # next to go first

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """The value, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        if self.config.cache_strategy == "lru":
            self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Any, size_bytes: int) -> bool:
        """Keep a value, in place of one under the same key. False: it is larger than the cache."""
        self.drop(key)
        if size_bytes > self.config.max_cache_size:
            return False
        while self.used_bytes + size_bytes > self.config.max_cache_size:
            self.drop(next(iter(self._entries)))
            self.counts.evictions += 1
        self._entries[key] = (value, size_bytes)
        self.used_bytes += size_bytes
        return True

    def drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[1]

    def clear(self) -> None:
        self._entries.clear()
        self.used_bytes = 0
