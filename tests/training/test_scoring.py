"""Metrics of scores and samples, what stops a run, and held-out evaluation of rewards that compare a group."""

import json

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.rewards.pairwise import held_out_rewards
from flowgrpo.training.scoring import diversity
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import message, refused


def test_the_diversity_of_groups():
    pictures = torch.zeros(4, 3, 128, 128)
    pictures[1] = 1.0
    assert diversity(pictures, 2) == pytest.approx([0.5**0.5, 0.0]) and diversity(pictures, 1) == []
    assert diversity(["a", "a", "b", "a", "b", "c"], 3) == [0.5, 1.0]


@pytest.mark.fast
def test_a_learning_rate_of_1000_ends_the_run_in_one_line(tmp_path, capsys):
    config = tiny.config(tmp_path, train__epochs=5, train__lr=1000.0, train__save_every=1, eval__every=0)
    refused(r"^the updates of epoch 2 have ruined the weights, which changed by \S+e\+07 times .* train.lr \(1000\) is "
            r"too large: begin anew with a smaller one$", tiny_runs.whole, config)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "alert, epoch" in line]
    assert line.startswith("alert, epoch 1: the weights have changed by ")
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["epoch-00001.damaged"]


@pytest.mark.fast
def test_the_last_good_epoch_is_kept_and_named_where_a_later_rate_ruins_the_weights(tmp_path):
    options = dict(train__save_every=1, train__keep=2, train__epochs=2)
    tiny_runs.whole(tiny.config(tmp_path, **options))
    config = tiny.config(tmp_path, **options | dict(train__epochs=4, train__lr=1e30))
    refused(r"updates of epoch 3 have ruined .* \(1e\+30\) is too large: --resume with a smaller one goes on from epoch"
            " 2$", tiny_runs.whole, config, resume=True)
    assert sorted(path.name for path in (config.folder / "checkpoints").iterdir()) == ["epoch-00001", "epoch-00002"]


@pytest.mark.parametrize("part, told", [
    ("vae", r"the model's own vae\.\S+ holds NaN or an infinity: load whole weights$"),
    ("transformer", r"the model's own transformer\.\S+ holds NaN or an infinity: load whole weights$")])
def test_samples_that_are_not_finite_stop_the_run_before_a_reward(part, told, tmp_path):
    pipe, seen = tiny.sd3(), []
    with torch.no_grad():
        next(iter(list(getattr(pipe, part).parameters())[-1:])).view(-1)[0] = torch.nan
    def tolerant(images, prompts):
        seen.append(images.isfinite().all())
        return images[:, 0].mean((1, 2)).nan_to_num(0.5)
    refused(r"^the sample of the prompt '\w+' holds NaN or an infinity, and no reward has seen it: " + told,
            tiny_runs.whole, tiny.config(tmp_path), {"red": tolerant}, pipe=pipe)
    assert all(seen)


@pytest.mark.fast
@pytest.mark.parametrize("epochs", [2, 4])
def test_a_reward_that_no_longer_answers_ends_the_run_with_its_epochs_saved(epochs, tmp_path, capsys):
    """At the last epoch the run ends as it would, and says it."""
    config = tiny.config(tmp_path, train__epochs=epochs, guard__unscored=2, reward={
        "red": 1.0, "gone": {"weight": 1.0, "on_error": "skip"}})
    def gone(images, prompts):
        raise RuntimeError("no answer")
    if epochs == 2:
        summary = tiny_runs.whole(config, {"red": tiny.red, "gone": gone})
        [said] = summary["trained"].pop("said")
        assert summary["trained"] == {"epochs": 2, "nothing": False}
        assert said.startswith("gone gave no score in 2 epochs (epochs 1 to 2) (its last error: reward 'gone' raised ")
        assert "RuntimeError: no answer" in said
        assert "gone gave no score in 2 epochs" in capsys.readouterr().out
        return
    refused(r"^reward 'gone' has failed on every sample of 2 epochs in a row, .*--resume; --guard.unscored=0 goes on "
            r"without its scores \(its last error: reward 'gone' raised .*: RuntimeError: no answer", tiny_runs.whole,
            config, {"red": tiny.red, "gone": gone})
    assert "epoch 2 is saved in " in capsys.readouterr().out
    tiny_runs.whole(config, {"red": tiny.red, "gone": tiny.red}, resume=True)


class Ranked:
    """Rank of each image's red within its group, 0 to 1, and how it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts, metadata, group, training=False):
        assert len(images) % group == 0
        self.calls.append((group, training))
        assert all(len({*prompts[start:start + group]}) == 1 for start in range(0, len(prompts), group))
        red = images[:, 0].flatten(1).mean(1).unflatten(0, (-1, group))
        return (red.argsort(1).argsort(1).flatten() / max(group - 1, 1)).tolist()


def go(folder, functions, **options):
    config = tiny.config(folder, **dict(train__epochs=1, held_out=0.5, eval__prompts=3) | options)
    return config, tiny_runs.whole(config, functions)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_reward_of_groups_is_measured_on_the_images_of_a_prompt(tmp_path, rows):
    """In micro-batches that end within a group too."""
    ranked = Ranked()
    config, summary = go(tmp_path, {"ranked": ranked}, reward="ranked", eval__samples=3, train__micro_batch=rows,
                         train__group=4)
    assert summary["before"] == summary["after"] == {"ranked": 0.5}
    scores = json.loads((config.folder / "before.json").read_text())["scores"]["ranked"]
    assert [sorted(scores[start:start + 3]) for start in (0, 3, 6)] == [[0, 0.5, 1]] * 3
    assert {(group, training) for group, training in ranked.calls} >= {(4, True), (3, False)}
    assert all(training == (group == 4) for group, training in ranked.calls[1:])  # the first one is a trial


def test_what_cannot_be_measured_is_refused_with_the_ways_out():
    def grouped(images, prompts, metadata, group):
        return [0.0] * len(images)
    def pairs(first, second, prompts):
        return [1.0] * len(first)
    assert held_out_rewards({"g": grouped}, {}, 2) == {"g": grouped}
    assert held_out_rewards({"p": pairs}, {"g": grouped}, 2) == {"g": grouped}
    refused("no groups: expected .* one image at a time, eval.samples of 2 or more, which are then a group, or "
            "eval.prompts: 0 for no evaluation$", held_out_rewards, {"g": grouped}, {})
    assert message(held_out_rewards, {}, {"p": pairs}, 2).endswith("one image at a time")


def test_a_reward_knows_whether_its_samples_are_trained_on():
    seen = []
    def voter(images, prompts, training: bool):
        seen.append(training)
        return [0.0] * len(images)
    rewards.score({"voter": voter}, torch.rand(2, 3, 8, 8), ["a"] * 2, [{}] * 2)
    rewards.score({"voter": voter}, torch.rand(2, 3, 8, 8), ["a"] * 2, [{}] * 2, training=True)
    assert seen == [False, True]
    assert not rewards.remembers({"voter": voter})


def test_an_evaluation_can_be_left_out(tmp_path):
    ranked = Ranked()
    config, summary = go(tmp_path, {"ranked": ranked}, reward="ranked", eval__prompts=0, train__group=4)
    assert {group for group, _ in ranked.calls} == {4}
    assert summary["before"] == summary["after"] == {} and summary["evaluation"]["prompts"] == 0
    assert (config.folder / "report.html").is_file() and not summary["trained"]["nothing"]
