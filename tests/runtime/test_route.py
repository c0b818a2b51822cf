"""By which way an edge's tensors cross: each is tried, the first that works is taken."""

from __future__ import annotations

import pytest

from omni_rt.runtime.route import End, Facts, Route, RouteChoice, routes


def _facts(there: str, device: str, *, peer: bool = True, problem: str | None = None) -> Facts:
    return Facts(End("writer", "A"), End(there, device, problem), peer)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (_facts("writer", "A"), [Route.LOCAL]),
        (_facts("painter", "A"), [Route.DEVICE, Route.SHARED]),
        (_facts("painter", "B"), [Route.PEER, Route.SHARED]),
        (_facts("painter", "B", peer=False), [Route.SHARED]),
        (_facts("painter", ""), [Route.SHARED]),
    ],
)
def test_the_ways_that_come_into_question(facts: Facts, expected: list[Route]) -> None:
    assert routes(facts) == expected


def test_a_way_is_chosen_when_it_has_worked() -> None:
    choice = RouteChoice("writer.hidden -> painter.x", _facts("painter", "A"))
    assert (choice.next, choice.chosen) == (Route.DEVICE, None)
    assert choice.text == "not known yet"
    choice.tried(None, 0.0004)
    assert (choice.next, choice.chosen, choice.on_device) == (None, Route.DEVICE, True)
    assert str(choice) == "writer.hidden -> painter.x: device memory, probed in 0.4 ms"


def test_a_way_that_fails_is_out_and_the_reason_is_kept() -> None:
    choice = RouteChoice("writer.hidden -> painter.x", _facts("painter", "B"))
    choice.tried("no IPC here", None)
    assert (choice.chosen, choice.on_device) == (Route.SHARED, False)
    assert choice.text == "shared memory (not device memory of a peer: no IPC here)"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (_facts("writer", "A"), "same process"),
        (
            _facts("painter", "", problem="no driver"),
            "shared memory (painter has no device pool: no driver)",
        ),
        (
            _facts("painter", "B", peer=False),
            "shared memory (the consumer's device cannot read the memory of the producer's)",
        ),
    ],
)
def test_what_is_certain_is_not_tried(facts: Facts, text: str) -> None:
    choice = RouteChoice("a.x -> b.y", facts)
    assert choice.next is None
    assert choice.text == text
