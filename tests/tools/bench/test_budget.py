"""Cost of an epoch in evaluations, foretold and counted."""

import pytest

from flowgrpo.config import validate
from flowgrpo.data.prompts import Prompt
from flowgrpo.rewards import differentiable
from flowgrpo.run import run
from flowgrpo.tools.bench.plan import epoch_cost, epochs_for, epochs_of
from tests.data.test_recorded_pairs import pairs_file
from tests.helpers import tiny


def config(folder, method: str, micro_batch: int, guidance: float = 1.0, **parts):
    return validate({
        "method": method, "parts": parts, "reward": "bright", "output": str(folder), "tracker": "none", "device": "cpu",
        "precision": "fp32",
        "image": {"call": tiny.CALL}, "adapter": {"rank": 2}, "eval": {"steps": 1, "prompts": 1, "grid": 1},
        "train": {"epochs": 3, "prompts": 2, "group": 3, "micro_batch": micro_batch, "guidance": guidance}})


def shortened(settings, **train):
    """Two epochs, of which the first alone checks its ratio, on a grid of 6 steps."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"epochs": 2, "steps": 6} | train)})


@differentiable
def bright(images, prompts):
    return images.flatten(1).mean(1)


def spent(settings) -> int:
    """Denoiser evaluations of the epochs of a run, without those that measure it."""
    prompts = [Prompt(text) for text in "abcde"]
    trainer = tiny.trainer_of(settings, {"bright": bright}, prompts)
    for trainer.epoch in range(settings.train.epochs):
        trainer.run_epoch()
    return trainer.policy.evaluations


# Parts of groups, or one group, as 4 rows do not hold two; every kind of replay, with guidance and without.
@pytest.mark.parametrize("method, guidance, micro_batch, parts", [
    ("flow_grpo", 1.0, 2, {}), ("flow_grpo", 1.0, 4, {}), ("flow_grpo_fast", 1.0, 2, {}), ("dance_grpo", 1.0, 2, {}),
    ("mix_grpo", 3.0, 2, {}), ("mix_grpo", 1.0, 4, {"plan": {"every": 1}}),
    ("mix_grpo_flash", 1.0, 2, {"plan": {"every": 1}}), ("mix_grpo+grpo_guard", 1.0, 4, {}),
    ("diffusion_nft", 1.0, 2, {}), ("diffusion_nft", 1.0, 4, {}), ("awm", 3.0, 2, {}), ("dgpo", 1.0, 2, {}),
    ("dgpo", 1.0, 4, {}), ("diffusion_dpo", 1.0, 4, {}), ("refl", 1.0, 2, {}),
    ("draft", 3.0, 4, {"plan": {"count": 2}}), ("alignprop", 1.0, 2, {})])
def test_a_run_costs_what_was_foretold(tmp_path, method, guidance, micro_batch, parts):
    settings = shortened(config(tmp_path, method, micro_batch, guidance, **parts))
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in range(2))


@pytest.mark.parametrize("method, staleness, guidance", [("flow_grpo", 1, 3.0), ("mix_grpo", 2, 1.0)])
def test_epochs_that_are_drawn_ahead_cost_a_replay_more(tmp_path, method, staleness, guidance):
    settings = shortened(config(tmp_path, method, 2, guidance), staleness=staleness, epochs=3)
    costs = [epoch_cost(settings, epoch) for epoch in range(3)]
    plain = [epoch_cost(shortened(settings, staleness=0), epoch) for epoch in range(3)]
    assert spent(settings) == sum(costs) and costs[0] == plain[0] and costs[1] > plain[1]


def test_a_whole_run_reports_what_was_foretold(tmp_path):
    settings = config(tmp_path, "mix_grpo", 4)
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == sum(epoch_cost(settings, epoch) for epoch in range(3))


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("method, parts", [("diffusion_dpo", {}), ("rpo", {"times": {"count": 2}})])
def test_a_run_on_recorded_pairs_costs_what_was_foretold(tmp_path, method, parts, micro_batch):
    texts = "abcde"
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in texts))
    settings = config(tmp_path, method, micro_batch, **parts)
    settings = settings.model_copy(update={
        "preferences": file, "labels": "rewards" if method == "rpo" else "file",
        "train": settings.train.model_copy(update={"group": 2, "epochs": 2})})
    # 2 pairs, so 4 rows at each time: the old score, the reference's, the policy's own, and this once more for the
    # first ratio; no rollout.
    rows = 4 * parts.get("times", {}).get("count", 4)
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [4 * rows, 3 * rows]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in texts])
    assert summary["denoiser_evaluations"] == 7 * rows


@pytest.mark.parametrize("guidance, edit, bases", [(1.0, {}, 4), (3.0, {"candidates": 2}, 8),
                                                   (1.0, {"acting": "pairs"}, 2)])
def test_a_run_of_edits_costs_its_bases(tmp_path, guidance, edit, bases):
    settings = config(tmp_path, "expo", 4, guidance, edit={"width": 8, "depth": 1} | edit,
                      value={"steps": 2, "batch": 4})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"group": 4, "epochs": 2})})
    # 2 prompts, with a grid of 10 steps
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [2 * bases * 10 * (2 if guidance > 1 else 1)] * 2
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in (0, 1))


@pytest.mark.parametrize("method", ["flow_grpo", "dgpo"])
def test_a_second_pass_costs_what_was_foretold(tmp_path, method):
    settings = shortened(config(tmp_path, method, 2), inner_epochs=2)
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in range(2))


def test_the_fewest_epochs_that_reach_a_budget(tmp_path):
    # 2 prompts of 3 rows: the step at which they part costs 2, another one 6. Rollout 2 + 9 * 6, replay of the window
    # 2 + 3 * 6, and in the first epoch once more for the first ratio.
    settings = config(tmp_path, "mix_grpo", 2)
    assert [epoch_cost(settings, epoch) for epoch in (0, 1, 24)] == [56 + 2 * 20, 56 + 20, 56 + 20]
    assert epoch_cost(settings, 25) == 56 - 4 + 20  # the window has moved: one more step per prompt
    assert epochs_for(settings, 96) == (1, 96)
    assert epochs_for(settings, 97) == (2, 172)


def test_previews_are_foretold_and_count(tmp_path):
    settings = config(tmp_path, "mix_grpo+sol_rl", 2, preview={"pool": 5, "steps": 2})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"group": 4, "epochs": 2})})
    # 2 prompts of 4 rows, each a noise of its own: previews 2 * 5 * 2, rollout 10 * 8, replay of the window 4 * 8, and
    # in the first epoch once more.
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [20 + 80 + 2 * 32, 20 + 80 + 32]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == 2 * (20 + 80) + 3 * 32
    assert summary["rollout_evaluations_per_picture"] == pytest.approx((20 + 80) / 8)
    assert summary["rollout_evaluations_saved_by_sharing"] == 0


def test_the_fewest_epochs_from_measured_costs():
    # 100 for the first epoch, 30 for each further one
    assert [epochs_of(100, 30, budget) for budget in (1, 100, 101, 130, 131)] == [1, 1, 2, 2, 3]
