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
    from omni_rt_workers.engines.vllm_ar.calls import Calls
    from omni_rt_workers.engines.vllm_ar.core import Core
    from omni_rt_workers.engines.vllm_ar.failure import Culprit
    from omni_rt_workers.engines.vllm_ar.reply import Group, Reply, Rows

log = logging.getLogger(__name__)

_ROWS = ("hidden", "embeds")
_OUTPUTS = (
    PortSpec("text", "text"),
    PortSpec("tokens", "tokens"),
    PortSpec("logprobs", "tensor"),
    *[PortSpec(port, "tensor") for port in _ROWS],
)


class AREngine:
    """Up to `max_batch` requests are in each step; vLLM keeps the others waiting."""

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._hidden = arguments.Hidden()
        self._facts: dict[int, str] = {}  # token id -> name
        self._replies: dict[str, Reply] = {}  # by the name given to vLLM
        self._groups: dict[Task, Group] = {}
        self._numbers = count()
        self._blocked: set[str] | None = None  # what could run and found no room, see `idle`
        self._search: Iterator[list[Any] | Culprit] | None = None  # after a step that failed
        self._in_vain = 0  # such searches since a step last went well
        self._build: prompt.Build = prompt.from_template
        self._parser: Any = None  # vLLM's class that finds calls of tools
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
        self._parser = self._find_parser()
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

    def _find_parser(self) -> Any:
        name = self._spec.options.get("tool_parser")
        if name is None:
            return None
        from omni_rt_workers.engines.vllm_ar import calls

        return calls.parser_named(name, self._spec.name)

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
        self._groups.clear()
        if hasattr(self, "_core"):
            self._core.close()
            del self._core

    # ---- requests

    def add(self, task: Task) -> None:
        from omni_rt_workers.engines.vllm_ar import sampling
        from omni_rt_workers.engines.vllm_ar.reply import Group

        sampling.check(task.params)
        rendered = self._core.render(self._prompt(task))
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
        replies = task.params.get("n") or 1
        if replies > 1 and not task.emit.keys().isdisjoint(_ROWS):
            raise BadRequest("with n above 1 there are no hidden states", param="n")
        group = self._groups[task] = Group(task, len(ids), left=replies)
        try:
            for index in range(replies):
                self._start(group, rendered, room, index)
        except BaseException:
            self._drop(group)
            raise

    def _prompt(self, task: Task) -> prompt.Prompt:
        tools = task.params.get("tools")
        more = {"tools": tools} if tools and task.params.get("tool_choice") != "none" else {}
        asked = prompt.prompt_of(task.values, self._core.tokenizer, self._build, more)
        keep = task.params.get("truncate_prompt_tokens")
        if keep is not None and asked.files:
            raise BadRequest(
                "a prompt with pictures, sound or film cannot be truncated",
                param="truncate_prompt_tokens",
            )
        return asked if keep is None else prompt.Prompt(asked.ids[-keep:])

    def _start(self, group: Group, rendered: dict[str, Any], room: int, index: int) -> None:
        from omni_rt_workers.engines.vllm_ar import sampling

        task = group.task
        calls = self._calls(task)
        params = sampling.sampling_params(
            task,
            self._core.sampling,
            room,
            rows=not task.emit.keys().isdisjoint(_ROWS),
            index=index,
            special_tokens=calls is not None and calls.special_tokens,
        )
        name = str(next(self._numbers))
        lora = task.params.get("lora")
        id = self._core.add(name, rendered, params, -task.priority, lora)
        group.names.append(name)
        self._replies[name] = self._reply(group, id, index, params.logprobs, calls)

    def _reply(
        self, group: Group, id: str, index: int, top_logprobs: int | None, calls: Calls | None
    ) -> Reply:
        from omni_rt_workers.engines.vllm_ar.reply import Reply

        reply = Reply(group, id, index, self._facts, calls=calls, top_logprobs=top_logprobs)
        for port in _ROWS:
            if port in group.task.emit:
                rows = reply.rows[port] = self._rows(group.prompt_tokens)
                self._core.watch_rows(id, port, rows.next, rows.end)
        return reply

    def _calls(self, task: Task) -> Calls | None:
        """What finds calls of tools in a reply to the task, if it may have some."""
        tools = task.params.get("tools")
        if not tools or task.params.get("tool_choice") == "none" or "text" not in task.emit:
            return None
        if self._parser is None:
            raise BadRequest(
                f"stage {self._spec.name} does not find calls of tools in what the model says",
                param="tools",
                hint=f"name vLLM's parser: stages.{self._spec.name}.tool_parser",
            )
        from omni_rt_workers.engines.vllm_ar.calls import Calls

        stream = task.emit["text"].stream
        try:
            return Calls(self._parser, self._core.tokenizer, tools, stream=stream)
        except ValueError as error:
            raise BadRequest(f"tools: {error}", param="tools") from error

    def _rows(self, prompt_tokens: int) -> Rows:
        from omni_rt_workers.engines.vllm_ar.reply import Rows

        first = prompt_tokens if self._hidden.rows == "reply" else 0
        end = prompt_tokens if self._hidden.rows == "prompt" else self.context
        return Rows(first, end, self._core.width, self._core.dtype)

    def feed(self, task: Task, port: str) -> None:
        """Nothing to do: the engine has no input ports."""

    def abort(self, task: Task) -> None:
        if task in self._groups:
            self._drop(self._groups[task])

    def _drop(self, group: Group) -> None:
        """All replies of a task."""
        left = [name for name in group.names if name in self._replies]
        self._core.abort([self._replies[name].id for name in left])
        for name in left:
            self._forget(name)
        del self._groups[group.task]

    def _forget(self, name: str) -> None:
        reply = self._replies.pop(name)
        if reply.rows:
            self._core.forget_rows([(reply.id, port) for port in reply.rows])

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
            (reply.id, port, rows)
            for output in outputs
            if (reply := self._replies[output.request_id]).rows
            for port, rows in reply.due(finished=output.finished)
        ]
        if not due:
            return
        taken = self._core.take_rows([(id, port) for id, port, _ in due])
        for (_, _, rows), parts in zip(due, taken, strict=True):
            rows.parts.extend(parts)

    def _give(self, output: Any) -> None:
        """Give out what a step made for one request; an error in that fails this request alone."""
        from omni_rt_workers.engines.vllm_ar.reply import checked

        reply = self._replies.get(output.request_id)
        if reply is None:  # another reply of its task failed just now
            return
        said = output.outputs[0]
        reason = None
        try:
            if output.finished:
                reason = checked(said.finish_reason, reply.task.request)
            reply.take(said)
            reply.group.cached = max(reply.group.cached, output.num_cached_tokens or 0)
            reply.give(self._out, reason)
            if reason is not None:
                reply.end(self._out, reason)
        except Exception as error:
            self._out.fail(reply.task, error)
            self._drop(reply.group)
        else:
            if output.finished:
                self._forget(output.request_id)
                if not reply.group.left:
                    del self._groups[reply.task]

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
        reply = next(reply for reply in self._replies.values() if reply.id == id)
        failed = StageFailed(
            f"the model fails on this request: {type(error).__name__}: {error}",
            request=reply.task.request,
            stage=self._spec.name,
        )
        failed.__cause__ = error
        self._out.fail(reply.task, failed)
        self._drop(reply.group)
