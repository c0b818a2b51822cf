"""`OmniLLM` and `AsyncOmniLLM`: a chain of stages by vLLM-omni's names, on the same runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from omni_rt.compat import asked
from omni_rt.compat.chain import Chain, chain
from omni_rt.compat.results import EngineOutput, MultimodalOutputProcessor, RequestOutput
from omni_rt.compat.stages import OmniStageConfig
from omni_rt.request import Done, Output, Progress, Request
from omni_rt.runtime.omni import AsyncOmni, Omni


class OmniLLM:
    """Loads the stages at once; use it as a context manager, or call `close` at the end.

    Raises `ConfigError` for stages that do not go together, `StageUnavailable` for one that
    cannot load.
    """

    def __init__(
        self,
        stage_configs: Sequence[OmniStageConfig],
        output_processor: MultimodalOutputProcessor | None = None,
    ) -> None:
        self.stage_configs = list(stage_configs)
        self.output_processor = output_processor or MultimodalOutputProcessor()
        self._chain = chain(self.stage_configs)
        self._omni: Omni | None = Omni(self._chain.config)
        self._omni.__enter__()

    def generate(
        self, stage_args_list: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[RequestOutput]:
        """Run the chain for each prompt in the first stage's arguments, all at the same time.

        `stage_args_list` has a mapping for each stage: the first has `prompt` (one or a list) or
        `messages`; all may have `sampling_params` and parameters of the stage. `kwargs` are
        `seed`, `priority`, `deadline_s`, `label` and parameters of any stage. Afterwards
        each configuration's `stage_output` has what its stage gave. Raises the first `OmniError`.
        """
        if self._omni is None:
            raise RuntimeError("this OmniLLM was closed")
        requests = asked.requests(self._chain.names, stage_args_list, kwargs)
        given = self._omni.generate(requests)
        return _settle(self._chain, self.stage_configs, self.output_processor, requests, given)

    def close(self) -> None:
        """End the stages; nothing is left of them."""
        omni, self._omni = self._omni, None
        if omni is not None:
            omni.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncOmniLLM:
    """The same on the caller's loop; the stages load with `async with`, or with the first call."""

    def __init__(
        self,
        stage_configs: Sequence[OmniStageConfig],
        output_processor: MultimodalOutputProcessor | None = None,
    ) -> None:
        self.stage_configs = list(stage_configs)
        self.output_processor = output_processor or MultimodalOutputProcessor()
        self._chain = chain(self.stage_configs)
        self._omni = AsyncOmni(self._chain.config)
        self._starting = asyncio.Lock()
        self._ready = False

    async def generate_async(
        self, stage_args_list: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[RequestOutput]:
        """As `OmniLLM.generate`. Calls may overlap: `stage_output` is that of the last to end."""
        await self._load()
        requests = asked.requests(self._chain.names, stage_args_list, kwargs)
        given = await self._omni.generate(requests)
        return _settle(self._chain, self.stage_configs, self.output_processor, requests, given)

    async def close(self) -> None:
        await self._omni.close(0)

    async def _load(self) -> None:
        async with self._starting:
            if not self._ready:
                await self._omni.__aenter__()
                self._ready = True

    async def __aenter__(self) -> Self:
        await self._load()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _settle(
    made: Chain,
    stages: Sequence[OmniStageConfig],
    processor: MultimodalOutputProcessor,
    requests: Sequence[Request],
    given: Sequence[Sequence[Output]],
) -> list[RequestOutput]:
    """Give every stage what it gave; the result."""
    for stage, shown in zip(stages, made.shown, strict=True):
        stage.stage_output = processor.process_outputs(_outputs(shown, requests, given))
    return processor.process_outputs(_outputs(made.result, requests, given))


def _outputs(
    shown: Sequence[str], requests: Sequence[Request], given: Sequence[Sequence[Output]]
) -> list[EngineOutput]:
    return [
        EngineOutput(str(k), request.prompt, tuple(x for x in items if _belongs(x, shown)))
        for k, (request, items) in enumerate(zip(requests, given, strict=True))
    ]


def _belongs(item: Output, shown: Sequence[str]) -> bool:
    if isinstance(item, Progress):
        return False
    return isinstance(item, Done) or item.output in shown
