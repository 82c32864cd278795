"""The base's images under shuffled prompts, and their likeness to the images after training."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.distances import Shuffled, structure
from flowgrpo.evaluation.report.verdict import sentences
from flowgrpo.evaluation.statistics import blind
from flowgrpo.rewards import About

POLICY = SimpleNamespace(device=torch.device("cpu"), fps=None)
PROMPTS = [Prompt(f"prompt {i}", metadata={"value": i, "even": i % 2 == 0}) for i in range(40)]
IMAGES = torch.arange(40.0).div(40)[:, None, None, None].expand(40, 3, 4, 4)


def fits(images, prompts, metadata):
    """1 for the image of its own prompt, less for others; draws from every random state."""
    random.random(), np.random.rand(), torch.rand(1)
    assert all(prompt == f"prompt {entry['value']}" for prompt, entry in zip(prompts, metadata))
    return [1 - abs(round(image.mean().item() * 40) - entry["value"]) / 40 for image, entry in zip(images, metadata)]


class Remote:
    about = About(needs="server")

    def __call__(self, images, prompts):
        raise AssertionError("asked")


class Group:
    group = True

    def __call__(self, images, prompts, metadata, group):
        raise AssertionError("asked")


class Based:
    base = True

    def __call__(self, images, prompts, metadata, base=None):
        raise AssertionError("asked")


def test_images_are_scored_under_the_prompt_half_the_list_away():
    shuffled = Shuffled.of({"fits": fits, "remote": Remote(), "group": Group(), "based": Based()}, PROMPTS)
    assert [*shuffled.rewards] == ["fits"] and len(shuffled.others["fits"]) == 32
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    scores = shuffled.score([0, None, 20, 35], IMAGES[[0, 1, 20, 35]], POLICY)[:, 0]
    torch.testing.assert_close(scores, torch.tensor([1 - 16 / 40, math.nan, 1 - 16 / 40, math.nan]), equal_nan=True)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_reward_of_some_prompts_gets_prompts_to_which_it_applies():
    reward = rewards.Composed(fits, WatchRule(when={"even": True}), name="fits")
    [others] = Shuffled.of({"fits": reward}, PROMPTS).others.values()
    assert {i: other.metadata["value"] for i, other in others.items()} == {
        i: (i + 16) % 32 for i in range(0, 32, 2)}


def test_no_image_gets_its_own_prompt_and_failures_have_no_scores():
    """Of 16 prompts that are 8, twice, another one is 7 or 9 away; of 7 prompts, and of one 16 times, there is none."""
    [others] = Shuffled.of({"fits": fits}, PROMPTS[:8] * 2).others.values()
    assert len(others) == 16 and all(other.metadata["value"] == (i + 7) % 8 for i, other in others.items())
    assert not Shuffled.of({"fits": fits}, PROMPTS[:7]).rewards
    assert not Shuffled.of({"fits": fits}, PROMPTS[:1] * 16).rewards
    def fails(images, prompts, metadata):
        raise KeyError("value")
    assert Shuffled.of({"it": fails}, PROMPTS).score([0, 1], IMAGES[:2], POLICY).isnan().all()


OWN = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]  # mean 0.35
SAME = ("reward 'x' gives images the same scores under other prompts ({} on 8 images): it does not tell whether an "
        "image fits its prompt")
MAY = ("reward 'x' may not tell whether an image fits its prompt: on 8 images {} under other prompts against {} under "
       "their own, a difference of {} (95 %); more eval.prompts narrow it")


@pytest.mark.parametrize("own, other, said", [
    (OWN, [0.1, 0.0, 0.3, 0.2, 0.5, 0.4, 0.7, 0.68], ("warn", SAME.format("0.360 against 0.350"))),
    ([0.5] * 8, [0.5] * 8, ("warn", SAME.format("0.500 against 0.500"))),
    ([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 8,
     ("plain", MAY.format("0.000", "0.250", "-0.120 to +0.591"))),
    (OWN, OWN[::-1], ("plain", MAY.format("0.350", "0.350", "-0.325 to +0.300"))),
    (OWN, OWN, ("plain", "reward 'x' does not read the prompt: 8 images have the same scores under other prompts")),
    (OWN, [value - 0.1 for value in OWN], None), (OWN, [math.nan, *OWN[1:]], None), (OWN, [None, *OWN[1:]], None),
    ([1.0] * 8, [0.0] * 8, None)])
def test_what_a_reward_cannot_tell(own, other, said):
    assert blind({"x": own}, {"x": other}) == ([said] if said else [])
    base = {"scores": {"x": own}, "shuffled": {"x": other}}
    shown = sentences(validate({}), [], [], {}, False, base=base)[1:]
    assert [(each["tone"], each["text"]) for each in shown] == ([(said[0], f"R{said[1][1:]}.")] if said else [])


def test_structure_is_ssim_of_pairs_in_the_levels_of_files():
    """Of equal images 1; of black and white (0 0 + c1) (0 + c2) / ((1 + c1) (0 + c2)), c1 = 0.0001. Half a level does
    not count."""
    black = torch.zeros(1, 3, 12, 12)
    assert structure(black, black + 0.4 / 255) == {"ssim": 1.0, "images": 1}
    found = structure(torch.cat([black, black]), torch.cat([black, black + 1]))
    assert found == {"ssim": pytest.approx((1 + 1e-4 / 1.0001) / 2), "images": 2}
    [shown] = [each["text"] for each in sentences(validate({}), [], [], {}, True, structure=found)[1:]]
    assert shown == "Images have kept 0.50 of the base's structure (SSIM of the same prompts and seeds, 2 images)."


def test_structure_of_large_images_is_averaged_first():
    """A chequerboard of single pixels and its negative are the same grey at half the size."""
    board = (torch.arange(512)[:, None] + torch.arange(512)).remainder(2).float().expand(1, 3, -1, -1)
    assert structure(board, 1 - board) == {"ssim": pytest.approx(1.0), "images": 1}
    small = board[..., :64, :64]
    assert structure(small, 1 - small)["ssim"] < -0.9


@pytest.mark.parametrize("base, tuned", [
    (["a"], ["b"]), (torch.zeros(1, 2, 3, 12, 12), torch.zeros(1, 2, 3, 12, 12)), (torch.empty(0), torch.empty(0)),
    (torch.zeros(1, 3, 10, 12), torch.zeros(1, 3, 10, 12)), (torch.zeros(1, 3, 12, 12), torch.zeros(2, 3, 12, 12))])
def test_there_is_no_structure_of_texts_clips_or_small_images(base, tuned):
    assert structure(base, tuned) is None


REWARDS = '''
def bright(images, prompts):
    return images.mean((1, 2, 3))

seen = {}

def fits(images, prompts):
    """1 for an image under the first prompt with which it came."""
    return [float(seen.setdefault(image.numpy().tobytes(), prompt) == prompt) + 0.1 * float(image.mean())
            for image, prompt in zip(images, prompts)]
'''


def test_a_run_says_which_reward_does_not_read_the_prompt_and_how_like_the_bases_its_images_are(
        tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.txt").write_text("".join(f"{count} {thing}\n" for count in "abc" for thing in (
        "star", "circle", "square", "cross")))
    assert main(["train", "starter", "--reward={rewards.py:bright: 1, rewards.py:fits: 1}", "--prompts=prompts.txt",
                 "--held_out=0.67", "--train.epochs=1", "--train.prompts=1", "--train.group=4", "--train.steps=4",
                 "--train.updates=1", "--train.lr=1e-2", "--method=mix_grpo", "--parts={plan: {size: 1}}",
                 "--eval.steps=2", "--eval.prompts=8", "--eval.grid=8", "--eval.rewards=[]", "--tracker=none",
                 "--output=runs", "--precision=fp32"]) == 0
    run, out = tmp_path / "runs" / "starter", capsys.readouterr().out
    said = "reward 'rewards.py:bright' does not read the prompt: 8 images have the same scores under other prompts"
    assert [line for line in out.splitlines() if "under other prompts" in line] == [said, f"R{said[1:]}."]
    base = json.loads((run / "before.json").read_text())
    assert base["shuffled"]["rewards.py:bright"] == base["scores"]["rewards.py:bright"]
    assert base["shuffled"]["rewards.py:fits"] == pytest.approx(
        [score - 1 for score in base["scores"]["rewards.py:fits"]])
    before, after = (torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
                                  for file in sorted((run / when).glob("[0-9]*.png"))]) for when in ("before", "after"))
    found = json.loads((run / "summary.json").read_text())["structure"]
    assert found == {"ssim": pytest.approx(structure(before, after)["ssim"], abs=1e-6), "images": 8}
    assert found["ssim"] < 0.999
    kept = f"have kept {found['ssim']:.2f} of the base's structure (SSIM of the same prompts and seeds, 8 images)."
    page = (run / "report.html").read_text()
    assert kept in out and kept in page and f"R{said[1:]}." in page
