"""How the stages connect: the graph of a pipeline, and the part of it that a request needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_rt.config import PipelineConfig, StreamConfig
from omni_rt.config.wiring import Ends, find_fault, topological
from omni_rt.errors import BadRequest, ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Edge:
    """`source.source_port -> target.target_port`."""

    source: str
    source_port: str
    target: str
    target_port: str
    when: str | None = None  # fact, or "not fact"
    stream: StreamConfig | None = None
    via: str | None = None

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} -> {self.target}.{self.target_port}"


@dataclass(frozen=True)
class Plan:
    """The sub-graph that the wanted outputs need."""

    stages: tuple[str, ...]  # in topological order
    edges: tuple[Edge, ...]
    outputs: dict[str, tuple[str, str]]  # name -> (stage, port)


class Graph:
    """The stages of a pipeline and the edges between them. Immutable after `from_config`."""

    def __init__(
        self,
        stages: tuple[str, ...],
        edges: tuple[Edge, ...],
        outputs: dict[str, tuple[str, str]],
    ) -> None:
        self.edges = edges
        self.outputs = outputs
        ends = [Ends(f"{e.source}.{e.source_port}", f"{e.target}.{e.target_port}") for e in edges]
        if fault := find_fault(stages, ends):
            raise ConfigError(fault.what, hint=fault.hint)
        self.order = topological(stages, ends)
        self._plans: dict[tuple[str, ...], Plan] = {}

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Graph:
        """Raises `ConfigError` for a cycle or two edges into one input port."""
        edges = tuple(
            Edge(*_split(e.source), *_split(e.target), e.when, e.stream, e.via)
            for e in config.edges
        )
        outputs = {name: _split(port) for name, port in config.outputs.items()}
        return cls(tuple(config.stages), edges, outputs)

    def plan(self, outputs: tuple[str, ...]) -> Plan:
        """What a request for these outputs needs; for none named, all. Raises `BadRequest`."""
        wanted = tuple(sorted(set(outputs))) or tuple(sorted(self.outputs))
        if wanted not in self._plans:
            for name in wanted:
                if name not in self.outputs:
                    raise BadRequest(
                        f"this pipeline has no output '{name}'",
                        param="outputs",
                        hint=nearest(name, self.outputs),
                    )
            self._plans[wanted] = self._make_plan(wanted)
        return self._plans[wanted]

    def check_ports(self, ports: Mapping[str, tuple[set[str], set[str]]]) -> None:
        """Compare the edges with (inputs, outputs) of loaded stages. Raises `ConfigError`."""
        for edge in self.edges:
            if edge.target in ports:
                _check_port(edge.target, "input", edge.target_port, ports[edge.target][0])
            if edge.source in ports:
                _check_port(edge.source, "output", edge.source_port, ports[edge.source][1])
        for stage, port in self.outputs.values():
            if stage in ports:
                _check_port(stage, "output", port, ports[stage][1])

    def _make_plan(self, wanted: tuple[str, ...]) -> Plan:
        needed = {self.outputs[name][0] for name in wanted}
        for stage in reversed(self.order):
            if stage in needed:
                needed |= {edge.source for edge in self.edges if edge.target == stage}
        return Plan(
            tuple(stage for stage in self.order if stage in needed),
            tuple(edge for edge in self.edges if edge.target in needed),
            {name: self.outputs[name] for name in wanted},
        )


def _check_port(stage: str, kind: str, port: str, has: set[str]) -> None:
    if port not in has:
        names = ", ".join(sorted(has)) or "none"
        raise ConfigError(f"stage {stage} has no {kind} '{port}'; it has: {names}")


def _split(port: str) -> tuple[str, str]:
    stage, _, name = port.partition(".")
    return stage, name
