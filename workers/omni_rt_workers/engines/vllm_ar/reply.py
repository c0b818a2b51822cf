"""One request's reply on its way from vLLM to the outbox: text, tokens, hidden states, facts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from omni_rt.errors import StageFailed
from omni_rt.wire.messages import TextPiece
from omni_rt_workers.engines.vllm_ar import logprobs

if TYPE_CHECKING:
    from omni_rt.request import CallPiece, TokenLogprob
    from omni_rt_workers.engine import Outbox, Task
    from omni_rt_workers.engines.vllm_ar.calls import Calls


@dataclass(slots=True)
class Rows:
    """Hidden states of one request that have not been given out yet."""

    next: int  # absolute position of the first of them
    end: int  # past the last position wanted
    width: int  # hidden size
    dtype: str
    parts: deque[torch.Tensor] = field(default_factory=deque)  # each [tokens, width]
    done: bool = False  # the port's last chunk has been given

    def write(self, into: torch.Tensor) -> None:
        """Move the first rows into `into` [count, width], each copied once."""
        at = 0
        while at < len(into):
            part = self.parts.popleft()
            count = min(len(part), len(into) - at)
            into[at : at + count].copy_(part[:count])
            if count < len(part):
                self.parts.appendleft(part[count:])
            at += count
        self.next += at


@dataclass(eq=False, slots=True)
class Group:
    """The replies of one task: one, or as many as its parameter `n` says."""

    task: Task
    prompt_tokens: int
    names: list[str] = field(default_factory=list)  # given to vLLM
    left: int = 0  # that have not ended
    sampled: int = 0
    cached: int = 0  # tokens of the prompt that the prefix cache answered
    found: dict[str, None] = field(default_factory=dict)  # facts, in order
    cut_off: bool = False  # one of them was too long

    def finish(self, out: Outbox) -> None:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sampled}
        if self.cached:
            usage["cached_tokens"] = self.cached
        out.finish(self.task, "length" if self.cut_off else "stop", usage, tuple(self.found))


@dataclass(eq=False, slots=True)
class Reply:
    """One reply to a task with what came of it so far."""

    group: Group
    id: str  # vLLM's own id of the request
    index: int
    facts: dict[int, str]  # token id -> name
    rows: dict[str, Rows] = field(default_factory=dict)  # by port
    calls: Calls | None = None  # if the text may call tools
    top_logprobs: int | None = None  # how many are wanted
    sampled: int = 0
    parsed: int = 0  # of `text_tokens`, by `calls`
    text: list[str] = field(default_factory=list)  # not given out yet
    text_tokens: list[int] = field(default_factory=list)  # that `text` was made of
    text_logprobs: list[TokenLogprob] = field(default_factory=list)  # of these
    tokens: list[int] = field(default_factory=list)  # not given out yet
    logprobs: list[torch.Tensor] = field(default_factory=list)  # not given out yet
    # Asked at every step of every request, so looked up once.
    task: Task = field(init=False)
    wants_text: bool = field(init=False)
    wants_tokens: bool = field(init=False)
    wants_logprobs: bool = field(init=False)
    streams: frozenset[str] = field(init=False)  # ports

    def __post_init__(self) -> None:
        self.task = self.group.task
        emit = self.task.emit
        self.wants_text = "text" in emit
        self.wants_tokens = "tokens" in emit
        self.wants_logprobs = "logprobs" in emit
        self.streams = frozenset(port for port, wanted in emit.items() if wanted.stream)

    def due(self, *, finished: bool) -> list[tuple[str, Rows]]:
        """The ports whose rows can be given out now."""
        return [
            (port, rows)
            for port, rows in self.rows.items()
            if finished or (port in self.streams and not rows.done)
        ]

    def take(self, said: Any) -> None:
        """What vLLM gave in one step, a `CompletionOutput`; its text lags behind while it could
        begin a stop string."""
        tokens = list(said.token_ids)
        self.sampled += len(tokens)
        self.group.sampled += len(tokens)
        if self.facts:
            found = self.group.found
            found.update((self.facts[one], None) for one in tokens if one in self.facts)
        if self.wants_tokens:
            self.tokens += tokens
        if self.wants_text:
            self.text_tokens += tokens
            if said.text:
                self.text.append(said.text)
        if said.logprobs and self.top_logprobs is not None:
            self._take_logprobs(tokens, said.logprobs, self.top_logprobs)

    def _take_logprobs(self, tokens: list[int], steps: Any, top: int) -> None:
        if self.wants_text:
            self.text_logprobs += map(logprobs.told, tokens, steps, [top] * len(tokens))
        if self.wants_logprobs:
            self.logprobs += map(logprobs.row, tokens, steps, [top] * len(tokens))

    def give(self, out: Outbox, reason: str | None) -> None:
        """Give out what is due: what streams now, the rest at the end, for which there is a
        `reason`."""
        finished = reason is not None
        last = finished and self.group.left == 1
        if self.wants_text and (finished or "text" in self.streams):
            self._give_text(out, reason)
        if self.wants_tokens and (finished or "tokens" in self.streams):
            self._put(out, "tokens", torch.tensor(self.tokens).long(), last)
            self.tokens = []
        if self.wants_logprobs and (finished or "logprobs" in self.streams):
            rows = self.logprobs or [torch.empty(0, 1 + (self.top_logprobs or 0), 2)]
            self._put(out, "logprobs", torch.stack(rows) if self.logprobs else rows[0], last)
            self.logprobs = []
        for port, due in self.due(finished=finished):
            self._give_rows(out, port, due, finished)

    def end(self, out: Outbox, reason: str) -> None:
        """The reply has been given out. The task is done if it was the last one."""
        self.group.left -= 1
        self.group.cut_off |= reason == "length"
        if not self.group.left:
            self.group.finish(out)

    def _put(self, out: Outbox, port: str, tensor: torch.Tensor, last: bool) -> None:
        if len(self.group.names) == 1:
            out.put(self.task, port, tensor, last=last)
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        out.reserve(self.task, port, tuple(tensor.shape), dtype).copy_(tensor)
        out.publish(self.task, port, last=last, meta={"index": self.index})

    def _give_text(self, out: Outbox, reason: str | None) -> None:
        streamed = "text" in self.streams
        text, ended = "".join(self.text), None
        calls: tuple[CallPiece, ...] = ()
        self.text = []
        if self.calls is not None and (text or reason is not None):
            new = self.text_tokens[self.parsed :]
            text, calls = self.calls.take(text, new, ended=reason is not None)
            self.parsed = len(self.text_tokens)
        if reason is not None and (len(self.group.names) > 1 or self.calls is not None):
            called = self.calls is not None and self.calls.called
            ended = "tool_calls" if called and reason == "stop" else reason
        trailing = reason is not None and self.text_logprobs
        if not (text or calls or ended or trailing or (reason is not None and not streamed)):
            return
        piece = TextPiece(
            text, tuple(self.text_tokens), self.index, tuple(self.text_logprobs), calls, ended
        )
        out.piece(self.task, piece)
        self.text_tokens, self.text_logprobs, self.parsed = [], [], 0

    def _give_rows(self, out: Outbox, port: str, rows: Rows, finished: bool) -> None:
        # The token sampled last has not been computed on; with asynchronous scheduling its row
        # may be there already, and is dropped if the reply ends here.
        ready = min(self.group.prompt_tokens + self.sampled - 1, rows.end)
        count = max(ready - rows.next, 0)
        last = finished or ready == rows.end
        if rows.done or not (count or last):
            return
        into = out.reserve(self.task, port, (count, rows.width), rows.dtype)
        rows.write(into)
        rows.done = last
        out.publish(self.task, port, last=last)


def checked(reason: str | None, request: str) -> str:
    """Why a reply ended. Raises `StageFailed` if vLLM gave it up."""
    if reason not in ("stop", "length"):
        raise StageFailed(f"vLLM ended the request with '{reason}'", request=request)
    return reason
