"""Prompts chosen by what is believed of them: the posterior by hand, what it prefers, and a run that resumes."""

import numpy as np
import pytest
import torch

from flowgrpo.curriculum import order
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.order import EpochPermutation, ThompsonSampling
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.training import state
from tests.helpers import tiny_text

POOL = [Prompt(f"p{i}") for i in range(200)]


def told(part: ThompsonSampling, memory: dict, prompts: list[Prompt], totals: torch.Tensor, epoch: int = 0) -> None:
    drawn = EpochBatch(POOL, epoch, 10, 0, Processes())
    drawn.add(prompts, totals[..., None], totals)
    part.learn(memory, drawn)


def test_the_posterior_by_hand():
    part = ThompsonSampling(keep=0.5, prior=1.0)
    memory: dict = {}
    told(part, memory, [POOL[0]], torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    assert memory["beliefs"]["p0"] == [4.0, 2.0]  # 0.5 * 1 + 0.5 * 1 + 3 and + 1
    told(part, memory, [POOL[0], Prompt("a hint")], torch.tensor([[0.0, 0.0, torch.nan, 0.0], [1.0] * 4]))
    assert memory["beliefs"] == {"p0": [2.5, 4.5]}  # of 3 samples; 0.5 * 4 + 0.5 + 0 and 0.5 * 2 + 0.5 + 3
    assert order.updated(3.0, 2.0, 0.25, 8, 1.0, 1.0) == (5.0, 8.0)  # without forgetting: Beta's own
    with pytest.raises(UserError, match="rewards from 0 to 2"):
        told(part, memory, [POOL[0]], torch.tensor([[0.0, 2.0]]))


def test_prompts_of_middling_rates_are_drawn():
    rates = np.linspace(0, 1, len(POOL))
    part, memory = ThompsonSampling(candidates=8), {}
    rng, chosen = np.random.default_rng(0), []
    for epoch in range(120):
        batch = part(POOL, 8, epoch, 0, None, memory, 8)
        assert len({prompt.key for prompt in batch}) == 8
        own = np.array([rates[int(prompt.text[1:])] for prompt in batch])
        chosen += own.tolist() if epoch >= 60 else []
        told(part, memory, batch, torch.from_numpy((rng.random((8, 8)) < own[:, None]).astype(np.float64)), epoch)
    middling = np.mean([0.3 <= rate <= 0.7 for rate in chosen])
    assert middling > 0.6  # of prompts drawn evenly 0.4


def test_the_nearest_to_the_target_of_the_candidates():
    memory = {"beliefs": {prompt.key: [1e7 * i, 1e7 * (199 - i)] for i, prompt in enumerate(POOL) if 0 < i < 199}}
    found = ThompsonSampling(target=0.25, candidates=1000)(POOL, 3, 5, 0, None, memory, 8)
    assert {prompt.text for prompt in found} == {"p49", "p50", "p51"}


def test_one_candidate_each_is_the_plain_draw():
    for part in (ThompsonSampling(candidates=1), EpochPermutation()):
        assert sorted(p.text for p in part(POOL, 7, 3, 1, None, {}, 8)) == sorted(
            p.text for p in sets.draw(POOL, 7, 3, 1))
    assert EpochPermutation()(POOL, 7, 3, 1, None, {}, 8) == sets.draw(POOL, 7, 3, 1)
    assert len(ThompsonSampling()(POOL[:3], 7, 0, 0, None, {}, 8)) == 7


@pytest.mark.parametrize("options", [dict(target=1.5), dict(keep=-0.1), dict(candidates=0), dict(prior=0.0)])
def test_impossible_beliefs(options):
    with pytest.raises(ValueError, match="ThompsonSampling: "):
        ThompsonSampling(**options)


def test_what_is_believed_is_in_the_checkpoint_and_the_next_epoch_is_the_same(tmp_path):
    def made():
        return tiny_text.trainer(tiny_text.policy(), method="grpo+mopps")
    trainer, other = made(), made()
    trainer.run_epoch()
    trainer.epoch = 1
    trainer.progress.saved_counters = state.counters(trainer)
    state.save(trainer, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00001")
    assert other.memory == trainer.memory and len(trainer.memory["beliefs"]) == 2
    drawn = [each.method.curriculum(each.prompts, 2, 1, 0, None, each.memory, 4) for each in (trainer, other)]
    assert drawn[0] == drawn[1]
