"""Parked calls that fit are joined, each group runs its module once, all are resumed.

A joined run is never trusted blindly. The first of each structure is run both ways and compared;
a structure that differs, or that fails where its members alone do not, runs alone from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from omni_rt_workers.engines.diffusers_dit.join import (
    Digests,
    Layout,
    Unjoinable,
    join,
    layout,
    split,
)

if TYPE_CHECKING:
    from omni_rt_workers.engines.diffusers_dit.fibre import Call, Fibre

log = logging.getLogger(__name__)

# Largest difference of a joined result from the one alone, relative to the largest value. Lower
# precisions round differently with every shape of a kernel.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(slots=True)
class Counts:
    """Since the start, warm-up included."""

    calls: int = 0  # calls that fibres made
    runs: int = 0  # times that a module was run for them
    joined: int = 0  # of these, runs for more than one call
    widest: int = 0  # most calls in one run


@dataclass(frozen=True, slots=True)
class Failure:
    """In place of a result: the call raised."""

    error: Exception


@dataclass(eq=False, slots=True)
class Parked:
    """A fibre and the call that it waits for."""

    fibre: Fibre
    call: Call
    layout: Layout | None  # None: is not to be joined
    looked: bool  # False: nobody has asked yet what it could be joined with

    @property
    def group(self) -> Hashable:
        """Calls of equal group can be run as one."""
        return self.layout.key if self.layout else id(self)

    @property
    def shape(self) -> Hashable:
        """Calls of equal shape and rows take equally long."""
        return self.layout.key if self.layout else self.call.component

    @property
    def rows(self) -> int:
        return self.layout.rows if self.layout else 1


class Batch:
    def __init__(self) -> None:
        self.counts = Counts()
        self._joins: dict[Hashable, bool] = {}  # by structure: whether joining it is right
        self._digests = Digests()

    def parked(self, fibre: Fibre, *, looked: bool = True, alone: bool = False) -> Parked:
        """The call that `fibre` waits for. `alone`: it is not to be joined."""
        call = fibre.parked
        assert call is not None
        return Parked(fibre, call, self._layout(call) if looked and not alone else None, looked)

    def tick(self, fibres: Sequence[Fibre]) -> None:
        """Serve the parked call of each fibre once."""
        groups: dict[Hashable, list[Parked]] = {}
        for fibre in fibres:
            if fibre.parked:
                parked = self.parked(fibre)
                groups.setdefault(parked.group, []).append(parked)
        for group in groups.values():
            self.serve(group)

    def serve(self, group: Sequence[Parked]) -> bool:
        """Run calls of one group as one. A failing call fails its own fibre alone.

        Returns whether that was a usual run, whose time tells how long others will take.
        """
        torch.set_grad_enabled(False)  # another engine on this thread may have turned it on
        runs = self.counts.runs
        outcomes = self._run(list(group))
        usual = self.counts.runs == runs + 1
        for member in group:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Failure):
                member.fibre.fail(outcome.error)
                usual = False
            else:
                member.fibre.resume(outcome)
        del outcome  # a failure's traceback refers to this frame: no cycle is left behind
        return usual

    def _layout(self, call: Call) -> Layout | None:
        try:
            found = layout(call, self._digests)
        except Unjoinable:
            return None
        return found if self._joins.get(found.structure, True) else None

    def _run(self, group: list[Parked]) -> list[Any]:
        self.counts.calls += len(group)
        calls = [member.call for member in group]
        layouts = [member.layout for member in group if member.layout]
        if len(group) == 1:
            return [self._alone(calls[0])]
        if self._joins.get(layouts[0].structure) is False:  # found out since they were looked at
            return [self._alone(call) for call in calls]
        if layouts[0].structure not in self._joins:
            return self._probe(calls, layouts)
        if any(_broken(call) for call in calls):
            return [self._alone(call) for call in calls]
        try:
            return self._together(calls, layouts)
        except Exception as error:
            return self._apart(calls, layouts, error)

    def _alone(self, call: Call) -> Any:
        """With the arguments just as the pipeline gave them: the result is the same bit for bit."""
        self.counts.runs += 1
        self.counts.widest = max(self.counts.widest, 1)
        if broken := _broken(call):
            return Failure(broken)
        try:
            return call.function(*call.args, **call.kwargs)
        except Exception as error:
            return Failure(error)

    def _together(self, calls: list[Call], layouts: list[Layout]) -> list[Any]:
        results = split(calls[0].function(**join(layouts)), layouts)
        self.counts.runs += 1
        self.counts.joined += 1
        self.counts.widest = max(self.counts.widest, len(calls))
        return results

    def _apart(self, calls: list[Call], layouts: list[Layout], error: Exception) -> list[Any]:
        """After a joined run failed: the culprit fails again, or else joining was the culprit."""
        results = [self._alone(call) for call in calls]
        failed = any(isinstance(result, Failure) for result in results)
        if not failed and not isinstance(error, torch.OutOfMemoryError):
            self._distrust(calls[0], layouts[0], f"{type(error).__name__}: {error}")
        return results

    def _probe(self, calls: list[Call], layouts: list[Layout]) -> list[Any]:
        alone = [self._alone(call) for call in calls]
        if any(isinstance(result, Failure) or not _finite(result) for result in alone):
            return alone  # says nothing about joining
        try:
            together = self._together(calls, layouts)
        except Exception as error:
            self._distrust(calls[0], layouts[0], f"{type(error).__name__}: {error}")
            return alone
        pairs = zip(together, alone, strict=True)
        worst = max(difference(joined, single) for joined, single in pairs)
        if worst <= 1.0:
            self._joins[layouts[0].structure] = True
        else:
            self._distrust(calls[0], layouts[0], f"{worst:.1g} times the tolerance apart")
        return alone

    def _distrust(self, call: Call, one: Layout, reason: str) -> None:
        self._joins[one.structure] = False
        log.warning("%s calls run one by one, not joined: %s", call.component, reason)


def difference(result: Any, reference: Any) -> float:
    """The largest difference over the tensors of two results, 1.0 being what is tolerated."""
    worst = 0.0
    for one, other in zip(_tensors(result), _tensors(reference), strict=True):
        if one.shape != other.shape:
            return float("inf")
        if not other.numel():
            continue
        apart = (one.double() - other.double()).abs().max().item()
        scale = max(other.double().abs().max().item(), 1e-12)
        worst = max(worst, apart / scale / TOLERANCE.get(other.dtype, 1e-4))
    return worst


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from _tensors(part)
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)


def _broken(call: Call) -> Exception | None:
    """Why there is no sense in decoding what a request came to. Asked once in a request: to know
    it is to wait for the device."""
    if call.component != "vae" or _finite(call.args):
        return None
    return FloatingPointError("the latents are not finite: the model's numbers overflowed")


def _finite(result: Any) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in _tensors(result))
