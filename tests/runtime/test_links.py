"""Which edges cross in device memory: handed over, tried, told, and taken back in order."""

from __future__ import annotations

import logging

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.graph import Graph
from omni_rt.request import Request
from omni_rt.runtime.core import Core
from omni_rt.runtime.effects import Effects
from omni_rt.runtime.flow import RunState
from omni_rt.runtime.spec import gpu_count, shared_size, worker_spec
from omni_rt.runtime.status import Status, status_of
from omni_rt.runtime.supervisor import Worker
from omni_rt.wire.messages import (
    Abort,
    Attach,
    AttachPool,
    Chunk,
    Detach,
    Finished,
    Free,
    Offered,
    OnDevice,
    Ports,
    PortSpec,
    Probed,
    ReaderGone,
    Ready,
    Released,
    Step,
    Submit,
)
from omni_rt.wire.tensors import DeviceBlock
from tests.runtime.real import collect, data_of, running

EDGE = "writer.hidden -> painter.embeds"
PIPELINE = """
stages:
  writer:  {engine: simulated, device: 'cuda:0', restart: {backoff_s: 1}}
  painter: {engine: simulated, device: 'cuda:1', restart: {backoff_s: 1}}
edges: [writer.hidden -> painter.embeds]
outputs: {image: painter.image}
"""
PORTS = {
    "writer": Ports((), (PortSpec("hidden", "tensor"),), (), 4),
    "painter": Ports((PortSpec("embeds", "tensor"),), (PortSpec("image", "tensor"),), (), 4),
}


class Bench:
    """A core and the messages of the workers that it does not have."""

    def __init__(self, text: str = PIPELINE) -> None:
        self.config = parse_pipeline(text, "device.yaml")
        self.graph = Graph.from_config(self.config)
        self.core = Core(self.config, self.graph)
        self.workers = {worker.name: worker for worker in self.core.supervisor.workers}
        for worker in self.workers.values():
            self.spawn(worker)

    def spawn(self, worker: Worker) -> None:
        self.core.spawned(worker, shared_size(self.config, worker), 0.0)

    def say(self, name: str, *messages: object) -> Effects:
        identity = self.workers[name].identity
        return self.core.on_messages(identity, messages, 0.0)  # type: ignore[arg-type]

    def load(
        self, name: str, device: str = "A", *reads: str, problem: str | None = None
    ) -> Effects:
        worker = self.workers[name]
        said: list[object] = [OnDevice(device, (device, *reads), problem)]
        if device and worker.pool:
            said += [Offered(n, self.offer(n)) for n in range(worker.readers)]
        self.say(name, *said)
        return self.say(name, Ready(name, PORTS[name], {}))

    def offer(self, reader: int) -> AttachPool:
        writer = self.workers["writer"]
        return AttachPool(
            writer.pool, 1 << 20, "A", b"handle", [b"w", b"%d" % reader], writer.arena
        )

    def submit(self) -> list[Submit]:
        effects = self.core.submit(Request(prompt="x"), f"r{len(self.core.flows)}", 1, 0.0)
        return [m for sent in effects.send.values() for m in sent if isinstance(m, Submit)]

    def sent(self, effects: Effects, name: str) -> list[object]:
        return list(effects.send.get(self.workers[name].identity, []))

    @property
    def status(self) -> Status:
        return status_of(self.core, self.config)

    def open(self) -> None:
        self.load("writer")
        self.load("painter")
        self.say("painter", Probed(self.workers["writer"].pool, None, 0.0004))


def test_a_pool_is_handed_over_and_tried_before_tensors_stay_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "omni_rt.runtime.links")
    bench = Bench()
    assert _all_sent(bench, bench.load("writer")) == []
    effects = bench.load("painter")
    writer = bench.workers["writer"]
    attach, pool = bench.sent(effects, "painter")
    assert attach == Attach(writer.arena, shared_size(bench.config, writer))
    assert pool == bench.offer(0)
    assert (bench.status.state, bench.status.edges[EDGE].transport) == ("loading", "shm")
    effects = bench.say("painter", Probed(writer.pool, None, 0.0004))
    assert effects.status_changed
    assert bench.status.state == "ready"
    edge = bench.status.edges[EDGE]
    assert (edge.transport, edge.about) == ("cuda", "device memory, probed in 0.4 ms")
    assert [emit.transport for emit in bench.submit()[0].emit] == ["cuda"]
    assert caplog.messages == [f"{EDGE}: device memory, probed in 0.4 ms"]


def _all_sent(bench: Bench, effects: Effects) -> list[object]:
    return [message for name in bench.workers for message in bench.sent(effects, name)]


def test_work_that_comes_before_the_probe_crosses_in_shared_memory() -> None:
    bench = Bench()
    bench.load("painter")
    bench.load("writer")
    assert [emit.transport for emit in bench.submit()[0].emit] == ["shm"]


@pytest.mark.parametrize(
    ("painter", "problem", "about"),
    [
        (("A",), "no IPC here", "shared memory (not device memory: no IPC here)"),
        (
            ("B", "A"),
            "bytes differ",
            "shared memory (not device memory of a peer: bytes differ)",
        ),
        (
            ("B",),
            None,
            "shared memory (the consumer's device cannot read the memory of the producer's)",
        ),
    ],
)
def test_what_cannot_be_read_crosses_in_shared_memory_and_says_why(
    painter: tuple[str, ...],
    problem: str | None,
    about: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "omni_rt.runtime.links")
    bench = Bench()
    bench.load("writer")
    bench.load("painter", *painter)
    if problem is not None:
        bench.say("painter", Probed(bench.workers["writer"].pool, problem, None))
    assert (bench.status.edges[EDGE].transport, bench.status.edges[EDGE].about) == ("shm", about)
    assert bench.status.state == "ready"
    assert [emit.transport for emit in bench.submit()[0].emit] == ["shm"]
    assert caplog.messages == [f"{EDGE}: {about}"]


def test_a_worker_without_a_driver_says_why() -> None:
    bench = Bench()
    bench.load("writer", "", problem="there is no driver")
    bench.load("painter")
    about = bench.status.edges[EDGE].about
    assert about == "shared memory (writer.0.1 has no device pool: there is no driver)"


def test_what_an_output_shows_stays_where_main_can_read_it() -> None:
    bench = Bench(
        PIPELINE.replace("{image: painter.image}", "{i: painter.image, h: writer.hidden}")
    )
    bench.open()
    assert [emit.transport for emit in bench.submit()[0].emit] == ["shm"]


def test_a_dead_reader_is_told_before_its_blocks_are_freed() -> None:
    bench = Bench()
    bench.open()
    writer, painter = bench.workers["writer"], bench.workers["painter"]
    key = _run_to_painter(bench)
    bench.core.cancel("r0", "", 0.0)
    effects = bench.core.on_exit(painter.identity, "killed", 0.0)
    assert bench.sent(effects, "writer") == [ReaderGone(0), Free([key])]
    assert bench.status.edges[EDGE].transport == "shm"
    assert [emit.transport for emit in bench.submit()[0].emit] == ["shm"]
    bench.spawn(painter)
    effects = bench.load("painter")
    assert not any(isinstance(m, AttachPool) for m in bench.sent(effects, "painter")), "not yet"
    effects = bench.say("writer", Offered(0, bench.offer(0)))
    assert [type(m) for m in bench.sent(effects, "painter")] == [Attach, AttachPool]
    bench.say("painter", Probed(writer.pool, None, 0.1))
    assert bench.status.edges[EDGE].transport == "cuda"


def test_a_reader_that_comes_again_works_when_it_has_the_pool() -> None:
    bench = Bench()
    bench.open()
    painter = bench.workers["painter"]
    _run_to_painter(bench)
    bench.core.on_exit(painter.identity, "killed", 0.0)
    bench.spawn(painter)
    effects = bench.load("painter")
    assert not any(isinstance(m, Submit) for m in bench.sent(effects, "painter"))
    effects = bench.say("writer", Offered(0, bench.offer(0)))
    assert not any(isinstance(m, Submit) for m in bench.sent(effects, "painter"))
    effects = bench.say("painter", Probed(bench.workers["writer"].pool, None, 0.1))
    (again,) = bench.sent(effects, "painter")
    assert isinstance(again, Submit)


def test_a_reader_that_comes_again_and_cannot_read_has_its_inputs_made_again() -> None:
    bench = Bench()
    bench.open()
    painter = bench.workers["painter"]
    key = _run_to_painter(bench)
    bench.core.on_exit(painter.identity, "killed", 0.0)
    bench.spawn(painter)
    bench.load("painter")
    bench.say("writer", Offered(0, bench.offer(0)))
    effects = bench.say("painter", Probed(bench.workers["writer"].pool, "no", None))
    free, again = bench.sent(effects, "writer")
    assert free == Free([key])
    assert isinstance(again, Submit)
    assert [emit.transport for emit in again.emit] == ["shm"]


def test_what_lay_in_a_dead_writers_pool_is_made_again() -> None:
    bench = Bench()
    bench.open()
    writer = bench.workers["writer"]
    old_pool = writer.pool
    key = _run_to_painter(bench)
    effects = bench.core.on_exit(writer.identity, "killed", 0.0)
    assert [type(message) for message in bench.sent(effects, "painter")] == [Abort, Detach]
    assert bench.core.flows["r0"].runs["writer"].state is RunState.QUEUED
    bench.spawn(writer)
    assert writer.pool != old_pool
    effects = bench.load("writer")
    assert [type(m) for m in bench.sent(effects, "painter")] == [Attach, AttachPool]
    (again,) = bench.sent(effects, "writer")
    assert isinstance(again, Submit)
    effects = bench.say("painter", Released([key]))
    assert bench.sent(effects, "painter") == [Detach(old_pool)]


def test_what_was_read_of_a_dead_writers_pool_is_not_made_again() -> None:
    bench = Bench()
    bench.open()
    key = _run_to_painter(bench)
    bench.say("painter", Released([key]))
    effects = bench.core.on_exit(bench.workers["writer"].identity, "killed", 0.0)
    assert {type(message) for message in bench.sent(effects, "painter")} == {Detach}
    assert bench.core.flows["r0"].runs["painter"].state is RunState.RUNNING


def test_only_workers_at_the_ends_of_such_edges_get_a_device() -> None:
    bench = Bench(PIPELINE.replace("device: 'cuda:1'", "device: cpu"))
    assert [(w.device, w.readers, w.pool) for w in bench.workers.values()] == [("", 0, 0)] * 2
    bench = Bench(PIPELINE.replace("'cuda:0'", "'cuda:0', pool: null"))
    assert [(w.device, w.readers, w.pool) for w in bench.workers.values()] == [("", 0, 0)] * 2
    bench = Bench()
    writer, painter = bench.workers.values()
    spec = worker_spec(bench.config, bench.graph, writer, 1, on_main_thread=True)
    assert (spec.device, spec.pool, spec.pool_readers) == ("cuda:0", writer.pool, 1)
    assert (spec.pool_bytes, spec.table) == (128 << 20, 256 << 20)
    assert spec.arena_bytes > spec.table
    spec = worker_spec(bench.config, bench.graph, painter, 1, on_main_thread=True)
    assert (spec.device, spec.pool, spec.table) == ("cuda:1", 0, 0)


async def test_without_a_usable_device_the_same_bytes_cross_in_shared_memory() -> None:
    text = """
stages:
  writer:  {engine: simulated, device: 'cuda:0', arena: 8MiB, simulated: {step_s: 0.005, steps: 2, ports: {hidden: {bytes: 100000}}}}
  painter: {engine: simulated, device: 'cuda:0', arena: 8MiB, simulated: {step_s: 0.005, steps: 2, inputs: [embeds], ports: {image: {bytes: 50000}}}}
edges: [writer.hidden -> painter.embeds]
outputs: {image: painter.image}
"""  # noqa: E501
    async with running(text) as omni:
        edge = omni.status().edges[EDGE]
        if not gpu_count():
            assert edge.transport == "shm"
            assert "has no device pool" in edge.about
        outputs = await collect(omni, Request(prompt="x"))
        assert len(data_of(outputs, "image")) == 50000


def _run_to_painter(bench: Bench) -> tuple[int, int, int]:
    """A request whose hidden block is on the writer's device, lent to the painter; its key."""
    (submit,) = bench.submit()
    block = DeviceBlock(bench.workers["writer"].pool, 0, 7, 0, "uint8", (9000,))
    chunk = Chunk(submit.request, submit.attempt, "hidden", 0, block, True)
    finished = Finished(submit.request, submit.attempt, "stop", {})
    effects = bench.say("writer", Step("writer", [chunk, finished], 0.1, 1))
    (given,) = bench.sent(effects, "painter")
    assert isinstance(given, Submit)
    assert given.tensors == {"embeds": [block]}
    return block.pool, block.offset, block.generation
