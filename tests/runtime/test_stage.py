"""Which request goes to which replica next."""

from __future__ import annotations

from omni_rt.runtime.stage import Stage


def _stage(replicas: int = 1, max_batch: int = 2) -> Stage:
    stage = Stage("painter", list(range(replicas)), max_batch, queue=4)
    for replica in stage.replicas:
        replica.identity = f"painter.{replica.slot}.1"
    return stage


def _order(stage: Stage) -> list[str]:
    taken = []
    while found := stage.next_run():
        taken.append(found[0])
    return taken


def test_first_come_first_served_within_a_priority() -> None:
    stage = _stage(max_batch=9)
    for order, (request, priority) in enumerate([("a", 0), ("b", 0), ("c", 5), ("d", 0)]):
        stage.push(request, priority, order)
    assert _order(stage) == ["c", "a", "b", "d"]


def test_a_retried_request_keeps_its_place() -> None:
    stage = _stage(max_batch=9)
    stage.push("later", 0, 8)
    stage.push("retried", 0, 3)
    assert _order(stage) == ["retried", "later"]


def test_a_replica_takes_no_more_than_its_slots() -> None:
    stage = _stage(max_batch=2)
    for order in range(3):
        stage.push(str(order), 0, order)
    assert _order(stage) == ["0", "1"]
    stage.discard("0")
    assert _order(stage) == ["2"]


def test_the_least_loaded_replica_is_next() -> None:
    stage = _stage(replicas=2, max_batch=3)
    for order in range(4):
        stage.push(str(order), 0, order)
    _order(stage)
    assert [len(replica.running) for replica in stage.replicas] == [2, 2]


def test_what_is_discarded_is_not_started() -> None:
    stage = _stage()
    stage.push("a", 0, 0)
    stage.push("b", 0, 1)
    stage.discard("a")
    assert _order(stage) == ["b"]


def test_nothing_goes_to_a_replica_that_is_gone() -> None:
    stage = _stage()
    stage.push("a", 0, 0)
    stage.lost("painter.0.1")
    assert _order(stage) == []


def test_full_counts_those_who_need_the_stage_not_only_those_in_its_queue() -> None:
    stage = _stage(max_batch=2)
    stage.members.update(str(number) for number in range(5))
    assert not stage.full
    stage.members.add("5")  # queue of 4 + 2 slots
    assert stage.full
