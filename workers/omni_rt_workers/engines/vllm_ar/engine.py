"""The engine: requests in, one step of vLLM for all of them, text, tokens and hidden states out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from omni_rt.errors import BadRequest, ConfigError, StageFailed
from omni_rt.wire.messages import Ports, PortSpec
from omni_rt_workers.engine import EngineBroken
from omni_rt_workers.engines.vllm_ar import arguments, guard, prompt

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engine import Outbox, Say, Task
    from omni_rt_workers.engines.vllm_ar.core import Core
    from omni_rt_workers.engines.vllm_ar.failure import Culprit
    from omni_rt_workers.engines.vllm_ar.reply import Reply, Rows

log = logging.getLogger(__name__)

_OUTPUTS = (PortSpec("text", "text"), PortSpec("tokens", "tokens"), PortSpec("hidden", "tensor"))


class AREngine:
    """Up to `max_batch` requests are in each step; vLLM keeps the others waiting."""

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._hidden = arguments.Hidden()
        self._facts: dict[int, str] = {}  # token id -> name
        self._replies: dict[str, Reply] = {}  # by the name given to vLLM
        self._names: dict[Task, str] = {}
        self._numbers = count()
        self._blocked: set[str] | None = None  # what could run and found no room, see `idle`
        self._search: Iterator[list[Any] | Culprit] | None = None  # after a step that failed
        self._in_vain = 0  # such searches since a step last went well
        self._build: prompt.Build = prompt.from_template
        self._core: Core

    # ---- start and end

    def load(self, say: Say) -> Ports:
        self._hidden = arguments.check_options(self._spec)
        versions = guard.check_versions(self._spec.name)
        say("importing vllm", 0.0)
        arguments.set_environment(self._spec)
        guard.check_seams(self._spec.name)
        guard.check_alone(self._spec.name)
        from omni_rt_workers.engines.vllm_ar import core, sampling

        self._check_sampling()
        say("loading weights", 0.5)
        self._core = core.Core(self._spec, self._hidden)
        self._build = prompt.builder(self._core.model_type)
        facts = self._spec.options.get("facts") or {}
        self._facts = prompt.fact_tokens(facts, self._core.tokenizer)
        say("warming up", 0.9)
        self._core.warm_up()
        log.info("stage %s: context of %d tokens, %s", self._spec.name, self.context, versions)
        takes = tuple(sorted(self._core.takes))
        return Ports((), _OUTPUTS, sampling.PARAMS, 2 * self._core.slots, takes=takes)

    def _check_sampling(self) -> None:
        from omni_rt_workers.engines.vllm_ar import sampling

        try:
            sampling.check(self._spec.sampling)
        except BadRequest as error:
            raise ConfigError(
                f"stage '{self._spec.name}': sampling: {error.message}",
                stage=self._spec.name,
                hint=error.hint,
            ) from None

    @property
    def context(self) -> int:
        """Tokens that prompt and reply may have together."""
        return self._core.context

    @property
    def core(self) -> Core:
        return self._core

    def memory(self) -> dict[str, int]:
        return self._core.memory()

    def close(self) -> None:
        self._replies.clear()
        self._names.clear()
        if hasattr(self, "_core"):
            self._core.close()
            del self._core

    # ---- requests

    def add(self, task: Task) -> None:
        from omni_rt_workers.engines.vllm_ar import sampling

        asked = prompt.prompt_of(task.values, self._core.tokenizer, self._build)
        rendered = self._core.render(asked)
        ids = rendered["prompt_token_ids"]
        room = self.context - len(ids)
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; the context holds {self.context}, "
                "at least one of them for the reply",
                param=prompt.param_of(task.values),
                stage=self._spec.name,
                hint="shorten the prompt",
            )
        rows = "hidden" in task.emit
        params = sampling.sampling_params(task, self._core.sampling, room, rows=rows)
        name = str(next(self._numbers))
        id = self._core.add(name, rendered, params, -task.priority)
        self._names[task] = name
        self._replies[name] = self._reply(task, id, len(ids))

    def _reply(self, task: Task, id: str, prompt_tokens: int) -> Reply:
        from omni_rt_workers.engines.vllm_ar.reply import Reply

        reply = Reply(task, id, prompt_tokens, self._facts)
        if "hidden" in task.emit:
            reply.rows = self._rows(prompt_tokens)
            self._core.watch_rows(id, reply.rows.next, reply.rows.end)
        return reply

    def _rows(self, prompt_tokens: int) -> Rows:
        from omni_rt_workers.engines.vllm_ar.reply import Rows

        first = prompt_tokens if self._hidden.rows == "reply" else 0
        end = prompt_tokens if self._hidden.rows == "prompt" else self.context
        return Rows(first, end, self._core.width, self._core.dtype)

    def feed(self, task: Task, port: str) -> None:
        """Nothing to do: the engine has no input ports."""

    def abort(self, task: Task) -> None:
        name = self._names.get(task)
        if name is not None:
            self._core.abort([self._replies[name].id])
            self._forget(name)

    def _forget(self, name: str) -> None:
        reply = self._replies.pop(name)
        del self._names[reply.task]
        if reply.rows is not None:
            self._core.forget_rows([reply.id])

    # ---- steps

    @property
    def idle(self) -> bool:
        """Also when those that could run wait for memory that held ones keep."""
        if self._search is not None or self._core.owes_step:
            return False
        if self._blocked is None:
            return all(reply.task.held for reply in self._replies.values())
        runnable = self._runnable()
        return not runnable or runnable == self._blocked

    def step(self) -> None:
        if self._search is not None:
            self._go_on_searching(self._search)
            return
        held = {reply.id for reply in self._replies.values() if reply.task.held}
        runnable = self._runnable() if held else None
        try:
            outputs = self._core.step(held)
        except Exception as error:
            log.warning("stage %s: a step failed: %s", self._spec.name, error)
            self._search = self._core.search(error, self._runnable_ids)
            return
        self._blocked = None if self._core.moved else runnable
        self._give_all(outputs)

    def _give_all(self, outputs: list[Any]) -> None:
        self._in_vain = 0
        self._fetch_rows(outputs)
        for output in outputs:
            self._give(output)

    def _runnable(self) -> set[str]:
        return {name for name, reply in self._replies.items() if not reply.task.held}

    def _fetch_rows(self, outputs: list[Any]) -> None:
        """Take the rows that are due from the worker: one call for all requests, none if none."""
        due = [
            (reply.id, reply.rows)
            for output in outputs
            if (reply := self._replies[output.request_id]).rows is not None
            and (output.finished or reply.wants_rows_now)
        ]
        if not due:
            return
        taken = self._core.take_rows([id for id, _ in due])
        for (_, rows), parts in zip(due, taken, strict=True):
            rows.parts.extend(parts)

    def _give(self, output: Any) -> None:
        """Give out what a step made for one request; an error in that fails this request alone."""
        reply = self._replies[output.request_id]
        said = output.outputs[0]
        try:
            reply.take(said.text, list(said.token_ids))
            reply.give(self._out, finished=output.finished)
            if output.finished:
                reply.finish(self._out, said.finish_reason)
        except Exception as error:
            self._out.fail(reply.task, error)
            if not output.finished:
                self._core.abort([reply.id])
            self._forget(output.request_id)
        else:
            if output.finished:
                self._forget(output.request_id)

    def _go_on_searching(self, search: Iterator[list[Any] | Culprit]) -> None:
        """After a step that raised: whoever made it fail fails alone, the others go on. One step
        of the search at a time, so that the worker can hear of aborts meanwhile.

        Raises `EngineBroken` if vLLM cannot be used any more.
        """
        found = next(search, None)
        if found is None:
            self._search = None
            self._blocked = None
            self._in_vain += 1
            if self._in_vain > 3:  # in a row: no request got on and none is to blame
                raise EngineBroken("vLLM's steps fail, whatever request is in them")
        elif isinstance(found, list):
            self._give_all(found)
        else:
            self._fail(found.id, found.error)

    def _runnable_ids(self) -> set[str]:
        return {reply.id for reply in self._replies.values() if not reply.task.held}

    def _fail(self, id: str, error: Exception) -> None:
        name = next(name for name, reply in self._replies.items() if reply.id == id)
        failed = StageFailed(
            f"the model fails on this request: {type(error).__name__}: {error}",
            request=self._replies[name].task.request,
            stage=self._spec.name,
        )
        failed.__cause__ = error
        self._out.fail(self._replies[name].task, failed)
        self._forget(name)
