"""What is to be done after an event: the answer of the synchronous core to its async caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_rt.errors import OmniError
from omni_rt.request import Done, Progress
from omni_rt.runtime.supervisor import Worker
from omni_rt.wire.messages import Chunk, ToWorker


@dataclass(slots=True)
class Delivery:
    """Something for a request's client, in order. A block in `item` is leased to the client."""

    request: str
    output: str  # name of the output; "" for what is not of one
    item: Chunk | Progress | Done | OmniError


@dataclass(slots=True)
class Effects:
    """To be carried out in this order: spawn, send, deliver, kill, close."""

    spawn: list[Worker] = field(default_factory=list)
    send: dict[str, list[ToWorker]] = field(default_factory=dict)  # by identity
    deliver: list[Delivery] = field(default_factory=list)
    kill: list[Worker] = field(default_factory=list)
    close_arenas: list[int] = field(default_factory=list)
    status_changed: bool = False

    def to(self, identity: str) -> list[ToWorker]:
        return self.send.setdefault(identity, [])
