"""Speech while more ask for it than the stages can carry."""

from __future__ import annotations

import pytest

from tests.simulation.speech import (
    ALONE_S,
    CARRIED,
    GROWTH_S,
    PIPELINE,
    RATE,
    SAMPLES,
    Listener,
    run,
)


def _served(listeners: list[Listener]) -> list[Listener]:
    return [one for one in listeners if one.accepted is not None]


@pytest.mark.parametrize("load", [0.7, 1.5, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_who_is_served_never_hears_a_gap_and_the_others_are_told_when_to_come(
    seed: int, load: float
) -> None:
    listeners = run(seed, load=load)
    served = _served(listeners)
    assert all(one.done and one.samples == one.tokens * SAMPLES for one in served)
    assert not [gap for one in served for gap in one.gaps]
    refused = [one for one in listeners if one.accepted is None]
    assert all(0.1 <= wait <= 30 for one in refused for wait in one.waits)
    assert len(refused) == sum(len(one.waits) for one in listeners)


@pytest.mark.parametrize("seed", range(4))
def test_those_who_do_not_listen_or_hang_up_give_nobody_else_a_gap(seed: int) -> None:
    served = _served(run(seed, load=3.0, mixed=True))
    players = [one for one in served if one.plays]
    assert len(served) > len(players) > 10
    assert any(one.done is None for one in served)
    assert not [gap for one in players for gap in one.gaps]


@pytest.mark.parametrize("seed", range(4))
def test_what_the_stages_can_carry_is_used(seed: int) -> None:
    """Refusing everybody would be no gap either."""
    listeners = run(seed, load=3.0)
    served = _served(listeners)
    sound_s = sum(one.samples for one in served) / RATE
    time_s = max(one.arrivals[-1] for one in served)
    assert sound_s / time_s > 0.8 * CARRIED
    few = run(seed, load=0.6)
    assert len(_served(few)) > 0.85 * len(few)


def test_without_the_limit_everybody_hears_gaps() -> None:
    listeners = run(0, rtf="null")
    assert sum(bool(one.gaps) for one in listeners) > 0.9 * len(listeners)


@pytest.mark.parametrize("seed", range(4))
def test_who_comes_again_when_told_is_served(seed: int) -> None:
    listeners = run(seed, retries=True)
    assert all(one.done for one in listeners)
    assert not [gap for one in listeners for gap in one.gaps]
    assert max(one.tries for one in listeners) < 60
    assert max(one.first_s for one in listeners) < 3 * ALONE_S + GROWTH_S


def test_a_burst_on_a_server_that_has_measured_nothing_is_let_in_slowly() -> None:
    served = _served(run(0, burst=48, warm=False))
    assert 1 < len(served) <= 4
    assert not [gap for one in served for gap in one.gaps]


def test_the_later_stages_have_worked_before_the_thinker_has_ended() -> None:
    done = run(0, burst=1, warm=False)[0].done
    assert done is not None
    assert done.first_output_s["talker"] < done.stage_s["thinker"] / 2
    assert done.first_output_s["vocoder"] < done.stage_s["thinker"] / 2
    assert list(done.first_output_s) == ["thinker", "talker", "vocoder"]


def test_without_streamed_edges_each_stage_waits_for_the_one_before() -> None:
    pipeline = PIPELINE.replace("stream: true", "stream: false")
    for stage, steps in (("inputs: [hidden]", 160), ("inputs: [codes]", 40)):
        pipeline = pipeline.replace(stage, f"steps: {steps}, {stage}")
    done = run(0, burst=1, warm=False, pipeline=pipeline)[0].done
    assert done is not None
    assert done.first_output_s["talker"] > done.stage_s["thinker"]
    assert done.first_output_s["vocoder"] > done.stage_s["talker"]
