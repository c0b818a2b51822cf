"""One request's reply on its way from vLLM to the outbox: text, tokens, hidden states, facts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from omni_rt.errors import StageFailed

if TYPE_CHECKING:
    from omni_rt_workers.engine import Outbox, Task


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
class Reply:
    """A task with what came of it so far."""

    task: Task
    id: str  # vLLM's own id of the request
    prompt_tokens: int
    facts: dict[int, str]  # token id -> name
    rows: Rows | None = None
    sampled: int = 0
    found: dict[str, None] = field(default_factory=dict)  # facts, in order
    text: list[str] = field(default_factory=list)  # not given out yet
    text_tokens: list[int] = field(default_factory=list)  # that `text` was made of
    tokens: list[int] = field(default_factory=list)  # not given out yet
    # Asked at every step of every request, so looked up once.
    wants_text: bool = field(init=False)
    wants_tokens: bool = field(init=False)
    streams: frozenset[str] = field(init=False)  # ports

    def __post_init__(self) -> None:
        emit = self.task.emit
        self.wants_text = "text" in emit
        self.wants_tokens = "tokens" in emit
        self.streams = frozenset(port for port, wanted in emit.items() if wanted.stream)

    @property
    def wants_rows_now(self) -> bool:
        return self.rows is not None and "hidden" in self.streams and not self.rows.done

    def take(self, text: str, tokens: list[int]) -> None:
        """What vLLM gave in one step; `text` lags behind while it could begin a stop string."""
        self.sampled += len(tokens)
        if self.facts:
            self.found.update((self.facts[one], None) for one in tokens if one in self.facts)
        if self.wants_tokens:
            self.tokens += tokens
        if self.wants_text:
            self.text_tokens += tokens
            if text:
                self.text.append(text)

    def give(self, out: Outbox, *, finished: bool) -> None:
        """Give out what is due: what streams now, the rest at the end."""
        if self.wants_text and (finished or "text" in self.streams):
            self._give_text(out)
        if self.wants_tokens and (finished or "tokens" in self.streams):
            out.put(self.task, "tokens", torch.tensor(self.tokens).long(), last=finished)
            self.tokens = []
        if self.rows is not None and (finished or self.wants_rows_now):
            self._give_rows(out, self.rows, finished)

    def finish(self, out: Outbox, reason: str | None) -> None:
        if reason not in ("stop", "length"):
            raise StageFailed(f"vLLM ended the request with '{reason}'", request=self.task.request)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sampled}
        out.finish(self.task, reason, usage, tuple(self.found))

    def _give_text(self, out: Outbox) -> None:
        if self.text or "text" not in self.streams:
            out.text(self.task, "".join(self.text), tuple(self.text_tokens))
            self.text, self.text_tokens = [], []

    def _give_rows(self, out: Outbox, rows: Rows, finished: bool) -> None:
        # The token sampled last has not been computed on; with asynchronous scheduling its row
        # may be there already, and is dropped if the reply ends here.
        ready = min(self.prompt_tokens + self.sampled - 1, rows.end)
        count = max(ready - rows.next, 0)
        last = finished or ready == rows.end
        if rows.done or not (count or last):
            return
        into = out.reserve(self.task, "hidden", (count, rows.width), rows.dtype)
        rows.write(into)
        rows.done = last
        out.publish(self.task, "hidden", last=last)
