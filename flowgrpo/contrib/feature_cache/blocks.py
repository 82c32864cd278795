"""diffusers' feature caches in the calls of a pipeline, each empty at the beginning of a call.

A pipeline names its CFG branches to the cache, which has features of each. diffusers decides for a whole batch at a
time, so that a sample depends on those that are sampled with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flowgrpo.config.sections import Rollout
from flowgrpo.samplers.scheduler import Segment

MAG = "mag"
EVERY_STEP = 1e9  # a threshold at which all steps are skipped that can be


class FeatureCache:
    """Feature cache of denoisers, around calls that do several steps.

    settings: the recipe's section. dtype: of the denoisers' arithmetic.
    ratios: of `mag`, of the norms of the blocks' outputs from step to step [T]; empty before they are measured.
    calls, computed: how often the blocks (of `taylorseer` their attention) were called, and how often they ran.
    """

    def __init__(self, denoisers: Mapping[str, Any], settings: Rollout, dtype: torch.dtype):
        self.denoisers, self.settings, self.dtype = denoisers, settings, dtype
        self.ratios: list[float] = []
        self.calls = self.computed = 0

    @contextlib.contextmanager
    def __call__(self, task: Segment) -> Iterator[None]:
        """Context manager: the denoisers have a new cache in a call that does the steps of a task."""
        if len(task.steps) < 2:  # a first step always runs
            yield
            return
        ratios = self.ratios[task.steps.start:task.steps.stop]
        with self._enabled(self.config(len(task.steps), ratios)):
            yield

    @contextlib.contextmanager
    def skipping_all(self, task: Segment) -> Iterator[None]:
        """Context manager: the denoisers skip all steps of a task that can be skipped."""
        steps = len(task.steps)
        with self._enabled(self.config(steps, [1.0] * steps, EVERY_STEP)):
            yield

    @contextlib.contextmanager
    def measuring(self, task: Segment) -> Iterator[None]:
        """Context manager: the denoisers skip nothing; a whole grid's `ratios` are measured, of `mag`."""
        from diffusers import MagCacheConfig

        steps = len(task.steps)
        # One step more than there are, or diffusers would print the ratios and forget them.
        with self._enabled(MagCacheConfig(num_inference_steps=steps + 1, calibrate=True)):
            managers = [hook.state_manager for hook in self.hooks()]
            for manager in managers:
                manager.reset = lambda: None  # or the pipeline would forget the ratios at the end of its call
            yield
            states = [state for manager in managers for state in manager._state_cache.values()]
            self.ratios = next((state.calibration_ratios for state in states), [])  # of the first branch

    def config(self, steps: int, ratios: list[float], threshold: float | None = None) -> Any:
        """Return diffusers' configuration for a call of so many steps. threshold: in place of the recipe's."""
        import diffusers

        own = self.settings
        threshold = own.cache_threshold if threshold is None else threshold
        given = {} if threshold is None else {"threshold": threshold}
        if own.cache == "first_block":
            return diffusers.FirstBlockCacheConfig(**given)
        if own.cache == MAG:
            return diffusers.MagCacheConfig(num_inference_steps=steps, mag_ratios=torch.tensor(ratios), **given)
        every = {} if own.cache_interval is None else {"cache_interval": own.cache_interval}
        return diffusers.TaylorSeerCacheConfig(taylor_factors_dtype=self.dtype, **every)

    @contextlib.contextmanager
    def _enabled(self, config: Any) -> Iterator[None]:
        """Context manager: the denoisers have a cache, and are afterwards as they were."""
        modules = [part for module in self.denoisers.values() for part in module.modules()]
        forwards = {part: vars(part).get("forward") for part in modules}
        enabled = []
        try:
            for module in self.denoisers.values():
                module.enable_cache(config)
                enabled.append(module)
            for hook in self.hooks():
                self._counted(hook.fn_ref)
            yield
        finally:
            for module in enabled:
                module.disable_cache()
            for part, forward in forwards.items():  # what the hooks left: a bound method of the class, or a count
                vars(part).pop("forward", None)
                if forward is not None:
                    part.forward = forward

    def hooks(self) -> Iterator[Any]:
        """Yield the present hooks of the cache, one per block."""
        for module in self.denoisers.values():
            for part in module.modules():
                registry = getattr(part, "_diffusers_hook", None)
                yield from (hook for hook in getattr(registry, "hooks", {}).values() if hasattr(hook, "state_manager"))

    def _counted(self, reference: Any) -> None:
        """Count a hook's calls, and those that run its block."""
        reference.forward = self._counting("calls", reference.forward)
        reference.original_forward = self._counting("computed", reference.original_forward)

    def _counting(self, name: str, function: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return counted
