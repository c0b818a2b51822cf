"""What is shown while stages load: a bar per stage on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from omni_rt.runtime.omni import AsyncOmni
from omni_rt.runtime.status import StageStatus, Status


class LoadingDisplay:
    """Follows a runtime's status until every stage is ready, and speaks up when one is not."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._shown: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def watch(self, omni: AsyncOmni) -> None:
        omni.watch(self.show)

    def show(self, status: Status) -> None:
        if self._console.is_terminal and status.state == "loading":
            self._draw(status)
            return
        self.close()
        if status.state == "stopping":
            return
        for name, stage in status.stages.items():
            line = _describe(stage)
            if self._shown.get(name) != line:
                self._shown[name] = line
                elapsed = time.monotonic() - self._started
                self._console.print(f"[{elapsed:5.1f} s] {name}: {line}", markup=False)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _draw(self, status: Status) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.fields[stage]:>12}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._tasks = {
                name: self._bars.add_task("", total=1.0, stage=name) for name in status.stages
            }
            self._bars.start()
        for name, stage in status.stages.items():
            self._bars.update(
                self._tasks[name], completed=stage.fraction, description=_describe(stage)
            )


def _describe(stage: StageStatus) -> str:
    if stage.state == "ready":
        return f"ready on {stage.device} (process {stage.pid})"
    reason = f" ({stage.error})" if stage.error else ""
    return f"{stage.state}: {stage.phase}{reason}" if stage.phase else f"{stage.state}{reason}"
