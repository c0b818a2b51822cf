"""The engine: requests in, one step of vLLM for all of them, text, tokens and hidden states out."""

from __future__ import annotations

import gc
import logging
from itertools import count
from typing import TYPE_CHECKING, Any

from omni_rt.errors import BadRequest, ConfigError, StageFailed, nearest
from omni_rt.wire.messages import Ports, PortSpec
from omni_rt_workers.engines.vllm_ar import arguments, guard

if TYPE_CHECKING:
    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engine import Outbox, Say, Task
    from omni_rt_workers.engines.vllm_ar.reply import Reply, Rows

log = logging.getLogger(__name__)

_OUTPUTS = (PortSpec("text", "text"), PortSpec("tokens", "tokens"), PortSpec("hidden", "tensor"))


class AREngine:
    """Up to `max_batch` requests are in each step; vLLM keeps the others waiting."""

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._hidden = arguments.Hidden()
        self._facts: dict[int, str] = {}
        self._defaults: dict[str, Any] = {}  # the model's own sampling parameters
        self._replies: dict[str, Reply] = {}  # by the id given to vLLM
        self._ids: dict[Task, str] = {}
        self._numbers = count()
        self._blocked: set[str] | None = None  # what could run and found no room, see `idle`
        self._all_blocks = 0
        self._broken: Exception | None = None
        self._started = False  # vLLM has, or may have, process groups
        self._llm: Any = None
        self._tokenizer: Any = None

    # ---- start and end

    def load(self, say: Say) -> Ports:
        self._hidden = arguments.check_options(self._spec)
        found = guard.check_versions(self._spec.name)
        say("importing vllm", 0.0)
        arguments.set_environment(self._spec)
        self._set_threads()
        import vllm  # noqa: F401

        guard.check_seams(self._spec.name)
        guard.check_alone(self._spec.name)
        from omni_rt_workers.engines.vllm_ar import sampling

        self._check_sampling()
        say("loading weights", 0.5)
        self._start()
        say("warming up", 0.9)
        self._warm_up()
        log.info("stage %s: context of %d tokens, %s", self._spec.name, self._context, found)
        return Ports((), _OUTPUTS, sampling.PARAMS, 2 * self._slots)

    def _set_threads(self) -> None:
        import torch

        wanted = arguments.threads(self._spec)
        if self._spec.device == "cpu" and torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

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

    def _start(self) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            config = arguments.engine_args(self._spec, self._hidden).create_engine_config()
            arguments.set_scheduler(config)
            self._started = True
            self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"stage '{self._spec.name}': vLLM cannot serve "
                f"{arguments.source(self._spec)}: {arguments.said(error)}",
                stage=self._spec.name,
            ) from error
        model = config.model_config
        self._context: int = model.max_model_len
        self._slots: int = config.scheduler_config.max_num_seqs
        self._width: int = model.get_hidden_size()
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._defaults = model.get_diff_sampling_param()
        self._tokenizer = self._llm.get_tokenizer()
        self._facts = self._fact_tokens()
        self._all_blocks = self._free_blocks

    def _fact_tokens(self) -> dict[int, str]:
        """Token id -> name. The tokens become special ones, so that they never appear as text."""
        named: dict[str, str] = self._spec.options.get("facts") or {}
        ids = self._tokenizer.get_vocab()
        for name, token in named.items():
            if token not in ids:
                raise ConfigError(
                    f"stage '{self._spec.name}': the tokenizer has no token '{token}' "
                    f"(fact '{name}')",
                    stage=self._spec.name,
                    hint=nearest(token, self._tokenizer.get_added_vocab()),
                )
        self._tokenizer.add_tokens(list(named.values()), special_tokens=True)
        return {ids[token]: name for name, token in named.items()}

    def _warm_up(self) -> None:
        """Run a greedy and a seeded request of two tokens, hidden states and all."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        ids = []
        for heat in (0.0, 1.0):
            params = SamplingParams(temperature=heat, top_p=0.9, seed=0, max_tokens=2)
            ids.append(self._llm.add_request(f"warm-up {heat}", tokens_input([0, 0]), params))
            self._llm.collective_rpc("watch_rows", args=(ids[-1], 0, 3))
        while not self.idle or self._llm.has_unfinished_requests():
            self._llm.step()
        self._llm.collective_rpc("forget_rows", args=(ids,))

    def memory(self) -> dict[str, int]:
        """Of all ranks together."""
        ranks = self._llm.collective_rpc("memory_bytes")
        return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}

    def close(self) -> None:
        self._replies.clear()
        self._ids.clear()
        if self._llm is not None:
            self._llm.engine_core.shutdown()
        elif self._started:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        self._llm = self._tokenizer = None
        self._started = False
        gc.collect()  # vLLM's objects hold each other; a later engine must not find them

    # ---- requests

    def add(self, task: Task) -> None:
        from omni_rt_workers.engines.vllm_ar import prompt, sampling

        ids = prompt.token_ids(task.values, self._tokenizer)
        room = self._context - len(ids)
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; the context holds {self._context}, "
                "at least one of them for the reply",
                param=prompt.param_of(task.values),
                stage=self._spec.name,
                hint="shorten the prompt",
            )
        rows = "hidden" in task.emit
        params = sampling.sampling_params(task, self._defaults, room, rows=rows)
        name = str(next(self._numbers))
        self._ids[task] = name
        self._replies[name] = self._reply(task, self._enter(name, task, ids, params), len(ids))

    def _enter(self, name: str, task: Task, ids: list[int], params: Any) -> str:
        """vLLM's own id of the request."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        try:
            entered: str = self._llm.add_request(
                name, tokens_input(ids), params, priority=-task.priority
            )
        except (VLLMClientError, ValueError) as error:
            param = getattr(error, "parameter", None)
            raise BadRequest(str(error), param=param, stage=self._spec.name) from error
        return entered

    def _reply(self, task: Task, id: str, prompt_tokens: int) -> Reply:
        from omni_rt_workers.engines.vllm_ar.reply import Reply

        reply = Reply(task, id, prompt_tokens, self._facts)
        if "hidden" in task.emit:
            reply.rows = self._rows(prompt_tokens)
            self._llm.collective_rpc("watch_rows", args=(id, reply.rows.next, reply.rows.end))
        return reply

    def _rows(self, prompt_tokens: int) -> Rows:
        from omni_rt_workers.engines.vllm_ar.reply import Rows

        first = prompt_tokens if self._hidden.rows == "reply" else 0
        end = prompt_tokens if self._hidden.rows == "prompt" else self._context
        return Rows(first, end, self._width, self._dtype)

    def feed(self, task: Task, port: str) -> None:
        """Nothing to do: the engine has no input ports."""

    def abort(self, task: Task) -> None:
        if self._broken is not None:
            raise StageFailed(
                "vLLM could not be made usable again after a failed step", stage=self._spec.name
            ) from self._broken
        name = self._ids.get(task)
        if name is not None:
            self._llm.abort_request([self._replies[name].id], internal=True)
            self._forget(name)

    def _forget(self, name: str) -> None:
        reply = self._replies.pop(name)
        del self._ids[reply.task]
        if reply.rows is not None:
            self._llm.collective_rpc("forget_rows", args=([reply.id],))

    # ---- steps

    @property
    def idle(self) -> bool:
        """Also when those that could run wait for memory that held ones keep."""
        core = self._llm.engine_core.engine_core
        if core.batch_queue or core.scheduler.has_finished_requests():
            return False  # vLLM's worker has yet to hear of ends: one more step, if an empty one
        runnable = self._runnable()
        return not runnable or runnable == self._blocked

    def step(self) -> None:
        runnable = self._runnable()
        held = {reply.id for reply in self._replies.values() if reply.task.held}
        self._scheduler.held = held
        try:
            outputs = self._llm.step()
        except Exception:
            self._recover()
            raise
        moved = bool(outputs) or self._scheduler.last.total_num_scheduled_tokens > 0
        self._blocked = None if moved or not held else runnable
        self._fetch_rows(outputs)
        for output in outputs:
            self._give(output)

    def _runnable(self) -> set[str]:
        return {name for name, reply in self._replies.items() if not reply.task.held}

    def _fetch_rows(self, outputs: list[Any]) -> None:
        """Take the rows that are due from the worker: one call for all requests, none if none."""
        due = []
        for output in outputs:
            reply = self._replies[output.request_id]
            if reply.rows is not None and (output.finished or reply.wants_rows_now):
                due.append(reply)
        if not due:
            return
        taken = self._llm.collective_rpc("take_rows", args=([reply.id for reply in due],))[0]
        for reply, parts in zip(due, taken, strict=True):
            assert reply.rows is not None
            reply.rows.parts.extend(parts)

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
                self._llm.abort_request([reply.id], internal=True)
            self._forget(output.request_id)
        else:
            if output.finished:
                self._forget(output.request_id)

    # ---- after a failed step

    def _recover(self) -> None:
        """Empty vLLM after an exception: its loop then aborts every task anyway. If something of
        them stays behind, `abort` raises, and the worker is started anew."""
        core = self._llm.engine_core.engine_core
        ids = [reply.id for reply in self._replies.values()]
        try:
            self._llm.collective_rpc("forget_step")
            self._llm.collective_rpc("forget_rows", args=(ids,))
            if core.batch_queue:
                core.batch_queue.clear()
            self._scheduler.repeat_ends()
            self._llm.abort_request(ids, internal=True)
            self._llm.step()  # empty: tells the worker of the ends
            self._check_empty()
            # The cache counts blocks as computed from when they are scheduled.
            if not self._llm.reset_prefix_cache():
                raise StageFailed("the prefix cache could not be emptied")
        except Exception as error:
            log.exception("stage %s: vLLM is not usable any more", self._spec.name)
            self._broken = error

    def _check_empty(self) -> None:
        known = self._llm.collective_rpc("held_requests")[0]
        left = len(self._scheduler.requests)
        if any(known) or left or self._free_blocks != self._all_blocks:
            raise StageFailed(
                f"after the abort of all requests the worker still has {known}, the scheduler "
                f"{left}, and {self._free_blocks} of {self._all_blocks} blocks are free"
            )

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    @property
    def _free_blocks(self) -> int:
        blocks: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks
