"""Which stretches of a memory are free: best fit, and neighbours grow together again."""

from __future__ import annotations

import bisect


class FreeSpans:
    """Free stretches of [0, size), in any unit."""

    def __init__(self, size: int) -> None:
        self._by_size: list[tuple[int, int]] = []  # (span, start)
        self._span_at: dict[int, int] = {}  # start -> span
        self._start_of: dict[int, int] = {}  # end -> start
        self._add(size, 0)

    def __repr__(self) -> str:
        return f"<FreeSpans {sum(self._span_at.values())} in {len(self._span_at)} pieces>"

    def take(self, span: int) -> int | None:
        """The start of a stretch that is not free any more, or None if none is long enough."""
        at = bisect.bisect_left(self._by_size, (span, 0))
        if at == len(self._by_size):
            return None
        free, start = self._by_size[at]
        self._remove(free, start)
        if free > span:
            self._add(free - span, start + span)
        return start

    def give(self, start: int, span: int) -> None:
        """Back what `take` gave. Whose it was is the caller's to know."""
        before = self._start_of.get(start)
        if before is not None:
            length = self._span_at[before]
            self._remove(length, before)
            start, span = before, span + length
        after = self._span_at.get(start + span)
        if after is not None:
            self._remove(after, start + span)
            span += after
        self._add(span, start)

    def _remove(self, span: int, start: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (span, start))]
        del self._span_at[start]
        del self._start_of[start + span]

    def _add(self, span: int, start: int) -> None:
        bisect.insort(self._by_size, (span, start))
        self._span_at[start] = span
        self._start_of[start + span] = start
