"""Credit of a text's steps, the length term, and TraceRL's value model, by hand and in runs."""

import math

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import methods
from flowgrpo.advantages.baselines import NoBaseline
from flowgrpo.advantages.gae import ValueHead, outcome_weights, over_traces, value_loss
from flowgrpo.methods import validate
from flowgrpo.storage import checkpoint
from flowgrpo.text.credit import LengthSwitch, StepScores, merge_steps, penalise_length, text_steps
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.samplers.decoding import Unmasking
from flowgrpo.training import sampling
from flowgrpo.types import Context, SampleMeasures, Scored, Segmented
from tests.helpers import loop, tiny_dna, tiny_runs, updates
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import message
from tests.helpers.tables import close, draw, f64

NAN = torch.nan
# A group of three samples with 3, 3 and 2 steps; the last token of the third was not drawn.
SEGMENTS = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2], [0, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
TOTALS = torch.tensor([[1.0, 0.0, 0.5]])
NONE = torch.zeros(3)


def taken(scores) -> Segmented:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    return Segmented(ids, torch.zeros(3, dtype=torch.int64), Scored(torch.zeros(3, 4), MASK), SEGMENTS,
                     torch.tensor(scores))


def test_steps_end_with_a_text_and_differ_in_one():
    assert text_steps([*"1\n23\n4"], "\n", "".join) == [2, 5, 6]
    assert text_steps([*"ab. c. "], ". ", "".join) == [4, 7]
    assert text_steps([*"abc"], "\n", "".join) == [3] and text_steps([], "\n", "".join) == []
    found = StepScores("group")(taken([[0.5, 1.0, 0.2], [0.5, 0.0, 0.2], [0.5, 0.5, NAN]]), NONE, TOTALS)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1, 1, 0], [0, 0, -1, 0], [0, 0, 0, 0]]))
    found = StepScores("group")(taken([[0.5, 0.5, 3.0], [0.5, 0.5, 1.0], [0.5, 0.5, NAN]]), NONE, TOTALS)
    half = 2**0.5 / 2
    torch.testing.assert_close(found, torch.tensor([[0, 0, 0, half], [0, 0, 0, -half], [0.0] * 4]))


def test_criticised_steps_and_false_alarms():
    outcome = torch.tensor([1.0, -0.5, 0.25])
    part = StepScores("blame", weight=0.3)
    found = part(taken([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [NAN, 1.0, NAN]]), outcome, TOTALS)
    expected = torch.tensor([[1, 0.7, 0.7, 1], [-0.5] * 4, [0.25, 0.25, 0.25, 0]])
    torch.testing.assert_close(found, expected)
    votes = torch.tensor([[1.0, 0, 1], [0, 0, 1], [NAN, NAN, NAN], [1, NAN, 0]])
    assert StepScores(votes=3).majority_vote(votes).tolist()[:2] == [1, 0]
    assert StepScores(votes=3).majority_vote(votes)[2].isnan() and StepScores(votes=3).majority_vote(votes)[3] == 0
    assert StepScores().majority_vote(torch.tensor([[0.3], [0.9]])).tolist() == pytest.approx([0.3, 0.9])


def test_potentials_and_progress_add_up():
    found = StepScores("potential", weight=2.0)(
        taken([[0.6, 0.7, 0.1], [0.4, 0.4, 0.1], [0.9, 0.1, NAN]]), torch.tensor([1.0, 0.0, 0.0]), TOTALS)
    # Scores behind the steps but the last: .6, .7 / .4, .4 / .9; the sums of the steps' credits are 0.
    expected = torch.tensor([[2.2, 1.2, 1.2, -0.4], [0.8, 0.8, 0.0, -0.8], [1.8, -1.8, -1.8, 0.0]])
    torch.testing.assert_close(found, expected)
    part = StepScores("progress", outcome=0.0)
    found = part(taken([[0.6, 0.7, 0.1], [0.4, 0.4, 0.1], [0.9, 0.1, NAN]]), NONE, TOTALS)
    expected = torch.tensor([[0.1, 0.1, 0.1, 0.3], [-0.1, -0.1, 0.0, -0.4], [0.4, -0.4, -0.4, 0.0]])
    torch.testing.assert_close(found, expected)
    sums = [sum(row[SEGMENTS[at] == step][0].item() for step in SEGMENTS[at].unique()) for at, row in enumerate(found)]
    assert sums == pytest.approx([0.5, -0.5, 0.0], abs=1e-6)


def test_thoughts_and_weights_of_steps():
    scores = torch.tensor([[1.0, 0.8, 0.0, 0.2, 1.0], [0.0, 1.0, NAN, NAN, NAN]])
    segments = torch.tensor([[0, 1, 2, 2, 3, 4], [0, 0, 1, 1, 1, 1]])
    merged, values = merge_steps(segments, scores, 0.5)
    assert merged.tolist() == [[0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
    torch.testing.assert_close(values[0, :3], torch.tensor([0.9, 0.1, 1.0]))
    torch.testing.assert_close(values[1, :2], torch.tensor([0.0, 1.0]))
    given = taken([[0.5, 1.0, 0.2], [0.5, 0.0, 0.2], [0.5, 0.5, NAN]])
    eased = StepScores("group", easing=True)(given, NONE, TOTALS)
    torch.testing.assert_close(eased, 0.5 * StepScores("group")(given, NONE, TOTALS))
    assert not StepScores("group", easing=True)(given, NONE, torch.ones(1, 3)).any()
    found = StepScores("last", weight=2.0)(taken([[9.0, 0.0, 1.0], [0.0, 5.0, 3.0], [7.0, 2.0, NAN]]), NONE, TOTALS)
    torch.testing.assert_close(found, torch.tensor([[-2.0] * 4, [2.0] * 4, [0.0] * 4]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_scores_the_steps_of_its_texts(whole):
    parts = {"spread": {"type": "StepScores", "ends": "1", "whole": whole, "rewards": ["score"], "votes": 1}}
    made = tiny_runs.trainer("tokens", tiny_runs.config("tokens", "grpo", parts, text__max_tokens=12))
    shown = []
    made.scoring.functions["score"] = lambda texts, prompts: shown.extend(texts) or [float(len(text)) for text in texts]
    [part, *_], conditioning, _ = sampling.sample(made, made.prompts[:2])
    [given] = part.transitions
    steps, tokenizer = 0, made.policy.tokenizer
    for ids, mask, segments, values in zip(given.ids, given.old.mask, given.segments, given.values):
        for step in segments[mask].unique().tolist():
            at = mask & ((segments <= step) if whole else (segments == step))
            text = tokenizer.decode(ids[at], skip_special_tokens=True)
            assert text in shown and values[step] == len(text)
            steps += 1
    assert steps > len(given.ids) and given.values.isnan().any()
    tiny_runs.epochs(made, 1)
    assert made.first_ratio.max_log_ratio < 1e-4


REWARDS = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.float64)[..., None]
LENGTHS = torch.tensor([[10, 20, 30, 40], [10, 20, 30, 40], [10, 30, 5, 5]])


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_shorter_right_answers_and_shares():
    found = penalise_length(REWARDS[..., 0], REWARDS[..., 0] == 1, LENGTHS, 0.2)
    z = 10 / (math.sqrt(200 / 3) + 1e-6)
    assert found[1].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 0.9, 1 - 0.2 * sigmoid(z), 0], abs=1e-10)
    z = 10 / (10 + 1e-6)
    assert found[2].tolist() == pytest.approx([1 - 0.2 * sigmoid(-z), 1 - 0.2 * sigmoid(z), 0, 0], abs=1e-10)
    assert found[0].tolist() == pytest.approx([0.9, 0, 0, 0], abs=1e-10)  # alone with itself
    both = torch.cat([REWARDS, REWARDS * 3], dim=2)
    both[1, 0, 0] = torch.nan
    found = LengthSwitch(top=1.0)(both, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert torch.equal(found[..., 1], both[..., 1]) and torch.equal(found.isnan(), both.isnan())
    assert found[1, 1, 0] == pytest.approx(1 - 0.2 * sigmoid(-5 / (5 + 1e-6)), abs=1e-10)  # 20 of 20 and 30


@pytest.mark.parametrize("part, on", [
    (LengthSwitch(top=0.0), []), (LengthSwitch(top=1 / 3), [1]), (LengthSwitch(top=2 / 3), [1, 2]),
    (LengthSwitch(top=1.0), [0, 1, 2]), (LengthSwitch(top=1.0, least=0.5), [1, 2]),
    (LengthSwitch(top=1.0, least=0.75), [1]), (LengthSwitch(), [1])])
def test_groups_that_are_right_often_enough_have_it(part, on):
    found = part(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    changed = [i for i in range(3) if not torch.equal(found[i], REWARDS[i])]
    assert changed == on and (found[REWARDS == 0] == 0).all()
    whole = LengthSwitch(top=1.0)(REWARDS, Context(samples=SampleMeasures(lengths=LENGTHS)))
    assert all(torch.equal(found[i], whole[i]) for i in on)


YES = torch.ones(1, 3, dtype=torch.bool)


def test_advantages_over_traces_by_hand():
    """gamma 0.9, decay 0.8. Row 1: step 0 is worth 0.2, step 1, the last, (0.4 + 0.6) / 2 with A* = 1 - 0.5. Row 2: the
    third token does not count, so that step 2 is the last, A* = -1 - 0.3, and step 1 is empty."""
    steps, mask = torch.tensor([[0, 1, 1], [2, 0, 3]]), torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = over_traces(f64([1.0, -1.0]), f64([[0.2, 0.4, 0.6], [0.3, 0.1, 0.9]]), steps, mask, 0.9, 0.8)
    close(advantages, [[-0.2 + 0.9 * 0.5 + 0.72 * 0.5, 0.6, 0.4], [-1.3, -0.1 + 0.9 * 0.3 - 0.72 * 1.3, 0.0]])
    close(returns, [[0.9, 1.0, 1.0], [-1.0, -0.9, 0.0]])
    values, steps = draw(5, 7), torch.randint(0, 4, (5, 7), generator=torch.Generator().manual_seed(0))
    rewards, mask = draw(5, seed=1), draw(5, 7, seed=2) > -1
    advantages, returns = over_traces(rewards, values, steps, mask, 1.0, 1.0)
    close(returns, (rewards[:, None] * mask).tolist())
    close(advantages, ((rewards[:, None] - values) * mask).tolist())


@pytest.mark.parametrize("gamma, decay", [(0.9, 0.7), (1.0, 0.0), (0.5, 1.0)])
def test_of_one_token_per_step_it_is_ordinary_gae(gamma, decay):
    values, steps = draw(1, 6), torch.tensor([[3, 0, 5, 1, 4, 2]])
    advantages, _ = over_traces(f64([2.0]), values, steps, torch.ones(1, 6, dtype=torch.bool), gamma, decay)
    ordered = values[0][steps[0].argsort()].tolist()
    deltas = [(2.0 if t == 5 else 0.0) - v + gamma * (ordered[t + 1] if t < 5 else 0.0) for t, v in enumerate(ordered)]
    expected = [sum((gamma * decay)**k * delta for k, delta in enumerate(deltas[t:])) for t in range(6)]
    close(advantages, [[expected[t] for t in steps[0].tolist()]])


def test_the_clipped_loss_by_hand():
    """R = 1, clip 0.2. From 0 to 0.1: within the range. To 0.5: the clipped 0.2 is worse and has no gradient. To -0.5:
    the plain one is worse."""
    values = f64([0.1, 0.5, -0.5]).requires_grad_()
    found = value_loss(values, f64([0.0, 0.0, 0.0]), f64([1.0, 1.0, 1.0]), 0.2)
    close(found, [0.81 / 2, 0.64 / 2, 2.25 / 2])
    found.sum().backward()
    close(values.grad, [-0.9, 0.0, -1.5])


def test_critics_are_for_tokens_and_one_part():
    value = {"value": {"type": "ValueHead"}}
    for method, kind in (("mix_grpo", "flow"), ("drakes", "masks")):
        config = tiny.config(method=method, parts=value)
        assert "reads no value: got parts.value ValueHead" in message(validate.resolve, config, kind)
    assert validate.resolve(tiny.config(method="ppo"), "tokens").parts()["value"] == ValueHead(1.0, 0.95)
    found = validate.resolve(tiny.config(method="grpo", parts=value), "masks")
    assert (found.credit.value, found.rollout.decoding) == (ValueHead(), Unmasking())
    assert methods.preset("trace_rl_value").parts()["value"] == ValueHead(1.0, 1.0, 0.2)
    assert methods.preset("trace_rl").parts()["value"] is None
    both = tiny.config(method="ppo", parts={"spread": {"type": "StepGroups"}})
    assert "value and spread (StepGroups) both make advantages of tokens" in message(validate.resolve, both, "tokens")


def test_tokens_weigh_what_the_critic_predicts_of_the_outcome_by_hand():
    """Classes 1 and 0: probabilities 3/4 and 1/4, then 1/5; over their means 1/2 and 1/5."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logits = f64([[1, 3], [3, 1], [1, 4]]).log()
    close(outcome_weights(logits, torch.tensor([1, 0]), mask), [[1.5, 0.5, 0], [1, 0, 0]])


# --- runs ------------------------------------------------------------------------------------------------------------
def adenines(texts, prompts):
    return [text.count("A") + text.count("C") / 2 for text in texts]


def trainer(**options):
    own = MaskedLM(*tiny_dna.model(steps=0), tiny.Adapter(rank=2), tiny.Text(max_tokens=6))
    found = tiny.trainer(own, {"adenines": adenines}, **{"method": "trace_rl_value", "reward": "adenines"} | options)
    found.prompts = [tiny.Prompt(text) for text in ("=", "==")]
    return found


@pytest.mark.parametrize("shrink", [1, 2])
def test_states_and_values_are_those_of_each_tokens_own_step(shrink):
    own = trainer(parts={"decoding": {"shrink": shrink}}, train__micro_batch=3)
    parts, asked = updates.credited(own)
    torch.nn.init.normal_(loop.critic(own).head.weight, generator=torch.Generator().manual_seed(0))
    given = loop.critic(own)(parts, asked)
    for part, after, (hidden, values, returns) in zip(parts, given, loop.critic(own).seen):
        [taken], expected = part.transitions, []
        turns = own.method.rollout.decoding.scorings(taken.steps, 6)
        for row, place in taken.old.mask.nonzero().tolist():
            state = torch.where(turns[row] < turns[row, place], taken.ids[row], own.policy.mask)
            prompt = asked.ids[taken.prompts[row]]
            with torch.no_grad():
                made = own.policy.model(input_ids=torch.cat([prompt, state])[None], output_hidden_states=True)
            expected.append(made.hidden_states[-1][0, len(prompt) + place])
        torch.testing.assert_close(hidden, torch.stack(expected), rtol=1e-4, atol=1e-5)
        there = loop.critic(own).values(torch.stack(expected)).detach()
        torch.testing.assert_close(values, there, rtol=1e-4, atol=1e-5)
        rewards = part.advantages[0][:, None].expand_as(taken.old.mask)[taken.old.mask]  # those of completions
        torch.testing.assert_close(returns, rewards)
        [advantage] = after.advantages
        assert advantage.shape == taken.ids.shape and (advantage[~taken.old.mask] == 0).all()
        torch.testing.assert_close(advantage[taken.old.mask], rewards - values)


def test_of_a_causal_model_states_are_those_before_each_token():
    own = tiny.trainer(rewards={"short": lambda texts, prompts: [len(text) for text in texts]}, method="ppo",
                       train__micro_batch=3)
    parts, asked = updates.credited(own)
    torch.nn.init.normal_(loop.critic(own).head.weight, generator=torch.Generator().manual_seed(0))
    for part, after, (hidden, values, _) in zip(parts, loop.critic(own)(parts, asked), loop.critic(own).seen):
        [taken], expected = part.transitions, []
        for row, place in taken.old.mask.nonzero().tolist():
            read = torch.cat([asked.ids[taken.prompts[row]], taken.ids[row, :place]])
            with torch.no_grad():
                expected.append(own.policy.model.base_model(input_ids=read[None]).last_hidden_state[0, -1])
        torch.testing.assert_close(hidden, torch.stack(expected), rtol=1e-3, atol=1e-4)
        held, mask = torch.zeros(taken.ids.shape).masked_scatter(taken.old.mask, values), taken.old.mask
        steps = torch.arange(taken.ids.shape[1]).expand(taken.ids.shape)  # one for each place
        advantage, _ = over_traces(part.advantages[0], held, steps, mask, 1.0, 0.95)
        torch.testing.assert_close(after.advantages[0], advantage, rtol=1e-5, atol=1e-5)
    own.run_epoch()
    assert own.first_ratio.max_log_ratio <= 1e-5 and loop.critic(own).head.weight.grad.abs().max() > 0


def test_the_head_finds_known_values():
    own = trainer(parts={"value": {"lr": 0.05}})
    hidden, truth = draw(40, own.policy.width).float(), draw(own.policy.width, seed=1).float()
    returns = hidden @ truth / 5 + 1
    found = []
    for _ in range(150):
        loop.critic(own).seen = [(part, loop.critic(own).values(part).detach(), goal)
                           for part, goal in zip(hidden.split(15), returns.split(15))]
        found.append(loop.critic(own).fit()["value_loss"])
    assert found[0] > 0.5 and found[-1] < 1e-3
    torch.testing.assert_close(loop.critic(own).values(hidden).detach(), returns, rtol=0, atol=0.1)


def test_a_head_of_zeros_leaves_the_gradient_that_completions_have():
    found = []
    for critic in (True, False):
        own = trainer()
        parts, asked = updates.credited(own)
        parts = loop.critic(own)(parts, asked) if critic else parts
        assert parts[0].advantages[0].ndim == (2 if critic else 1)
        found.append(updates.gradient(own, parts, asked))
    assert found[0].norm() > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)


def test_epochs_train_policy_and_values_and_the_first_ratio_is_one():
    own = trainer(train__updates=2)
    before = own.policy.weights.snapshot()
    for own.epoch in range(3):
        metrics = own.run_epoch()
        assert metrics["value_loss"] > 0 and metrics["grad_norm"] > 0
    assert own.first_ratio.max_log_ratio <= 1e-5 and loop.critic(own).head.weight.abs().max() > 0
    assert any(not torch.equal(each, before[key]) for key, each in own.policy.weights.snapshot().items())
    assert not loop.critic(own).head.weight.grad.isnan().any() and NoBaseline()(f64([[[2.0]]]), f64([0.5])).item() == 1


def test_a_resumed_run_goes_on_bit_for_bit_with_its_values(tmp_path):
    def arguments(folder, **options):
        settings = tiny.config(folder, method="trace_rl_value", reward="adenines", **options)
        return settings, dict(pipe=tiny_dna.model(steps=0), functions={"adenines": adenines},
                              prompts=[tiny.Prompt("=" * n) for n in (1, 2, 3, 4)])
    whole, part = tiny_runs.whole_and_resumed(arguments, tmp_path)
    one, two = (checkpoint.load(folder / "checkpoints" / "epoch-00003")[0] for folder in (whole, part))
    assert one["critic/weight"].abs().max() > 0 and {"critic/bias", "critic/optimizer.0.exp_avg"} <= one.keys()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert all("lora_" in key for key in load_file(whole / "adapter_model.safetensors"))  # no value model


def test_a_critic_of_outcomes_learns_to_tell_them_and_keeps_the_mean():
    own = tiny.trainer(rewards={"short": lambda texts, prompts: [float(len(text) > 3) for text in texts]},
                       method="remax", train__micro_batch=3, train__group=6,
                       parts={"value": {"type": "OutcomeHead", "bounds": [0.5], "lr": 0.05, "passes": 30}})
    parts, asked = updates.credited(own)
    given, losses = loop.critic(own)(parts, asked), []
    for part, after in zip(parts, given):  # of a new critic all tokens weigh the same
        [taken] = part.transitions
        torch.testing.assert_close(after.advantages[0], part.advantages[0][:, None] * taken.old.mask)
        classes = loop.critic(own).seen[len(losses)][1]
        assert classes.tolist() == (part.rewards[0] > 0.5).long()[:, None].expand_as(taken.old.mask)[
            taken.old.mask].tolist()
        losses.append(0)
    first = loop.critic(own).fit()["value_loss"]
    later = loop.critic(own)(parts, asked)
    assert loop.critic(own).fit()["value_loss"] < first == pytest.approx(0.6931, abs=1e-3)
    for part, after in zip(parts, later):
        mask = part.transitions[0].old.mask
        torch.testing.assert_close(after.advantages[0].sum(1) / mask.sum(1), part.advantages[0].float(), rtol=1e-4,
                                   atol=1e-5)
