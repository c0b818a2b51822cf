"""Who holds which block. Main forwards every descriptor, so it knows every lease by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omni_rt.errors import ProtocolError
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local

BlockKey = tuple[int, int, int]
"""(arena or pool id, offset, generation)"""

Leased = Block | DeviceBlock | Local
"""The refs that name memory which must be given back."""


def key_of(ref: Leased) -> BlockKey:
    memory = ref.pool if isinstance(ref, DeviceBlock) else ref.arena
    return memory, ref.offset, ref.generation


def leased(ref: object) -> Leased | None:
    """The ref if it names memory to give back; None for inline tensors and text."""
    return None if isinstance(ref, Inline) or not isinstance(ref, Leased) else ref


class Ledger:
    """Leases by block and by holder.

    A holder is a string: a worker's identity, a request's id (what a running request keeps for a
    replay) or a client's. One holder may hold a block several times. Methods that take leases away
    return the blocks that nobody holds any more: these go back to their producer with `Free`.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, dict[str, int]] = {}
        self._held: dict[str, set[BlockKey]] = {}
        self._blocks_of: dict[int, set[BlockKey]] = {}  # by arena

    def __len__(self) -> int:
        return len(self._holders)

    def __repr__(self) -> str:
        return f"<Ledger {len(self._holders)} blocks, {len(self._held)} holders>"

    def book(self, key: BlockKey, holders: Iterable[str]) -> bool:
        """A new block with its first holders. False if there are none: it is free at once."""
        if key in self._holders:
            raise ProtocolError(f"block {key} was announced twice")
        for holder in holders:
            self.lend(key, holder)
        return key in self._holders

    def lend(self, key: BlockKey, holder: str) -> None:
        counts = self._holders.get(key)
        if counts is None:
            counts = self._holders[key] = {}
            self._blocks_of.setdefault(key[0], set()).add(key)
        counts[holder] = counts.get(holder, 0) + 1
        self._held.setdefault(holder, set()).add(key)

    def release(self, key: BlockKey, holder: str) -> bool:
        """One lease of `holder` ends. True if the block is free now.

        A lease that is not in the books is ignored: its holder was declared dead meanwhile.
        """
        counts = self._holders.get(key)
        if counts is None or holder not in counts:
            return False
        counts[holder] -= 1
        if counts[holder]:
            return False
        return self._remove(key, holder)

    def drop(self, holder: str) -> list[BlockKey]:
        """All leases of `holder` end: it died or ended. The blocks that are free now."""
        keys = self._held.get(holder, set())
        return [key for key in list(keys) if self._remove(key, holder)]

    def holders(self, key: BlockKey) -> dict[str, int]:
        return self._holders.get(key, {})

    def blocks(self, arena: int) -> Iterator[BlockKey]:
        return iter(self._blocks_of.get(arena, ()))

    def busy(self, arena: int) -> bool:
        return bool(self._blocks_of.get(arena))

    def _remove(self, key: BlockKey, holder: str) -> bool:
        held = self._held[holder]
        held.discard(key)
        if not held:
            del self._held[holder]
        counts = self._holders[key]
        del counts[holder]
        if counts:
            return False
        del self._holders[key]
        blocks = self._blocks_of[key[0]]
        blocks.discard(key)
        if not blocks:
            del self._blocks_of[key[0]]
        return True
