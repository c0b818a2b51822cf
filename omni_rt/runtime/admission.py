"""What may enter: checks of a request against the pipeline, and what each stage is told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from omni_rt.config import PipelineConfig
from omni_rt.errors import BadRequest, ConfigError, Overloaded, StageUnavailable, nearest
from omni_rt.graph import Edge, Graph, Plan
from omni_rt.request import ChatMessage, Request, TextPart, kind_of
from omni_rt.runtime.flow import Run
from omni_rt.runtime.stage import Stage
from omni_rt.runtime.supervisor import Supervisor
from omni_rt.wire.messages import Emit, ParamProduct, ParamSpec, Ports, Transport

# Characters of a request's text; no model reads more, and a message must fit a frame.
_MAX_TEXT = 4_000_000
# Of all pictures, sound and film of a request, which travel in one message to its first stages.
MAX_MEDIA_BYTES = 16 << 20
_MEDIA = {"image": "images", "audio": "sound", "video": "film"}
_ENCODED_KINDS = {"image", "audio", "video"}


class Admission:
    def __init__(
        self,
        config: PipelineConfig,
        graph: Graph,
        stages: Mapping[str, Stage],
        supervisor: Supervisor,
    ) -> None:
        self._config = config
        self._graph = graph
        self._stages = stages
        self._supervisor = supervisor
        self._emits: dict[tuple[tuple[str, ...], str], tuple[Emit, ...]] = {}

    def check(self, request: Request) -> Plan:
        """The request's sub-graph. Raises what keeps it from being accepted."""
        plan = self._graph.plan(request.outputs)
        if not request.prompt and not request.messages:
            raise BadRequest("the request has neither a prompt nor messages", param="prompt")
        text = len(request.prompt or "") + sum(len(m.text) for m in request.messages)
        if text > _MAX_TEXT:
            raise BadRequest(
                f"the text has {text} characters, more than {_MAX_TEXT}", param="prompt"
            )
        media = sum(message.media_bytes for message in request.messages)
        if media > MAX_MEDIA_BYTES:
            raise BadRequest(
                f"pictures, sound and film have {media} bytes, more than {MAX_MEDIA_BYTES}",
                param="messages",
                hint="send smaller ones",
            )
        check_sendable(request)
        if request.deadline_s is not None and not request.deadline_s > 0:
            raise BadRequest("deadline_s must be above 0", param="deadline_s")
        for stage in plan.stages:
            if error := self.unavailable(stage):
                raise error
        self._check_media(request, plan)
        self._check_params(request, plan)
        self._check_replies(request, plan)
        for name in plan.stages:
            if self._stages[name].full:
                limit = self._stages[name].queue_limit
                raise Overloaded(f"{limit} requests already wait for stage {name}", stage=name)
        return plan

    def unavailable(self, stage: str) -> StageUnavailable | None:
        """Why nobody can be served by the stage now or soon, or None."""
        workers = [w for w in self._supervisor.workers if stage in w.stages]
        last = next((w.error for w in workers if w.error), "no last words")
        if all(worker.down for worker in workers):
            return StageUnavailable(
                f"stage {stage} is down: its process died too often ({last})", stage=stage
            )
        if all(worker.down or worker.waited_out for worker in workers):
            return StageUnavailable(
                f"stage {stage} is being restarted after its process died ({last})",
                stage=stage,
                hint="try again in some seconds",
            )
        if self._stages[stage].ports is None:
            phase, fraction = workers[0].phase.get(stage, ("starting", 0.0))
            return StageUnavailable(
                f"stage {stage} is not ready yet: {phase} ({fraction:.0%})", stage=stage
            )
        return None

    def deadline_s(self, request: Request) -> float | None:
        return request.deadline_s if request.deadline_s is not None else self._config.deadline_s

    # ---- what a stage is told

    def params(self, request: Request, stage: str) -> dict[str, Any]:
        """The request's parameters that the stage accepts; those addressed to it win."""
        ports = self._ports(stage)
        accepted = {spec.name for spec in ports.params}
        shared = {name: value for name, value in request.params.items() if name in accepted}
        return {**shared, **request.stage_params.get(stage, {})}

    def values(self, request: Request, run: Run, seed: int) -> dict[str, Any]:
        """The request itself goes to the stages at the graph's entry; all others get inputs."""
        values: dict[str, Any] = {"seed": seed}
        if not run.inputs:
            if request.prompt is not None:
                values["prompt"] = request.prompt
            if request.messages:
                takes = self._ports(run.stage).takes
                values["messages"] = [_told(message, takes) for message in request.messages]
        return values

    def emits(self, plan: Plan, stage: str) -> tuple[Emit, ...]:
        """The output ports that the plan wants of the stage, and how each is to be sent."""
        key = (tuple(sorted(plan.outputs)), stage)
        if key not in self._emits:
            self._emits[key] = self._make_emits(plan, stage)
        return self._emits[key]

    def _make_emits(self, plan: Plan, stage: str) -> tuple[Emit, ...]:
        kinds = {port.name: port.kind for port in self._ports(stage).outputs}
        shown = {port for source, port in plan.outputs.values() if source == stage}
        edges: dict[str, list[Edge]] = {}
        for edge in plan.edges:
            if edge.source == stage:
                edges.setdefault(edge.source_port, []).append(edge)
        return tuple(
            Emit(
                port,
                "shm" if port in shown else self._transport(edges[port]),
                encode=port in shown and kinds.get(port) in _ENCODED_KINDS,
                stream=(port in shown and kinds.get(port) != "tensor")
                or any(edge.stream is not None for edge in edges.get(port, ())),
            )
            for port in sorted(shown | edges.keys())
        )

    def transports(self) -> dict[str, Transport]:
        """How each edge's tensors cross, if they are larger than what travels in a message."""
        return {str(edge): self._transport([edge]) for edge in self._graph.edges}

    def _transport(self, edges: list[Edge]) -> Transport:
        """`local` if all ends are in one process, which only a single replica guarantees."""
        same = all(
            self._worker(edge.source) == self._worker(edge.target)
            and self._config.stages[edge.source].replicas == 1
            for edge in edges
        )
        return "local" if same else "shm"

    def _worker(self, stage: str) -> str:
        return self._config.stages[stage].worker or stage

    # ---- checks

    def check_ports(self, stage: str, ports: Ports) -> None:
        """A stage has loaded: does it have the ports that the file names? Raises `ConfigError`."""
        inputs = {port.name for port in ports.inputs}
        outputs = {port.name for port in ports.outputs}
        self._graph.check_ports({stage: (inputs, outputs)})
        kinds = {port.name: port.kind for port in ports.outputs}
        for name, (source, port) in self._graph.outputs.items():
            feeds = any(
                edge.source == source and edge.source_port == port for edge in self._graph.edges
            )
            if source == stage and feeds and kinds.get(port) in _ENCODED_KINDS:
                raise ConfigError(
                    f"{source}.{port} is both the output '{name}', which is encoded, and the "
                    "input of a stage, which wants the tensor",
                    hint="give the stage a second port or leave one of the two out",
                )

    def _check_replies(self, request: Request, plan: Plan) -> None:
        """Several replies of one request cannot go on into other stages."""
        for name, given in {"": request.params, **request.stage_params}.items():
            several = given.get("n")
            if isinstance(several, int) and several > 1 and plan.edges:
                raise BadRequest(
                    "n above 1 is for requests that end in the stage that replies",
                    param=f"stage_params.{name}.n" if name else "n",
                    hint="send several requests, or ask for its own outputs only",
                )

    def _check_media(self, request: Request, plan: Plan) -> None:
        """Each picture, sound and film must be for one of the stages at the graph's entry."""
        targets = {edge.target for edge in plan.edges}
        takes = {kind for s in plan.stages if s not in targets for kind in self._ports(s).takes}
        for at, message in enumerate(request.messages):
            for part in message.parts:
                if not isinstance(part, TextPart) and kind_of(part) not in takes:
                    raise BadRequest(
                        f"model {self._config.name} takes no {_MEDIA[kind_of(part)]}",
                        param=f"messages[{at}].content",
                    )

    def _check_params(self, request: Request, plan: Plan) -> None:
        specs = {stage: _by_name(self._ports(stage).params) for stage in plan.stages}
        known = {name for by_name in specs.values() for name in by_name}
        for name, value in request.params.items():
            if name not in known:
                raise BadRequest(
                    f"no stage of this request has a parameter '{name}'",
                    param=name,
                    hint=nearest(name, known),
                )
            for by_name in specs.values():
                if name in by_name:
                    check_value(by_name[name], value, name)
        for stage, params in request.stage_params.items():
            if stage not in specs:
                raise BadRequest(
                    f"the request does not pass a stage '{stage}'",
                    param=f"stage_params.{stage}",
                    hint=nearest(stage, specs),
                )
            for name, value in params.items():
                where = f"stage_params.{stage}.{name}"
                if name not in specs[stage]:
                    raise BadRequest(
                        f"stage {stage} has no parameter '{name}'",
                        param=where,
                        hint=nearest(name, specs[stage]),
                    )
                check_value(specs[stage][name], value, where)
        for stage in plan.stages:
            for limit in self._ports(stage).products:
                check_product(limit, self.params(request, stage))

    def _ports(self, stage: str) -> Ports:
        ports = self._stages[stage].ports
        if ports is None:
            raise StageUnavailable(f"stage {stage} is not ready yet", stage=stage)
        return ports


def _told(message: ChatMessage, takes: tuple[str, ...]) -> dict[str, Any]:
    """A message as a stage sees it: text alone as a string, else the parts that it takes."""
    told: dict[str, Any] = {"role": message.role, "content": message.text}
    parts = [{"type": kind_of(part), **msgspec.structs.asdict(part)} for part in message.parts]
    if any(part["type"] in takes for part in parts):
        told["content"] = [part for part in parts if part["type"] in ("text", *takes)]
    if message.tool_calls:
        told["tool_calls"] = [msgspec.structs.asdict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        told["name"] = message.name
    return told


def check_sendable(request: Request) -> None:
    """Raise `BadRequest` that names the first field which cannot travel to a worker.

    Integers beyond 64 bits and half surrogates, for instance: found only when it is sent, the
    request would have been accepted and never end.
    """
    for name in request.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(request, name))
        except (OverflowError, TypeError, ValueError) as error:
            raise BadRequest(f"{name} cannot be sent to a stage: {error}", param=name) from error


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list": (list, tuple),
    "dict": (dict,),
}


def check_value(spec: ParamSpec, value: Any, where: str) -> None:
    """Raise `BadRequest` unless the value is of the spec's kind and within its limits."""
    fits = isinstance(value, _TYPES[spec.kind]) and (
        spec.kind == "bool" or not isinstance(value, bool)
    )
    if not fits:
        raise BadRequest(f"{where} must be of type {spec.kind}, got {value!r}", param=where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(spec, value, where)
    if spec.choices and value not in spec.choices:
        raise BadRequest(
            f"{where} cannot be {value!r}", param=where, hint=nearest(str(value), spec.choices)
        )


def check_product(limit: ParamProduct, params: Mapping[str, Any]) -> None:
    """Raise `BadRequest` if the parameters, multiplied, are above the limit."""
    values = [params.get(n, d) for n, d in zip(limit.names, limit.defaults, strict=True)]
    if not all(isinstance(value, int | float) for value in values):
        return  # of the wrong type, which is told by its name
    if math.prod(values) > limit.maximum:
        raise BadRequest(
            f"{' x '.join(limit.names)} must be at most {limit.maximum:,.0f} {limit.about}, "
            f"got {' x '.join(f'{value:g}' for value in values)}",
            param=next((name for name in limit.names if name in params), limit.names[0]),
        )


def _check_number(spec: ParamSpec, value: float, where: str) -> None:
    low, high = spec.minimum, spec.maximum
    if not math.isfinite(value):
        raise BadRequest(f"{where} must be a finite number", param=where)
    if (low is not None and value < low) or (high is not None and value > high):
        parts = [] if low is None else [f"at least {low:g}"]
        parts += [] if high is None else [f"at most {high:g}"]
        limits = " and ".join(parts)
        raise BadRequest(f"{where} must be {limits}, got {value:g}", param=where)
    if spec.multiple_of and value % spec.multiple_of:
        below = value - value % spec.multiple_of
        raise BadRequest(
            f"{where} must be a multiple of {spec.multiple_of}, got {value:g}",
            param=where,
            hint=f"nearest: {below:g} or {below + spec.multiple_of:g}",
        )


def _by_name(specs: tuple[ParamSpec, ...]) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in specs}
