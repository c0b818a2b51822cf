"""The random generators of seeded requests, kept in step with their replies.

Model runner V1 has one generator for each seeded request; V2 draws by seed and position and needs
none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_KEPT = 2  # states of each request: with asynchronous scheduling two steps are under way


class Draws:
    def __init__(self) -> None:
        # By request, and by the number of reply tokens before the draw.
        self._before: dict[str, dict[int, torch.Tensor]] = {}

    @contextmanager
    def drawing(self, runner: Any) -> Iterator[None]:
        """Around the runner's sampling."""
        batch = getattr(runner, "input_batch", None)
        if batch is None or not batch.generators:
            yield
            return
        hidden = _undrawn(runner)
        self._note(runner)
        try:
            yield
        finally:
            batch.generators.update(hidden)

    def take_back(self, runner: Any, held: dict[str, tuple[int, int]]) -> None:
        """Undo draws whose tokens nobody got: `held` has what each request has, in tokens, and
        in tokens of the reply."""
        for request, states in self._before.items():
            _, sampled = held.get(request, (0, -1))
            if sampled in states:
                runner.requests[request].generator.set_state(states[sampled])

    def forget(self, requests: set[str]) -> None:
        for request in requests:
            self._before.pop(request, None)

    def _note(self, runner: Any) -> None:
        for at, generator in runner.input_batch.generators.items():
            request = runner.input_batch.req_ids[at]
            states = self._before.setdefault(request, {})
            sampled = len(runner.requests[request].output_token_ids)
            states.pop(sampled, None)
            states[sampled] = generator.get_state()
            if len(states) > _KEPT:
                del states[next(iter(states))]


def _undrawn(runner: Any) -> dict[int, Any]:
    """Takes out the generators of requests whose prompt is not through yet, on CPU.

    The runner draws for them too and then sets the generator back, which one of the CPU cannot do:
    vLLM 0.32 fails with a seed and a prompt of more than one step.
    """
    if runner.device.type != "cpu":
        return {}
    batch = runner.input_batch
    early = runner.discard_request_mask.np
    return {at: batch.generators.pop(at) for at in list(batch.generators) if early[at]}
