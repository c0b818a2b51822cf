"""Starts, deaths, back-off and silence, with the clock in hand."""

from __future__ import annotations

from omni_rt.config import parse_pipeline
from omni_rt.runtime.supervisor import Supervisor, Worker, WorkerState

PIPELINE = """
stages:
  echo: {engine: echo, restart: {max_deaths: 3, backoff_s: 1, backoff_max_s: 3, wait_s: 8}}
outputs: {text: echo.text}
heartbeat_s: 10
stall_s: 30
load_stall_s: 60
"""


def _loaded(now: float = 0.0) -> tuple[Supervisor, Worker]:
    supervisor = Supervisor(parse_pipeline(PIPELINE, "test.yaml"))
    worker = supervisor.workers[0]
    assert supervisor.due(now).spawn == [worker]
    supervisor.spawned(worker, now)
    supervisor.loaded(worker, "echo")
    return supervisor, worker


def _die(supervisor: Supervisor, worker: Worker, now: float) -> float:
    """The worker dies; when it is started again."""
    supervisor.exited(worker, now)
    assert worker.state is WorkerState.BACKOFF
    return worker.next_start


def test_restarts_back_off_and_a_finished_request_forgives() -> None:
    supervisor, worker = _loaded()
    pauses = []
    for _ in range(4):
        pauses.append(_die(supervisor, worker, 100.0) - 100.0)
        supervisor.spawned(worker, 100.0)
        supervisor.loaded(worker, "echo")
    assert pauses == [1, 2, 3, 3]
    supervisor.served(worker)
    assert _die(supervisor, worker, 200.0) == 201.0


def test_a_worker_that_dies_too_often_in_a_row_is_down_but_tried_again() -> None:
    supervisor, worker = _loaded()
    for death in range(3):
        assert not worker.down
        _die(supervisor, worker, float(death))
        supervisor.spawned(worker, float(death))
    assert worker.down
    supervisor.exited(worker, 10.0)
    assert supervisor.due(worker.next_start).spawn == [worker]


def test_a_first_start_that_fails_is_not_repeated() -> None:
    supervisor = Supervisor(parse_pipeline(PIPELINE, "test.yaml"))
    worker = supervisor.workers[0]
    supervisor.spawned(worker, 0.0)
    supervisor.exited(worker, 1.0)
    assert worker.state is WorkerState.FAILED
    assert worker.down
    assert supervisor.next_time() is None
    assert not supervisor.due(1e9).spawn


def test_every_identity_is_used_once() -> None:
    supervisor, worker = _loaded()
    first = worker.identity
    _die(supervisor, worker, 1.0)
    supervisor.spawned(worker, 2.0)
    assert worker.identity != first
    assert supervisor.find(first) is None
    assert supervisor.find(worker.identity) is worker


def test_an_idle_worker_is_pinged_and_a_silent_one_killed_once() -> None:
    supervisor, worker = _loaded()
    assert supervisor.next_time() == 10.0
    assert supervisor.due(10.0).ping == [worker]
    assert supervisor.next_time() == 40.0
    supervisor.heard(worker, 10.5)
    assert supervisor.next_time() == 20.0
    assert supervisor.due(20.0).ping == [worker]
    assert supervisor.next_time() == 50.0
    due = supervisor.due(50.0)
    assert due.kill == [worker]
    assert "30 s" in (worker.error or "")
    assert supervisor.next_time() is None
    assert not supervisor.due(60.0).kill


def test_silence_is_forgiven_if_main_itself_was_late() -> None:
    supervisor, worker = _loaded()
    supervisor.next_time()
    supervisor.due(10.0)
    assert supervisor.next_time() == 40.0
    assert not supervisor.due(500.0).kill  # the loop was blocked: answers may lie unread


def test_requests_wait_for_a_restart_for_a_bounded_time() -> None:
    supervisor, worker = _loaded()
    _die(supervisor, worker, 100.0)
    supervisor.spawned(worker, 101.0)
    assert not supervisor.due(107.9).waited_out
    supervisor.next_time()
    assert supervisor.due(108.0).waited_out
    assert worker.waited_out
    assert not supervisor.due(108.1).waited_out  # said once
    supervisor.loaded(worker, "echo")
    assert not worker.waited_out


def test_loading_without_a_sign_of_life_is_ended() -> None:
    supervisor = Supervisor(parse_pipeline(PIPELINE, "test.yaml"))
    worker = supervisor.workers[0]
    supervisor.spawned(worker, 0.0)
    supervisor.heard(worker, 50.0)
    assert supervisor.next_time() == 110.0
    assert supervisor.due(110.0).kill == [worker]
