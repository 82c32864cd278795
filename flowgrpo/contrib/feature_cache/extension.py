"""Feature caches of a run's rollouts: `rollout.cache`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from flowgrpo.contrib.feature_cache.blocks import MAG, FeatureCache
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.run import Run


class RolloutCache(Extension):
    """Cache in every call of an epoch that samples. Training, scores and evaluations never read it."""

    name = "feature_cache"
    needs = frozenset({capabilities.FINALS_ALONE, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        policy = cast(PipelinePolicy, trainer.policy)
        self.cache = FeatureCache(policy.denoisers, trainer.config.rollout, policy.dtype)
        self._try()

    @classmethod
    def asked(cls, setup: Setup) -> str:
        return f"rollout.cache is {setup.config.rollout.cache}"

    @classmethod
    def require(cls, setup: Setup) -> None:
        if setup.loaded is None:
            return
        found = denoisers(setup.loaded)
        for module in found.values():
            if not hasattr(module, "enable_cache"):
                raise UserError(f"rollout.cache: got {type(module).__name__}, expected a model with diffusers' feature "
                                "caches (`enable_cache`): leave rollout.cache out")
        if len(found) > 1 and setup.config.rollout.cache == MAG:
            raise UserError(f"rollout.cache is {MAG}, which counts the steps of one denoiser, but "
                            f"{type(setup.loaded).__name__} has {len(found)}: use first_block or taylorseer")

    @classmethod
    def refused(cls, setup: Setup) -> dict[str, bool]:
        memory = setup.config.memory
        return {"rollout.engine, which draws": setup.config.rollout.engine is not None,
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

    @contextlib.contextmanager
    def _around(self, context: Any) -> Iterator[None]:
        """Context manager: the pipeline's calls that sample run inside a context, given their task."""
        driver = cast(PipelinePolicy, self.trainer.policy).driver
        before, driver.around_rollout = driver.around_rollout, context
        try:
            yield
        finally:
            driver.around_rollout = before

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        """Context manager: the policy samples with the cache."""
        self.cache.settings = self.trainer.config.rollout
        with self._around(self.cache):
            yield

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the share of the blocks' calls that ran, of all processes."""
        calls, computed = self.trainer.processes.total([self.cache.calls, self.cache.computed])
        self.cache.calls = self.cache.computed = 0
        return {"rollout/computed": computed / calls} if calls else {}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {}, {"ratios": self.cache.ratios}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.cache.ratios = values.get("ratios", self.cache.ratios)
