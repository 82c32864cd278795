"""Hints of the length at which a prompt's accuracy is near one half: the fit, the rounds and what is kept."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.contrib.hint_length import KEY, LEAST, HintLength, fit_logistic
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.images import noised_image, read_image
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.methods.validate import resolve
from tests.helpers import tiny_runs, tiny_text, tiny_vision
from tests.helpers.refusals import message

WORDS = "one two three four five six seven eight nine ten"
LED, PLAIN = Prompt("2+2=", metadata={"solution": WORDS}), Prompt("1+2=", metadata={"answer": 3})
PART = HintLength(text="{prompt}({hint})")


def logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


def drawn(prompts: list[Prompt], totals: list[list[float]], epoch: int = 0, memory=None) -> EpochBatch:
    found = EpochBatch([LED, PLAIN], epoch, 10, 0, Processes(), {} if memory is None else memory)
    found.add(prompts, torch.tensor(totals)[..., None], torch.tensor(totals))
    return found


def words(prompt: Prompt) -> int:
    return len(prompt.shown.partition("(")[2].split())


def test_the_fit_by_hand_and_weights_of_earlier_epochs():
    # The measured pair and the prior: sigmoid(b) = 1/18 and sigmoid(a + b) = 0.95.
    slope, offset = fit_logistic([(0.0, 1 / 18, 8.0)])
    assert offset == pytest.approx(logit(1 / 18), abs=5e-3) and slope + offset == pytest.approx(logit(0.95), abs=0.03)
    assert PART.share([[0.0, 0.0, 8, 0]], 0) == pytest.approx(-offset / slope)
    assert PART.share([], 0) == 0 and PART.share([[0.0, 1.0, 8, 0]], 0) == 0
    slope, offset = fit_logistic([(0.2, 0.9, 50.0), (0.8, 0.2, 50.0)])
    assert slope == LEAST and -5 < offset < 5
    old, new = [0.3, 0.0, 8, 0], [0.3, 1.0, 8, 4]
    fresh = [*old[:3], 4]
    assert PART.share([old, new], 4) < PART.share([fresh, new], 4) < PART.share([fresh, [*new[:3], 0]], 4)


NOISY = HintLength(text="{prompt}({hint})", noise=0.5)
SHOWN = Prompt("7+8=", image="seven.png", metadata={"solution": WORDS})


@pytest.mark.parametrize("part, steep, middle", [
    (PART, 12, 0.7), (PART, 8, 0.4), (PART, 20, 0.85), (PART, 10, 0.2), (PART, 15, 0.55),
    (NOISY, 12, -0.4), (NOISY, 8, -0.6), (NOISY, 15, -0.2), (NOISY, 10, 0.3)])
def test_the_accuracy_is_near_one_half_after_four_rounds(part, steep, middle):
    """By hints, and of an image by noise or hints, after five."""
    pairs, share = [], 0.0
    for _ in range(4 if part is PART else 5):
        pairs.append([share, round(8 / (1 + math.exp(-steep * (share - middle)))) / 8, 8, 0])
        share = part.share(pairs, 0, part.least(SHOWN))
    assert 1 / (1 + math.exp(-steep * (share - middle))) == pytest.approx(0.5, abs=0.1 if part is PART else 0.15)


def test_groups_off_the_target_are_followed_by_one_with_another_hint():
    found = drawn([LED, PLAIN], [[0.0] * 8, [0.0] * 8])
    [(place, once)] = PART(found)  # one has no solution
    assert place is None and words(once) == 5 and once.guided.level == pytest.approx(0.491, abs=0.01)
    assert once.text == LED.text and once.metadata == LED.metadata and once.learned is once
    found.add(found.replace([(place, once)]), torch.ones(1, 8, 1), torch.ones(1, 8))
    [(_, twice)] = PART(found)
    assert 0 < words(twice) < 5 and twice.text == LED.text
    found.add(found.replace([(None, twice)]), torch.zeros(1, 8, 1), torch.tensor([[0.0, 1.0] * 4]))
    assert PART(found) == [] and found.standing() == [0, 1, 2, 3]  # near the target; all groups are trained
    assert HintLength(rounds=1)(drawn([LED], [[0.0] * 8])) == []
    assert PART(drawn([LED], [[1.0] * 8])) == []  # an easy prompt has no hint to lose


def test_the_next_epoch_begins_with_the_predicted_share():
    memory = {}
    assert PART.begin([LED, PLAIN], drawn([], [], memory=memory)) == [LED, PLAIN]
    PART.learn(drawn([LED, PLAIN], [[0.0] * 8, [1.0] * 8], memory=memory))
    assert json.loads(json.dumps(memory))[KEY] == {"2+2=": [[0.0, 0.0, 8, 0]]}
    led, plain = PART.begin([LED, PLAIN], drawn([], [], 1, memory))
    assert words(led) == 5 and plain is PLAIN
    HintLength(keep=1).learn(drawn([led], [[1.0] * 8], 1, memory))
    assert memory[KEY]["2+2="] == [[led.guided.level, 1.0, 8, 1]]


def test_an_epoch_trains_with_hints_of_several_lengths():
    shown = []
    trainer = tiny_text.trainer(rewards={"short": lambda texts, prompts: [0.0] * len(texts)}, train__prompts=1,
                                parts={"redraw": {"type": "HintLength", "text": "{prompt}{hint}", "rounds": 3}})
    trainer.prompts = [Prompt("2+2=", metadata={"solution": "1 + 2 + 3 + 4 + 5"})]
    encode = trainer.rollouts.encode
    trainer.rollouts.encode = lambda texts, **given: shown.append(texts) or encode(texts, **given)
    metrics = [trainer.run_epoch() for trainer.epoch in range(2)]
    first, second, third, learned, again, *_ = shown
    assert first == ["2+2="] and len(second[0]) < len(third[0]) <= len(again[0]) and learned == first + second + third
    assert metrics[0]["extra_groups"] == 2 and len(trainer.memory[KEY]["2+2="]) >= 4


# Noise on the images of easy prompts
def test_an_easy_prompt_with_a_image_gets_noise_and_a_hard_one_a_hint():
    found = drawn([SHOWN, LED, PLAIN, SHOWN], [[1.0] * 8, [1.0] * 8, [1.0] * 8, [0.0, 1.0] * 4])
    [(place, noisy)] = NOISY(found)  # without an image an easy prompt stays, and so does one near the target
    assert place is None and noisy.shown == noisy.text == SHOWN.text and noisy.unguided == SHOWN
    assert -1 <= noisy.guided.level < 0 and noisy.guided.noise == -0.5 * noisy.guided.level
    assert noisy.learned is noisy and noisy.key != SHOWN.key and noisy.image == SHOWN.image
    [(_, hinted)] = NOISY(drawn([SHOWN], [[0.0] * 8]))
    assert words(hinted) == 5 and hinted.guided.noise == 0
    assert PART(found) == [] and HintLength(noise=0.5, rounds=1)(found) == []


def test_the_noise_follows_what_it_did():
    """An image that became too hard to read gets less noise in the next epoch, at last a hint."""
    memory, levels = {}, []
    for rate in (1.0, 0.0, 0.0, 0.0):
        [prompt] = NOISY.begin([SHOWN], drawn([], [], len(levels), memory))
        levels.append(prompt.guided.level if prompt.guided else 0.0)
        NOISY.learn(drawn([prompt], [[rate] * 8], len(levels), memory))
    assert levels[0] == 0 > levels[1] and levels[1] < levels[2] < levels[3]
    assert [share for share, *_ in memory[KEY][SHOWN.key]] == levels


def test_a_run_reads_the_noised_image_and_rewards_see_the_prompt(tmp_path):
    [red, *_] = tiny_vision.files(tmp_path)
    read, seen = [], []
    def right(texts, prompts, metadata):
        seen.extend(zip(prompts, (entry["image"] for entry in metadata)))
        return [1.0] * len(texts)
    own = tiny_vision.policy("llava")
    trainer = tiny_text.trainer(own, {"short": right}, train__prompts=1, parts={
        "redraw": {"type": "HintLength", "noise": 0.3, "rounds": 2}, "advantage": {"type": "NoBaseline"}})
    trainer.prompts = [Prompt("2+2=", image=red)]
    encode = trainer.rollouts.encode
    trainer.rollouts.encode = lambda texts, images: read.append(images) or encode(texts, images=images)
    metrics = trainer.run_epoch()
    clean, noised, learned = read[0][0], read[1][0], read[2]
    assert clean == red and np.array_equal(learned[1], noised) and learned[0] == red
    assert not np.array_equal(noised, read_image(red)) and {*seen} == {("2+2=", red)}
    assert metrics["extra_groups"] == 1 and trainer.first_ratio.max_log_ratio <= 1e-4


def test_noise_is_of_its_deviation_and_for_images(tmp_path):
    Image.new("RGB", (64, 64), (128, 128, 128)).save(tmp_path / "grey.png")
    one, again, other = (np.asarray(noised_image(tmp_path / "grey.png", 0.1, seed)) / 255 for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert one.std() == pytest.approx(0.1, rel=0.03) and one.mean() == pytest.approx(128 / 255, abs=0.005)
    with pytest.raises(UserError, match="parts.redraw.noise is about images that language models read"):
        resolve(tiny_runs.config("flow", "flow_grpo", {"redraw": {"type": "HintLength", "noise": 0.1}}), "flow")


@pytest.mark.parametrize("options", [{"target": 0.0}, {"band": 1.0}, {"decay": 0.0}, {"rounds": 0}, {"keep": 0},
                                     {"text": "{prompt}"}, {"noise": -0.1}])
def test_impossible_settings(options):
    assert "HintLength: " in message(HintLength, **options, error=ValueError)
