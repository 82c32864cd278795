"""The replay buffer of the critic of edits: what it keeps, what it teaches, and that it goes on from a checkpoint."""

import copy

import torch

from flowgrpo.advantages.gae import Recall
from flowgrpo.distributed.processes import Processes, make_accelerator
from flowgrpo.methods import preset
from flowgrpo.objectives.surrogates import ActorCritic
from flowgrpo.policies.pipelines.edits import Editor
from flowgrpo.samplers.latent_edits import Edit
from flowgrpo.training.credit import credit
from flowgrpo.training.extensions.credit import Recalling
from flowgrpo.types import Context, PromptGroups
from tests.helpers.refusals import message
from tests.samplers.test_latent_edits import asked, reward, sampled, stirred


def recalling(**fields) -> Recalling:
    torch.manual_seed(3)
    editor = Editor(Edit(width=16, depth=1), 2, 1)
    return Recalling(Recall(**fields), editor, Processes(make_accelerator("cpu")))


def test_the_newest_samples_are_kept_with_their_own_prompts():
    kept = recalling(kept=4)
    numbers = torch.arange(8.0)
    kept.remember(numbers[:3, None], torch.tensor([[[10.0]], [[11.0]]]), torch.tensor([1, 0, 1]), numbers[:3])
    assert kept.prompts[kept.of].flatten().tolist() == [11, 10, 11]
    kept.remember(numbers[3:5, None], torch.tensor([[[20.0]], [[21.0]], [[22.0]]]), torch.tensor([2, 2]), numbers[3:5])
    assert kept.states.flatten().tolist() == kept.rewards.tolist() == [1, 2, 3, 4]
    assert kept.prompts[kept.of].flatten().tolist() == [10, 11, 22, 22]
    kept.remember(numbers[5:8, None], torch.tensor([[[30.0]]]), torch.tensor([0, 0, 0]), numbers[5:8])
    assert kept.prompts[kept.of].flatten().tolist() == [22, 30, 30, 30]
    assert kept.prompts.flatten().tolist() == [22, 30]  # no others
    kept.remember(numbers[:1, None], torch.zeros(1, 2, 1), torch.tensor([0]), numbers[:1])
    assert kept.rewards.tolist() == [0]  # prompts of another length


def test_what_an_epoch_drew_is_remembered_as_it_was_scored():
    kept, method = recalling(), preset("expo")
    part = sampled(stirred(kept.editor), method, 3, 4)
    scores = reward(part.finals[0])
    context = Context(groups=PromptGroups(["p"] * 3))
    [part] = credit(method, [part], scores.view(3, 4, 1), [1.0], context, lambda rows: rows)
    assert kept([part], asked(3)) == [part]
    torch.testing.assert_close(kept.states, part.finals[0], rtol=0, atol=0)
    torch.testing.assert_close(kept.rewards, scores, rtol=0, atol=1e-6)


def test_the_critic_comes_to_know_the_rewards_and_nothing_else_moves():
    kept = recalling(steps=60, lr=1e-2)
    assert kept.fit() == {}  # of nothing
    before = copy.deepcopy(kept.editor.networks.edit.state_dict())
    states = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    kept.remember(states, torch.ones(1, 1, 1), torch.zeros(500, dtype=torch.int64), reward(states) / 10)
    losses = [kept.fit()["critic_loss"] for _ in range(6)]
    held = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    found, right = kept.editor.value(asked(1).rows(torch.zeros(200, dtype=torch.int64)), held), reward(held) / 10
    assert losses[-1] < 0.1 * losses[0] and (found - right).square().mean() < 0.1 * right.var()
    assert all(torch.equal(value, before[key]) for key, value in kept.editor.networks.edit.state_dict().items())
    assert all(p.grad is None for p in kept.editor.networks.parameters())


def validated(method):
    method.target.validate(method.rollout, method.credit, method.loss, [], 4)


def test_edits_without_a_learning_critic_are_refused():
    silent = preset("expo").having(value=None, surrogate=ActorCritic(critic=0.0))
    assert "the critic would learn nothing" in message(validated, silent, error=ValueError)
    validated(silent.having(value=Recall()))
