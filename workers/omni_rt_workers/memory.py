"""The memory a worker shares: the one arena it writes, the arenas it reads, the objects it keeps.

No torch here: engines that need none start at once. `tensors.py` makes tensors of the views.
"""

from __future__ import annotations

from typing import Any

from omni_rt.errors import StaleRef
from omni_rt.wire.arena import Arena, BlockReader, BlockWriter
from omni_rt.wire.tensors import Block, Inline, Local


class Memory:
    """What this worker can write to and read from. Used by its one thread only."""

    def __init__(self, arena: Arena, epoch: int) -> None:
        self.writer = BlockWriter(arena, epoch)
        self.arena_id = arena.id
        self._readers: dict[int, BlockReader] = {arena.id: BlockReader(arena)}
        self._arenas: dict[int, Arena] = {arena.id: arena}
        self._objects: dict[int, Any] = {}
        self._next_key = 1

    def attach(self, arena: Arena) -> None:
        self._arenas[arena.id] = arena
        self._readers[arena.id] = BlockReader(arena)

    def detach(self, arena_id: int) -> None:
        self._readers.pop(arena_id, None)
        arena = self._arenas.pop(arena_id, None)
        if arena is not None:
            arena.close()

    def keep(self, thing: Any) -> int:
        """Put an object into the table of `local` refs; the key is never reused."""
        key = self._next_key
        self._next_key += 1
        self._objects[key] = thing
        return key

    def kept(self, ref: Local) -> Any:
        try:
            return self._objects[ref.offset]
        except KeyError:
            raise StaleRef(f"local object {ref.offset} is gone") from None

    def drop(self, key: int) -> None:
        self._objects.pop(key, None)

    def view(self, ref: Inline | Block) -> memoryview:
        """The ref's bytes, in place. Raises `StaleRef`."""
        if isinstance(ref, Inline):
            return memoryview(ref.data)
        reader = self._readers.get(ref.arena)
        if reader is None:
            raise StaleRef(f"arena {ref.arena} is not attached to this worker")
        return reader.open(ref.offset, ref.generation, ref.nbytes)

    def check(self, ref: Block) -> None:
        """Raise `StaleRef` if the block was reused while it was lent: what was read is void."""
        reader = self._readers.get(ref.arena)
        if reader is not None:
            reader.check(ref.offset, ref.generation)

    def close(self) -> None:
        self._objects.clear()
        for arena_id in list(self._arenas):
            self.detach(arena_id)
