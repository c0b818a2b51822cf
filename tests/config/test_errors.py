"""What is wrong with a file is said in one line, with its place and what would be right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omni_rt.config import load_pipeline, parse_bytes, parse_pipeline
from omni_rt.config.model import EdgeConfig, PipelineConfig, StageConfig
from omni_rt.errors import ConfigError
from omni_rt.graph import Graph


def pipeline(
    *stages: str, edges: tuple[str, ...] = (), outputs: str = "{text: a.text}", more: str = ""
) -> str:
    """A file whose stages begin in line 2, a line each."""
    lines = ["stages:", *(f"  {stage}" for stage in stages)]
    lines += ["edges:", *(f"  - {edge}" for edge in edges)] if edges else []
    return "\n".join([*lines, f"outputs: {outputs}", more]) + "\n"


A, B, C = "a: {engine: echo}", "b: {engine: echo}", "c: {engine: echo}"
LM = "a: {engine: vllm, model: some/lm, facts: {image: '<i>'}}"
NAME = "a name of lower-case letters, digits and _ that begins with a letter"
PORT = "a port, written as stage.port in lower-case letters, digits and _"
ENGINES = "(valid: diffusers, echo, simulated, torch, vllm), or one of your own as module:function"
STAGE_KEYS = ", ".join(sorted(field for field in StageConfig.__struct_fields__))

# What is written, the line, and the message behind "file:line: ".
WRONG = {
    "broken yaml": ("stages: {a: [1, 2}", 1, "this is not YAML: expected ',' or ']', but got '}'"),
    "tab": (
        "stages:\n\ta: 1",
        2,
        "this is not YAML: found character '\\t' that cannot start any token",
    ),
    "control character": (
        "stages:\n  a: \x00",
        2,
        "this is not YAML: special characters are not allowed",
    ),
    "two documents": (
        "a: 1\n---\nb: 2",
        2,
        "this is not YAML: but found another document",
    ),
    "empty": (
        "",
        1,
        "a pipeline file is a mapping. it has at least the keys 'stages' and 'outputs'",
    ),
    "a list": (
        "- a",
        1,
        "a pipeline file is a mapping. it has at least the keys 'stages' and 'outputs'",
    ),
    "key twice": (
        pipeline(A, B, A),
        4,
        "stages.a stands twice (first in line 2)",
    ),
    "key that is a list": ("name: x\n[a, b]: 1", 2, "a key must be a word"),
    "unknown tag": (
        "name: !thing x",
        1,
        "name: cannot read 'x'. quote it if it is text",
    ),
    "no such day": (
        "name: 2026-13-45",
        1,
        "name: cannot read '2026-13-45'. quote it if it is text",
    ),
    "day": (
        "name: 2026-12-01",
        1,
        "name: cannot read '2026-12-01'. quote it if it is text",
    ),
    "bytes": (
        pipeline("a: {engine: echo, sampling: {x: !!binary aGk=}}"),
        2,
        "stages.a.sampling.x: cannot read 'aGk='. quote it if it is text",
    ),
    "brackets without end": ("stages: " + "[" * 3000, 1, "this is nested too deeply"),
    "alias in itself": ("stages: &s\n  a: *s", 1, "stages.a.a.a... is nested too deeply"),
    "unknown key": (
        pipeline("a: {engine: echo,", "    max_bach: 3}"),
        3,
        f"stages.a.max_bach: unknown key. did you mean 'max_batch'? (valid: {STAGE_KEYS})",
    ),
    "unknown key, the second stage": (
        pipeline(A, "b: {engine: echo, restart: {wait: 3}}"),
        3,
        "stages.b.restart.wait: unknown key. did you mean 'wait_s'? "
        "(valid: backoff_max_s, backoff_s, max_deaths, wait_s)",
    ),
    "unknown key of an edge": (
        pipeline(A, B, edges=("{from: a.out, too: b.in}",)),
        5,
        "edges[0].too: unknown key. did you mean 'to'? (valid: from, stream, to, via, when)",
    ),
    "stages missing": ("outputs: {text: a.text}", 1, "stages: this key is missing"),
    "outputs missing": ("name: x\nstages:\n  a: {engine: echo}", 1, "outputs: this key is missing"),
    "engine missing": (pipeline(A, "b: {queue: 3}"), 3, "stages.b.engine: this key is missing"),
    "edge without from": (
        pipeline(A, B, edges=("{to: b.in}",)),
        5,
        "edges[0].from: this key is missing",
    ),
    "no stage": ("stages: {}\noutputs: {text: a.text}", 1, "stages: there is no stage"),
    "no output": (pipeline(A, outputs="{}"), 3, "outputs: there is no output"),
    "stages a list": (
        "stages: [a]\noutputs: {text: a.text}",
        1,
        "stages: expected a mapping, got a list",
    ),
    "torch without a module": (
        pipeline("a: {engine: torch}"),
        2,
        "stages.a.module: the stage has no module. name its class: package.module:Class",
    ),
    "module of another engine": (
        pipeline("a: {engine: echo, module: 'x:Y'}"),
        2,
        "stages.a.module: only torch has 'module', not echo",
    ),
    "stage empty": (pipeline("a:"), 2, "stages.a: expected a mapping, got nothing"),
    "edges a mapping": (
        pipeline(A, more="edges: {a: b}"),
        4,
        "edges: expected a list, got a mapping",
    ),
    "outputs a list": (
        pipeline(A, outputs="[a.text]"),
        3,
        "outputs: expected a mapping, got a list",
    ),
    "stage name": (
        pipeline("Writer: {engine: echo}"),
        2,
        f"stages.Writer: expected {NAME}, got 'Writer'",
    ),
    "stage name with a line break": (
        pipeline('"a\\n": {engine: echo}'),
        2,
        f"stages.a\n: expected {NAME}, got 'a\\n'",
    ),
    "size with a line break": (
        pipeline('a: {engine: echo, arena: "1MiB\\n"}'),
        2,
        "stages.a.arena: expected a size such as 256MiB or 1.5GiB (KiB to TiB), got '1MiB\\n'",
    ),
    "worker name": (
        pipeline("a: {engine: echo, worker: GPU-0}"),
        2,
        f"stages.a.worker: expected {NAME}, got 'GPU-0'",
    ),
    "output name": (
        pipeline(A, outputs="{my text: a.text}"),
        3,
        f"outputs.my text: expected {NAME}, got 'my text'",
    ),
    "output port": (
        pipeline(A, outputs="{text: a}"),
        3,
        f"outputs.text: expected {PORT}, got 'a'",
    ),
    "output of no stage": (
        pipeline(A, outputs="\n  text: a.text\n  image: aa.image"),
        5,
        "outputs.image: there is no stage 'aa'. did you mean 'a'? (valid: a)",
    ),
    "engine misspelt": (
        pipeline(A, "b: {engine: vlm}"),
        3,
        f"stages.b.engine: there is no engine 'vlm'. did you mean 'vllm'? {ENGINES}",
    ),
    "engine a number": (
        pipeline("a: {engine: 3}"),
        2,
        "stages.a.engine: expected an engine: echo, simulated, vllm, diffusers, torch or "
        "module:function, got 3",
    ),
    "device": (
        pipeline("a: {engine: echo, device: gpu}"),
        2,
        "stages.a.device: expected a device: auto, cpu or cuda:N, got 'gpu'",
    ),
    "size without a unit": (
        pipeline("a: {engine: echo, arena: 256}"),
        2,
        "stages.a.arena: expected a size such as 256MiB or 1.5GiB (KiB to TiB), got 256",
    ),
    "size of nothing": (
        pipeline("a: {engine: echo, arena: 0MiB}"),
        2,
        "stages.a.arena: expected a size such as 256MiB or 1.5GiB (KiB to TiB), got '0MiB'",
    ),
    "memory": (
        pipeline("a: {engine: echo, memory: 140%}"),
        2,
        "stages.a.memory: expected a size such as 256MiB or 1.5GiB (KiB to TiB), got '140%'",
    ),
    "count": (
        pipeline("a: {engine: echo, max_batch: 0}"),
        2,
        "stages.a.max_batch: expected a whole number of at least 1, got 0",
    ),
    "count true": (
        pipeline("a: {engine: echo, replicas: true}"),
        2,
        "stages.a.replicas: expected a whole number of at least 1, got true",
    ),
    "queue": (
        pipeline("a: {engine: echo, queue: -1}"),
        2,
        "stages.a.queue: expected a whole number, 0 or more, got -1",
    ),
    "seconds": (
        pipeline(A, more="stall_s: 0"),
        4,
        "stall_s: expected a number of seconds above 0, got 0",
    ),
    "seconds without end": (
        pipeline(A, more="stall_s: .inf"),
        4,
        "stall_s: expected a number of seconds above 0, got inf",
    ),
    "not a number in sampling": (
        pipeline("a: {engine: echo, sampling: {temperature: .nan}}"),
        2,
        "stages.a.sampling.temperature: expected a finite number, got nan",
    ),
    "not a number inside sampling": (
        pipeline("a: {engine: echo, sampling: {bias: [1.0, {x: .nan}]}}"),
        2,
        "stages.a.sampling.bias[1].x: expected a finite number, got nan",
    ),
    "text": (
        pipeline(A, "b: {engine: diffusers, model: 7}"),
        3,
        "stages.b.model: expected text, got 7",
    ),
    "whole number": (
        pipeline("a: {engine: vllm, model: x, hidden: {layer: last}}"),
        2,
        "stages.a.hidden.layer: expected a whole number, got 'last'",
    ),
    "choice": (
        pipeline("a: {engine: vllm, model: x, hidden: {rows: replies}}"),
        2,
        "stages.a.hidden.rows: expected one of reply, prompt, all, got 'replies'",
    ),
    "fact name": (
        pipeline("a: {engine: vllm, model: x, facts: {Image: '<i>'}}"),
        2,
        f"stages.a.facts.Image: expected {NAME}, got 'Image'",
    ),
    "options of another engine": (
        pipeline("a: {engine: echo, vllm: {seed: 1}}"),
        2,
        "stages.a.vllm: the engine is echo. its options belong under 'echo'",
    ),
    "options of another engine than one's own": (
        pipeline("a: {engine: 'mine:make', vllm: {seed: 1}}"),
        2,
        "stages.a.vllm: the engine is mine:make. its options belong under 'options'",
    ),
    "options": (
        pipeline("a: {engine: echo, options: {x: 1}}"),
        2,
        "stages.a.options: the engine is echo. its options belong under 'echo'",
    ),
    "hidden elsewhere": (
        pipeline("a: {engine: echo, hidden: {layer: 1}}"),
        2,
        "stages.a.hidden: only stages of vllm have 'hidden', not echo",
    ),
    "facts elsewhere": (
        pipeline("a: {engine: simulated, facts: {x: y}}"),
        2,
        "stages.a.facts: only stages of vllm have 'facts', not simulated",
    ),
    "cache elsewhere": (
        pipeline("a: {engine: vllm, model: x, cache: {}}"),
        2,
        "stages.a.cache: only diffusers has 'cache', not vllm",
    ),
    "steps elsewhere": (
        pipeline("a: {engine: vllm, model: x, steps: 4}"),
        2,
        "stages.a.steps: only diffusers has 'steps', not vllm",
    ),
    "no model": (
        pipeline("a: {engine: vllm}"),
        2,
        "stages.a.model: the stage has no model, and neither has the pipeline",
    ),
    "two vllm in a process": (
        pipeline("a: {engine: vllm, model: x}", "b: {engine: vllm, model: x, worker: a}"),
        3,
        "stages.b.worker: a process holds one vLLM engine; a has one as well",
    ),
    "replicas of a shared process": (
        pipeline("a: {engine: echo, worker: w}", "b: {engine: echo, worker: w, replicas: 2}"),
        2,
        "stages.a.replicas: a and b share a process and so 'replicas'. write the same for both",
    ),
    "restart of a shared process": (
        pipeline("a: {engine: echo}", "b: {engine: echo, worker: a, restart: {wait_s: 1}}"),
        3,
        "stages.b.restart: b and a share a process and so 'restart'. write the same for both",
    ),
    "devices of a shared process": (
        pipeline(
            "a: {engine: echo, worker: w, device: 'cuda:1'}",
            "b: {engine: echo, worker: w, device: cpu}",
        ),
        2,
        "stages.a.device: a and b share a process and so the kind of 'device'. "
        "put both on the CPU or both on GPUs",
    ),
    "no arrow": (
        pipeline(A, B, edges=("a.out to b.in",)),
        5,
        "edges[0]: 'a.out to b.in' is no edge. write an edge as 'stage.port -> stage.port'",
    ),
    "two arrows": (
        pipeline(A, B, C, edges=("a.out -> b.in -> c.in",)),
        6,
        "edges[0]: 'a.out -> b.in -> c.in' is no edge. write an edge as 'stage.port -> stage.port'",
    ),
    "edge a number": (pipeline(A, edges=("3",)), 4, "edges[0]: expected a mapping, got 3"),
    "edge without a port": (
        pipeline(A, B, edges=("a.out -> b",)),
        5,
        f"edges[0].to: expected {PORT}, got 'b'",
    ),
    "edge from no stage": (
        pipeline(A, "bell: {engine: echo}", edges=("bel.out -> a.in",)),
        5,
        "edges[0].from: there is no stage 'bel'. did you mean 'bell'? (valid: a, bell)",
    ),
    "edge to no stage": (
        pipeline(A, B, edges=("a.out -> b.in", "{from: a.out, to: cc.in}")),
        6,
        "edges[1].to: there is no stage 'cc'. valid: a, b",
    ),
    "condition": (
        pipeline(LM, B, edges=("{from: a.hidden, to: b.in, when: image and text}",)),
        5,
        "edges[0].when: expected a fact's name, or 'not' and its name, got 'image and text'",
    ),
    "no such fact": (
        pipeline(LM, B, edges=("{from: a.hidden, to: b.in, when: not imag}",)),
        5,
        "edges[0].when: stage a reports no fact 'imag'. declare it under its 'facts'; "
        "did you mean 'image'? (valid: image)",
    ),
    "an engine without facts": (
        pipeline(A, B, edges=("{from: a.out, to: b.in, when: image}",)),
        5,
        "edges[0].when: stage a reports no facts: its engine is echo",
    ),
    "condition on a stream": (
        pipeline(LM, B, edges=("{from: a.hidden, to: b.in, when: image, stream: true}",)),
        5,
        "edges[0].stream: an edge with a condition cannot stream: "
        "facts are known at the producer's end",
    ),
    "stream": (
        pipeline(A, B, edges=("{from: a.out, to: b.in, stream: 4}",)),
        5,
        "edges[0].stream: expected a mapping, got 4",
    ),
    "first": (
        pipeline(A, B, edges=("{from: a.out, to: b.in, stream: {first: 0}}",)),
        5,
        "edges[0].stream.first: expected a whole number of at least 1, got 0",
    ),
    "via": (
        pipeline(A, B, edges=("{from: a.out, to: b.in, via: my.function}",)),
        5,
        "edges[0].via: expected a function, written as module:function, got 'my.function'",
    ),
    "input fed twice": (
        pipeline(A, B, C, edges=("a.out -> c.in", "b.out -> c.in")),
        7,
        "edges[1]: two edges lead into c.in: 'a.out -> c.in' and 'b.out -> c.in'. "
        "an input takes one; give each an input port of its own",
    ),
    "cycle": (
        pipeline(A, B, C, edges=("a.out -> b.in", "c.out -> a.in", "b.out -> c.in")),
        8,
        "edges[2]: the edges form a cycle: a -> b -> c -> a. take one of them out",
    ),
    "cycle of one": (
        pipeline(A, edges=("a.out -> a.in",)),
        4,
        "edges[0]: the edges form a cycle: a -> a. take one of them out",
    ),
    "no such preset": (
        "name: x\npreset: eco",
        2,
        "preset: there is no preset 'eco'. did you mean 'echo'? (valid: echo, simulated-omni)",
    ),
    "preset a list": (
        pipeline(A, more="preset: [echo]"),
        4,
        "preset: expected text, got a list",
    ),
}


@pytest.mark.parametrize(("text", "line", "message"), WRONG.values(), ids=WRONG.keys())
def test_error_names_line_key_and_remedy(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(text, "mine.yaml")
    assert str(caught.value) == f"mine.yaml:{line}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("outputs: {text: eko.text}", "mine.yaml:2: outputs.text: there is no stage 'eko'"),
        ("stages: {echo: {queu: 1}}", "mine.yaml:2: stages.echo.queu: unknown key"),
        ("stages: {next: {queue: 1}}", "mine.yaml:2: stages.next.engine: this key is missing"),
    ],
)
def test_errors_over_a_preset_have_the_files_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(f"preset: echo\n{text}", "mine.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("a.out", "a.in")], "the edges form a cycle: a -> a"),
        ([("b.out", "a.in"), ("b.text", "a.in")], "two edges lead into a.in"),
    ],
)
def test_a_graph_without_a_file_is_checked_as_well(
    edges: list[tuple[str, str]], message: str
) -> None:
    config = PipelineConfig(
        stages={"a": StageConfig(engine="echo"), "b": StageConfig(engine="echo")},
        edges=tuple(EdgeConfig(*ends) for ends in edges),
        outputs={"text": "a.text"},
    )
    with pytest.raises(ConfigError, match=message):
        Graph.from_config(config)


@pytest.mark.parametrize(
    "model", ["./lm", "../lm", "/nowhere/lm", "~nobody_of_that_name/lm", "./" + "x" * 300]
)
def test_missing_folder_is_named_as_it_was_looked_for(tmp_path: Path, model: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(pipeline(A, "b: {engine: diffusers,", f"    model: {model}}}"))
    with pytest.raises(ConfigError) as caught:
        load_pipeline(file)
    tried = os.path.realpath(tmp_path / model)
    assert str(caught.value).startswith(
        f"{file}:4: stages.b.model: there is no folder {tried}. write a folder's path"
    )


def test_missing_folder_of_the_pipeline_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(pipeline("a: {engine: vllm}", more="model: ./lm"))
    with pytest.raises(ConfigError, match=f"{file}:4: model: there is no folder {tmp_path}/lm"):
        load_pipeline(file)


def test_unreadable_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_pipeline(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        load_pipeline(tmp_path / "latin.yaml")


@pytest.mark.parametrize("size", ["256", "1.2.3MiB", "MiB", "4GB", "0KiB", "-1MiB"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="is not a size. write it as 256MiB"):
        parse_bytes(size)
