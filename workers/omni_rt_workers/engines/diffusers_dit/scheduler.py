"""Which parked calls form the next step: policies, and what they decide on.

A policy sees calls as plain values and time as a number, so that all of it can be tried on virtual
time. It is asked once for every step and told afterwards how long the step took.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_rt.errors import ConfigError, nearest

_SHARE_OF_OLDEST = 0.25
_KEPT = 8  # times of a shape and width that are remembered; the shortest counts
_SHAPES = 256  # remembered
_NO_GAIN = 1.05  # a wider group must take this much less for each row to be worth the wait


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A call that a request waits for."""

    request: int  # 0, 1, 2, ... in order of arrival
    group: Hashable  # calls of equal group can be run as one
    shape: Hashable  # calls of equal shape and rows take equally long
    rows: int
    priority: int  # higher goes first
    left: int  # steps that the request still needs, this one included
    deadline: float | None = None  # on the clock of `now`


class Policy(Protocol):
    def schedule(self, waiting: Sequence[Waiting], now: float) -> list[list[Waiting]]:
        """What to run in this step, in order: at least one group of at most `max_batch` calls.

        Called before each step with all calls that could be run, at least one.
        """
        ...

    def ran(self, group: Sequence[Waiting], seconds: float, *, usual: bool = True) -> None:
        """A group took that long. `usual` is False if more was done than running it once."""
        ...


MakePolicy = Callable[[int], Policy]  # called with `max_batch`


class Together:
    """The first `max_batch` requests, each once in every step: the slowest sets the pace."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch

    def schedule(self, waiting: Sequence[Waiting], now: float) -> list[list[Waiting]]:
        groups: dict[Hashable, list[Waiting]] = {}
        first = sorted(waiting, key=lambda one: (-one.priority, one.request))
        for one in first[: self._max_batch]:
            groups.setdefault(one.group, []).append(one)
        return list(groups.values())

    def ran(self, group: Sequence[Waiting], seconds: float, *, usual: bool = True) -> None:
        """Nothing to learn."""


class FirstCome:
    """The request that came first, with those that fit it: the others wait until it has ended."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch

    def schedule(self, waiting: Sequence[Waiting], now: float) -> list[list[Waiting]]:
        order = sorted(waiting, key=lambda one: (-one.priority, one.request))
        return [_fitting(order[0], order)[: self._max_batch]]

    def ran(self, group: Sequence[Waiting], seconds: float, *, usual: bool = True) -> None:
        """Nothing to learn."""


class OmniDiffusionScheduler:
    """One group in each step. First the request that has least left to do, by measured times.

    So a short request does not wait for long ones, nor a small picture for films. Higher priorities
    come first, and within one priority requests that otherwise miss their deadline. Nobody starves:
    a quarter of the device's time goes to the request that came first, whatever its rank.
    """

    def __init__(self, max_batch: int, share_of_oldest: float = _SHARE_OF_OLDEST) -> None:
        self._max_batch = max_batch
        self._accrual = share_of_oldest / (1 - share_of_oldest)
        self._owed_s = 0.0  # device time that the oldest request has to get
        self._oldest: int | None = None  # request
        self._times = StepTimes()

    def schedule(self, waiting: Sequence[Waiting], now: float) -> list[list[Waiting]]:
        order = sorted(waiting, key=lambda one: self._rank(one, now))
        oldest = min(waiting, key=lambda one: one.request)
        self._oldest = oldest.request
        leader = order[0]
        if self._owed_s > self._times.estimate(oldest.shape, oldest.rows):
            leader = oldest
        return [self._joined(_fitting(leader, order)[: self._max_batch])]

    def ran(self, group: Sequence[Waiting], seconds: float, *, usual: bool = True) -> None:
        if any(one.request == self._oldest for one in group):
            self._owed_s = max(0.0, self._owed_s - seconds)
        else:
            self._owed_s += seconds * self._accrual
        if usual:
            self._times.add(group[0].shape, _rows(group), seconds)

    def _rank(self, one: Waiting, now: float) -> tuple[float, ...]:
        needs = one.left * self._times.estimate(one.shape, one.rows)
        spare = None if one.deadline is None else one.deadline - now - needs
        if one.deadline is not None and spare is not None and 0 <= spare < needs:
            return (-one.priority, 0, one.deadline, one.request)
        return (-one.priority, 1, needs, one.request)

    def _joined(self, members: list[Waiting]) -> list[Waiting]:
        """As many of them as pay: a device that is full with fewer takes longer for more."""
        rows = [_rows(members[:count]) for count in range(1, len(members) + 1)]
        shape = members[0].shape
        each = [self._times.for_each_row(shape, number) for number in rows]
        if each[-1] is None:
            return members
        best = min(one for one in each if one is not None)
        enough = next(
            n for n, one in enumerate(each, 1) if one is not None and one <= best * _NO_GAIN
        )
        return members[:enough]


class StepTimes:
    """How long calls take, by shape and rows, as measured."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, dict[int, deque[float]]] = {}

    def add(self, shape: Hashable, rows: int, seconds: float) -> None:
        widths = self._seconds.pop(shape, {})  # put at the end again: used last
        self._seconds[shape] = widths
        widths.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)
        if len(self._seconds) > _SHAPES:
            del self._seconds[next(iter(self._seconds))]

    def for_each_row(self, shape: Hashable, rows: int) -> float | None:
        """Seconds, the shortest of those measured; None if they are too few to be sure."""
        times = self._seconds.get(shape, {}).get(rows, ())
        return min(times) / rows if len(times) == _KEPT else None

    def estimate(self, shape: Hashable, rows: int) -> float:
        """Seconds of a call with about so many rows; 0 for a shape that has never run."""
        widths = self._seconds.get(shape)
        if not widths:
            return 0.0
        nearest_rows = min(widths, key=lambda number: abs(number - rows))
        return min(widths[nearest_rows]) / nearest_rows * rows


_POLICIES: dict[str, MakePolicy] = {
    "fair": OmniDiffusionScheduler,
    "first_come": FirstCome,
    "together": Together,
}


def find(name: str, stage: str) -> MakePolicy:
    """The maker of a policy, by its name or as module:function. Raises `ConfigError`."""
    if made := _POLICIES.get(name):
        return made
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError(
            f"stage '{stage}': there is no policy '{name}'",
            stage=stage,
            hint=nearest(name, _POLICIES) + " or one of your own as module:function",
        )
    try:
        make: MakePolicy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"stage '{stage}': cannot find the policy '{name}': {error}",
            stage=stage,
            hint="its folder must be in PYTHONPATH",
        ) from error
    return make


def _fitting(leader: Waiting, order: Sequence[Waiting]) -> list[Waiting]:
    """The leader, then those that can be run with it, in order."""
    others = [one for one in order if one.group == leader.group and one is not leader]
    return [leader, *others]


def _rows(group: Sequence[Waiting]) -> int:
    return sum(one.rows for one in group)
