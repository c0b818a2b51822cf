"""The engine without a model: says what it was asked. For tests and for trying the wiring.

Options (`echo:`): `words_per_step` (default 1), `bytes` (size of what the port `out` gives for a
request without an input; default: the prompt's bytes), `chunks` (how often; default 1).
Ports: in `in` (anything, streamed or whole), out `text` (the prompt), `out` (what came in).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omni_rt.errors import BadRequest, ConfigError, nearest
from omni_rt.wire.messages import ParamSpec, Ports, PortSpec, StageSpec
from omni_rt_workers.engine import Engine, Outbox, Say, Task

_OPTIONS = ("words_per_step", "bytes", "chunks")


@dataclass(slots=True)
class _Echo:
    words: list[str]
    said: int = 0
    passed: int = 0  # chunks passed on from `in` to `out`
    payloads: list[bytes] = field(default_factory=list)  # for `out`, if nothing comes in


class EchoEngine:
    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        options: dict[str, Any] = spec.options.get("echo", {})
        for name in options:
            if name not in _OPTIONS:
                raise ConfigError(f"echo has no option '{name}'; {nearest(name, _OPTIONS)}")
        self._out = out
        self._words = int(options.get("words_per_step", 1))
        self._bytes = options.get("bytes")
        self._chunks = int(options.get("chunks", 1))
        self._slots = spec.max_batch
        self._tasks: dict[Task, _Echo] = {}

    def load(self, say: Say) -> Ports:
        say("warming up", 1.0)
        return Ports(
            inputs=(PortSpec("in", "tensor"),),
            outputs=(PortSpec("text", "text"), PortSpec("out", "tensor")),
            params=(ParamSpec("max_tokens", "int", 1, about="words of the prompt to say"),),
            slots=self._slots,
        )

    def add(self, task: Task) -> None:
        prompt = prompt_of(task)
        if not prompt and "text" in task.emit:
            raise BadRequest("the prompt is empty", param="prompt")
        words = prompt.split(" ")[: task.params.get("max_tokens")]
        echo = _Echo([word if k == 0 else f" {word}" for k, word in enumerate(words)])
        if "out" in task.emit and not task.inputs.ports():
            data = prompt.encode() if self._bytes is None else bytes(int(self._bytes))
            echo.payloads = [data] * self._chunks
        if "text" not in task.emit:
            echo.words = []
        self._tasks[task] = echo

    def feed(self, task: Task, port: str) -> None:
        return None  # `step` looks at what has arrived

    def abort(self, task: Task) -> None:
        self._tasks.pop(task, None)

    def step(self) -> None:
        for task, echo in list(self._tasks.items()):
            if not task.held and self._movable(task, echo):
                self._advance(task, echo)

    def _advance(self, task: Task, echo: _Echo) -> None:
        piece = echo.words[echo.said : echo.said + self._words]
        if piece:
            echo.said += len(piece)
            self._out.text(task, "".join(piece), tuple(range(len(piece))))
        if echo.payloads:
            data = echo.payloads.pop()
            self._out.put_bytes(task, "out", data, last=not echo.payloads)
        elif self._to_pass(task, echo):
            self._pass_on(task, echo)
        if self._finished(task, echo):
            del self._tasks[task]
            usage = {"prompt_tokens": len(echo.words), "completion_tokens": echo.said}
            self._out.finish(task, "stop", usage)

    def _pass_on(self, task: Task, echo: _Echo) -> None:
        for view in task.inputs.views("in"):
            echo.passed += 1
            last = task.inputs.ended("in") and echo.passed == task.inputs.count("in")
            self._out.put_bytes(task, "out", view, last=last)
        task.inputs.release("in", echo.passed)

    def _to_pass(self, task: Task, echo: _Echo) -> bool:
        return "in" in task.inputs.ports() and echo.passed < task.inputs.count("in")

    def _finished(self, task: Task, echo: _Echo) -> bool:
        return (
            echo.said >= len(echo.words)
            and not echo.payloads
            and not self._to_pass(task, echo)
            and task.inputs.ended("in")
        )

    def _movable(self, task: Task, echo: _Echo) -> bool:
        return (
            echo.said < len(echo.words)
            or bool(echo.payloads)
            or self._to_pass(task, echo)
            or self._finished(task, echo)
        )

    @property
    def idle(self) -> bool:
        return not any(
            not task.held and self._movable(task, echo) for task, echo in self._tasks.items()
        )

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._tasks.clear()


def prompt_of(task: Task) -> str:
    """The request's prompt: as given, or the last message."""
    messages = task.values.get("messages") or ()
    return task.values.get("prompt") or (messages[-1]["content"] if messages else "")


def make(spec: StageSpec, out: Outbox) -> Engine:
    return EchoEngine(spec, out)
