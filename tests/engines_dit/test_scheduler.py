"""Which requests get the next step: tried on virtual time, with declared step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from omni_rt.errors import ConfigError
from omni_rt_workers.engines.diffusers_dit.scheduler import (
    FirstCome,
    OmniDiffusionScheduler,
    Policy,
    Together,
    Waiting,
    find,
)

Cost = Callable[[str, int], float]
"""Seconds of a step, by shape and rows."""


@dataclass(slots=True)
class Job:
    arrives: float
    steps: int
    shape: str = "small"
    priority: int = 0
    deadline: float | None = None
    ended: float | None = None
    got_s: float = 0.0  # device time, its share of each step

    @property
    def latency(self) -> float:
        assert self.ended is not None
        return self.ended - self.arrives


def in_proportion(shape: str, rows: int) -> float:
    """A device that one row fills; a large picture takes five times a small one."""
    return {"small": 0.1, "large": 0.5}[shape] * rows


def mostly_launches(shape: str, rows: int) -> float:
    """A device that eight rows do not fill."""
    return {"small": 0.1, "large": 0.5}[shape] * (0.9 + 0.1 * rows)


def simulate(policy: Policy, jobs: Sequence[Job], cost: Cost, slots: int = 1000) -> int:
    """Run all jobs to their end; the widest group that ran."""
    now, widest, left = 0.0, 0, {n: job.steps for n, job in enumerate(jobs)}
    while left:
        ready = [n for n in left if jobs[n].arrives <= now][:slots]
        if not ready:
            now = min(jobs[n].arrives for n in left)
            continue
        waiting = [
            Waiting(n, job.shape, job.shape, 1, job.priority, left[n], job.deadline)
            for n, job in ((n, jobs[n]) for n in ready)
        ]
        for group in policy.schedule(waiting, now):
            assert len({one.group for one in group}) == 1
            widest = max(widest, len(group))
            seconds = cost(str(group[0].shape), len(group))
            now += seconds
            policy.ran(group, seconds)
            for one in group:
                jobs[one.request].got_s += seconds / len(group)
                left[one.request] -= 1
                if not left[one.request]:
                    del left[one.request]
                    jobs[one.request].ended = now
    return widest


def p95(jobs: Sequence[Job]) -> float:
    return sorted(job.latency for job in jobs)[int(0.95 * len(jobs))]


def mixed(seed: int, long_shape: str, load: float) -> list[Job]:
    """Short and long requests that each ask for half of `load`, at random times."""
    draw = random.Random(seed)
    short_s, long_s = 4 * in_proportion("small", 1), 50 * in_proportion(long_shape, 1)
    jobs = []
    for steps, shape, work_s, count in (
        (4, "small", short_s, 400),
        (50, long_shape, long_s, max(4, int(400 * short_s / long_s))),
    ):
        now = 0.0
        for _ in range(count):
            now += draw.expovariate(load / 2 / work_s)
            jobs.append(Job(now, steps, shape))
    return sorted(jobs, key=lambda job: job.arrives)


def shorts_of(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.steps == 4]


def alone(jobs: Sequence[Job], share: float, cost: Cost) -> float:
    """p95 of the short requests without the others, on a device that is only `share` as fast."""
    copies = [Job(job.arrives, job.steps, job.shape) for job in shorts_of(jobs)]
    simulate(FirstCome(8), copies, lambda shape, rows: cost(shape, rows) / share)
    return p95(copies)


@pytest.mark.parametrize("cost", [in_proportion, mostly_launches])
@pytest.mark.parametrize("long_shape", ["small", "large"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_short_requests_hardly_wait_for_long_ones(cost: Cost, long_shape: str, seed: int) -> None:
    """Their p95 is within twice what they have alone with the share of the device they got here.
    First come, first served is beside it."""
    load = 0.8 if cost is in_proportion else 1.2
    fair, first = mixed(seed, long_shape, load), mixed(seed, long_shape, load)
    simulate(OmniDiffusionScheduler(8), fair, cost)
    simulate(FirstCome(8), first, cost)
    busy = sum(job.got_s for job in fair)
    share = sum(job.got_s for job in shorts_of(fair)) / busy
    ours, theirs, lone = (p95(shorts_of(fair)), p95(shorts_of(first)), alone(fair, share, cost))
    assert ours <= 2 * lone
    assert theirs > 2 * ours or long_shape == "small"


def test_first_come_first_served_makes_short_requests_wait() -> None:
    """The measure can fail: by this policy it does."""
    jobs = mixed(1, "large", 0.8)
    simulate(FirstCome(8), jobs, in_proportion)
    share = sum(job.got_s for job in shorts_of(jobs)) / sum(job.got_s for job in jobs)
    assert p95(shorts_of(jobs)) > 2 * alone(jobs, share, in_proportion)


def test_a_long_request_ends_under_an_endless_load_of_short_ones() -> None:
    """More short ones come than the device can do; the first long one gets its quarter."""
    flood = [Job(0.35 * n, 4, "small") for n in range(1000)]
    jobs = [Job(0.0, 50, "large"), *flood]
    simulate(OmniDiffusionScheduler(1), jobs, in_proportion)
    alone_s = 50 * in_proportion("large", 1)
    assert jobs[0].latency <= 4 * alone_s + 2
    assert jobs[0].latency > 2 * alone_s  # nor does it get the device for itself


def test_without_a_share_for_the_oldest_the_long_request_would_starve() -> None:
    flood = [Job(0.35 * n, 4, "small") for n in range(1000)]
    jobs = [Job(0.0, 50, "large"), *flood]
    simulate(OmniDiffusionScheduler(1, share_of_oldest=0.0), jobs, in_proportion)
    assert jobs[0].latency > 10 * 50 * in_proportion("large", 1)


def test_a_lower_priority_waits_but_does_not_starve() -> None:
    jobs = [Job(0.0, 10, priority=0), *(Job(0.0, 10, priority=5) for _ in range(40))]
    simulate(OmniDiffusionScheduler(1), jobs, in_proportion)
    high = sorted(job.latency for job in jobs[1:])
    assert jobs[0].latency > high[1]
    assert jobs[0].latency <= 4 * 10 * 0.1 + 0.2


def test_equal_requests_that_share_nothing_end_one_after_the_other() -> None:
    """Taking turns would let all of them end last."""
    jobs = [Job(0.01 * n, 10) for n in range(4)]
    simulate(OmniDiffusionScheduler(1), jobs, in_proportion)
    ends = [job.ended for job in jobs]
    assert ends == sorted(ends, key=float)  # type: ignore[arg-type]
    assert ends[0] == pytest.approx(1.0, abs=0.11)


def test_a_deadline_that_can_be_kept_is_kept() -> None:
    """By what is left to do alone, the long request would come last and miss it."""
    known = [Job(0.0, 2), Job(0.0, 2, "large")]  # so that step times are known
    late = Job(2.0, 10, "large", deadline=8.5)
    shorts = [Job(2.0, 10) for _ in range(6)]
    policy = OmniDiffusionScheduler(1, share_of_oldest=0.0)
    simulate(policy, [*known, late, *shorts], in_proportion)
    assert late.ended is not None
    assert late.ended <= 8.5
    hopeless = Job(2.0, 10, "large", deadline=4.0)
    others = [Job(2.0, 10) for _ in range(6)]
    again = OmniDiffusionScheduler(1, share_of_oldest=0.0)
    simulate(again, [Job(0.0, 2), Job(0.0, 2, "large"), hopeless, *others], in_proportion)
    assert all(job.ended < hopeless.ended for job in others)  # type: ignore[operator]


def test_groups_are_wide_where_it_pays_and_narrow_where_it_does_not() -> None:
    wide, narrow = [[Job(0.02 * n, 30) for n in range(16)] for _ in range(2)]
    assert simulate(OmniDiffusionScheduler(8), wide, mostly_launches) == 8
    simulate(OmniDiffusionScheduler(8), narrow, in_proportion)
    work_s = 16 * 30 * 0.1
    assert max(job.ended or 0 for job in wide) < work_s / 3
    mean = sum(job.latency for job in narrow) / 16
    assert mean < 0.75 * work_s  # in step with each other all would end at about `work_s`
    assert max(job.ended or 0 for job in narrow) == pytest.approx(work_s, rel=0.01)


def test_a_step_slowed_by_something_else_is_not_remembered() -> None:
    policy = OmniDiffusionScheduler(8)
    calls = [Waiting(n, "a", "a", 1, 0, 5) for n in range(3)]
    for _ in range(8):
        policy.ran(calls[:1], 0.1)
        policy.ran(calls, 3.0, usual=False)  # the probe
    assert policy.schedule(calls, 0.0) == [calls]  # the width is still unknown
    for _ in range(7):
        policy.ran(calls, 0.3)
    assert policy.schedule(calls, 0.0) == [calls]  # too few to be sure
    policy.ran(calls, 0.3)
    assert policy.schedule(calls, 0.0) == [calls[:1]]


def test_together_serves_each_of_the_first_once_in_a_step() -> None:
    calls = [Waiting(n, "ab"[n % 2], "a", 1, 0, 5) for n in range(4)]
    calls.append(Waiting(9, "a", "a", 1, 3, 5))
    ran = Together(4).schedule(calls, 0.0)
    assert sorted(one.request for group in ran for one in group) == [0, 1, 2, 9]
    assert [len(group) for group in ran] == [3, 1]


def test_policies_are_found_by_name() -> None:
    assert find("fair", "painter") is OmniDiffusionScheduler
    here = f"{__name__}:FirstCome"
    assert find(here, "painter") is FirstCome
    with pytest.raises(ConfigError, match="no policy 'fare'.*did you mean 'fair'"):
        find("fare", "painter")
    with pytest.raises(ConfigError, match="cannot find the policy 'nowhere:Mine'"):
        find("nowhere:Mine", "painter")
