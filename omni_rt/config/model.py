"""The values of a pipeline file. Every key, its default and its meaning: docs/config.md."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_rt.errors import ConfigError

ENGINES = ("echo", "simulated", "vllm", "diffusers", "torch")
SECTIONS = ("echo", "simulated", "vllm", "diffusers")  # engines with a key of their own name
AR_ENGINES = ("vllm",)
POLICIES = ("fair", "first_come", "together")  # of the diffusers engine

_NAME = r"[a-z][a-z0-9_]*"
PORT = rf"{_NAME}\.{_NAME}"
_FUNCTION = r"[\w.]+:\w+"
_SIZE = r"(?=.*[1-9])[0-9]+(\.[0-9]+)? ?[KMGT]iB"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _whole(pattern: str) -> str:
    """For all of a text; `$` alone would let a line break through at its end."""
    return rf"^({pattern})$(?!\n)"


# The description is what an error says was expected.
Name = Annotated[
    str,
    Meta(
        pattern=_whole(_NAME),
        description="a name of lower-case letters, digits and _ that begins with a letter",
    ),
]
Port = Annotated[
    str,
    Meta(
        pattern=_whole(PORT),
        description="a port, written as stage.port in lower-case letters, digits and _",
    ),
]
Engine = Annotated[
    str,
    Meta(
        pattern=_whole(f"{'|'.join(ENGINES)}|{_FUNCTION}"),
        description=f"an engine: {', '.join(ENGINES)} or module:function",
    ),
]
Device = Annotated[
    str,
    Meta(pattern=_whole("auto|cpu|cuda:[0-9]+"), description="a device: auto, cpu or cuda:N"),
]
Condition = Annotated[
    str, Meta(pattern=_whole(f"(not )?{_NAME}"), description="a fact's name, or 'not' and its name")
]
Function = Annotated[
    str, Meta(pattern=_whole(_FUNCTION), description="a function, written as module:function")
]
Policy = Annotated[
    str,
    Meta(
        pattern=_whole(f"{'|'.join(POLICIES)}|{_FUNCTION}"),
        description=f"a policy: {', '.join(POLICIES)} or module:function",
    ),
]
Size = Annotated[
    str, Meta(pattern=_whole(_SIZE), description="a size such as 256MiB or 1.5GiB (KiB to TiB)")
]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
CountOrZero = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]
Seconds = Annotated[float, Meta(gt=0, description="a number of seconds above 0")]
Factor = Annotated[float, Meta(gt=0, description="a number above 0")]
SecondsOrZero = Annotated[float, Meta(ge=0, description="a number of seconds, 0 or more")]


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file: unknown keys are errors."""


class RestartConfig(_Value, frozen=True):
    """When a stage's process dies."""

    max_deaths: Count = 5  # in a row, without a finished request: then the stage is down
    backoff_s: Seconds = 0.5  # before the first restart; doubles with every death in a row
    backoff_max_s: Seconds = 30.0
    wait_s: Seconds = 8.0  # how long requests wait for a stage that is being restarted


class HiddenConfig(_Value, frozen=True):
    """What the port `hidden` of an AR stage gives."""

    layer: int = -1  # index into transformers' `output_hidden_states`
    rows: Literal["reply", "prompt", "all"] = "reply"


class LimitsConfig(_Value, frozen=True):
    """The most that a request may ask of a diffusers stage; what the model itself cannot make is
    refused in any case."""

    max_side: Count = 2048  # pixels of height and width
    max_pixels: Count | None = None  # height x width x frames; default: what fits into memory
    max_frames: Count = 257
    max_steps: Count = 1000


class CacheConfig(_Value, frozen=True):
    """Tensors that a diffusers stage keeps between requests."""

    cache_tensors: tuple[Literal["prompt_embeds"], ...] = ("prompt_embeds",)
    max_cache_size: Size = "256MiB"
    cache_strategy: Literal["fifo", "lru"] = "fifo"
    enable_optimization: bool = True


class StreamConfig(_Value, frozen=True):
    """An edge whose chunks are handed on as they come."""

    first: Count = 1  # chunks to collect before the consumer starts


class PlaybackConfig(_Value, frozen=True):
    """When requests whose sound is played while it comes are refused."""

    rtf: Factor | None = 0.9  # seconds that a second of sound may take; none: no limit
    unmeasured: Count = 4  # that may be under way before it is known how fast sound is made


class StageConfig(_Value, frozen=True, kw_only=True):
    """One stage: an engine on a device."""

    engine: Engine
    model: str | None = None  # folder or hub id; default: the pipeline's
    part: str | None = None  # a folder inside the model
    module: Function | None = None  # torch: the class that is the stage
    device: Device = "auto"
    replicas: Count = 1
    worker: Name | None = None  # stages with the same name share one process
    memory: Size | None = None  # of the device, for weights and KV cache
    threads: Count | None = None  # CPU threads of the stage's process; default: one per stage
    max_batch: Count = 8
    queue: CountOrZero = 64  # requests that may wait before `Overloaded`
    arena: Size = "256MiB"  # shared memory the stage's process writes its outputs to
    pool: Size | None = "128MiB"  # the same on its device, for stages on devices; none: no pool
    sampling: dict[str, Any] = {}  # default request parameters
    steps: Count | None = None  # diffusers: short for sampling.num_inference_steps
    policy: Policy | None = None  # diffusers: which requests make the next step; default: fair
    slots: Count | None = None  # diffusers: requests in work; default: 4 for each of `max_batch`
    limits: LimitsConfig | None = None  # diffusers
    cache: CacheConfig | None = None  # diffusers
    hidden: HiddenConfig | None = None  # AR engines
    facts: dict[Name, str] = {}  # AR engines: fact -> special token that reports it
    lora: dict[str, str] = {}  # AR engines: adapters by name; folders, relative to the file
    tool_parser: str | None = None  # AR engines: vLLM's, that finds calls of tools in the text
    restart: RestartConfig = RestartConfig()
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # torch
    options: dict[str, Any] = {}  # of the torch module, or of an engine given as module:function
    echo: dict[str, Any] = {}
    simulated: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    diffusers: dict[str, Any] = {}


class EdgeConfig(_Value, frozen=True, rename={"source": "from", "target": "to"}):
    """What flows from one stage's output port to another's input port."""

    source: Port
    target: Port
    when: Condition | None = None
    stream: StreamConfig | None = None
    via: Function | None = None


class PipelineConfig(_Value, frozen=True, kw_only=True):
    """A whole pipeline."""

    name: str = ""  # served model name; default: the file's name
    preset: str | None = None  # a shipped file that this one overrides
    model: str | None = None  # folder (relative to the file) or hub id
    stages: dict[Name, StageConfig]
    edges: tuple[EdgeConfig, ...] = ()
    outputs: dict[Name, Port]
    deadline_s: Seconds | None = None  # of a request that names none
    playback: PlaybackConfig = PlaybackConfig()
    shutdown_s: SecondsOrZero = 10.0  # for an orderly end
    heartbeat_s: Seconds = 10.0
    stall_s: Seconds = 120.0  # a worker that answers for so long not at all is replaced
    load_stall_s: Seconds = 300.0  # the same while it loads


def parse_bytes(size: str) -> int:
    """Bytes of "256MiB", "1.5 GiB", ..."""
    if re.fullmatch(_SIZE, size) is None:
        raise ConfigError(f"'{size}' is not a size", hint="write it as 256MiB or 4GiB")
    return int(float(size[:-3]) * _UNITS[size[-3:]])
