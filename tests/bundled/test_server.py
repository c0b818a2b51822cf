"""The bundled model behind `omni-rt serve`: right, undisturbed by neighbours, and hard to kill."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

import plain
import speech
import world
from evaluate import examine, held_out_dialogues, http_asker
from tests.bundled.client import answer, chat, get
from tests.processes import all_end, serving, shared_memory, short_folder, workers_of

pytestmark = pytest.mark.model

ASKED = "draw a red circle above a blue square"
MAX_PIXEL_DIFFERENCE = 2  # of 255
TIME_TO_END_S = 10.0

Server = tuple[subprocess.Popen[str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = short_folder()
    with serving(None, folder) as running:
        yield running
    folder.rmdir()


@pytest.fixture(scope="module")
def reference() -> plain.Model:
    return plain.load()


def difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel of any pixel."""
    first, second = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (one, other))
    assert first.shape == second.shape
    return int(np.abs(first - second).max())


def test_a_reply_and_its_picture_are_those_of_the_plain_scripts(
    server: Server, reference: plain.Model
) -> None:
    requests = [ASKED, "Please paint an orange triangle!", "show me a green square on black", "hi"]
    for seed, request in enumerate(requests):
        text, picture = answer(server[1], request, seed=seed)
        expected, _, hidden = reference.reply(request)
        assert text == expected
        assert (picture is None) == (len(hidden) == 0)
        if picture is not None:
            assert difference(picture, reference.paint(hidden, seed)) <= MAX_PIXEL_DIFFERENCE


def test_neighbours_change_nothing(server: Server) -> None:
    """Each of 12 different requests at once gets what it gets alone."""
    scenes = world.all_scenes()[::97][:12]
    requests = [f"draw {scene}" for scene in scenes]

    def ask(number: int) -> tuple[str, Image.Image | None]:
        return answer(server[1], requests[number], seed=number)

    alone = [ask(number) for number in range(len(requests))]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(ask, range(len(requests))))
    for (text, picture), (text_alone, picture_alone) in zip(together, alone, strict=True):
        assert text == text_alone
        assert picture is not None
        assert picture_alone is not None
        assert difference(picture, picture_alone) <= MAX_PIXEL_DIFFERENCE
    assert difference(alone[0][1], alone[1][1]) > 50  # type: ignore[arg-type]


def test_held_out_requests_are_painted_right(server: Server) -> None:
    """A sample of what `make demo-eval` does with more."""
    summary = examine(held_out_dialogues(40, seed=1), http_asker(server[1]), workers=8)
    assert summary["accuracy"] >= 0.9


def test_what_it_cannot_paint_it_says_without_a_picture(server: Server) -> None:
    text, picture = answer(server[1], "draw a cat")
    assert picture is None
    assert "circle" in text
    assert speech.IMAGE not in text


def test_a_size_that_the_model_cannot_make_is_refused_with_its_limit(server: Server) -> None:
    status, body = chat(server[1], ASKED, size="1024x1024")
    assert status == 400
    assert "at most 512" in body["error"]["message"]
    _, picture = answer(server[1], ASKED, size="512x256", num_inference_steps=1)
    assert picture is not None
    assert picture.size == (512, 256)


@pytest.mark.parametrize(
    ("more", "param", "told"),
    [
        ({"size": "100000x100000"}, "size", "at most 512, got 100000"),
        ({"num_inference_steps": 0}, "num_inference_steps", "at least 1 and at most 1000, got 0"),
        ({"num_inference_steps": 10**9}, "num_inference_steps", "at most 1000"),
        ({"guidance_scale": -1}, "guidance_scale", "at least 0, got -1"),
        ({"scheduler": "Sorcery"}, "scheduler", "valid: FlowMatchEulerDiscreteScheduler"),
        ({"extra_body": {"steps": 4}}, "extra_body.steps", "steps"),
        ({"n": 17}, "n", "16"),
    ],
)
def test_what_cannot_be_painted_is_refused_by_name(
    server: Server, more: dict[str, Any], param: str, told: str
) -> None:
    status, body = chat(server[1], ASKED, **more)
    assert status == 400
    assert body["error"]["param"] == param
    assert told in body["error"]["message"]


@pytest.mark.parametrize("victim", ["writer", "painter"])
def test_a_killed_worker_under_load_leaves_no_request_hanging(server: Server, victim: str) -> None:
    _, url = server
    pid = get(url, "/health")[1]["stages"][victim]["pid"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(chat, url, f"draw {s}", 60.0) for s in world.all_scenes()[:48]]
        concurrent.futures.wait(jobs[:2], return_when=concurrent.futures.FIRST_COMPLETED)
        os.kill(pid, signal.SIGKILL)
        done, pending = concurrent.futures.wait(jobs, timeout=TIME_TO_END_S)
    assert not pending
    for job in done:
        status, body = job.result()
        assert status == 200 or body["error"]["code"] in ("stage_unavailable", "stage_failed")
    _until_ready(url)
    assert get(url, "/health")[1]["stages"][victim]["restarts"] == 1
    assert answer(url, ASKED)[1] is not None


def test_a_client_that_goes_away_stops_its_request_everywhere(server: Server) -> None:
    _, url = server
    with pytest.raises(TimeoutError):
        chat(url, ASKED, 0.05, num_inference_steps=1000)
    limit = time.monotonic() + TIME_TO_END_S
    while get(url, "/health")[1]["running"]:
        assert time.monotonic() < limit, "it runs on"
        time.sleep(0.05)


def test_a_signal_under_load_ends_all_in_time() -> None:
    """Here its own server: stopped by SIGTERM while it paints for longer than it is given."""
    folder = short_folder()
    shm = shared_memory()
    with serving(None, folder) as (process, url):
        workers = workers_of(process.pid)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(chat, url, ASKED, 60.0, num_inference_steps=1000) for _ in range(8)]
            while not get(url, "/health")[1]["running"]:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            results = [job.result() for job in jobs]
        assert {status for status, _ in results} <= {200, 499}
        assert process.wait(20) == 0
        assert all_end(workers, 2)
    assert os.listdir(folder) == []
    folder.rmdir()
    assert shared_memory() == shm


def test_a_killed_server_leaves_nothing() -> None:
    folder = short_folder()
    shm = shared_memory()
    with serving(None, folder) as (process, url):
        workers = workers_of(process.pid)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(chat, url, ASKED, 60.0, num_inference_steps=1000)
            while not get(url, "/health")[1]["running"]:
                time.sleep(0.05)
            process.kill()
        assert len(workers) == 2
        assert all_end(workers, 2)
    assert os.listdir(folder) == []
    folder.rmdir()
    assert shared_memory() == shm


def _until_ready(url: str, limit_s: float = 90.0) -> None:
    limit = time.monotonic() + limit_s
    while get(url, "/ready")[0] != 200:
        assert time.monotonic() < limit, "the stage does not come back"
        time.sleep(0.2)
