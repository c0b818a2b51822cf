"""Shells: cheap copies of a pipeline, one for each request, that share its modules.

A shell has its own attributes and schedulers. Its modules are shallow copies of the real ones
(same class, config and weights) whose `forward` and `decode` park the fibre. The real pipeline
and its modules are never changed.
"""

from __future__ import annotations

import functools
import inspect
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from omni_rt_workers.engines.diffusers_dit.fibre import Call, Fibre, name_calls, park
from omni_rt_workers.engines.diffusers_dit.prompts import remember

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_rt_workers.engines.diffusers_dit.cache import DiTCacheManager

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Shells:
    """Makes fibres of one pipeline. A shell costs about a millisecond and no weights."""

    def __init__(self, pipeline: Any, cache: DiTCacheManager | None = None) -> None:
        """`cache`: keeps the embeddings of prompts."""
        self._pipeline = pipeline
        self._cache = cache
        components = pipeline.components
        self._proxies = {
            name: _proxy(name, part)
            for name, part in components.items()
            if isinstance(part, nn.Module)
        }
        self._schedulers = [name for name, part in components.items() if _is_scheduler(part)]

    def fibre(
        self,
        kwargs: dict[str, Any],
        on_step: Callable[[Any, Any], None],
        *,
        scheduler: str | None = None,
        exact: bool = False,
    ) -> Fibre:
        """A fibre for `pipeline(**kwargs)`; calls `on_step(shell, result)` after each step of its
        scheduler.

        `scheduler`: one of `compatible_schedulers` in place of the pipeline's own. `exact`: nothing
        that it is given was made in a batch.
        """
        shell = self._shell(on_step, scheduler)
        if self._cache is not None:
            remember(shell, self._cache, exact=exact)
        return Fibre(shell, kwargs)

    def _shell(self, on_step: Callable[[Any, Any], None], scheduler: str | None) -> Any:
        # Written past __setattr__, which would register the proxies in the pipeline's config.
        shell = object.__new__(type(self._pipeline))
        own = vars(shell)
        own.update(vars(self._pipeline))
        own.update(self._proxies)
        own.update({name: deepcopy(own[name]) for name in self._schedulers})
        if scheduler is not None:
            cls = compatible_schedulers(self._pipeline)[scheduler]
            own["scheduler"] = cls.from_config(self._pipeline.scheduler.config)
        own["_own_schedulers"] = [own[name] for name in self._schedulers]
        own["_progress_bar_config"] = {"disable": True}
        own["maybe_free_model_hooks"] = _nothing  # it would reset and offload for every request
        for one in own["_own_schedulers"]:
            _watch(one, functools.partial(on_step, shell))
        return shell


def compatible_schedulers(pipeline: Any) -> dict[str, Any]:
    """The schedulers that can take the place of the pipeline's, by class name: those that diffusers
    calls compatible and that can be made of its scheduler's config."""
    own = getattr(pipeline, "scheduler", None)
    if own is None or not _is_scheduler(own):
        return {}
    classes = {type(own), *getattr(own, "compatibles", ())}
    return {cls.__name__: cls for cls in classes if _can_be_made(cls, own.config)}


def _can_be_made(cls: Any, config: Any) -> bool:
    try:
        cls.from_config(config)
    except Exception:  # it needs another package, or does not take these values
        return False
    return True


def _proxy(name: str, real: nn.Module) -> nn.Module:
    proxy = object.__new__(type(real))
    own = vars(proxy)
    own.update(vars(real))
    own.update({hooks: type(own[hooks])() for hooks in _HOOKS if hooks in own})  # run on `real`
    own["_compiled_call_impl"] = None  # the compiled code too
    own["forward"] = _parking(name, real, inspect.signature(real.forward))
    if callable(decode := getattr(real, "decode", None)):
        own["decode"] = _parking(name, decode, inspect.signature(decode))
    if hasattr(real, "cache_context"):
        own["cache_context"] = name_calls
    return proxy


def _parking(
    component: str, function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    @functools.wraps(getattr(function, "forward", function))
    def parked(*args: Any, **kwargs: Any) -> Any:
        return park(Call(component, function, signature, args, kwargs))

    return parked


def _watch(scheduler: Any, done: Callable[[Any], None]) -> None:
    step = scheduler.step

    @functools.wraps(step)  # pipelines inspect its signature
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        done(result)
        return result

    scheduler.step = watched


def _is_scheduler(part: Any) -> bool:
    return hasattr(part, "step") and hasattr(part, "set_timesteps")


def _nothing() -> None:
    return None
