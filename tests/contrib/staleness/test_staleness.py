"""Epochs that are drawn ahead of their update: bounded staleness, the decoupled loss, resume and failures."""

import math
import threading

import pytest
import torch

from flowgrpo.contrib.staleness.extension import Staleness, behaviour_weights
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.objectives import Clip
from flowgrpo.training import state
from flowgrpo.training.extensions import require
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.tiny_runs import next_epochs


def length(completions, prompts):
    """The share of the characters that are digits above 4."""
    return [sum(letter in "56789" for letter in text) / 6 for text in completions]


def trainer(kind: str, staleness: int = 0, rewards=None, **options):
    """A trainer of 5 epochs, which an update moves far enough to be seen."""
    usual = dict(train__staleness=staleness, train__epochs=5, train__lr=1e-2)
    if kind == "pictures":
        return tiny.trainer(rewards=rewards, **usual | dict(parts__plan={"size": 2}, train__steps=4) | options)
    if kind == "masks":
        return tiny_runs.trainer("masks", tiny_runs.config("masks", "grpo", **usual | options))
    return tiny_text.trainer(rewards=rewards or {"short": length}, **usual | options)


def assert_same(made, other) -> None:
    for key, tensor in made.policy.weights.snapshot().items():
        assert torch.equal(tensor, other.policy.weights.snapshot()[key]), key


# --- the loss --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("proximal, behaviour, now, advantage, loss, slope", [
    (0.30, 0.20, 0.30, 2.0, -3.0, -3.0),  # weight 1.5, ratio 1: -1.5 * 2
    (0.30, 0.20, 0.33, 2.0, -3.3, -3.3),  # ratio 1.1, within 0.2
    (0.30, 0.20, 0.45, 2.0, -3.6, 0.0),  # ratio 1.5 is clipped at 1.2: -1.5 * 1.2 * 2
    (0.30, 0.20, 0.15, 2.0, -1.5, -1.5),  # ratio 0.5, where the smaller term is not the clipped one
    (0.20, 0.40, 0.30, -1.0, 0.75, 0.75),  # weight 0.5, ratio 1.5
    (0.20, 0.40, 0.10, -1.0, 0.40, 0.0),  # ratio 0.5 is clipped at 0.8
    (0.60, 0.10, 0.60, 1.0, 0.0, 0.0),  # weight 6 is above the cap of 5
    (0.40, 0.40, 0.50, 1.0, -1.2, 0.0)])  # the same two policies: PPO
def test_the_decoupled_loss_by_hand(proximal, behaviour, now, advantage, loss, slope):
    apart = torch.tensor([[math.log(proximal / behaviour)]])
    weight = behaviour_weights(apart, torch.ones(1, 1, dtype=torch.bool), 5.0)
    log_ratio = torch.tensor([[math.log(now / proximal)]], requires_grad=True)
    value = (Clip(0.2, 0.2)(log_ratio, torch.tensor([[advantage]])) * weight).sum()
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert log_ratio.grad.item() == pytest.approx(slope, abs=1e-5)


def test_weights_where_nothing_counts_are_1():
    weights = behaviour_weights(torch.tensor([[9.0, 0.0, math.log(2.0)]]), torch.tensor([[False, True, True]]), 3.0)
    assert weights.tolist() == [pytest.approx([1.0, 1.0, 2.0])]


@pytest.mark.parametrize("kind", ["pictures", "text", "masks"])
def test_decisions_of_older_weights_are_weighted_and_the_ratio_begins_at_1(kind):
    made = trainer(kind, 1)
    first = made.run_epoch()
    assert first["staleness/epochs"] == 0 and first["staleness/weight"] == 1
    [waiting] = loop.extension(made, "Staleness").queue
    drew = [taken.old.logp.clone() for part in waiting.parts for taken in part.transitions]
    made.epoch, seen, backward = 1, [], made.backward
    def spied(epoch, part, *rest):
        for k, taken in enumerate(part.transitions):
            new = torch.cat([score.logp for at, _, score in made.rollouts.replay(part, epoch.conditioning) if at == k])
            seen.append((taken, new.detach()))
        return backward(epoch, part, *rest)
    made.backward = spied
    second = made.run_epoch()
    assert second["staleness/epochs"] == 1 and len(seen) == len(drew)
    apart = 0.0
    for (taken, new), before in zip(seen, drew):
        assert (new - taken.old.logp).abs().max() < 1e-5  # the clip is around the policy before the update
        mask = taken.old.mask
        torch.testing.assert_close(taken.importance[mask], (new - before).exp()[mask].float(), rtol=1e-4, atol=1e-5)
        apart = max(apart, (taken.importance - 1).abs()[mask].max().item())
    assert apart > (1e-6 if kind == "pictures" else 1e-4)
    assert second["staleness/weight"] == pytest.approx(
        torch.cat([taken.importance[taken.old.mask] for taken, _ in seen]).mean().item())


# --- epochs ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [pytest.param("pictures", marks=pytest.mark.fast), "text"])
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(kind):
    made, other = trainer(kind), trainer(kind)
    assert "Staleness" not in loop.names(made)
    other.extensions.present.insert(0, Staleness(other))
    assert loop.extension(other, "Staleness").bound == 0
    for one, two in zip(next_epochs(made, 3), next_epochs(other, 3)):
        assert one == {key: value for key, value in two.items() if not key.startswith("staleness/")}
    assert_same(made, other)
    assert made.memory == other.memory and made.progress.sampled == other.progress.sampled


def test_every_epoch_is_drawn_once_and_is_as_stale_as_the_bound_allows():
    made = trainer("text", 2)
    drawn, sample = [], made.rollouts.sample
    made.rollouts.sample = lambda conditioning, epoch, *rest: (drawn.append((made.epoch, epoch)),
                                                               sample(conditioning, epoch, *rest))[1]
    lines = next_epochs(made, 5)
    assert drawn == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    assert [line["staleness/epochs"] for line in lines] == [0, 1, 2, 2, 2]
    assert made.progress.sampled == 5 * 8 and not loop.extension(made, "Staleness").queue


def test_an_epoch_that_is_past_is_not_trained():
    """A run that goes on at a later epoch than its queue drops what was drawn for those before."""
    made = trainer("text", 1)
    made.run_epoch()
    assert [drawn.epoch for drawn in loop.extension(made, "Staleness").queue] == [1]
    made.epoch = 2
    made.run_epoch()
    assert loop.extension(made, "Staleness").current.epoch == 2
    assert [drawn.epoch for drawn in loop.extension(made, "Staleness").queue] == [3]


def test_an_epoch_is_scored_while_the_next_one_is_sampled():
    begun, waited = threading.Event(), []
    def slow(completions, prompts):
        waited.append(begun.wait(30))
        return length(completions, prompts)
    made = trainer("text", 1, {"short": slow})
    sample = made.rollouts.sample
    def spied(conditioning, epoch, *rest):
        if epoch == 1:
            begun.set()
        return sample(conditioning, epoch, *rest)
    made.rollouts.sample = spied
    made.run_epoch()
    assert waited[:2] == [True, True]  # both parts of epoch 0


@pytest.mark.parametrize("every", [0, 1])
def test_an_evaluation_waits_for_the_rewards_of_all_drawn_epochs(every):
    """It calls the same rewards."""
    learning, learn = threading.Event(), []
    def slow(completions, prompts):
        if len(learn) == 2:  # both parts of the first epoch are scored
            learning.wait(0.2 if every else 30)
        learn.append(len(completions))
        return length(completions, prompts)
    made = trainer("text", 1, {"short": slow}, eval__every=every)
    found = []
    def examined(epoch):
        [waiting] = loop.extension(made, "Staleness").queue
        found.append(all(future.done() for future in waiting.pending))
        learning.set()
    loop.watch(made, on_drawn=examined)
    made.run_epoch()
    assert found == [bool(every)]


def test_rewards_are_called_by_one_thread_in_the_order_of_the_epochs():
    calls, threads = [], set()
    def watched(completions, prompts):
        calls.append(tuple(map(str, completions)))
        threads.add(threading.current_thread().name)
        return length(completions, prompts)
    made = trainer("text", 3, {"short": watched})
    order, staleness = [], loop.extension(made, "Staleness")
    submit = staleness._submit
    staleness._submit = lambda drawn, part, outputs: (order.append(tuple(map(str, outputs[0]))),
                                                      submit(drawn, part, outputs))
    next_epochs(made, 5)
    assert calls == order and len(calls) == 10 and threads == {"rewards"}


def test_a_toy_learns_at_a_staleness_of_4():
    means = {}
    for staleness in (0, 4):
        made = trainer("text", staleness, train__epochs=24, train__lr=2e-2, train__prompts=4, parts__kl={"weight": 0})
        means[staleness] = [line["reward/short/mean"] for line in next_epochs(made, 24)]
    for values in means.values():
        assert sum(values[-6:]) / 6 > sum(values[:6]) / 6 + 0.1, means


# --- failures, stops and resume --------------------------------------------------------------------------------------

def test_a_reward_that_fails_in_the_thread_is_reported_as_without_one():
    def broken(completions, prompts):
        if broken.calls == 2:  # of the second epoch
            raise ValueError("no license")
        broken.calls += 1
        return length(completions, prompts)
    said = []
    for staleness in (0, 1):
        broken.calls = 0
        made = trainer("text", staleness, {"short": broken})
        with pytest.raises(UserError) as raised:
            next_epochs(made, 2)
        said.append(str(raised.value))
    assert said[0] == said[1] and "no license" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("kind", ["pictures", "text", "masks"])
def test_a_resumed_run_goes_on_to_the_same_bit(kind, tmp_path):
    made, other = trainer(kind, 2), trainer(kind, 2)
    next_epochs(made, 2)
    state.save(made, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00002")
    assert [drawn.epoch for drawn in loop.extension(other, "Staleness").queue] == [2, 3]
    for one, two in zip(next_epochs(made, 3), next_epochs(other, 3)):
        assert one == two and one["staleness/epochs"] == 2
    assert_same(made, other)
    assert made.progress.saved_counters == other.progress.saved_counters
    assert made.scoring.extremes.as_json() == other.scoring.extremes.as_json()


def test_a_stop_while_a_reward_hangs_saves_what_was_drawn(tmp_path):
    hangs, free = threading.Event(), threading.Event()
    def slow(completions, prompts):
        if hangs.is_set():
            free.wait(30)
        return length(completions, prompts)
    made, whole = trainer("text", 1, {"short": slow}), trainer("text", 1)
    next_epochs(made, 1)
    hangs.set()
    made.stop.asked = True  # as its signal does, in the second epoch
    with pytest.raises(Stopped):
        made.run_epoch()
    state.save(made, tmp_path)
    loop.extension(made, "Staleness").close()
    free.set()
    other = trainer("text", 1)
    state.restore(other, tmp_path / "checkpoints" / "epoch-00001")
    assert [drawn.epoch for drawn in loop.extension(other, "Staleness").queue] == [1]
    expected = next_epochs(whole, 4)[1:]
    assert next_epochs(other, 3) == expected
    assert_same(other, whole)


@pytest.mark.parametrize("options, named", [
    (dict(method="diffusion_nft"), "noised finals"), (dict(memory__rewards="cpu"), "memory.rewards"),
    (dict(image__sizes=[[16, 16]]), "image.sizes"), (dict(parts={"plan": {"type": "EachStep"}}), "several groups"),
    (dict(phases=[{"at": 2}]), "phases")])
def test_what_cannot_be_drawn_ahead_is_refused(options, named):
    settings = tiny.config(train__staleness=1, **options)
    with pytest.raises(UserError, match=f"train.staleness is 1, which does not go with .*{named}"):
        require(Staleness, loop.setup(settings, "pipeline"))


@pytest.mark.parametrize("reward", [lambda images, prompts, metadata, memory: [], lambda images, prompts, epoch: [],
                                    lambda images, prompts, policy: []])
def test_rewards_that_follow_the_run_are_refused(reward):
    settings = tiny.config(train__staleness=1)
    with pytest.raises(UserError, match="the reward 'memory', which re"):
        require(Staleness, loop.setup(settings, "pipeline", rewards={"memory": reward}))
    require(Staleness, loop.setup(settings, "pipeline", rewards={"red": tiny.red}))
