"""Phases of a run: which one an epoch is in, what it changes, which prompts it draws, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import torch

from flowgrpo.contrib.phases import Carried, Phases
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.order import EpochPermutation
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.policies import build
from flowgrpo.tools.check.tiny import videos
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message

PROMPTS = [Prompt(text, metadata={"sign": text[1] if text[1] in "+-" else "other"}) for text in tiny_text.PROMPTS]


def text_trainer(listed: list[dict], **options):
    made = tiny_text.trainer(phases=listed, train__epochs=10, **options)
    made.prompts = PROMPTS
    return made


def test_the_phase_of_an_epoch_by_its_number_its_share_and_a_reward():
    listed = [{"at": 2}, {"at": 0.5}, {"at": 15, "reach": 0.8}]
    made = loop.extension(tiny_text.trainer(train__epochs=20, phases=listed), "Phases")
    assert made.begins == [2, 10, 15]
    assert [made.number_at({}, epoch) for epoch in (0, 1, 2, 9, 10, 14, 15)] == [-1, -1, 0, 0, 1, 1, 2]
    assert [made.number_at({"phase_mean": mean}, 11) for mean in (0.7, 0.8)] == [1, 2]
    assert made.number_at({"phase_mean": 0.1, "phase": 2}, 12) == 2  # once begun, it stays


def test_a_phase_changes_what_it_sets_and_evaluations_keep_their_own():
    made = text_trainer([{"at": 1, "when": {"sign": "+"}, "set": {"train.group": 6, "train.prompts": 1,
                                                                  "text.max_tokens": 3, "train.lr": 0.5}}])
    lengths, prompts = [], []
    def spied(epoch):
        lengths.append(tuple(epoch.parts[0].transitions[0].ids.shape))
        prompts.append({prompt.text for prompt in epoch.groups.prompts})
    loop.watch(made, on_drawn=spied)
    for made.epoch in range(2):
        made.run_epoch()
    assert lengths == [(4, 6), (6, 3)] and prompts[1] < {"1+2=", "7+8=", "2+2="}
    assert made.optimization.optimizer.param_groups[0]["lr"] == 0.5 and made.rollouts.rollout_evaluations > 0
    assert made.policy.text.max_tokens == 6 and len(made.prompts) == 6  # again behind the epoch


@pytest.mark.fast
def test_grids_sizes_and_steps_of_phases():
    made = tiny.trainer(phases=[{"at": 1, "set": {"image.sizes": [[8, 8]], "train.steps": 4}}], train__epochs=3,
                        parts={"plan": {"size": 2}})
    shapes = []
    loop.watch(made, on_drawn=lambda epoch: shapes.append((tuple(epoch.parts[0].finals[0].shape[-2:]),
                                                           len(epoch.parts[0].exploration.grid))))
    for made.epoch in range(2):
        metrics = made.run_epoch()
    assert shapes == [((8, 8), 7), ((4, 4), 5)] and metrics["grad_norm"] > 0
    settings = tiny.config(phases=[{"at": 1, "set": {"train.shift": 2.0}}], train__grid="stock", train__epochs=4)
    with pytest.raises(UserError, match="^phases.0..set: train.shift is 2.0, but train.grid is 'stock'"):
        Phases.require(loop.setup(settings, build.PIPELINE, PROMPTS))


def test_the_weights_of_rewards_change():
    rewards = {"short": tiny_text.short, "long": lambda texts, prompts: [float(len(text) > 4) for text in texts]}
    made = text_trainer([{"at": 1, "weights": {"short": 0.0, "long": 2.0}}], rewards=rewards,
                        reward={"short": 1.0, "long": 0.5})
    weights = []
    for made.epoch in range(2):
        made.run_epoch()
        weights.append(dict(made.scoring.weights))
    assert weights == [{"short": 1.0, "long": 0.5}, {"short": 0.0, "long": 2.0}]


def test_hard_prompts_of_earlier_phases_are_carried():
    now, memory = frozenset(prompt.key for prompt in PROMPTS[3:]), {"rates": {"1+2=": [0.0], "33+4=": [0.5, 1.0]}}
    part = Carried(EpochPermutation(), now, 0.5)
    drawn = [part(PROMPTS, 2, epoch, 0, None, memory, 4) for epoch in range(400)]
    carried = Counter(batch[0].text for batch in drawn)
    assert carried["1+2="] + carried["33+4="] == 400  # the third of the earlier prompts was never sampled
    assert carried["33+4="] == pytest.approx(400 * 0.05 / 1.05, abs=12) and {b[1].key for b in drawn} <= now
    assert all(prompt.key in now for prompt in Carried(EpochPermutation(), now)(PROMPTS, 3, 0, 0, None, memory, 4))
    batch = EpochBatch(PROMPTS, 0, 1, 0, Processes())
    batch.add(PROMPTS[:1], torch.tensor([[[1.0], [0.0]]]), torch.tensor([[1.0, 0.0]]))
    Carried(EpochPermutation(), now, records=True).learn(memory, batch)
    assert memory["rates"]["1+2="] == [0.0, 0.5] and memory["phase_mean"] == 0.5


def test_a_resumed_run_goes_on_in_its_phase(tmp_path):
    listed = [{"at": 0, "when": {"sign": "+"}}, {"at": 1, "carry": 0.5, "when": {"sign": "other"}, "reach": 0.0,
                                                "set": {"train.group": 6}}]
    made, other, [line] = tiny_runs.assert_resumes(lambda: text_trainer(listed), tmp_path, 2, 1)
    assert made.geometry.group == other.geometry.group == 6
    assert np.isfinite(line["grad_norm"]) and made.memory == other.memory


@pytest.mark.parametrize("listed, told", [
    ([{"at": 0.5, "set": {"adapter.rank": 4}}], "phases[0].set: 'adapter.rank' cannot change within a run"),
    ([{"at": 0.5}, {"at": 2}], "rising numbers under `at`"),
    ([{"at": 1, "when": {"sign": "*"}}], "no training prompt has {'sign': '*'}"),
    ([{"at": 1, "weights": {"shirt": 1.0}}], "no reward 'shirt': did you mean 'short'"),
    ([{"at": 1, "set": {"train.group": 1}}], "compares the samples of a group: set train.group to 2 or more"),
    ([{"at": 1, "set": {"train.steps": 4}}], "phases[0].set: train.steps is set, which is about denoisers: leave it"),
    ([{"at": 0, "reach": 0.5}], "phases[0].reach is 0.5, but the run begins with this phase: leave reach out"),
    ([{"at": 0, "carry": 0.5, "when": {"sign": "+"}}], "phases[0].carry is 0.5, but the run begins with this phase"),
    ([{"at": 1, "carry": 0.5}], "phases[0].when is empty, so that all prompts are its own: set when, or leave carry"),
    ([{"at": 1, "carry": 0.5, "reach": 0.5, "when": {"sign": "+"}}], None),
    ([{"at": 0, "when": {"sign": "+"}}, {"at": 1, "set": {"text.max_tokens": 8}}], None),
    ([{"at": 1, "set": {"train.prompts": 1, "train.group": 3}}], None)])
def test_impossible_phases(listed, told):
    setup = loop.setup(tiny_text.config(phases=listed, train__epochs=10), build.CAUSAL_LM, PROMPTS)
    assert Phases.require(setup) is None if told is None else told in message(Phases.require, setup)


def test_a_phase_of_videos_has_other_frames():
    pipe, call = videos.FACTORIES["WanPipeline"](0)
    sizes = {"image__height": call["height"], "image__width": call["width"], "image__frames": call["num_frames"],
             "image__call": {"max_sequence_length": call["max_sequence_length"]}}
    settings = tiny.config(**sizes, parts={"plan": {"size": 2}}, train__epochs=3, train__group=2,
                           phases=[{"at": 1, "set": {"image.frames": 1}}])
    made = tiny.trainer_of(settings, {"red": lambda videos, prompts: videos[:, 0, 0].mean((1, 2))}, PROMPTS, pipe)
    frames = []
    loop.watch(made, on_drawn=lambda epoch: frames.append(epoch.parts[0].finals[0].shape[2]))
    for made.epoch in range(2):
        made.run_epoch()
    assert frames[1] == 1 < frames[0] and made.policy.call == call
