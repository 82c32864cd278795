"""The limit of the first ratio, by precision and clip range, and the epoch of the reference's scores."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.distributed.processes import Processes
from flowgrpo.methods import Method, preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.training import sampling
from flowgrpo.training.first_ratio import FirstRatio
from tests.helpers import loop, tiny
from tests.helpers.refusals import refused


@pytest.mark.parametrize("surrogate, limit", [
    (Clip(1e-4, 1e-4), 1e-5), (Clip(0.2, 2e-6), 2e-7), (Clip(0.1, 0.3), 1e-2), (Clip(0.1, math.inf), 1e-2),
    (with_parts(preset("ddpo"), {"surrogate": {"type": "Reinforce"}}).loss.surrogate, 1e-5),
])
def test_limits_by_hand(surrogate, limit):
    rollouts = SimpleNamespace(processes=Processes(), exact=1e-6, policy=SimpleNamespace(unit="images"),
                               method=Method().having(surrogate=surrogate))  # nothing is replayed here
    assert FirstRatio(rollouts).limit == 1e-6
    rollouts.exact = None
    assert FirstRatio(rollouts).limit == pytest.approx(limit)


def bf16(**options):
    return tiny.trainer(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"), precision="bf16", **options)


def shifted(trainer, off: float):
    """(parts of an epoch, of which the old scores of the first transition are off, conditioning, that transition)."""
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:2])
    [first, *rest] = loop.credit(trainer, parts, grouped, conditioning.prompts)
    taken = first.transitions[0]
    moved = replace(taken, old=replace(taken.old, logp=taken.old.logp + off))
    return [replace(first, transitions=(moved, *first.transitions[1:])), *rest], conditioning, taken


def test_what_no_rounding_makes_stops_a_run_below_fp32_too():
    trainer = bf16()
    parts, conditioning, taken = shifted(trainer, 0.05)
    refused(r"the first \|log ratio\| is 5.0e-02, and rounding makes less than 2.0e-02", trainer.first_ratio, parts,
            conditioning, print)


def test_without_a_clip_old_scores_that_differ_are_computed_again_too():
    trainer = bf16(method="ddpo", parts__surrogate={"type": "Reinforce"})
    parts, conditioning, taken = shifted(trainer, 1e-4)
    again = trainer.first_ratio(parts, conditioning, print)
    assert trainer.first_ratio.rescore and trainer.first_ratio.max_log_ratio == pytest.approx(1e-4, rel=0.1)
    torch.testing.assert_close(again[0].transitions[0].old.logp, taken.old.logp, rtol=0, atol=1e-5)


def test_the_limit_is_for_the_methods_own_log_ratio():
    """Guard's is the deviation times the difference of log-probabilities: 1e-4 of these is below its limit."""
    trainer = bf16(method="flow_grpo+grpo_guard")
    parts, conditioning, taken = shifted(trainer, 1e-4)
    trainer.first_ratio(parts, conditioning, print)
    std = taken.old.std.flatten()[0].item()
    assert 0 < std < 1 and trainer.first_ratio.max_log_ratio == pytest.approx(1e-4 * std, rel=0.05)


def by_batch(policy, share: float):
    """Let a denoiser's outputs depend on the batch's size by a share, as a GPU's products of other shapes do."""
    policy.denoisers["transformer"].register_forward_hook(lambda _module, _inputs, outputs: tuple(
        value * (1 + share * len(value)) for value in outputs))
    return policy


def checked(trainer, off: float = 0.0, micro_batch: int | None = None) -> list[str]:
    """Check the first epoch's scores, off by a number, at another micro-batch than they were sampled with."""
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    moved = [replace(part, transitions=tuple(replace(taken, old=replace(taken.old, logp=taken.old.logp + off))
                                             for taken in part.transitions)) for part in parts]
    trainer.geometry.micro_batch = micro_batch or trainer.geometry.micro_batch
    lines: list[str] = []
    trainer.first_ratio(moved, conditioning, lines.append)
    return lines


def test_in_fp32_the_limit_is_a_multiple_of_what_another_batch_size_changes():
    trainer = tiny.trainer(by_batch(tiny.policy(), 1e-4), train__micro_batch=4)
    [line] = checked(trainer, micro_batch=2)
    check = trainer.first_ratio
    assert 1e-6 < check.max_log_ratio <= check.limit <= 1e-4 and "half the micro-batch alone changes" in line
    assert trainer.geometry.micro_batch == 2


@pytest.mark.parametrize("share, off", [(0.0, 3e-6), (0.0, 1e-3), (1e-4, 2e-4), (1.0, 1e-3)])
def test_what_is_more_than_that_stops_a_run_in_fp32(share, off):
    """The last one's batches differ by far more than rounding: the limit stays at 1e-4."""
    trainer = tiny.trainer(by_batch(tiny.policy(), share), train__micro_batch=4)
    refused(r"the first \|log ratio\| is .*, expected at most .*: replay and rollout", checked, trainer, off)
    assert trainer.first_ratio.limit <= 1e-4


def test_a_run_that_agrees_replays_nothing_twice():
    trainer = tiny.trainer()
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    before = trainer.policy.evaluations
    trainer.first_ratio(parts, conditioning, print)
    rows = sum(len(taken.x) for part in parts for taken in part.transitions)
    assert trainer.policy.evaluations - before == rows * (2 if trainer.policy.guidance > 1 else 1)
    assert trainer.first_ratio.max_log_ratio <= 1e-6 and trainer.first_ratio.limit == 1e-6


def test_an_epoch_reads_no_scores_of_an_earlier_one():
    """Scores are kept for the passes of one epoch, and the next one computes them anew, also where the last broke off.

    The reference is the base model, whose weights are changed here between the epochs.
    """
    trainer = tiny.trainer(parts__kl={"type": "GaussianKL", "weight": 0.1}, train__inner_epochs=2)
    [part], conditioning, _ = sampling.sample(trainer, trainer.prompts[:1])
    epoch = loop.epoch(trainer, [part], conditioning)
    def scores() -> torch.Tensor:
        return torch.cat([score.logp for score in trainer.kl_reference.scores(part)])
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, 2)
    before = scores()
    with torch.no_grad():
        for name, weight in trainer.policy.pipe.transformer.named_parameters():
            if "lora" not in name:
                weight.mul_(1.1)
    assert torch.equal(scores(), before)  # the second pass
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 1, 2)
    assert (scores() - before).abs().max() > 1e-4
