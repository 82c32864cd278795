"""Putting a state into a pipeline's loop.

Most pipelines take a state as `latents` and hand it to their scheduler as it is. Some do not: an image-to-video
pipeline may set the first frame of `latents` itself and show its scheduler the others alone, mix its picture into them
once more at every call, or keep a second state beside them. Their loop is given the state by its scheduler: in an idle
step, whose "next state" it is. What the denoiser says in an idle step is not read, so that it does not run; it answers
with zeros.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch


class IdleSteps:
    """Denoisers that do not run while their scheduler idles, once a real step has shown what they return."""

    def __init__(self, scheduler: Any, denoisers: dict[str, torch.nn.Module], skipped: Callable[[int], None]):
        """skipped: called with the rows of every evaluation that did not take place."""
        self.scheduler, self.denoisers, self.skipped = scheduler, denoisers, skipped
        self._known: dict[str, tuple[int, Any]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context manager: the denoisers look at the scheduler before they run."""
        kept: dict[str, Any] = {name: vars(module).get("forward") for name, module in self.denoisers.items()}
        for name, module in self.denoisers.items():
            module.forward = self._asked(name, module.forward)
        try:
            yield
        finally:
            for name, module in self.denoisers.items():
                del module.forward
                if kept[name] is not None:
                    module.forward = kept[name]

    def _asked(self, name: str, forward: Callable) -> Callable:
        states = next(iter(inspect.signature(forward).parameters))

        def answer(*args: Any, **kwargs: Any) -> Any:
            rows = len(args[0] if args else kwargs[states])
            if self.scheduler.idling and name in self._known:
                self.skipped(rows)
                return _zeros(self._known[name][1], rows / self._known[name][0])
            out = forward(*args, **kwargs)
            if isinstance(out, tuple):
                self._known.setdefault(name, (rows, tuple(map(_shape, out))))
            return out
        vars(answer)["__signature__"] = inspect.signature(forward)  # some pipelines look whether an argument is there
        return answer


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if torch.is_tensor(value) else None


def _zeros(shapes: tuple, times: float) -> tuple:
    return tuple(shape and torch.zeros((round(shape[0][0] * times), *shape[0][1:]), dtype=shape[1], device=shape[2])
                 for shape in shapes)
