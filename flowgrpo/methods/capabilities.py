"""Capabilities of a run that its rare features need: what goes together is said by them, not by lists of features.

A feature says which it needs, and which a run with it lacks. `lacking` says it of the settings and parts of the core;
an extension says it of itself (`training.extension.Extension.needs` and `.missing`).
"""

from flowgrpo.methods.setup import Setup

PRESENT_WEIGHTS = "present weights"  # an epoch draws and scores its samples by the weights that it begins with
ONE_DRAW = "one draw"  # an epoch draws its groups at once, whatever their rewards, and trains them all
AS_LEARNED = "as learned"  # samples are drawn by the policy that is trained, under the prompts that it learns
ONE_POLICY = "one policy"  # an epoch trains no samples of another model
OWN_SAMPLES = "own samples"  # an epoch trains no samples of other epochs
RECORDABLE = "recordable"  # samples with their old scores can be stored, and trained in a later epoch
ENCODED_ONCE = "encoded once"  # the encoding of a prompt stays the same in the whole run
LORA = "LoRA"  # the trained weights are a LoRA, whose base model stays
WHOLE_WEIGHTS = "whole weights"  # every process holds all trained weights
FINALS_ALONE = "finals alone"  # the loss reads final samples, and no step on the way to them
ALL = (PRESENT_WEIGHTS, ONE_DRAW, AS_LEARNED, ONE_POLICY, OWN_SAMPLES, RECORDABLE, ENCODED_ONCE, LORA, WHOLE_WEIGHTS,
       FINALS_ALONE)


def lacking(setup: Setup) -> dict[str, list[str]]:
    """The capabilities that settings and parts of the core take from a run, each with the reasons in words."""
    config, method = setup.config, setup.method
    reasons = [
        (LORA, "adapter.rank: 0, which trains all weights in place of a LoRA", not config.adapter.rank),
        (WHOLE_WEIGHTS, "memory.shard, whose processes hold shares of the weights", bool(config.memory.shard)),
        (AS_LEARNED, "parts.lag, whose old policy draws", method.rollout.lag.most > 0),
        (RECORDABLE, "image.sizes, which changes with the epoch", bool(config.image.sizes))]
    if not method.for_tokens:
        denoising = method.denoising
        planned = denoising.plan(config.train.steps, 0, config.seed)
        reasons += [
            (FINALS_ALONE, f"a method that trains {method.target.trains}, which reads the steps of a rollout",
             method.target.scores_sampling),
            (ENCODED_ONCE, "text encoders that are trained", denoising.adapted.encoders),
            (RECORDABLE, f"the kernel {type(denoising.kernel).__name__}, which learns",
             denoising.learned_noise is not None),
            (RECORDABLE, f"the plan {type(denoising.plan).__name__}, by which a prompt has several groups",
             isinstance(planned, tuple) and len(planned) > 1)]
    found: dict[str, list[str]] = {}
    for capability, reason, applies in reasons:
        if applies:
            found.setdefault(capability, []).append(reason)
    return found
