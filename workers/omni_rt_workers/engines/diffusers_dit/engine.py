"""The engine: takes requests in, gives each a fibre, steps them, and gives their pictures out."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from omni_rt import errors
from omni_rt_workers import media
from omni_rt_workers.engines.diffusers_dit import guard, loading, scheduler
from omni_rt_workers.engines.diffusers_dit.cache import DiTCacheConfig, DiTCacheManager
from omni_rt_workers.engines.diffusers_dit.scheduler import Waiting
from omni_rt_workers.engines.diffusers_dit.timing import DeviceTimer

if TYPE_CHECKING:
    import torch

    from omni_rt.wire.messages import Ports, StageSpec
    from omni_rt_workers.engine import Outbox, Say, Task
    from omni_rt_workers.engines.diffusers_dit.batch import Batch, Counts, Parked
    from omni_rt_workers.engines.diffusers_dit.fibre import Fibre
    from omni_rt_workers.engines.diffusers_dit.params import CallForm
    from omni_rt_workers.engines.diffusers_dit.previews import Previews
    from omni_rt_workers.engines.diffusers_dit.shell import Shells

log = logging.getLogger(__name__)

# Requests in work for each place in a step, so that a short one need not wait for a long one's end.
_SLOTS_PER_PLACE = 4
_PREVIEW_EVERY = 5  # steps, if a request does not say


@dataclass(eq=False, slots=True)
class Painting:
    """A task with its fibre."""

    task: Task
    seed: int
    fibre: Fibre
    exact: bool  # never run together with others
    expected: int  # steps that it asks for
    steps: int = 0  # denoise steps done
    total: int = 0  # of these in all; known after the first
    latents: torch.Tensor | None = None  # of the last step, if wanted along with the picture
    gave_latents: bool = False
    parked: Parked | None = None  # what its fibre waits for, once it has been looked at

    @property
    def left(self) -> int:
        """Steps still to do, the one it waits for included."""
        return max(1, (self.total or self.expected) - self.steps)


class DiTEngine:
    """Several requests are in work at once. A policy decides which of them make the next step.

    The stage's `max_batch` bounds the requests of a step, `slots` those in work; others wait,
    higher priority first.
    """

    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._waiting: list[Task] = []
        self._paintings: list[Painting] = []
        self._weights_bytes = 0
        self._arrivals = itertools.count()
        self._slots = spec.options.get("slots") or _SLOTS_PER_PLACE * spec.max_batch
        self._timer = DeviceTimer(spec.device)
        self._policy: scheduler.Policy
        self._previews: Previews | None = None
        self.cache = DiTCacheManager(DiTCacheConfig(enable_optimization=False))
        self.pipeline: Any = None
        self._form: CallForm
        self._shells: Shells
        self._batch: Batch

    def load(self, say: Say) -> Ports:
        loading.check_options(self._spec)
        self.cache = DiTCacheManager(_cache_config(self._spec))
        name = self._spec.options.get("policy") or "fair"
        self._policy = scheduler.find(name, self._spec.name)(self._spec.max_batch)
        where = loading.source(self._spec)
        notes = guard.check(self._spec.name)
        say("importing diffusers", 0.0)
        import torch

        from omni_rt_workers.engines.diffusers_dit import batch, limits, params, previews, shell

        torch.set_grad_enabled(False)
        say("loading weights", 0.3)
        pipeline = loading.load_pipeline(self._spec, where)
        self._weights_bytes = loading.weights_bytes(pipeline)
        options = self._spec.options
        most = {name: options[name] for name in loading.LIMITS if options.get(name) is not None}
        self._form = params.CallForm(
            self._spec.name,
            pipeline,
            limits.Limits(**most),
            defaults=self._spec.sampling,
            room=loading.room_bytes(self._spec, self._weights_bytes),
        )
        self._check_sampling()
        self.pipeline = pipeline
        self._shells = shell.Shells(pipeline, self._prompt_cache)
        self._batch = batch.Batch()
        say("warming up", 0.8)
        self._warm_up()
        log.info("%s: %s", type(pipeline).__name__, ", ".join(notes))
        self._previews = previews.fit(pipeline)
        return self._form.ports(self._slots, previews=self._previews is not None)

    @property
    def counts(self) -> Counts:
        return self._batch.counts

    @property
    def _prompt_cache(self) -> DiTCacheManager | None:
        return self.cache if self.cache.config.keeps("prompt_embeds") else None

    @property
    def working(self) -> int:
        """Requests that have been started and not ended."""
        return len(self._paintings)

    def memory(self) -> dict[str, int]:
        used = {} if self._prompt_cache is None else {"cache": self.cache.used_bytes}
        return {"weights": self._weights_bytes, **used}

    def add(self, task: Task) -> None:
        self._form.refuse_unknown(task.params)
        task.state = next(self._arrivals)
        self._waiting.append(task)
        self._waiting.sort(key=lambda one: -one.priority)

    def feed(self, task: Task, port: str) -> None:
        """Nothing to do: a task starts once all its inputs have ended, see `_startable`."""

    def abort(self, task: Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
        for painting in [one for one in self._paintings if one.task is task]:
            self._paintings.remove(painting)
            painting.fibre.end()

    @property
    def idle(self) -> bool:
        return not self._startable() and all(one.task.held for one in self._paintings)

    def step(self) -> None:
        for task in self._startable():
            self._start(task)
        self._timer.tell_finished()
        active = [one for one in self._paintings if not one.task.held]
        for group, waiting in self._chosen([one for one in active if one.fibre.parked]):
            self._serve(group, waiting)
        for painting in active:
            if painting.fibre.dead:
                self._conclude(painting)

    def _chosen(self, paintings: list[Painting]) -> list[tuple[list[Painting], list[Waiting]]]:
        """What the policy wants in this step."""
        if not paintings:
            return []
        only = len(paintings) == 1
        waiting = {self._waiting_call(one, only): one for one in paintings}
        chosen = self._policy.schedule(list(waiting), time.monotonic())
        return [([waiting[call] for call in group], group) for group in chosen]

    def _waiting_call(self, painting: Painting, only: bool) -> Waiting:
        task, parked = painting.task, painting.parked
        if parked is None or not (parked.looked or only):
            looked = not only  # with nothing to join it with there is no need to
            parked = self._batch.parked(painting.fibre, looked=looked, alone=painting.exact)
            painting.parked = parked
        return Waiting(
            task.state,
            parked.group,
            parked.shape,
            parked.rows,
            task.priority,
            painting.left,
            task.deadline,
        )

    def _serve(self, group: list[Painting], waiting: list[Waiting]) -> None:
        parked = [one.parked for one in group if one.parked]
        for painting in group:
            painting.parked = None
        usual = True

        def tell(seconds: float) -> None:
            self._policy.ran(waiting, seconds, usual=usual)

        with self._timer.timed(tell):
            usual = self._batch.serve(parked)

    def close(self) -> None:
        for task in [*self._waiting, *(one.task for one in self._paintings)]:
            self.abort(task)
        self.cache.clear()
        for name in ("_form", "_shells", "_batch", "pipeline"):
            vars(self).pop(name, None)
        if self._spec.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def _check_sampling(self) -> None:
        try:
            self._form.refuse_unknown(self._spec.sampling)
        except errors.BadRequest as error:
            raise errors.ConfigError(
                f"sampling: {error.message}", stage=self._spec.name, hint=error.hint
            ) from None

    def _startable(self) -> list[Task]:
        room = self._slots - len(self._paintings)
        ready = [task for task in self._waiting if not task.held and self._complete(task)]
        return ready[:room]

    def _complete(self, task: Task) -> bool:
        return all(map(task.inputs.ended, task.inputs.ports()))

    def _start(self, task: Task) -> None:
        self._waiting.remove(task)
        try:
            painting = self._painting(task)
        except Exception as error:
            self._out.fail(task, error)
            return
        self._paintings.append(painting)
        painting.fibre.start()

    def _painting(self, task: Task) -> Painting:
        seed = task.params.get("seed", task.values.get("seed"))
        seed = secrets.randbits(32) if seed is None else int(seed)
        arguments = self._form.arguments(task, seed)
        if {"image", "latents"} <= task.emit.keys():
            self._form.watch_latents(arguments, lambda latents: self._saw(painting, latents))
        exact = bool(task.params.get("exact"))
        fibre = self._shells.fibre(
            arguments,
            lambda shell, result: self._stepped(painting, shell, result),
            scheduler=task.params.get("scheduler"),
            exact=exact,
        )
        expected = self._form.steps(task.params)
        painting = Painting(task, seed, fibre, exact, expected)
        return painting

    def _stepped(self, painting: Painting, shell: Any, result: Any) -> None:
        painting.steps += 1
        total = getattr(shell, "_num_timesteps", None) or len(shell.scheduler.timesteps)
        painting.total = max(total, painting.steps)
        self._out.progress(painting.task, painting.steps, painting.total)
        if "preview" in painting.task.emit:
            self._give_preview(painting, result)

    def _give_preview(self, painting: Painting, result: Any) -> None:
        """Every so many steps; none after the last step, nor while earlier output finds no room."""
        task = painting.task
        every = int(task.params.get("preview_every") or _PREVIEW_EVERY)
        done, total = painting.steps, painting.total
        if done % every or done >= total or task.held or self._previews is None:
            return
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        if latents.ndim != 4:
            return
        picture = self._previews.picture(latents)
        self._give_picture(painting, "preview", picture, last=done + every >= total)

    def _saw(self, painting: Painting, latents: torch.Tensor) -> None:
        """Latents after a step, of a request that wants them and the picture: the last are given
        out before the picture is decoded."""
        painting.latents = latents
        if painting.steps == painting.total:
            self._give_latents(painting, latents)

    def _conclude(self, painting: Painting) -> None:
        """Give out what a finished fibre made, or why it failed."""
        task, fibre = painting.task, painting.fibre
        self._paintings.remove(painting)
        try:
            if fibre.error is not None:
                raise fibre.error
            made = self._give(painting, fibre.result[0])
        except Exception as error:
            self._out.fail(task, self._explained(error, painting))
        else:
            self._out.finish(task, usage={"images": made})
        finally:
            fibre.end()

    def _give(self, painting: Painting, result: Any) -> int:
        """`result` is a list of pictures, or the latents if no picture is wanted."""
        task = painting.task
        if "image" not in task.emit:
            self._give_latents(painting, result)
            return 0
        if painting.latents is not None:
            self._give_latents(painting, painting.latents)
        for number, picture in enumerate(result, 1):
            self._give_picture(painting, "image", picture, last=number == len(result))
        return len(result)

    def _give_latents(self, painting: Painting, latents: torch.Tensor) -> None:
        if "latents" in painting.task.emit and not painting.gave_latents:
            painting.gave_latents = True
            self._out.put(painting.task, "latents", latents, last=True)

    def _give_picture(self, painting: Painting, port: str, picture: Any, *, last: bool) -> None:
        task = painting.task
        if not task.emit[port].encode:
            self._out.put(task, port, _pixels(picture), last=last)
            return
        encode, form = (media.jpeg, "jpeg") if port == "preview" else (media.png, "png")
        meta = {
            "media_type": f"image/{form}",
            "width": picture.width,
            "height": picture.height,
            "seed": painting.seed,
        }
        self._out.put_bytes(task, port, encode(picture), last=last, meta=meta)

    def _explained(self, error: Exception, painting: Painting) -> errors.OmniError:
        """The error with its traceback as text: a live one would hold the whole run's tensors."""
        if isinstance(error, errors.OmniError):
            return error
        said = f"{type(error).__name__}: {error}"
        detail = "".join(traceback.format_exception(error))
        if not painting.fibre.calls:  # the pipeline refused its arguments, or stumbled over them
            if isinstance(error, ValueError):
                return errors.BadRequest(str(error), stage=self._spec.name, detail=detail)
            if hint := self._form.missing(painting.task):
                return errors.BadRequest(said, stage=self._spec.name, hint=hint, detail=detail)
        return errors.StageFailed(said, stage=self._spec.name, detail=detail)

    def _warm_up(self) -> None:
        """Run two small requests, so that kernels are warm and their joining is proven."""
        fibres = [self._shells.fibre(call, lambda *_: None) for call in self._form.tiny()]
        together = [fibres] if self._spec.max_batch > 1 else [[one] for one in fibres]
        try:
            for crowd in together:
                for fibre in crowd:
                    fibre.start()
                while any(crowd):  # some have not finished
                    self._batch.tick(crowd)
            for failed in [one for one in fibres if one.error]:
                log.warning("stage %s: warm-up failed: %s", self._spec.name, failed.error)
        finally:
            for fibre in fibres:
                fibre.end()


def _cache_config(spec: StageSpec) -> DiTCacheConfig:
    """Without the option `cache` nothing is kept. Raises `ConfigError`."""
    options = spec.options.get("cache")
    if options is None:
        return DiTCacheConfig(enable_optimization=False)
    try:
        return msgspec.convert(options, DiTCacheConfig)
    except msgspec.ValidationError as error:
        raise errors.ConfigError(f"stage '{spec.name}': cache: {error}", stage=spec.name) from None


def _pixels(picture: Any) -> torch.Tensor:
    """uint8 [height, width, 3]."""
    import torch

    raw = bytearray(picture.convert("RGB").tobytes())
    return torch.frombuffer(raw, dtype=torch.uint8).view(picture.height, picture.width, 3)
