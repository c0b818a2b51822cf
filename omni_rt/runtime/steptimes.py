"""How long a stage's steps take, by the number of requests in them, as measured."""

from __future__ import annotations

from dataclasses import dataclass, field

# The least that a new measurement counts: what was long ago fades.
_WEIGHT = 0.05
# Up to so many times the largest batch seen, a line is trusted to go on.
_TRUSTED = 2


@dataclass(slots=True)
class Mean:
    """An average in which old values fade."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(_WEIGHT, 1 / self.count)


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step of a stage, for each batch size."""

    first: Mean = field(default_factory=Mean)  # what a request's first step adds: its prompt
    _by_batch: dict[int, Mean] = field(default_factory=dict)

    def add(self, batch: int, seconds: float) -> None:
        self._by_batch.setdefault(batch, Mean()).add(seconds)

    def of(self, batch: int) -> float | None:
        """Seconds of a step of so many requests; None if nothing has been measured.

        Between two sizes that were seen, on the line between them. Beyond the largest, on the line
        from the smallest to it, up to twice its size; from there on, and if only one size was
        seen, in proportion to the size, as if batching gained nothing.
        """
        if not self._by_batch:
            return None
        seen = sorted(self._by_batch)
        low = max((n for n in seen if n <= batch), default=seen[0])
        high = min((n for n in seen if n >= batch), default=seen[-1])
        if batch <= seen[0] or low == high == batch:
            return self._by_batch[low].value
        if low < batch < high:
            return self._line(low, high, batch)
        if low == seen[0]:
            return self._by_batch[low].value * batch / low
        end = min(batch, low * _TRUSTED)
        return max(self._by_batch[low].value, self._line(seen[0], low, end)) * batch / end

    def _line(self, a: int, b: int, at: int) -> float:
        first, second = self._by_batch[a].value, self._by_batch[b].value
        return first + (second - first) * (at - a) / (b - a)
