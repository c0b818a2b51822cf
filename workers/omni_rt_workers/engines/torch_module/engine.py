"""The module engine: keeps the requests, cuts their streamed inputs, lets the module step."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from omni_rt.errors import StageFailed, nearest
from omni_rt.wire.messages import Ports, PortSpec, StageSpec
from omni_rt_workers.engine import Engine, EngineBroken, Outbox, Say, Task
from omni_rt_workers.engines.torch_module.cut import Cutter
from omni_rt_workers.engines.torch_module.loading import load_module
from omni_rt_workers.media import pcm16
from omni_rt_workers.module import Job, Module, Outputs

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Work:
    """A request as the engine sees it."""

    task: Task
    job: Job
    port: str | None = None  # its input with a window
    cutter: Cutter | None = None
    begun: bool = False  # the module has heard of it
    turn: int = 0  # number of the engine's step that it was in last
    samples: int = 0  # of audio, given so far
    waits: list[str] = field(default_factory=list)  # streamed inputs that the module wants whole


class TorchEngine(Engine):
    def __init__(self, spec: StageSpec, out: Outbox) -> None:
        self._spec = spec
        self._out = out
        self._works: dict[Task, _Work] = {}
        self._turn = 0
        self._module: Module
        self._device = torch.device(spec.device)

    def load(self, say: Say) -> Ports:
        self._module = module = load_module(self._spec, say)
        return Ports(
            inputs=tuple(PortSpec(name, "tensor") for name in module.inputs),
            outputs=tuple(PortSpec(name, kind) for name, kind in module.outputs.items()),
            params=tuple(module.params),
            slots=self._spec.max_batch * 2,
        )

    def add(self, task: Task) -> None:
        values = task.values
        job = Job(task.params, int(values.get("seed", 0)), str(values.get("prompt") or ""))
        work = _Work(task, job)
        for port in task.inputs.ports():
            window = self._module.inputs.get(port)
            if window is not None:
                streamed = not task.inputs.ended(port)
                work.port, work.cutter = port, Cutter(window, self._device, streamed=streamed)
            else:
                work.waits.append(port)
        self._begin(work)
        self._take(work)
        self._works[task] = work

    def feed(self, task: Task, port: str) -> None:
        if (work := self._works.get(task)) is not None:
            self._take(work)

    def abort(self, task: Task) -> None:
        self._works.pop(task, None)

    def step(self) -> None:
        self._turn += 1
        group = self._group()
        try:
            results = self._run(group) if group else ()
        except Exception as error:
            self._apart(group, error)
            return
        for work, result in zip(group, results, strict=True):
            self._give(work, result)

    @property
    def idle(self) -> bool:
        return not any(self._movable(work) for work in self._works.values())

    def memory(self) -> dict[str, int]:
        """Modules that the stage's module holds as attributes."""
        parts = [part for part in vars(self._module).values() if isinstance(part, nn.Module)]
        tensors = {id(t): t.nbytes for part in parts for t in (*part.parameters(), *part.buffers())}
        return {"weights": sum(tensors.values())}

    def close(self) -> None:
        self._works.clear()

    # ---- which requests are next

    def _group(self) -> list[_Work]:
        """Requests that step together: the one that has waited longest, and those that fit it."""
        ready = [
            (work, key)
            for work in list(self._works.values())
            if self._movable(work) and (key := self._prepare(work)) is not None
        ]
        ready.sort(key=lambda pair: (-pair[0].task.priority, pair[0].turn))
        fitting = [work for work, key in ready if key == ready[0][1]]
        return fitting[: self._spec.max_batch]

    def _movable(self, work: _Work) -> bool:
        if work.task.held:
            return False
        if not work.begun:
            return self._complete(work)
        cutter = work.cutter
        return cutter is None or work.job.piece is not None or cutter.ready or cutter.over

    def _prepare(self, work: _Work) -> tuple[Hashable] | None:
        """The key of a request that can step; None if it cannot, or has ended here."""
        try:
            self._begin(work)
            return (self._module.key(work.job),) if self._has_work(work) else None
        except Exception as error:
            self._fail(work, error)
            return None

    def _has_work(self, work: _Work) -> bool:
        """Whether there is something to step on: cuts the next piece."""
        cutter, job = work.cutter, work.job
        if cutter is None or job.piece is not None:
            return True
        if cutter.ready:
            job.piece = cutter.cut()
            self._take(work)
        elif cutter.over:  # an input without a row
            self._finish(work)
        return job.piece is not None

    def _take(self, work: _Work) -> None:
        """Copy what has arrived, but no more than the next piece needs: the rest stays lent, so
        that a producer that is far ahead is held."""
        cutter, inputs = work.cutter, work.task.inputs
        if cutter is None or cutter.ready or cutter.ended:
            return
        assert work.port is not None
        cutter.take(inputs.tensors(work.port))
        cutter.ended = inputs.ended(work.port)
        if cutter.streamed:
            inputs.release(work.port, inputs.count(work.port))

    def _complete(self, work: _Work) -> bool:
        return all(work.task.inputs.ended(port) for port in work.waits)

    def _begin(self, work: _Work) -> None:
        """Tell the module, once, if the inputs that it wants whole are there."""
        if work.begun or not self._complete(work):
            return
        for port in work.waits:
            chunks = [chunk.to(self._device) for chunk in work.task.inputs.tensors(port)]
            if chunks:
                work.job.inputs[port] = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        with torch.inference_mode():
            self._module.add(work.job)
        work.begun = True

    # ---- what comes out

    def _run(self, group: Sequence[_Work]) -> Sequence[Outputs | None]:
        with torch.inference_mode():
            results = self._module.step([work.job for work in group])
        if len(results) != len(group):
            what = f"{self._spec.name}: step gave {len(results)} results for {len(group)} jobs"
            raise StageFailed(what, stage=self._spec.name)
        return results

    def _apart(self, group: Sequence[_Work], error: Exception) -> None:
        """A step failed: find out whose fault it was. Raises `EngineBroken` for a lost device."""
        _check_device(error)
        if len(group) == 1:
            self._fail(group[0], error)
            return
        log.warning("stage %s: a step of %d failed: %s", self._spec.name, len(group), error)
        for work in group:
            try:
                (result,) = self._run([work])
            except Exception as own:
                _check_device(own)
                self._fail(work, own)
            else:
                self._give(work, result)

    def _give(self, work: _Work, result: Outputs | None) -> None:
        work.turn = self._turn
        if result is None:
            return
        piece, work.job.piece = work.job.piece, None
        last = piece is None or piece.last
        try:
            for port, tensor in result.items():
                self._put(work, port, tensor, last)
        except Exception as error:
            self._fail(work, error)
            return
        if last:
            self._finish(work)

    def _put(self, work: _Work, port: str, tensor: torch.Tensor, last: bool) -> None:
        module, task = self._module, work.task
        if port not in module.outputs:
            hint = nearest(port, module.outputs)
            raise StageFailed(f"the module gave '{port}', which it does not declare", hint=hint)
        if module.outputs[port] != "audio" or port not in task.emit or not task.emit[port].encode:
            self._out.put(task, port, tensor, last=last)
            return
        work.samples += tensor.numel()
        meta = {"media_type": "audio/pcm", "sample_rate": module.sample_rate}
        self._out.put_bytes(task, port, pcm16(tensor), last=last, meta=meta)

    def _finish(self, work: _Work) -> None:
        del self._works[work.task]
        usage = {"audio_samples": work.samples} if work.samples else {}
        self._out.finish(work.task, "stop", usage)

    def _fail(self, work: _Work, error: Exception) -> None:
        self._works.pop(work.task, None)
        self._out.fail(work.task, error)


def _check_device(error: Exception) -> None:
    """After an error of its own, not for want of memory, a device does nothing more for us."""
    if isinstance(error, torch.AcceleratorError | EngineBroken):
        raise EngineBroken(f"the device cannot be used any more: {error}") from error
