"""A request runs what its outputs need, in an order in which every edge leads on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_rt.config import EdgeConfig, PipelineConfig, StageConfig, StreamConfig, parse_pipeline
from omni_rt.errors import BadRequest, ConfigError
from omni_rt.graph import Edge, Graph


def pipeline(stages: list[str], edges: list[tuple[str, str]], outputs: list[str]) -> PipelineConfig:
    """Every edge leads into an input of its own."""
    return PipelineConfig(
        stages={name: StageConfig(engine="echo") for name in stages},
        edges=tuple(EdgeConfig(f"{a}.out", f"{b}.in{k}") for k, (a, b) in enumerate(edges)),
        outputs={name: f"{name}.text" for name in outputs},
    )


@st.composite
def graphs(draw: Any, *, acyclic: bool = True) -> tuple[list[str], list[tuple[str, str]]]:
    """Stages in any order in the file, and edges between them."""
    names = [f"s{k}" for k in range(draw(st.integers(1, 8)))]
    places = range(len(names))
    pairs = [(a, b) for a in places for b in places if a < b or not acyclic]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=16)) if pairs else []
    return draw(st.permutations(names)), [(names[a], names[b]) for a, b in chosen]


def ancestors(of: set[str], edges: list[tuple[str, str]]) -> set[str]:
    """By definition: the smallest set that holds `of` and, with a stage, all that lead into it."""
    found = set(of)
    while more := {a for a, b in edges if b in found} - found:
        found |= more
    return found


@given(graphs(), st.data())
def test_a_plan_is_the_ancestors_of_the_outputs_in_topological_order(
    graph: tuple[list[str], list[tuple[str, str]]], data: st.DataObject
) -> None:
    stages, edges = graph
    wanted = data.draw(st.lists(st.sampled_from(stages), min_size=1, unique=True))
    plan = Graph.from_config(pipeline(stages, edges, stages)).plan(tuple(wanted))

    needed = ancestors(set(wanted), edges)
    assert len(plan.stages) == len(needed)
    assert set(plan.stages) == needed
    assert all(plan.stages.index(e.source) < plan.stages.index(e.target) for e in plan.edges)
    assert sorted((e.source, e.target) for e in plan.edges) == sorted(
        (a, b) for a, b in edges if b in needed
    )
    assert plan.outputs == {name: (name, "text") for name in wanted}


@given(graphs(acyclic=False))
def test_a_graph_is_refused_exactly_if_a_stage_is_its_own_ancestor(
    graph: tuple[list[str], list[tuple[str, str]]],
) -> None:
    stages, edges = graph
    config = pipeline(stages, edges, stages)
    circular = {s for s in stages if s in ancestors({a for a, b in edges if b == s}, edges)}
    if not circular:
        Graph.from_config(config)
        return
    with pytest.raises(ConfigError) as caught:
        Graph.from_config(config)
    shown = caught.value.message.removeprefix("the edges form a cycle: ").split(" -> ")
    assert shown[0] == shown[-1]
    assert set(zip(shown, shown[1:], strict=False)) <= set(edges)


def test_an_edge_keeps_what_the_file_says_of_it() -> None:
    config = parse_pipeline(
        """
stages:
  a: {engine: vllm, model: some/lm, facts: {image: "<i>"}}
  b: {engine: "mine:make"}
edges:
  - a.hidden->b.whole
  - {from: a.hidden, to: b.asked, when: not image, via: "mine.shapes:flat"}
  - {from: a.hidden, to: b.eager, stream: true}
  - {from: a.hidden, to: b.patient, stream: {first: 3}}
  - {from: a.hidden, to: b.late, stream: false}
outputs: {x: b.x}
""",
        "mine.yaml",
    )
    assert Graph.from_config(config).edges == (
        Edge("a", "hidden", "b", "whole"),
        Edge("a", "hidden", "b", "asked", when="not image", via="mine.shapes:flat"),
        Edge("a", "hidden", "b", "eager", stream=StreamConfig(first=1)),
        Edge("a", "hidden", "b", "patient", stream=StreamConfig(first=3)),
        Edge("a", "hidden", "b", "late"),
    )


def test_without_wanted_outputs_all_are_planned() -> None:
    graph = Graph.from_config(pipeline(["a", "b"], [], ["a", "b"]))
    assert graph.plan(()).stages == ("a", "b")


def test_an_unknown_output_is_the_requests_error() -> None:
    graph = Graph.from_config(pipeline(["text"], [], ["text"]))
    with pytest.raises(BadRequest, match="no output 'txt'.*did you mean 'text'") as caught:
        graph.plan(("txt",))
    assert caught.value.param == "outputs"


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ({"a": ({"in"}, {"text"})}, "stage a has no output 'out'; it has: text"),
        ({"b": (set(), {"text"})}, "stage b has no input 'in0'; it has: none"),
        ({"b": ({"in0"}, {"out"})}, "stage b has no output 'text'; it has: out"),
    ],
)
def test_ports_that_loaded_stages_do_not_have_are_named(
    ports: dict[str, tuple[set[str], set[str]]], message: str
) -> None:
    graph = Graph.from_config(pipeline(["a", "b"], [("a", "b")], ["b"]))
    with pytest.raises(ConfigError) as caught:
        graph.check_ports(ports)
    assert str(caught.value) == message
