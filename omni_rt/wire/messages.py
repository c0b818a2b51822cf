"""The messages between main and its workers: one tagged union for each direction.

A frame on the wire is one msgpack array of messages, so that all that a step or a turn of the loop
has to say leaves in one frame. Messages about a request carry its id and an attempt number; what
belongs to an attempt that is over is counted and dropped by the receiver.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from omni_rt.request import CallPiece, TokenLogprob
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local

# Raised with every change of a message. A worker of another version is stopped at once.
PROTOCOL_VERSION = 3

Payload = Inline | Block | DeviceBlock | Local
Transport = Literal["local", "shm", "cuda"]


class TextPiece(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """A piece of text with its tokens, as data of a `Chunk`."""

    text: str
    tokens: tuple[int, ...] = ()
    index: int = 0  # which of a request's `n` replies
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, if asked for
    calls: tuple[CallPiece, ...] = ()
    finish_reason: str | None = None  # on a reply's last piece, if there is something to tell


class Emit(msgspec.Struct, frozen=True, array_like=True):
    """One output port that somebody wants of a request, and how."""

    port: str
    transport: Transport  # for what is larger than the inline limit
    encode: bool  # True: as the client's file (PNG, ...); False: as a tensor
    stream: bool  # True: chunks as they come; False: one chunk at the end


# ---- main -> worker ---------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Start a request in a stage. What is in `tensors` is leased to the worker until released."""

    stage: str
    request: str
    attempt: int
    # "prompt": str, "seed": int, "messages": [{"role", "content"}]; a content is text or, if there
    # is something among it that the stage `takes`, [{"type", "text" or "data", "media_type"}].
    values: dict[str, Any]
    tensors: dict[str, list[Payload | TextPiece]]  # by input port, whole; in order
    streams: tuple[str, ...]  # input ports of which `Feed`s will follow
    params: dict[str, Any]  # checked against the stage's `ParamSpec`s by main
    emit: tuple[Emit, ...]
    priority: int  # higher first
    deadline: float | None = None  # on the machine's monotonic clock; main keeps it as well


class Feed(msgspec.Struct, frozen=True, tag="feed", array_like=True):
    """The next chunk, or the end, of a streamed input."""

    stage: str
    request: str
    attempt: int
    port: str
    seq: int  # 0, 1, 2, ... per port and attempt
    data: Payload | TextPiece | None  # None only with last=True
    last: bool


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Forget the request at the next step boundary; what it was lent comes back as released."""

    stage: str
    request: str
    attempt: int


class Free(msgspec.Struct, frozen=True, tag="free", array_like=True):
    """Blocks of the worker's own arena, pool or table that nobody holds any more."""

    blocks: list[tuple[int, int, int]]  # (arena or pool id, offset, generation)


class Attach(msgspec.Struct, frozen=True, tag="attach", array_like=True):
    """Another arena to read from; its descriptor is the next one on the lifeline socket."""

    arena: int
    size_bytes: int


class Detach(msgspec.Struct, frozen=True, tag="detach", array_like=True):
    """No ref into this arena or pool will come any more."""

    arena: int


class AttachPool(msgspec.Struct, frozen=True, tag="attach_pool", array_like=True):
    """A device pool to read from, opened once; its writer's arena was attached before.

    The block `probe` is read and compared at once (cuda/probe.py): answer with `Probed`.
    """

    pool: int
    size_bytes: int
    device: str  # UUID of the exporter's device
    handle: bytes  # IPC handle of the one allocation
    events: list[bytes]  # IPC handles of the slots' events: written, then this reader's
    arena: int = 0  # the writer's arena, and where in it is which generation lies in each slot
    table: int = 0
    probe: DeviceBlock | None = None  # noise; it is never freed


class ReaderGone(msgspec.Struct, frozen=True, tag="reader_gone", array_like=True):
    """The process that read this worker's pool as that number has ended: answer with `Offered`.
    Comes before the `Free` of what it held."""

    reader: int


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Answer with `Pong`."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """Close the engines and exit with status 0."""


ToWorker = Submit | Feed | Abort | Free | Attach | Detach | AttachPool | ReaderGone | Ping | Stop


# ---- worker -> main ---------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """First message of a worker."""

    version: int
    pid: int


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """What a stage is doing before it is ready. Counts as progress for the start-up watchdog."""

    stage: str
    phase: str  # "importing vllm", "loading weights", "warming up", ...
    fraction: float  # 0..1 of the whole load


class PortSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: Literal["text", "tokens", "tensor", "image", "audio", "video"]


class ParamSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request parameter that a stage accepts, with its limits."""

    name: str
    kind: Literal["int", "float", "str", "bool", "list", "dict"]
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None  # for sizes that a model can make
    choices: tuple[str, ...] = ()
    about: str = ""


class ParamProduct(msgspec.Struct, frozen=True, array_like=True):
    """A limit of several parameters multiplied, such as the pixels of a picture."""

    names: tuple[str, ...]
    defaults: tuple[float, ...]  # of those that a request leaves out; 0: not known, no check
    maximum: float
    about: str = ""


class Ports(msgspec.Struct, frozen=True, array_like=True):
    """What a loaded engine takes and gives. Returned by `Engine.load`."""

    inputs: tuple[PortSpec, ...]  # tensors it can be handed; prompt and messages need no port
    outputs: tuple[PortSpec, ...]
    params: tuple[ParamSpec, ...]
    slots: int  # requests that the engine works on at once
    notes: tuple[str, ...] = ()  # said to the user once: versions, fall-backs, chosen backends
    takes: tuple[str, ...] = ()  # of "image", "audio", "video": what messages may have beside text
    products: tuple[ParamProduct, ...] = ()  # limits of parameters taken together


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    stage: str
    ports: Ports
    memory: dict[str, int]  # bytes by purpose: "weights", "kv_cache", ...


class Chunk(msgspec.Struct, frozen=True, tag="c", array_like=True):
    """A piece of output of one request. A `Block` in it is lent to main, which books the leases."""

    request: str
    attempt: int
    port: str
    seq: int  # 0, 1, 2, ... per port and attempt
    data: Payload | TextPiece
    last: bool  # the port's last chunk
    meta: dict[str, Any] | None = None  # media: media_type, width, height, seed, ...


class Finished(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """The stage is done with the request; all its chunks came before."""

    request: str
    attempt: int
    reason: str  # "stop" | "length"
    usage: dict[str, int]
    facts: tuple[str, ...] = ()  # what edges with `when:` ask for


class Failed(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """The stage gave the request up; the stage itself goes on."""

    request: str
    attempt: int
    kind: str  # `OmniError.kind`
    message: str
    param: str | None = None
    detail: str | None = None  # traceback, as text


class StepProgress(msgspec.Struct, frozen=True, tag="p", array_like=True):
    request: str
    attempt: int
    step: int
    total: int


StepItem = Chunk | Finished | Failed | StepProgress


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """All that came out of one step of one stage. Steps that give nothing are told with the next
    one that does."""

    stage: str
    items: list[StepItem]
    step_s: float  # seconds inside Engine.step
    batch: int  # requests the engine held during the step
    steps: int = 1  # that this tells of; 0: what comes out between two steps
    new: int = 0  # requests that were in none of the steps told of before


class OnDevice(msgspec.Struct, frozen=True, tag="on_device", array_like=True):
    """The worker's tensors can cross on its device, or why not. Sent while it loads, if main wants
    to know (`WorkerSpec.device`)."""

    device: str  # UUID of its own; "": they cannot
    reads: tuple[str, ...]  # UUIDs of the devices whose memory it can read, its own included
    problem: str | None = None


class Offered(msgspec.Struct, frozen=True, tag="offered", array_like=True):
    """What a process needs to read this worker's pool as reader number 0, 1, ...

    Sent for every number while it loads, and anew after `ReaderGone`.
    """

    reader: int
    attach: AttachPool


class Probed(msgspec.Struct, frozen=True, tag="probed", array_like=True):
    """How reading another worker's pool went."""

    pool: int
    problem: str | None  # None: every byte arrived
    took_s: float | None


class Released(msgspec.Struct, frozen=True, tag="released", array_like=True):
    """Blocks of others that this worker is done with: one entry for each lease given back."""

    blocks: list[tuple[int, int, int]]  # (arena or pool id, offset, generation)


class Stalled(msgspec.Struct, frozen=True, tag="stalled", array_like=True):
    """The stage holds a request because its output finds no room. Sent once per stall."""

    stage: str
    request: str
    port: str
    wanted_bytes: int
    free_bytes: int
    memory: int  # id of the arena or pool in which it waits for room


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    number: int
    counters: dict[str, int]  # since start: steps, aborted, dropped, arena_bytes_in_use, ...


class Crashed(msgspec.Struct, frozen=True, tag="crashed", array_like=True):
    """The worker cannot go on and exits; the last message it sends."""

    stage: str
    message: str
    detail: str


ToMain = (
    Hello
    | Loading
    | Ready
    | Step
    | Released
    | OnDevice
    | Offered
    | Probed
    | Stalled
    | Pong
    | Crashed
)


# ---- handed over at spawn ---------------------------------------------------------------------


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know to build one stage's engine."""

    name: str
    engine: str
    model: str | None  # absolute folder or hub id
    part: str | None
    device: str  # "cpu", "cuda:0", ...
    max_batch: int
    options: dict[str, Any]  # the engine's own section of the stage, checked by the engine
    sampling: dict[str, Any]  # defaults for request parameters
    credits: dict[str, int]  # bytes of the arena that each output port may hold


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """First packet on the lifeline socket; the arena's descriptor travels with it."""

    version: int
    identity: str  # "worker.replica.epoch", never reused
    epoch: int
    main_pid: int
    die_with_thread: bool  # whether PR_SET_PDEATHSIG is safe: main was on its main thread
    arena: int
    arena_bytes: int
    inline_limit_bytes: int
    stages: tuple[StageSpec, ...]
    device: str = ""  # "cuda:0", ...: tensors come to it or leave it on that device
    pool: int = 0  # id of the device pool that it makes; 0: none
    pool_bytes: int = 0
    pool_readers: int = 0  # processes that may read it at once
    table: int = 0  # where in the arena the pool's table is: behind what blocks are made of
