"""Between workers on devices: whose pool can be read by whom, found out by trying.

A link leads from a worker with a device pool to one that reads it. As soon as both have loaded,
the reader is handed the pool and reads noise from it. Until it has said that every byte arrived,
and if it did not, tensors cross in shared memory. A reader that starts again is handed the pool
again, and gets no work before that is settled: blocks that wait for it may lie there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from msgspec.structs import replace

from omni_rt.config import PipelineConfig
from omni_rt.graph import Edge, Graph, Plan
from omni_rt.runtime.arenas import Arenas
from omni_rt.runtime.effects import Effects
from omni_rt.runtime.route import End, Facts, RouteChoice
from omni_rt.runtime.spec import device_of, pool_size
from omni_rt.runtime.supervisor import Worker, WorkerState
from omni_rt.wire.messages import AttachPool, Emit, Offered, OnDevice, Probed, ReaderGone, Transport

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Link:
    """From one worker slot to another, over the lives of both processes."""

    producer: Worker
    consumer: Worker
    reader: int  # the consumer's number among the readers of the producer's pool
    edges: list[str] = field(default_factory=list)
    choice: RouteChoice | None = None  # for both processes, once they have said where they are
    told: str = ""  # the last outcome that was logged
    offer: AttachPool | None = None  # of the present producer, for a reader that is to come
    asked: bool = False  # the present reader was handed the pool of the present producer
    open: bool = False  # and every byte arrived
    was_open: bool = False  # blocks of the present producer may be under way to its readers

    @property
    def settling(self) -> bool:
        """Both ends are there, and whether the pool can be read will be known soon."""
        both = self.producer.state is WorkerState.READY is self.consumer.state
        return both and not self.open and self.choice is not None and self.choice.on_device

    @property
    def usable(self) -> bool:
        """It is open, or whoever comes to its end will first be handed the pool."""
        if self.open or self.choice is None:
            return self.open
        return self.consumer.state is not WorkerState.READY and self.choice.on_device


class Links:
    """All links of a pipeline. Says which workers get a device, and how many readers a pool has."""

    def __init__(
        self, config: PipelineConfig, graph: Graph, workers: list[Worker], arenas: Arenas
    ) -> None:
        self._arenas = arenas
        self._workers = workers
        self._there: dict[str, OnDevice] = {}  # by identity
        self._held: set[int] = set()  # slots that have loaded and are not given work yet
        self._broken: list[Link] = []
        self._changed = False
        self._links: dict[tuple[int, int], Link] = {}  # by the slots of both ends
        for edge in graph.edges:
            for producer in workers:
                if edge.source in producer.stages and pool_size(config, producer):
                    self._connect(config, edge, producer)

    def __repr__(self) -> str:
        return f"<Links {[str(link.choice) for link in self._links.values()]}>"

    @property
    def settling(self) -> bool:
        return any(link.settling for link in self._links.values())

    # ---- events

    def started(self, worker: Worker) -> None:
        """The worker's stages have loaded: see `to_open`."""
        self._held.add(worker.slot)
        self._changed = True

    def on_device(self, worker: Worker, message: OnDevice) -> None:
        self._there[worker.identity] = message
        for link in self._links.values():
            if worker in (link.producer, link.consumer):
                self._choose(link)

    def offered(self, worker: Worker, message: Offered) -> None:
        for link in self._links.values():
            if link.producer is worker and link.reader == message.reader:
                link.offer = message.attach
                self._changed = True

    def probed(self, worker: Worker, message: Probed) -> None:
        for link in self._links.values():
            asked = link.consumer is worker and link.producer.pool == message.pool and link.asked
            if not asked or link.choice is None:
                continue
            link.choice.tried(message.problem, message.took_s)
            self._changed = True
            if message.problem is None:
                link.open = link.was_open = True
                self._tell(link)
            else:
                self._shut(link)

    def ended(self, fx: Effects, worker: Worker) -> None:
        """The worker's process is gone. To be told before what it held is freed."""
        for link in self._links.values():
            if link.consumer is worker and link.asked:
                fx.to(link.producer.identity).append(ReaderGone(link.reader))
                link.asked = link.open = False
            if link.producer is worker:
                link.offer = None
                link.asked = link.open = link.was_open = False
        self._there.pop(worker.identity, None)
        self._held.discard(worker.slot)
        self._changed = True

    # ---- what follows

    def take_broken(self) -> list[Link]:
        """Links that have failed while blocks for their readers may be under way."""
        broken, self._broken = self._broken, []
        return broken

    def to_open(self, fx: Effects) -> list[Worker]:
        """Hand pools to readers that are there. The loaded workers that may be given work now."""
        if not self._changed:
            return []
        self._changed = False
        settling = [link for link in self._links.values() if link.settling]
        for link in settling:
            self._hand(fx, link)
        free = self._held - {link.consumer.slot for link in settling}
        self._held -= free
        return [worker for worker in self._workers if worker.slot in free]

    def carry(
        self, plan: Plan, stage: str, identity: str, emits: tuple[Emit, ...]
    ) -> tuple[Emit, ...]:
        """What the worker of that identity is told of its output ports: those that only lead to
        stages which can read its pool go there."""
        if not any(
            link.open for link in self._links.values() if link.producer.identity == identity
        ):
            return emits
        shown = {port for source, port in plan.outputs.values() if source == stage}
        edges = [edge for edge in plan.edges if edge.source == stage]
        return tuple(
            replace(emit, transport="cuda")
            if emit.transport == "shm"
            and emit.port not in shown
            and self._reach(identity, [edge for edge in edges if edge.source_port == emit.port])
            else emit
            for emit in emits
        )

    def transport(self, edge: Edge) -> tuple[Transport, str]:
        """How the edge's large tensors cross where its ends are in different processes, and why."""
        links = [link for link in self._links.values() if str(edge) in link.edges]
        shut = [link for link in links if not link.open]
        if links and not shut:
            return "cuda", str(links[0].choice and links[0].choice.text)
        why = next((link.choice.text for link in shut if link.choice), "shared memory")
        return "shm", why

    # ---- inside

    def _reach(self, identity: str, edges: list[Edge]) -> bool:
        """Whether all that the edges lead to can read the pool of the worker of that identity."""
        found = False
        for edge in edges:
            for consumer in self._workers:
                if edge.target not in consumer.stages or consumer.identity == identity:
                    continue  # in the worker itself the pool can be read
                link = self._find(identity, consumer)
                if link is None or not link.usable or str(edge) not in link.edges:
                    return False
                found = found or link.open
        return found

    def _connect(self, config: PipelineConfig, edge: Edge, producer: Worker) -> None:
        here = device_of(config, edge.source, producer.replica)
        for consumer in self._workers:
            if edge.target not in consumer.stages or consumer is producer:
                continue
            there = device_of(config, edge.target, consumer.replica)
            ends = ((producer, here), (consumer, there))
            if any(name == "cpu" or worker.device not in ("", name) for worker, name in ends):
                continue  # a worker's pool and what it opens are on one device
            producer.device, consumer.device = here, there
            key = producer.slot, consumer.slot
            if key not in self._links:
                self._links[key] = Link(producer, consumer, producer.readers)
                producer.readers += 1
            self._links[key].edges.append(str(edge))

    def _find(self, identity: str, consumer: Worker) -> Link | None:
        for link in self._links.values():
            if link.consumer is consumer and link.producer.identity == identity:
                return link
        return None

    def _choose(self, link: Link) -> None:
        here = self._there.get(link.producer.identity)
        there = self._there.get(link.consumer.identity)
        if here is None or there is None:
            return
        facts = Facts(
            End(link.producer.identity, here.device, here.problem),
            End(link.consumer.identity, there.device, there.problem),
            can_peer=here.device in there.reads,
        )
        link.choice = RouteChoice(", ".join(link.edges), facts)
        if link.choice.chosen:
            self._shut(link)

    def _shut(self, link: Link) -> None:
        """Tensors cross in shared memory, as long as both ends live."""
        link.open = False
        self._tell(link)
        if any(k.was_open for k in self._links.values() if k.producer is link.producer):
            self._broken.append(link)

    def _tell(self, link: Link) -> None:
        """Once, and again if it changes with a process that was started again."""
        assert link.choice is not None
        if link.told != link.choice.outcome:
            link.told = link.choice.outcome
            log.info("%s", link.choice)

    def _hand(self, fx: Effects, link: Link) -> None:
        if link.offer is None or link.asked:
            return
        self._arenas.attach(fx, link.consumer, link.producer.arena)
        link.consumer.attached.add(link.offer.pool)
        fx.to(link.consumer.identity).append(link.offer)
        link.asked, link.offer = True, None
