"""The engine that only takes time: declared step times, sizes and ports, on real or virtual time.

Plan a pipeline for eight GPUs on a laptop, or test the runtime. What it gives is a function of what
it got, so that a wrong, lost or doubled hand-off shows in the result: see `digest`.

Options (`simulated:`): `step_s` seconds of one step of the whole batch (default 0.01); `more_s`
what each further request adds to it (0); `first_s` what a request's first step adds (0), as a
prompt does; `steps` of one request (default 10); `repeat` (1), below; `busy` true = burn a core
instead of sleeping; `inputs` names of input ports; `facts` reported by every request; `load_s`
seconds to load; `ports` {name: {"bytes": size of one chunk (default 32), "every": steps between
chunks; 0 = one chunk at the end (default), "kind": tensor (default), text, image or audio}}.
A port of kind audio gives 16-bit PCM at `sample_rate` (24000): a ramp of the sample's number, so
that a gap shows.
A request whose inputs stream makes one step for each chunk of its first streamed port, and when
that has ended, further ones until they are `repeat` times as many as there were chunks: so a talker
goes on speaking when the text is over.
"""

from __future__ import annotations

import hashlib
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from omni_rt.errors import ConfigError
from omni_rt.wire.messages import ParamSpec, Ports, PortSpec, StageSpec
from omni_rt_workers.engine import Engine, Outbox, Say, Task
from omni_rt_workers.engines.echo import prompt_of


class PortOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int = 32
    every: int = 0
    kind: Literal["tensor", "text", "image", "audio"] = "tensor"
    sample_rate: int = 24_000


class SimulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step_s: float = 0.01
    more_s: float = 0.0
    first_s: float = 0.0
    steps: int = 10
    repeat: int = 1
    busy: bool = False
    inputs: tuple[str, ...] = ()
    ports: dict[str, PortOptions] = {}
    facts: tuple[str, ...] = ()
    load_s: float = 0.0


@dataclass(slots=True)
class _Work:
    steps: int  # to do in all; -1: as many as chunks arrive on `stream`
    stream: str | None
    done: int = 0
    chunk: bytes = b""  # digest of the streamed chunk that this step takes
    all_chunks: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    sent: dict[str, int] = field(default_factory=dict)


class SimulatedEngine:
    def __init__(self, spec: StageSpec, out: Outbox, work: Callable[[float], None]) -> None:
        try:
            self._options = msgspec.convert(spec.options.get("simulated", {}), SimulatedOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"stages.{spec.name}.simulated: {error}") from error
        self._spec = spec
        self._out = out
        self._work = work
        self._running: dict[Task, _Work] = {}
        self._waiting: dict[Task, _Work] = {}

    def load(self, say: Say) -> Ports:
        say("loading weights", 0.5)
        self._work(self._options.load_s)
        outputs = [PortSpec(name, _kind(name, port)) for name, port in self._options.ports.items()]
        return Ports(
            inputs=tuple(PortSpec(name, "tensor") for name in self._options.inputs),
            outputs=tuple(outputs),
            params=self._params(),
            slots=self._spec.max_batch * 2,
        )

    def _params(self) -> tuple[ParamSpec, ...]:
        steps = ParamSpec("steps", "int", 1, 10000, about="steps of this request")
        speaks = any(port.kind == "audio" for port in self._options.ports.values())
        return (steps, ParamSpec("voice", "str", about="changes nothing")) if speaks else (steps,)

    def add(self, task: Task) -> None:
        stream = next((p for p in task.inputs.ports() if not task.inputs.ended(p)), None)
        steps = -1 if stream else int(task.params.get("steps", self._options.steps))
        self._waiting[task] = _Work(steps, stream)
        self._admit()

    def feed(self, task: Task, port: str) -> None:
        return None  # `step` looks at what has arrived

    def abort(self, task: Task) -> None:
        self._running.pop(task, None)
        self._waiting.pop(task, None)
        self._admit()

    def _admit(self) -> None:
        for task in sorted(self._waiting, key=lambda task: -task.priority):
            if len(self._running) >= self._spec.max_batch:
                return
            self._running[task] = self._waiting.pop(task)

    def step(self) -> None:
        batch = [(task, work) for task, work in self._running.items() if self._movable(task, work)]
        self._work(self._seconds(batch))
        for task, work in batch:
            self._advance(task, work)
        self._admit()

    def _seconds(self, batch: list[tuple[Task, _Work]]) -> float:
        moving = [work for task, work in batch if not self._ended(task, work)]
        new = sum(not work.done for work in moving)
        more = max(0, len(moving) - 1)
        options = self._options
        return options.step_s + more * options.more_s + new * options.first_s

    def _advance(self, task: Task, work: _Work) -> None:
        if not self._ended(task, work):
            self._take_chunk(task, work)
            work.done += 1
            self._give(task, work, at_end=False)
        if self._ended(task, work):
            self._give(task, work, at_end=True)
            del self._running[task]
            usage = {"steps": work.done}
            self._out.finish(task, "stop", usage, self._options.facts)

    def _give(self, task: Task, work: _Work, *, at_end: bool) -> None:
        for port, options in self._options.ports.items():
            due = at_end if not options.every else not at_end and work.done % options.every == 0
            if due and port in task.emit:
                number = work.sent.get(port, 0)
                work.sent[port] = number + 1
                seen = self._seen(task, work, at_end=at_end)
                mark = digest(self._spec.name, port, number, prompt_of(task), seen)
                if _kind(port, options) == "text":
                    self._out.text(task, mark.hex(), (number,))
                elif options.kind == "audio":
                    meta = {"media_type": "audio/pcm", "sample_rate": options.sample_rate}
                    self._out.put_bytes(task, port, ramp(number, options.bytes // 2), meta=meta)
                elif task.emit[port].encode:
                    seed = int(task.values.get("seed", 0))
                    meta = {"media_type": "image/png", "width": 8, "height": 8, "seed": seed}
                    self._out.put_bytes(task, port, _png(mark[:3], 8), last=at_end, meta=meta)
                else:
                    data = mark * -(-options.bytes // len(mark))
                    self._out.put_bytes(task, port, data[: options.bytes])

    def _take_chunk(self, task: Task, work: _Work) -> None:
        """Consume the next streamed chunk: note it and give its lease back, as a vocoder would."""
        if work.stream and work.done < self._arrived(task, work.stream):
            view = task.inputs.views(work.stream)[0]
            work.chunk = _hash([view])
            work.all_chunks.update(view)
            task.inputs.release(work.stream, work.done + 1)

    def _seen(self, task: Task, work: _Work, *, at_end: bool) -> list[bytes]:
        """Digests of the inputs: whole ones whole, of a streamed one this step's chunk or all."""
        inputs = task.inputs
        if work.stream:
            return [work.all_chunks.digest() if at_end else work.chunk]
        return [_hash(inputs.views(port)) for port in sorted(inputs.ports())]

    def _ended(self, task: Task, work: _Work) -> bool:
        if work.stream:
            steps = self._arrived(task, work.stream) * self._options.repeat
            return task.inputs.ended(work.stream) and work.done >= steps
        return work.done >= work.steps

    def _movable(self, task: Task, work: _Work) -> bool:
        if task.held:
            return False
        if not work.stream:
            return True
        return work.done < self._arrived(task, work.stream) or task.inputs.ended(work.stream)

    def _arrived(self, task: Task, port: str) -> int:
        return task.inputs.count(port)

    @property
    def idle(self) -> bool:
        return not any(self._movable(task, work) for task, work in self._running.items())

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()


def _kind(name: str, options: PortOptions) -> Literal["tensor", "text", "image", "audio"]:
    return "text" if name == "text" else options.kind


def _png(color: bytes, side: int) -> bytes:
    """A square PNG of one RGB color (PNG specification, third edition, sections 5 and 11)."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + color * side) * side
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


_RAMP = array("h", range(-32768, 32768)).tobytes() * 2


def ramp(number: int, samples: int) -> bytes:
    """Chunk `number` of a sound: `samples` (at most 65536) values that count up, 16 bits each."""
    start = number * samples % 65536
    return _RAMP[2 * start : 2 * (start + samples)]


def digest(stage: str, port: str, number: int, prompt: str, seen: Iterable[bytes]) -> bytes:
    """The 16 bytes that chunk `number` of a port repeats: a function of all that went in."""
    return _hash([f"{stage}.{port}.{number}.{prompt}".encode(), *seen])


def _hash(parts: Iterable[bytes | memoryview]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def make(spec: StageSpec, out: Outbox) -> Engine:
    options: dict[str, Any] = spec.options.get("simulated", {})
    return SimulatedEngine(spec, out, _busy if options.get("busy") else time.sleep)
