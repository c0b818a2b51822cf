"""The module engine: who steps with whom, cut inputs, failures, cancelled requests."""

from __future__ import annotations

import pytest
import torch

from omni_rt.errors import BadRequest, ConfigError, StageFailed
from omni_rt_workers.engine import EngineBroken
from tests.doubles import GivenInputs
from tests.engines_torch.fakes import RATE, Desk, Sums

HERE = "tests.engines_torch.fakes"
ROWS = torch.arange(1, 15)
WHOLE = torch.tensor(
    [sum(ROWS[max(0, k - 2) : k + 2].tolist()) for k in range(len(ROWS))]
)  # what Sums gives for ROWS


def sums(max_batch: int = 8) -> Desk:
    return Desk(f"{HERE}:Sums", max_batch=max_batch)


def batches(desk: Desk) -> list[int]:
    module = desk.engine._module
    assert isinstance(module, Sums)
    return module.batches


def test_a_whole_input_is_one_piece() -> None:
    desk = sums()
    task = desk.add({"x": ROWS})
    assert desk.run() == 1
    assert torch.equal(desk.got(task), WHOLE)
    assert desk.out.ends[task] == "stop"


def test_a_long_whole_input_is_cut_into_long_pieces() -> None:
    desk = sums()
    task = desk.add({"x": torch.ones(21, dtype=torch.int64)})
    assert desk.run() == 2  # 20 rows and 1
    assert desk.got(task).tolist() == [2, 3, *[4] * 18, 3]


@pytest.mark.parametrize("sizes", [[14], [1] * 14, [3, 1, 7, 2, 1], [13, 1]])
@pytest.mark.parametrize("eager", [True, False])
def test_a_stream_is_cut_alike_however_its_chunks_fall(sizes: list[int], eager: bool) -> None:
    desk = sums()
    task = desk.add(streams=("x",))
    for chunk in ROWS.split(sizes):
        desk.feed(task, chunk)
        if eager:
            desk.run()
    desk.feed(task, end=True)
    desk.run()
    assert torch.equal(desk.got(task), WHOLE)
    assert [len(tensor) for _, tensor, _ in desk.out.given[task]] == [2, 3, 3, 3, 3]
    assert [last for _, _, last in desk.out.given[task]] == [False] * 4 + [True]


def test_the_first_piece_comes_as_soon_as_its_context_is_there() -> None:
    desk = sums()
    task = desk.add(streams=("x",))
    desk.feed(task, ROWS[:2])
    assert desk.engine.idle
    desk.feed(task, ROWS[2:3])
    desk.run()
    assert desk.got(task).tolist() == WHOLE[:2].tolist()


def test_a_producer_far_ahead_is_not_drained() -> None:
    desk = sums()
    task = desk.add(streams=("x",))
    desk.feed(task, *ROWS[:8].split(1))
    inputs = task.inputs
    assert isinstance(inputs, GivenInputs)
    assert len(inputs.tensors("x")) == 5  # two rows and one of context were taken
    desk.run()
    assert inputs.tensors("x") == []


def test_a_stream_without_a_row_gives_nothing_and_ends() -> None:
    desk = sums()
    task = desk.add(streams=("x",))
    desk.feed(task, end=True)
    desk.run()
    assert desk.out.ends[task] == "stop"
    assert task not in desk.out.given


def test_requests_of_one_shape_step_together() -> None:
    desk = sums(max_batch=3)
    tasks = [desk.add({"x": ROWS}, scale=k) for k in (1, 2, 3, 4)]
    other = desk.add({"x": ROWS[:4]})
    desk.run()
    assert sorted(batches(desk)) == [1, 1, 3]
    for k, task in enumerate(tasks, 1):
        assert torch.equal(desk.got(task), WHOLE * k)
    assert desk.got(other).tolist() == [3, 6, 10, 9]


def test_streams_take_turns() -> None:
    desk = sums(max_batch=1)
    tasks = [desk.add(streams=("x",)) for _ in range(3)]
    for task in tasks:
        desk.feed(task, ROWS, end=True)
    for _ in range(3):
        desk.engine.step()
    assert [len(desk.got(task)) for task in tasks] == [2, 2, 2]


def test_the_higher_priority_goes_first() -> None:
    desk = sums(max_batch=1)
    low, high = desk.add({"x": ROWS}), desk.add({"x": ROWS}, priority=1)
    desk.engine.step()
    assert high in desk.out.ends
    assert low not in desk.out.ends


def test_a_module_may_take_several_steps_and_requests_join_between_them() -> None:
    desk = Desk(f"{HERE}:Steps")
    long = desk.add({"x": torch.tensor([5])})
    desk.engine.step()
    short = desk.add({"x": torch.tensor([1, 1])})
    desk.engine.step()
    desk.engine.step()
    assert short in desk.out.ends
    assert long not in desk.out.ends
    assert desk.run() == 2
    assert long in desk.out.ends


def test_an_input_without_a_window_is_waited_for_and_joined() -> None:
    desk = Desk(f"{HERE}:Steps")
    task = desk.add(streams=("x",))
    desk.feed(task, torch.tensor([1]), torch.tensor([1, 1]))
    assert desk.engine.idle
    desk.feed(task, end=True)
    assert desk.run() == 3
    assert desk.got(task).tolist() == [1, 1, 1]


def test_a_failed_step_costs_only_the_culprit() -> None:
    desk = sums()
    good = [desk.add({"x": ROWS}) for _ in range(3)]
    bad = desk.add({"x": torch.full((14,), -1)})
    desk.run()
    assert isinstance(desk.error(bad), ValueError)
    for task in good:
        assert torch.equal(desk.got(task), WHOLE)
    after = desk.add({"x": ROWS})
    desk.run()
    assert torch.equal(desk.got(after), WHOLE)


def test_a_refused_request_leaves_nothing_behind() -> None:
    desk = sums()
    with pytest.raises(BadRequest, match="nothing would be left"):
        desk.add({"x": ROWS}, scale=0)
    assert desk.engine.idle


def test_a_cancelled_request_is_not_in_the_next_step() -> None:
    desk = sums()
    gone, stays = (desk.add(streams=("x",)) for _ in range(2))
    for task in (gone, stays):
        desk.feed(task, ROWS, end=True)
    desk.engine.step()
    desk.engine.abort(gone)
    desk.run()
    assert len(desk.got(gone)) == 2
    assert gone not in desk.out.ends
    assert torch.equal(desk.got(stays), WHOLE)
    assert batches(desk)[:2] == [2, 1]


def test_a_held_request_waits_and_others_go_on() -> None:
    desk = sums()
    held, free = desk.add({"x": ROWS}), desk.add({"x": ROWS})
    held.held = True
    desk.run()
    assert free in desk.out.ends
    assert held not in desk.out.ends
    held.held = False
    desk.run()
    assert torch.equal(desk.got(held), WHOLE)


def test_sound_goes_out_as_16_bit_samples_and_depends_on_the_seed_alone() -> None:
    desk = Desk(f"{HERE}:Draw")
    tasks = [desk.add(seed=seed, encode=True) for seed in (7, 8, 7)]
    desk.run()
    one, other, again = (desk.got(task) for task in tasks)
    assert one.dtype == torch.int16
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    noise = torch.randn(100, generator=torch.Generator().manual_seed(7))
    assert torch.equal(one, (noise.clamp(-1, 1) * 32767).round().to(torch.int16))
    assert desk.out.metas[0] == {"media_type": "audio/pcm", "sample_rate": RATE}
    assert desk.out.usage[tasks[0]] == {"audio_samples": 100}


def test_sound_for_another_stage_stays_floats() -> None:
    desk = Desk(f"{HERE}:Draw")
    task = desk.add()
    desk.run()
    assert desk.got(task).dtype == torch.float32


def test_a_lost_device_ends_the_worker() -> None:
    desk = Desk(f"{HERE}:Lost")
    desk.add()
    desk.add()
    with pytest.raises(EngineBroken, match="device-side assert"):
        desk.run()


def test_an_undeclared_output_is_the_modules_fault() -> None:
    desk = Desk(f"{HERE}:Odd")
    task = desk.add()
    desk.run()
    assert isinstance(desk.error(task), StageFailed)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no.such.module:Thing", "cannot find the module"),
        (f"{HERE}:Sumz", "cannot find the module"),
        (f"{HERE}:Recorder", "no subclass"),
    ],
)
def test_what_is_no_module_is_refused_by_name(module: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Desk(module)
