"""Metrics of a run's scores and samples."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.run import run
from flowgrpo.training.scoring import diversity
from tests.helpers import tiny


def test_the_diversity_of_groups():
    pictures = torch.zeros(4, 3, 128, 128)
    pictures[1] = 1.0
    assert diversity(pictures, 2) == pytest.approx([0.5**0.5, 0.0]) and diversity(pictures, 1) == []
    assert diversity(["a", "a", "b", "a", "b", "c"], 3) == [0.5, 1.0]


@pytest.mark.fast
def test_a_learning_rate_of_1000_ends_the_run_in_one_line(tmp_path, capsys):
    config = tiny.config(tmp_path, train__epochs=5, train__lr=1000.0, train__save_every=1, eval__every=0)
    with pytest.raises(UserError, match=r"^the updates of epoch 2 have ruined the weights, which changed by "
                                        r"\S+e\+07 times .* train.lr \(1000\) is too large: begin anew with a "
                                        r"smaller one$"):
        run(config, pipe=tiny.sd3(), functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "alert, epoch" in line]
    assert line.startswith("alert, epoch 1: the weights have changed by ")
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["epoch-00001.damaged"]


@pytest.mark.fast
def test_the_last_good_epoch_is_kept_and_named_where_a_later_rate_ruins_the_weights(tmp_path):
    options = dict(train__save_every=1, train__keep=2, train__epochs=2)
    given = dict(functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    run(tiny.config(tmp_path, **options), pipe=tiny.sd3(), **given)
    config = tiny.config(tmp_path, **options | dict(train__epochs=4, train__lr=1e30))
    with pytest.raises(UserError, match=r"updates of epoch 3 have ruined .* \(1e\+30\) is too large: --resume with a "
                                        r"smaller one goes on from epoch 2$"):
        run(config, True, pipe=tiny.sd3(), **given)
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
    with pytest.raises(UserError, match=r"^the sample of the prompt '\w+' holds NaN or an infinity, and no reward has "
                                        r"seen it: " + told):
        run(tiny.config(tmp_path), pipe=pipe, functions={"red": tolerant},
            prompts=[Prompt(text) for text in tiny.PROMPTS])
    assert all(seen)


@pytest.mark.fast
@pytest.mark.parametrize("epochs", [2, 4])
def test_a_reward_that_no_longer_answers_ends_the_run_with_its_epochs_saved(epochs, tmp_path, capsys):
    """At the last epoch the run ends as it would, and says it."""
    config = tiny.config(tmp_path, train__epochs=epochs, guard__unscored=2, reward={
        "red": 1.0, "gone": {"weight": 1.0, "on_error": "skip"}})
    given = dict(prompts=[Prompt(text) for text in tiny.PROMPTS])
    def gone(images, prompts):
        raise RuntimeError("no answer")
    if epochs == 2:
        summary = run(config, pipe=tiny.sd3(), functions={"red": tiny.red, "gone": gone}, **given)
        assert summary["trained"] == {"epochs": 2, "nothing": False,
                                      "said": ["gone gave no score in 2 epochs (epochs 1 to 2)."]}
        assert "gone gave no score in 2 epochs" in capsys.readouterr().out
        return
    with pytest.raises(UserError, match=r"^reward 'gone' has failed on every sample of 2 epochs in a row, .*--resume; "
                                        r"--guard.unscored=0 goes on"):
        run(config, pipe=tiny.sd3(), functions={"red": tiny.red, "gone": gone}, **given)
    assert "epoch 2 is saved in " in capsys.readouterr().out
    run(config, True, pipe=tiny.sd3(), functions={"red": tiny.red, "gone": tiny.red}, **given)
