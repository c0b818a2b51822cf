"""/live, /ready, /health, /v1/models; and what is answered while stages load."""

from __future__ import annotations

import os
import signal

import httpx

from omni_rt.config import parse_pipeline
from omni_rt.runtime.omni import AsyncOmni
from tests.server.serving import PIPELINE, served, site, until


async def test_a_ready_server_says_so_everywhere() -> None:
    async with site() as where:
        for path in ("/live", "/ready", "/health"):
            assert (await where.http.get(path)).status_code == 200
        health = (await where.http.get("/health")).json()
        model = (await where.http.get("/v1/models")).json()["data"][0]
        one = await where.http.get("/v1/models/world")
        none = await where.http.get("/v1/models/other")
    assert health["status"] == "ready"
    assert set(health["stages"]) == {"writer", "painter"}
    assert {"state", "pid", "device", "restarts"} <= set(health["stages"]["writer"])
    assert {edge["transport"] for edge in health["edges"].values()} == {"shm"}
    assert {edge["about"] for edge in health["edges"].values()} == {"shared memory"}
    assert model["id"] == "world"
    assert model["capabilities"]["output"] == ["image", "text"]
    assert one.status_code == 200
    assert none.status_code == 404


async def test_a_models_name_may_have_slashes() -> None:
    text = (PIPELINE % {"fact": "image"}).replace("name: world", "name: some/world")
    async with site(text=text) as where:
        one = await where.http.get("/v1/models/some/world")
        none = await where.http.get("/v1/models/some/other")
    assert one.json()["id"] == "some/world"
    assert none.json()["error"]["code"] == "model_not_found"


async def test_a_loading_server_answers_and_says_what_it_does() -> None:
    text = PIPELINE % {"fact": "image"}
    omni = AsyncOmni(parse_pipeline(text.replace("{step_s", "{load_s: 60, step_s"), "world.yaml"))
    await omni.start()
    try:
        async with served(omni) as url, httpx.AsyncClient(base_url=url) as http:
            await until(lambda: omni.status().stages["writer"].phase == "loading weights")
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            body = {"messages": [{"role": "user", "content": "x"}]}
            reply = await http.post("/v1/chat/completions", json=body)
    finally:
        await omni.close(0)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert "writer: loading weights" in reply.json()["error"]["message"]


async def test_a_dead_stage_shows_and_comes_back() -> None:
    async with site() as where:
        pid = (await where.http.get("/health")).json()["stages"]["painter"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: where.omni.status().stages["painter"].restarts == 1)
        broken = await where.http.get("/health")
        assert broken.status_code == 503
        assert broken.json()["stages"]["writer"]["state"] == "ready"
        await until(lambda: where.omni.status().state == "ready")
        assert (await where.http.get("/ready")).status_code == 200
