"""Two epochs of each method that trains other weights than a denoiser's LoRA, or by another loss: what moves, and that
nothing else does."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from flowgrpo.config.sections import Adapter
from flowgrpo.methods import preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.policies.pipelines.edits import EditPolicy
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.latent_edits import Edit
from tests.helpers import tiny, tiny_runs

DDIM_V = DDIMScheduler(prediction_type="v_prediction", clip_sample=False, **tiny.SD15_NOISE)
DENOISER = {tiny.sd3: "transformer", tiny.flux: "transformer", tiny.sd15: "unet"}
VP_PAIRS = {"surrogate": {"similarity": 0.0}, "times": {"count": 3}}
BY_RATIO = {"surrogate": {"through": 0.0, "ratio": 1.0}, "advantage": {"type": "Paired"}, "edit": {"acting": "pairs"}}
NOISE_LEVEL = {"kernel": {"type": "FlowDDIM", "eta": 1.0}, "step_weight": {"type": "NoiseLevel"}}


def made(pipe: Callable[..., Any], method: str, parts: dict[str, Any] | None = None, scheduler: Any = None,
         guidance: float = 1.0, **options: Any):
    """A trainer of a method whose weights are off their start."""
    parts, built = parts or {}, pipe(scheduler) if scheduler else pipe()
    call = tiny.call_of(built)
    options = dict(method=method, parts=parts, train__lr=1e-3, train__guidance=guidance, image__call=call) | options
    torch.manual_seed(0)
    if method == "expo":
        acting = parts.get("edit", {}).get("acting", "argmax")
        return tiny.trainer(EditPolicy(built, Edit(width=8, depth=1, acting=acting), call=call), **options)
    if method == "reinflow":
        trainer = tiny.trainer(**options)
        tiny.stir(trainer.policy)
        return trainer
    adapted = with_parts(preset(method), parts).rollout.adapted
    policy = PipelinePolicy(built, Adapter(rank=2), call=call, guidance=guidance, adapted=adapted)
    return tiny.trainer(tiny.stir(policy, 0.03 if scheduler else 0.1), **options)


def texforce(pipe: Callable[..., Any], host: str, denoisers: bool) -> tuple[Any, ...]:
    encoders = {"text_encoder"} | ({"text_encoder_2"} if pipe is not tiny.sd15 else set())
    return (pipe, f"{host}+texforce", {"adapted": {"denoisers": denoisers}}), {}, encoders | (
        {DENOISER[pipe]} if denoisers else set())


# Arguments of `made`, and the parts of the model that are trained; without them, the denoiser.
ROWS: list[tuple[Any, ...]] = [
    *(((tiny.sd3, name), {}) for name in ("refl", "draft", "alignprop")),
    *(((tiny.sd15, name), {"guidance": 2.0}) for name in ("refl", "draft", "alignprop")),
    ((tiny.sd3, "reinflow"), {}, {"transformer", "noise"}),
    *(((pipe, "expo"), {"train__updates": 1}, {"edit", "critic"}) for pipe in (tiny.sd3, tiny.sd15, tiny.flux)),
    ((tiny.sd3, "expo", BY_RATIO), {"train__updates": 1}, {"edit", "critic"}),
    *(texforce(pipe, host, both) for both in (False, True) for pipe, host in (
        (tiny.sd3, "flow_grpo_fast"), (tiny.sd15, "ddpo"), (tiny.flux, "flow_grpo"))),
    *(((tiny.sd15, method, parts), {"guidance": 2.0, "train__micro_batch": 8}) for method, parts in (
        ("ddpo", {"kernel": {"type": "DDIM", "eta": 0.5}}), ("ddpo", {"kernel": {"type": "CPS", "level": 1.0}}),
        ("mix_grpo+grpo_guard", NOISE_LEVEL), ("ddpo+sol_rl", {"preview": {"pool": 6, "steps": 2}}))),
    *(((tiny.sd15, method, VP_PAIRS, scheduler), {"train__group": 2}) for method in ("diffusion_dpo", "rpo")
      for scheduler in (tiny.pndm(), DDIM_V))]


@pytest.mark.parametrize("row", ROWS)
def test_what_is_trained_moves_and_nothing_else(row):
    arguments, options, trained = (*row, {DENOISER[row[0][0]]})[:3]
    trainer = made(*arguments, **options)
    before, kept = tiny.weights(trainer.policy), trainer.policy.weights.snapshot()
    found = tiny_runs.epochs(trainer, 2)
    assert trainer.first_ratio.max_log_ratio <= 1e-6
    assert (trainer.optimization.update, trainer.optimization.skipped) == (2, 0)
    assert all(math.isfinite(each["loss"]) and each["grad_norm"] > 1e-6 for each in found)
    moved = {key for key, value in trainer.policy.weights.snapshot().items() if not torch.equal(value, kept[key])}
    assert {key.split(".")[0] for key in moved} == trained
    # Of a text encoder, what stands after the last hidden state that the pipeline reads is not reached.
    assert len(moved) > len(kept) / 2 and all(key in moved for key in kept if key.startswith("noise."))
    after = tiny.weights(trainer.policy)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert all("lora_" in key and key.split(".")[0] in trained and after[key].isfinite().all() for key in changed)
    if arguments[1] in ("refl", "draft", "alignprop"):
        margin = 2.0 if arguments[1] == "refl" else 0.0
        assert found[0]["loss"] == pytest.approx(margin - found[0]["reward/red/mean"], abs=1e-6)
