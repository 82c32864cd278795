"""Feature caches of a run's rollouts: `rollout.cache`. They are diffusers', each empty at the beginning of a call.

A pipeline names its CFG branches to the cache, which has features of each. diffusers decides for a whole batch at a
time, so that a sample depends on those that are sampled with it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import diffusers
import torch

from flowgrpo.contrib.features import CacheKeys, EngineKeys
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run

MAG = "mag"
EVERY_STEP = 1e9  # a threshold at which all steps are skipped that can be


class FeatureCache:
    """Feature cache of denoisers, around calls that do several steps.

    settings: the recipe's keys. dtype: of the denoisers' arithmetic.
    ratios: of `mag`, of the norms of the blocks' outputs from step to step [T]; empty before they are measured.
    calls, computed: how often the blocks (of `taylorseer` their attention) were called, and how often they ran.
    """

    def __init__(self, denoisers: Mapping[str, Any], settings: CacheKeys, dtype: torch.dtype):
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
        with self._enable(self.config(len(task.steps), ratios)):
            yield

    @contextlib.contextmanager
    def skipping_all(self, task: Segment) -> Iterator[None]:
        """Context manager: the denoisers skip all steps of a task that can be skipped."""
        steps = len(task.steps)
        with self._enable(self.config(steps, [1.0] * steps, EVERY_STEP)):
            yield

    @contextlib.contextmanager
    def measuring(self, task: Segment) -> Iterator[None]:
        """Context manager: the denoisers skip nothing; the `ratios` of `mag` are measured on a whole grid."""
        steps = len(task.steps)
        # One step more than there are, or diffusers would print the ratios and forget them.
        with self._enable(diffusers.MagCacheConfig(num_inference_steps=steps + 1, calibrate=True)):
            managers = [hook.state_manager for hook in self.hooks()]
            for manager in managers:
                manager.reset = lambda: None  # or the pipeline would forget the ratios at the end of its call
            yield
            states = [state for manager in managers for state in manager._state_cache.values()]
            self.ratios = next((state.calibration_ratios for state in states), [])  # of the first branch

    def config(self, steps: int, ratios: list[float], threshold: float | None = None) -> Any:
        """Diffusers' configuration for a call of so many steps."""
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
    def _enable(self, config: Any) -> Iterator[None]:
        """Context manager: the denoisers have a cache, and are afterwards as they were."""
        modules = [part for module in self.denoisers.values() for part in module.modules()]
        forwards = {part: vars(part).get("forward") for part in modules}
        enabled = []
        try:
            for module in self.denoisers.values():
                module.enable_cache(config)
                enabled.append(module)
            for hook in self.hooks():
                reference = hook.fn_ref
                reference.forward = self._counting("calls", reference.forward)
                reference.original_forward = self._counting("computed", reference.original_forward)
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

    def _counting(self, name: str, function: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return counted


class RolloutCache(Extension):
    """Cache in every call of an epoch that samples. Training, scores and evaluations never read it."""

    name = "feature_cache"
    asked_by = "rollout.cache is {0.config.rollout.cache}"
    needs = frozenset({capabilities.FINALS_ALONE, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        policy = cast(PipelinePolicy, trainer.policy)
        self.cache = FeatureCache(policy.denoisers, CacheKeys.read(trainer.config), policy.dtype)
        self._try()

    @classmethod
    def require(cls, setup: Setup) -> None:
        if setup.loaded is None:
            return
        found = denoisers(setup.loaded)
        for module in found.values():
            if not hasattr(module, "enable_cache"):
                raise UserError(f"rollout.cache: got {type(module).__name__}, expected a model with diffusers' feature "
                                "caches (`enable_cache`): leave rollout.cache out")
        if len(found) > 1 and CacheKeys.read(setup.config).cache == MAG:
            raise UserError(f"rollout.cache is {MAG}, which counts the steps of one denoiser, but "
                            f"{type(setup.loaded).__name__} has {len(found)}: use first_block or taylorseer")

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        memory = setup.config.memory
        return {"rollout.engine, which draws": EngineKeys.read(setup.config).engine is not None,
                "train.compile, whose blocks are compiled without it": setup.config.train.compile,
                "memory.context_parallel, whose processes would skip different steps": memory.context_parallel > 1,
                "memory.offload, whose blocks come in a fixed order": memory.offload != "none"}

    def _try(self) -> None:
        """Skip all steps that can be skipped, for one row, and measure the ratios of `mag`.

        Raises UserError for a model that diffusers' cache does not go with.
        """
        policy = cast(PipelinePolicy, self.trainer.policy)
        rollouts: Any = self.trainer.rollouts
        spec = rollouts.explorations(0)[0]
        row = rollouts.conditioning([self.trainer.prompts[0]])
        # The trial leaves no trace: counters and random numbers are put back at its end.
        before, states, cache = policy.evaluations, torch.get_rng_state(), self.cache
        contexts = [cache.skipping_all, cache.measuring] if cache.settings.cache == MAG else [cache.skipping_all]
        try:
            for context in contexts:
                generators = policy.generators([0])
                with self._around(context):
                    policy.run(spec.task(0, spec.steps, generators), row, None, generators)
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(f"rollout.cache is {cache.settings.cache}, which diffusers cannot do for "
                            f"{type(policy.pipe).__name__} ({error}): use another, or leave it out") from error
        if cache.settings.cache == MAG and len(cache.ratios) != spec.steps:
            raise UserError(f"rollout.cache is {MAG}, which counts steps, but {type(policy.pipe).__name__} calls its "
                            "denoiser several times in one without naming its branches: use another, or leave it out")
        if not cache.calls:
            raise UserError(f"rollout.cache is {cache.settings.cache}, but {type(policy.pipe).__name__} has no blocks "
                            "that it knows: use another, or leave it out")
        cache.calls = cache.computed = 0
        policy.evaluations = before
        torch.set_rng_state(states)

    def _around(self, context: Any) -> contextlib.AbstractContextManager[None]:
        return replaced("around_rollout", (cast(PipelinePolicy, self.trainer.policy).driver, context))

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        self.cache.settings = CacheKeys.read(self.trainer.config)
        with self._around(self.cache):
            yield

    def on_trained(self, epoch: Epoch) -> Metrics:
        calls, computed = self.trainer.processes.total([self.cache.calls, self.cache.computed])
        self.cache.calls = self.cache.computed = 0
        return {"rollout/computed": computed / calls} if calls else {}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {}, {"ratios": self.cache.ratios}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.cache.ratios = values.get("ratios", self.cache.ratios)
