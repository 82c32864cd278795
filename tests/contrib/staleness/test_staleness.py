"""Epochs sampled ahead of their update, and completions sampled in pieces: staleness, the decoupled loss, resume."""

import math
import threading
from collections import Counter

import pytest
import torch

from flowgrpo.contrib.staleness.extension import Staleness, behaviour_weights
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.text.samplers import importance
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling, state
from flowgrpo.training.extensions import require
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import assert_same_weights, next_epochs


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


def waiting(made) -> list[int]:
    """The epochs that are drawn ahead."""
    return [drawn.epoch for drawn in loop.extension(made, "Staleness").queue]


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
    # Where nothing counts weights are 1.
    weights = behaviour_weights(torch.tensor([[9.0, 0.0, math.log(2.0)]]), torch.tensor([[False, True, True]]), 3.0)
    assert weights.tolist() == [pytest.approx([1.0, 1.0, 2.0])]


@pytest.mark.parametrize("kind", ["pictures", "text", "masks"])
def test_decisions_of_older_weights_are_weighted_and_the_ratio_begins_at_1(kind):
    made = trainer(kind, 1)
    first = made.run_epoch()
    assert first["staleness/epochs"] == 0 and first["staleness/weight"] == 1
    [ahead] = loop.extension(made, "Staleness").queue
    drew = [taken.old.logp.clone() for part in ahead.parts for taken in part.transitions]
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
    assert_same_weights(made, other)
    assert made.memory == other.memory and made.progress.sampled == other.progress.sampled


def test_epochs_are_as_stale_as_the_bound():
    made = trainer("text", 2)
    drawn, sample = [], made.rollouts.sample
    made.rollouts.sample = lambda conditioning, epoch, *rest: (drawn.append((made.epoch, epoch)),
                                                               sample(conditioning, epoch, *rest))[1]
    lines = next_epochs(made, 5)
    assert drawn == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    assert [line["staleness/epochs"] for line in lines] == [0, 1, 2, 2, 2]
    assert made.progress.sampled == 5 * 8 and not loop.extension(made, "Staleness").queue


@pytest.mark.fast
def test_a_run_that_goes_on_at_a_later_epoch_drops_earlier_samples():
    made = trainer("text", 1)
    made.run_epoch()
    assert waiting(made) == [1]
    made.epoch = 2
    made.run_epoch()
    assert loop.extension(made, "Staleness").current.epoch == 2 and waiting(made) == [3]


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
        [ahead] = loop.extension(made, "Staleness").queue
        found.append(all(future.done() for future in ahead.pending))
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
        said.append(message(next_epochs, made, 2))
    assert said[0] == said[1] and "no license" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("kind", ["pictures", "text", "masks"])
def test_a_resumed_run_goes_on_to_the_same_bit(kind, tmp_path):
    made, other = trainer(kind, 2), trainer(kind, 2)
    next_epochs(made, 2)
    tiny_runs.resume(made, other, tmp_path)
    assert waiting(other) == [2, 3]
    for one, two in zip(next_epochs(made, 3), next_epochs(other, 3)):
        assert one == two and one["staleness/epochs"] == 2
    assert_same_weights(made, other)
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
    assert waiting(other) == [1]
    expected = next_epochs(whole, 4)[1:]
    assert next_epochs(other, 3) == expected
    assert_same_weights(other, whole)


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
    red, follows = (loop.setup(tiny.config(train__staleness=1), "pipeline", rewards={"memory": each})
                    for each in (tiny.red, reward))
    require(Staleness, red)
    assert "the reward 'memory', which re" in message(require, Staleness, follows)


def first_digit(completions, prompts):
    """1 for a completion that begins with a digit above 4."""
    return [float(text[:1] in ("5", "6", "7", "8", "9")) for text in completions]


def partial_trainer(**options):
    """A trainer of 4 epochs of 2 groups of 4, one more of which is begun; one of 12 tokens at a time. Completions end
    with any digit below 4 too, so that groups become whole at different times."""
    usual = dict(text__over_provision=0.5, text__chunk=1, text__max_tokens=12, train__epochs=4, train__lr=2e-2)
    made = tiny_text.trainer(rewards={"short": first_digit}, **usual | options)
    made.policy.ends = made.policy.ends + [made.policy.tokenizer(digit)["input_ids"][-1] for digit in "0123"]
    return made


def seen_by(made) -> list[tuple[str, str]]:
    """(prompt, completion) of everything that the rewards score."""
    seen, judge = [], made.scoring.functions["short"]
    made.scoring.functions["short"] = lambda completions, prompts: (
        seen.extend(zip(prompts, map(str, completions))), judge(completions, prompts))[1]
    return seen


def test_a_completion_in_pieces_is_the_one_that_is_drawn_at_once():
    policy = tiny_text.stir(tiny_text.policy(max_tokens=12))
    prompts = policy.encode(["1+2=", "33+4="])
    whole = policy.sample(prompts.rows(torch.tensor([0, 0, 1, 1])), Decoding(), policy.generators([3, 4, 5, 6]),
                          torch.zeros(4, dtype=torch.bool))
    groups = [importance.begin([3, 4], 12), importance.begin([5, 6], 12)]
    for version in range(6):
        groups = importance.continue_groups(policy, prompts, groups, Decoding(), 2, 3, version)
    pieces = importance.complete_groups(policy, prompts.prompts, groups)
    assert torch.equal(pieces.ids[pieces.mask], whole.ids[whole.mask]) and torch.equal(pieces.mask, whole.mask)
    assert torch.equal(pieces.cut, whole.cut) and pieces.texts == whole.texts
    torch.testing.assert_close(pieces.logp, whole.logp, rtol=0, atol=1e-5)
    assert policy.text.max_tokens == 12
    for group in groups:
        places = torch.arange(12)
        assert torch.equal(group.versions[group.token_mask], (places // 2).expand(2, 12)[group.token_mask])


def test_every_token_keeps_the_log_probability_of_the_weights_that_drew_it():
    policy = tiny_text.policy(max_tokens=6)
    prompts, groups = policy.encode(["1+2="]), [importance.begin([7, 8, 9], 6)]
    scores = {}
    for version in range(2):
        groups = importance.continue_groups(policy, prompts, groups, Decoding(), 3, 8, version)
        [group] = groups
        scores[version] = policy.log_probs(prompts, torch.zeros(3, dtype=torch.int64), group.ids, group.token_mask,
                                           Decoding()).logp.detach()
        tiny_text.stir(policy, 0.3)
    for version in range(2):
        at = group.token_mask & (group.versions == version)
        assert at.any()
        torch.testing.assert_close(group.logp[at], scores[version][at], rtol=0, atol=1e-4)
    first = group.token_mask & (group.versions == 0)
    assert (group.logp - scores[1])[first].abs().max() > 1e-3  # the later weights would say something else


def test_the_ratio_of_a_continued_completion_uses_the_stored_log_probabilities():
    made = partial_trainer(train__lr=0.1)
    made.run_epoch()
    made.epoch, taken = 1, []
    staleness = loop.extension(made, "Staleness")
    draw = staleness.pool.draw
    staleness.pool.draw = lambda epoch: taken.extend(draw(epoch)) or taken
    drawn = staleness.draw_epoch()
    parts, conditioning = drawn.parts, drawn.conditioning
    stored = torch.cat([group.logp for _, group in taken])
    versions = torch.cat([group.versions for _, group in taken])
    at = 0
    for part in parts:
        [completions] = part.transitions
        [(_, _, new)] = made.rollouts.replay(part, conditioning)
        rows, mask = slice(at, at + len(completions.ids)), completions.old.mask
        torch.testing.assert_close(completions.old.logp[mask], new.logp.detach()[mask], rtol=0, atol=1e-5)
        expected = (new.logp.detach() - stored[rows]).exp()
        expected = expected.masked_fill(expected > 5, 0.0)
        torch.testing.assert_close(completions.importance[mask], expected[mask], rtol=1e-4, atol=1e-4)
        older = mask & (versions[rows] < made.optimization.update)
        assert (completions.importance[mask & ~older] - 1).abs().max() < 1e-3
        at += len(completions.ids)
    assert (torch.cat([part.transitions[0].importance for part in parts]) - 1).abs().max() > 1e-3
    assert 0 < staleness.on_trained(drawn)["partial/older"] < 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_completion_is_lost_and_each_is_trained_once(staleness):
    """With weights that stay, a run has the completions of one without over-provision, in another order."""
    frozen = dict(train__lr=1e-12)
    plain = partial_trainer(text__over_provision=0, **frozen)
    made = partial_trainer(train__staleness=staleness, **frozen)
    expected, seen = seen_by(plain), seen_by(made)
    next_epochs(plain, 4)
    lines = next_epochs(made, 4)
    assert Counter(seen) == Counter(expected) and len(seen) == 32
    assert [line["partial/groups"] for line in lines][-1] == 0 and lines[0]["partial/groups"] == (staleness == 0 or 1)


def test_an_epoch_ends_when_enough_groups_are_whole():
    """One completion of 12 tokens does not keep two short groups: of three groups these are trained."""
    made = partial_trainer(train__group=2, text__chunk=2)
    ended, rounds = made.policy.ends[0], []
    sample = made.policy.sample
    def drawn(tokenized, decoding, generators, greedy):
        """The first prompt never ends, the others end with their second token."""
        found = sample(tokenized, decoding, generators, greedy)
        rounds.append(len(found.ids))
        long = torch.tensor([prompt == first for prompt in tokenized.prompts])
        ids = torch.where(long[:, None], torch.tensor([[7, 7]]), torch.tensor([[7, ended]]))
        return type(found)(ids, torch.full((len(ids), 2), -1.0), torch.ones(len(ids), 2, dtype=torch.bool), long,
                           found.texts)
    first = sampling.choose_prompts(made, 0)[0].text
    made.policy.sample = drawn
    whole = loop.extension(made, "Staleness").pool.draw(0)
    assert first not in [prompt.text for prompt, _ in whole] and len(whole) == 2 and sum(rounds) == 6
    [(prompt, left)] = loop.extension(made, "Staleness").pool.groups
    assert prompt.text == first and left.lengths.tolist() == [2, 2] and not left.ended.any()


def test_a_resumed_run_goes_on_with_unfinished_completions(tmp_path):
    made, other = partial_trainer(), partial_trainer()
    next_epochs(made, 2)
    tiny_runs.resume(made, other, tmp_path)
    [(_, group)] = loop.extension(other, "Staleness").pool.groups
    assert not group.whole and 0 < group.lengths.min()
    assert next_epochs(made, 2) == next_epochs(other, 2)
    assert made.progress.saved_counters == other.progress.saved_counters
    assert_same_weights(made, other)


def test_a_checkpoint_amid_an_epoch_has_the_completions_of_the_one_before(tmp_path):
    made, other, whole = partial_trainer(), partial_trainer(), partial_trainer()
    next_epochs(made, 1)
    loop.extension(made, "Staleness").draw_epoch()  # of an epoch that is stopped
    tiny_runs.resume(made, other, tmp_path)
    assert next_epochs(other, 3) == next_epochs(whole, 4)[1:]


@pytest.mark.parametrize("options, named", [
    (dict(method="latr"), "parts.draws"), (dict(parts={"decoding": {"greedy": 1}}), "greedy samples"),
    (dict(text__engine_precision="bf16"), "text.engine"), (dict(method="grpo+dynamic_sampling"), "parts.redraw")])
def test_what_cannot_go_on_is_refused(options, named):
    settings = tiny_text.config(text__over_provision=0.5, **options)
    with pytest.raises(UserError, match=f"text.over_provision is 0.5, which does not go with .*{named}"):
        require(Staleness, loop.setup(settings, "causal_lm"))
