"""Life and death of real worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    StageFailed,
    StageUnavailable,
)
from omni_rt.request import Done, Request, Text
from omni_rt.runtime.omni import AsyncOmni, Omni
from tests.processes import shared_memory
from tests.runtime.real import (
    CHAIN,
    ECHO,
    children,
    collect,
    data_of,
    done_of,
    open_fds,
    running,
    text_of,
)


async def test_a_request_goes_in_and_its_words_come_out() -> None:
    async with running(ECHO) as omni:
        outputs = await collect(omni, Request(prompt="one two three"))
    assert text_of(outputs) == "one two three"
    assert [o.text for o in outputs if isinstance(o, Text)] == ["one", " two", " three"]
    assert done_of(outputs).usage == {"prompt_tokens": 3, "completion_tokens": 3}


async def test_the_loop_leaves_no_process_and_no_descriptor_behind() -> None:
    async with running(ECHO) as omni:  # what libraries open once stays open
        await collect(omni, Request(prompt="hello"))
    fds, before = open_fds(), children()
    async with running(CHAIN) as omni:
        await asyncio.gather(*(collect(omni, Request(prompt=f"p {k}")) for k in range(8)))
    assert children() == before
    assert open_fds() == fds


async def test_the_wanted_outputs_decide_how_far_a_request_goes() -> None:
    async with running(CHAIN) as omni:
        text = await collect(omni, Request(prompt="p", outputs=("text",)))
        both = await collect(omni, Request(prompt="p"))
    assert set(done_of(text).stage_s) == {"writer"}
    assert set(done_of(both).stage_s) == {"writer", "painter"}
    assert len(data_of(both, "image")) == 50000


@pytest.mark.parametrize("victim", ["writer", "painter"])
async def test_a_killed_worker_costs_no_request_that_can_be_done_again(victim: str) -> None:
    async with running(CHAIN) as omni:
        alone = await collect(omni, Request(prompt="p 3", outputs=("image",)))
        tasks = [
            asyncio.create_task(collect(omni, Request(prompt=f"p {k}", outputs=("image",))))
            for k in range(12)
        ]
        while not omni.status().stages[victim].running:
            await asyncio.sleep(0.005)
        pid = omni.status().stages[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks)
        assert data_of(results[3], "image") == data_of(alone, "image")
        assert omni.status().counters["retried"] > 0
        assert omni.status().stages[victim].restarts == 1
        assert await collect(omni, Request(prompt="after"))


async def test_what_has_reached_the_client_is_not_sent_twice() -> None:
    async with running(CHAIN.replace("steps: 8", "steps: 400")) as omni:
        stream = omni.submit(Request(prompt="p"))
        assert isinstance(await anext(stream), Text)
        pid = omni.status().stages["writer"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StageFailed) as caught:
            async for _ in stream:
                pass
    assert caught.value.stage == "writer"
    assert "SIGKILL" in str(caught.value)


async def test_a_stage_that_keeps_dying_is_down_and_says_so() -> None:
    async with running(CHAIN) as omni:
        for _ in range(3):
            await _until_ready(omni)
            pid = omni.status().stages["painter"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while omni.status().stages["painter"].pid == pid:
                await asyncio.sleep(0.01)
        assert omni.status().stages["painter"].state == "down"
        assert omni.status().state == "degraded"
        with pytest.raises(StageUnavailable, match="painter is down"):
            omni.submit(Request(prompt="p"))
        assert await collect(omni, Request(prompt="p", outputs=("text",)))


async def test_a_worker_that_stops_answering_is_replaced() -> None:
    async with running(CHAIN, "heartbeat_s: 0.2\nstall_s: 0.5\n") as omni:
        task = asyncio.create_task(collect(omni, Request(prompt="p", outputs=("image",))))
        pid = omni.status().stages["writer"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            assert await task
        assert omni.status().stages["writer"].restarts == 1


async def test_a_cancelled_request_ends_in_every_stage() -> None:
    slow = CHAIN.replace("steps: 8", "steps: 100000").replace("every: 1", "every: 100")
    async with running(slow, "heartbeat_s: 0.1\n") as omni:
        stream = omni.submit(Request(prompt="p"))
        while not omni.status().stages["writer"].running:
            await asyncio.sleep(0.005)
        assert stream.cancel()
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        assert not stream.cancel()
        await _until(lambda: _counted(omni, "writer", "aborted") == 1)
        assert _counted(omni, "writer", "tasks") == 0
        assert omni.status().live == 0


async def test_leaving_the_iterator_cancels_the_request() -> None:
    async with running(CHAIN.replace("steps: 8", "steps: 100000")) as omni:
        async for output in omni.submit(Request(prompt="p")):
            assert isinstance(output, Text)
            break
        await _until(lambda: omni.status().live == 0)
        assert omni.status().counters["cancelled"] == 1


async def test_a_deadline_ends_a_request_and_says_which() -> None:
    async with running(CHAIN.replace("steps: 8", "steps: 100000")) as omni:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            await collect(omni, Request(prompt="p", deadline_s=0.1))


async def test_a_full_queue_refuses_at_once() -> None:
    async with running(CHAIN.replace("queue: 32", "queue: 1")) as omni:
        # One waits, and the engine takes 8.
        accepted = [omni.submit(Request(prompt=f"p {k}")) for k in range(9)]
        with pytest.raises(Overloaded) as caught:
            omni.submit(Request(prompt="one too many"))
        assert caught.value.retry_after_s > 0
        for stream in accepted:
            await stream.aclose()


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request(), "prompt"),
        (Request(prompt="p", outputs=("video",)), "outputs"),
        (Request(prompt="p", params={"stepz": 3}), "stepz"),
        (Request(prompt="p", params={"steps": 0}), "steps"),
        (Request(prompt="p", params={"steps": "3"}), "steps"),
        (Request(prompt="p", params={"steps": True}), "steps"),
        (Request(prompt="p", params={"steps": float("nan")}), "steps"),
        (Request(prompt="p", stage_params={"singer": {}}), "stage_params.singer"),
        (Request(prompt="p", deadline_s=0), "deadline_s"),
        # What cannot be sent to a worker: found when it is sent, it would keep its place for good.
        (Request(prompt="p", params={"steps": 2**70}), "params"),
        (Request(prompt="p", params={"steps": 10**400}), "params"),
        (Request(prompt="p", stage_params={"writer": {"steps": object()}}), "stage_params"),
        (Request(prompt="p", seed=2**70), "seed"),
        (Request(prompt="p", priority=2**70), "priority"),
        (Request(prompt="\ud83d"), "prompt"),
    ],
)
async def test_a_wrong_request_is_refused_before_anything_is_queued(
    request_: Request, param: str
) -> None:
    async with running(CHAIN) as omni:
        with pytest.raises(BadRequest) as caught:
            omni.submit(request_)
        assert caught.value.param == param
        assert omni.status().counters["accepted"] == 0


async def test_a_stage_that_cannot_load_is_shown_at_once_with_its_own_error() -> None:
    config = parse_pipeline(
        CHAIN.replace("step_s: 0.01", "step_sec: 0.01").replace(
            "simulated: {step_s: 0.005", "simulated: {load_s: 30, step_s: 0.005"
        ),
        "test.yaml",
    )
    before = children()
    with pytest.raises(StageUnavailable, match="painter cannot load: .*step_sec"):
        async with asyncio.timeout(10), AsyncOmni(config):
            pass
    assert children() == before


@pytest.mark.parametrize(
    ("engine", "shown"),
    [
        pytest.param("refuse", False, id="on purpose"),
        pytest.param("stumble", True, id="by a fault"),
    ],
)
async def test_a_worker_logs_where_a_fault_came_from_but_not_a_refusal(
    engine: str,
    shown: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    stage = f"a: {{engine: 'tests.runtime.engines:{engine}'}}"
    config = parse_pipeline(f"stages: {{{stage}}}\noutputs: {{text: a.text}}\n", "test.yaml")
    caplog.set_level(logging.INFO)
    with pytest.raises(StageUnavailable, match="cannot load: .*cannot be made"):
        async with asyncio.timeout(20), AsyncOmni(config):
            pass
    assert "cannot be made" in caplog.text
    assert ("Traceback" in caplog.text) is shown


async def test_closing_lets_running_requests_finish() -> None:
    async with running(CHAIN) as omni:
        task = asyncio.create_task(collect(omni, Request(prompt="p")))
        await asyncio.sleep(0)
        await omni.close(10)
        assert isinstance((await task)[-1], Done)


async def test_closing_cancels_what_does_not_finish_in_time() -> None:
    async with running(CHAIN.replace("steps: 8", "steps: 100000")) as omni:
        stream = omni.submit(Request(prompt="p"))
        closing = asyncio.create_task(omni.close(0.1))
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await closing
        with pytest.raises(OmniError):
            omni.submit(Request(prompt="p"))


def test_omni_serves_programs_without_a_loop() -> None:
    config = parse_pipeline(ECHO, "test.yaml")
    with Omni(config) as omni:
        first, second = omni.generate([Request(prompt="a b"), Request(prompt="c")])
        assert (text_of(first), text_of(second)) == ("a b", "c")
        assert text_of(omni.generate(Request(prompt="again"))[0]) == "again"


_MAIN = """
    import asyncio, sys
    from omni_rt.config import parse_pipeline
    from omni_rt.request import Request
    from omni_rt.runtime.omni import AsyncOmni

    async def main():
        async with AsyncOmni(parse_pipeline(sys.argv[1], "test.yaml")) as omni:
            streams = [omni.submit(Request(prompt=f"p {k}")) for k in range(8)]
            print(*(stage.pid for stage in omni.status().stages.values()), flush=True)
            async for _ in streams[0]:
                pass

    asyncio.run(main())
"""


def test_nothing_outlives_a_killed_main() -> None:
    shm = shared_memory()
    folder = tempfile.mkdtemp()  # pytest's own have too long a path for a socket
    main = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_MAIN), CHAIN.replace("steps: 8", "steps: 100000")],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": folder},
    )
    assert main.stdout is not None
    pids = [int(pid) for pid in main.stdout.readline().split()]
    assert len(pids) == 2
    ends = [os.pidfd_open(pid) for pid in pids]
    main.kill()
    main.wait()
    main.stdout.close()
    for end in ends:
        assert _readable_within(end, 2.0), "a worker lived on"
        os.close(end)
    assert shared_memory() == shm
    assert os.listdir(folder) == []
    os.rmdir(folder)


def _readable_within(fd: int, seconds: float) -> bool:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _counted(omni: AsyncOmni, stage: str, name: str) -> int:
    return sum(
        counters.get(name, 0)
        for identity, counters in omni.worker_counters().items()
        if identity.startswith(stage)
    )


async def _until_ready(omni: AsyncOmni) -> None:
    await _until(lambda: omni.status().stages["painter"].state == "ready")


async def _until(condition: object, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)
