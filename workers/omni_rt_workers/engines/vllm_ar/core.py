"""vLLM's `LLMEngine` with its core in this process, and what lies behind it.

All that reaches past `LLMEngine`'s own methods is here: the scheduler's held requests, the
worker's rows, and how a step that failed is taken up again.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from omni_rt.errors import BadRequest, ConfigError, nearest
from omni_rt.wire.tensors import nbytes_of
from omni_rt_workers.engines.vllm_ar import arguments, failure, media, ranks, rest, rows

if TYPE_CHECKING:
    import torch

    from omni_rt.wire.messages import StageSpec
    from omni_rt_workers.engines.vllm_ar.prompt import Prompt

log = logging.getLogger(__name__)


class Core:
    """Requests go by the name they were added under, or by the id that vLLM made of it."""

    def __init__(self, spec: StageSpec, hidden: arguments.Hidden) -> None:
        """Load the weights. Raises `ConfigError` with vLLM's complaint."""
        try:
            config = arguments.engine_args(spec, hidden).create_engine_config()
            arguments.set_scheduler(config)
            alone = config.parallel_config.world_size == 1
            with rest.drowsy_threads() if alone else ranks.meeting():
                self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except BaseException as error:
            cleanup_dist_env_and_memory()
            if not isinstance(error, ValueError | OSError):
                raise
            raise ConfigError(
                f"stage '{spec.name}': vLLM cannot serve {arguments.source(spec)}: "
                f"{arguments.said(error)}",
                stage=spec.name,
            ) from error
        self._adapters = arguments.adapters(spec)
        model = config.model_config
        self.context: int = model.max_model_len  # tokens of prompt and reply
        self.slots: int = config.scheduler_config.max_num_seqs
        self.width: int = model.get_hidden_size()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.sampling: dict[str, Any] = model.get_diff_sampling_param()  # the model's own
        self.tokenizer: Any = self._llm.get_tokenizer()
        self.model_type = str(getattr(model.hf_config, "model_type", ""))
        self._served = Path(arguments.source(spec)).name
        self.takes: set[str] = set()  # modalities beside text
        if model.is_multimodal_model:
            limits = self._llm.renderer.get_mm_processor().info.allowed_mm_limits
            self.takes = {modality for modality, limit in limits.items() if limit}
        self._scheduler: Any = self._llm.engine_core.engine_core.scheduler
        self._all_blocks = self._free_blocks
        self._rows: rows.SharedRows | None = None
        if not alone:
            ranks.die_with_ranks(self._llm.engine_core.engine_core.model_executor)
            self._rows = self._share_rows(spec.name)

    def _share_rows(self, stage: str) -> rows.SharedRows:
        """Hidden states of ranks in processes of their own come through memory shared with them."""
        width_bytes = self.width * nbytes_of(self.dtype, (1,))
        shared = rows.SharedRows(self.slots * self.context * width_bytes)
        arena = shared.arena
        refused = self._llm.collective_rpc(
            "share_rows", args=(os.getpid(), arena.fd, arena.size_bytes)
        )
        if any(refused):
            log.warning(
                "stage %s: hidden states come through a pipe, and slower, as vLLM's processes "
                "cannot open the worker's memory: %s",
                stage,
                refused[0],
            )
        return shared

    # ---- requests

    def render(self, prompt: Prompt) -> dict[str, Any]:
        """vLLM's input of a prompt; its `prompt_token_ids` have a place for each row of pictures,
        sound and film. Raises `BadRequest`."""
        if not prompt.files:
            return dict(tokens_input(prompt.ids))
        data = media.decoded(prompt.files, self._served, self.takes)
        tokens = {
            "prompt_token_ids": prompt.ids,
            "multi_modal_data": data,
            "mm_processor_kwargs": prompt.options,
        }
        try:
            (rendered,) = self._llm.renderer.render_cmpl([tokens])
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(f"the model cannot take this: {error}", param="messages") from error
        return dict(rendered)

    def add(
        self,
        name: str,
        prompt: dict[str, Any],
        params: Any,
        priority: int,
        lora: str | None = None,
    ) -> str:
        """vLLM's id of the request. Raises `BadRequest` with vLLM's complaint."""
        if lora is not None and lora not in self._adapters:
            raise BadRequest(
                f"there is no adapter '{lora}'", param="lora", hint=nearest(lora, self._adapters)
            )
        adapter = None if lora is None else self._adapters[lora]
        try:
            added: str = self._llm.add_request(
                name, prompt, params, lora_request=adapter, priority=priority
            )
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(str(error), param=getattr(error, "parameter", None)) from error
        return added

    def abort(self, ids: list[str]) -> None:
        self._llm.abort_request(ids, internal=True)

    def watch_rows(self, id: str, port: str, first: int, end: int) -> None:
        """Keep the rows of positions `first` to `end` - 1: of the port `hidden` or `embeds`."""
        self._llm.collective_rpc("watch_rows", args=(id, port, first, end))

    def take_rows(self, keys: list[tuple[str, str]]) -> list[list[torch.Tensor]]:
        """Of each (id, port) what was kept since they were taken last, each [tokens, width]."""
        taken = self._llm.collective_rpc("take_rows", args=(keys, *self._through()))[0]
        if self._rows is None:
            return taken
        return [[self._rows.open(part) for part in parts] for parts in taken]

    def forget_rows(self, keys: list[tuple[str, str]]) -> None:
        self._llm.collective_rpc("forget_rows", args=(keys, *self._through()))

    def _through(self) -> list[list[rows.Block]]:
        return [] if self._rows is None else [self._rows.through()]

    # ---- steps

    def step(self, held: set[str]) -> list[Any]:
        """vLLM's `RequestOutput`s of one step of all requests but those `held`, by vLLM's id."""
        self._scheduler.held = held
        outputs: list[Any] = self._llm.step()
        return outputs

    @property
    def moved(self) -> bool:
        """Whether the latest step computed anything."""
        last = self._scheduler.last
        return last is not None and last.total_num_scheduled_tokens > 0

    @property
    def owes_step(self) -> bool:
        """A step is under way, or vLLM's worker has yet to hear of ends, in an empty step."""
        under_way = bool(self._llm.engine_core.engine_core.batch_queue)
        return under_way or self._scheduler.has_finished_requests()

    def warm_up(self) -> None:
        """Run a greedy and a seeded request of two tokens, hidden states and all."""
        ids = []
        for heat in (0.0, 1.0):
            params = SamplingParams(temperature=heat, top_p=0.9, seed=0, max_tokens=2)
            ids.append(self.add(f"warm-up {heat}", dict(tokens_input([0, 0])), params, 0))
            self.watch_rows(ids[-1], "hidden", 0, 3)
        while self._llm.has_unfinished_requests() or self.owes_step:
            self._llm.step()
        self.forget_rows([(id, "hidden") for id in ids])

    def search(
        self, error: Exception, runnable: Callable[[], set[str]]
    ) -> Iterator[list[Any] | failure.Culprit]:
        """After a step that raised: who made it fail, and the outputs of the steps that it takes
        to find out. See `failure.search`."""
        return failure.search(self._llm, self._scheduler, error, self._step_only, runnable)

    def _step_only(self, ids: set[str]) -> list[Any]:
        return self.step(self._scheduler.requests.keys() - ids)

    # ---- memory

    def memory(self) -> dict[str, int]:
        """Of all ranks together."""
        ranks = self._llm.collective_rpc("memory_bytes")
        return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}

    @property
    def leftovers(self) -> dict[str, int]:
        """What vLLM holds for requests; all are 0 when there are none."""
        known, watched = self._llm.collective_rpc("held_requests")[0]
        return {
            "blocks in use": self._all_blocks - self._free_blocks,
            "requests in the scheduler": len(self._scheduler.requests),
            "requests in the detokenizer": len(self._llm.output_processor.request_states),
            "requests in the worker": known,
            "requests with rows": watched,
        }

    @property
    def _free_blocks(self) -> int:
        blocks: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks

    def call_worker(self, method: str, *args: Any) -> Any:
        """What a method of the first rank's worker returns."""
        return self._llm.collective_rpc(method, args=args)[0]

    def close(self) -> None:
        self._llm.engine_core.shutdown()
        del self._llm, self._scheduler, self.tokenizer
        if self._rows is not None:
            self._rows.close()
        gc.collect()  # vLLM's objects hold each other; a later engine must not find them
