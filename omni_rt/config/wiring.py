"""Which stage comes after which, and what is wrong with edges: a cycle, an input fed twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Ends(NamedTuple):
    """The two ports that an edge joins, each as "stage.port"."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Fault(NamedTuple):
    edge: int  # position of the edge to look at
    what: str
    hint: str


def stage_of(port: str) -> str:
    return port.partition(".")[0]


def topological(stages: Iterable[str], edges: Sequence[Ends]) -> tuple[str, ...]:
    """The stages so that every edge leads on; among equals in the given order.

    Stages on a cycle, and those behind one, are left out.
    """
    order: list[str] = []
    left = list(stages)
    while free := [stage for stage in left if not _before(stage, left, edges)]:
        order += free
        left = [stage for stage in left if stage not in free]
    return tuple(order)


def find_fault(stages: Sequence[str], edges: Sequence[Ends]) -> Fault | None:
    """The first thing that is wrong with edges between stages that exist."""
    first: dict[str, int] = {}
    for k, edge in enumerate(edges):
        other = first.setdefault(edge.target, k)
        if other != k:
            what = f"two edges lead into {edge.target}: '{edges[other]}' and '{edge}'"
            return Fault(k, what, "an input takes one; give each an input port of its own")
    if left := set(stages).difference(topological(stages, edges)):
        cycle = _cycle([stage for stage in stages if stage in left], edges)
        names = " -> ".join(stage_of(edges[k].source) for k in [*cycle, cycle[0]])
        return Fault(max(cycle), f"the edges form a cycle: {names}", "take one of them out")
    return None


def _before(stage: str, left: list[str], edges: Sequence[Ends]) -> list[int]:
    """Positions of the edges that lead to the stage from one of `left`."""
    return [
        k
        for k, (source, target) in enumerate(edges)
        if stage_of(target) == stage and stage_of(source) in left
    ]


def _cycle(left: list[str], edges: Sequence[Ends]) -> list[int]:
    """The edges of one cycle, in their direction, among stages that each have one before them."""
    path: list[int] = []
    visited = [left[0]]
    while True:
        path.append(_before(visited[-1], left, edges)[0])
        source = stage_of(edges[path[-1]].source)
        if source in visited:
            return path[visited.index(source) :][::-1]
        visited.append(source)
