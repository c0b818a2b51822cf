"""The vLLM worker that gives hidden states out.

vLLM computes the rows of all requests of a step in one tensor; after `execute_model` they are
sliced by request and those that somebody asked for are kept until the engine takes them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from omni_rt.errors import ConfigError, OmniError
from omni_rt_workers.engines.vllm_ar import ranks
from omni_rt_workers.engines.vllm_ar.draws import Draws
from omni_rt_workers.engines.vllm_ar.rows import Block, Keeper, Ref, Watched

_NOT_ASYNC = "set vllm.async_scheduling to false"


class OmniARModelRunner:
    """Mixin for vLLM's worker classes; its methods are called by `LLMEngine.collective_rpc`.

    `additional_config["hidden_layer"]` says which layer, by transformers' numbering of
    `output_hidden_states`: 0 is the embedding, -1 is the output after the final norm.
    """

    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device
    distributed_init_method: str
    is_driver_worker: bool
    get_model: Any

    def __init__(
        self, vllm_config: Any, *args: Any, distributed_init_method: str, **kwargs: Any
    ) -> None:
        ranks.die_with_parent()
        place = ranks.meeting_place(distributed_init_method, vllm_config.parallel_config.world_size)
        super().__init__(vllm_config, *args, distributed_init_method=place, **kwargs)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._watched: dict[tuple[str, str], Watched] = {}  # by request and port
        self._keeper = Keeper()
        pooled = self.vllm_config.additional_config.get("pooler_output", False)
        self._pooled: dict[str, torch.Tensor] | None = {} if pooled else None
        if pooled and self.vllm_config.scheduler_config.async_scheduling:
            raise ConfigError("pooler_output needs a step's output at once", hint=_NOT_ASYNC)
        self._draws = Draws()
        self._kv_cache_bytes = 0
        layers: int = self.model_config.hf_text_config.num_hidden_layers
        layer = self.vllm_config.additional_config.get("hidden_layer", -1)
        if not -layers - 1 <= layer <= layers:
            raise ConfigError(
                f"hidden.layer is {layer}, and the model has {layers} layers",
                hint=f"give one of {-layers - 1} to {layers}; -1 is after the final norm",
            )
        wanted = {} if layer in (-1, layers) else {"hidden": layer % (layers + 1)}
        if self.vllm_config.additional_config.get("embeds", False):
            wanted["embeds"] = 0
        given = sorted(set(wanted.values()))
        # Where a port's rows are among those that the model returns beside its output, if they are.
        self._places = {port: given.index(layer) for port, layer in wanted.items()}
        if given:
            self._give_out(tuple(given))

    def _give_out(self, layers: tuple[int, ...]) -> None:
        """Have the model return the inputs of `layers` beside its output: both or neither of the
        layers and the runner's flag must be set, so that forward's tuple is understood."""
        model = self.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers") and hasattr(
            model, "get_language_model"
        ):
            model = model.get_language_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise ConfigError(
                f"{type(model).__name__} gives out no hidden states but those of its last layer",
                hint="set hidden.layer to -1",
            )
        model.set_aux_hidden_state_layers(layers)
        self.model_runner.use_aux_hidden_state_outputs = True

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        ranks.forget_names(self.distributed_init_method)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._kv_cache_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """vLLM's own: a step's forward, of which `sample_tokens` makes a `ModelRunnerOutput`.

        With `additional_config["pooler_output"]` both at once: the output's `pooler_output` then
        has the step's hidden states for each of its `req_ids`, [tokens, hidden size]. Only where
        a step has structured outputs is sampling left to `sample_tokens`, which is given their
        grammars. `intermediate_tensors` are other ranks' of a pipeline, which vLLM's worker
        receives itself.
        """
        self._draws.forget(scheduler_output.finished_req_ids)
        out = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self.is_driver_worker:
            self._keep_rows(scheduler_output)
        if (
            self._pooled is None
            or out is not None
            or scheduler_output.has_structured_output_requests
        ):
            return out
        return self.sample_tokens(None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self._draws.drawing(self.model_runner):
            out = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._pooled is None or out is None:
            return out
        return replace(out, pooler_output=[self._pooled.get(id) for id in out.req_ids])

    def _keep_rows(self, scheduler_output: Any) -> None:
        if not self._watched and self._pooled is None:
            return
        ports = {port for _, port in self._watched} | {"hidden"}
        starts = _starts(scheduler_output)
        for port in sorted(ports):
            place = self._places.get(port)
            parts = _rows_by_request(self.model_runner, scheduler_output, place)
            if self._pooled is not None and port == "hidden":
                self._pooled = {request: rows.clone() for request, rows in parts}
            for request, rows in parts:
                if (request, port) in self._watched:
                    self._watched[request, port].keep(starts[request], rows, self._keeper)

    # ---- called by the engine

    def watch_rows(self, request: str, port: str, first: int, end: int) -> None:
        """Keep a request's rows of positions `first` to `end` - 1 from now on: hidden states for
        the port `hidden`, input embeddings for `embeds`."""
        self._watched[request, port] = Watched(first, end)

    def share_rows(self, process: int, fd: int, size_bytes: int) -> str | None:
        """Hand rows over in the arena that `process` has under `fd`. Why not, if that fails."""
        try:
            if self.is_driver_worker:
                self._keeper.share(process, fd, size_bytes)
        except (OSError, OmniError) as error:
            return str(error)
        return None

    def take_rows(
        self, keys: list[tuple[str, str]], through: Collection[Block] = ()
    ) -> list[list[torch.Tensor | Ref]]:
        """The rows kept of each request and port since they were taken last; empty on other ranks.

        `through` are blocks taken before that may be used again.
        """
        if not self.is_driver_worker:
            return []
        self._keeper.free(through)
        taken = []
        for key in keys:
            watched = self._watched[key]
            taken.append([self._keeper.give(part) for part in watched.parts])
            watched.parts = []
        return taken

    def forget_rows(self, keys: list[tuple[str, str]], through: Collection[Block] = ()) -> None:
        gone = [self._watched.pop(key, None) for key in keys]
        parts = [part for watched in gone if watched is not None for part in watched.parts]
        self._keeper.free(through)
        self._keeper.free([part.block for part in parts if part.block is not None])

    def settle(self, held: dict[str, tuple[int, int]]) -> tuple[list[str], str | None]:
        """Drop what a failed step left half done.

        `held` has how many tokens, and how many of them in the reply, each request really has.
        The requests that the runner knows, and what stands in the way of going on. Never raises:
        where there are several ranks, an exception would mix up their later answers.
        """
        try:
            self.model_runner.execute_model_state = None
            self._draws.take_back(self.model_runner, held)
            for (request, _), watched in self._watched.items():
                if request in held:
                    watched.cut(held[request][0], self._keeper)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # raises if the device is lost
            return list(_known(self.model_runner)), None
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": _weights_bytes(self.get_model()), "kv_cache": self._kv_cache_bytes}

    def held_requests(self) -> tuple[int, int]:
        """Requests that the runner knows, and requests whose rows are kept."""
        return len(_known(self.model_runner)), len({request for request, _ in self._watched})


class OmniCPUWorker(OmniARModelRunner, CPUWorker):
    pass


class OmniGPUWorker(OmniARModelRunner, Worker):
    pass


def _weights_bytes(model: Any) -> int:
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    packed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        columns = getattr(module, "input_size_per_partition", None)
        if weight is not None and weight.numel() == 0 and columns is not None:
            # On CPU, vLLM packs the weight for oneDNN and leaves an empty one in its place.
            packed += columns * module.output_size_per_partition * weight.element_size()
    return sum(tensors.values()) + packed


def _known(runner: Any) -> Collection[str]:
    """The requests that a model runner, V1 or V2, has heard of."""
    requests = getattr(runner, "requests", None)
    known: Collection[str] = runner.req_states.req_id_to_index if requests is None else requests
    return known


def _rows_by_request(
    runner: Any, scheduler_output: Any, place: int | None
) -> list[tuple[str, torch.Tensor]]:
    """Each request's rows of the step, in the runner's order: views of what it uses again. `place`
    is where they are among the layers given beside the output, None for the output itself."""
    state = runner.execute_model_state
    if state is None or not scheduler_output.total_num_scheduled_tokens:
        return []
    rows = state.hidden_states if place is None else state.aux_hidden_states[place]
    made = getattr(state, "input_batch", None)
    if made is not None:  # model runner V2 makes a batch for each step
        bounds = made.query_start_loc_np.tolist()
        requests = made.req_ids[: made.num_reqs]
    else:  # V1 keeps one
        requests = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        counts = [scheduler_output.num_scheduled_tokens[request] for request in requests]
        bounds = list(accumulate(counts, initial=0))
    return [(one, rows[bounds[at] : bounds[at + 1]]) for at, one in enumerate(requests)]


def _starts(scheduler_output: Any) -> dict[str, int]:
    """The absolute position of each request's first row in this step."""
    starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts
