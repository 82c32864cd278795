"""Completions that another program draws than the one that is trained: their weights, by hand and in a run."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.run import run
from flowgrpo.samplers.rollout import seeder
from flowgrpo.text.policies import engines
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.rollouts.completions import EngineRollouts, TextRollouts
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.text.samplers.importance import Mismatch
from flowgrpo.types import Segmented
from tests.helpers import tiny_masked, updates
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import message
from tests.helpers.tiny_text import many

F64 = torch.float64
# Probabilities of two completions: of the trainer, of the engine; the last token of the second one was never drawn.
TRAINER = torch.tensor([[0.5, 0.9, 0.2], [0.3, 0.8, 0.4]], dtype=F64).log()
ENGINE = torch.tensor([[0.25, 0.3, 0.4], [0.6, 0.5, 0.01]], dtype=F64).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize("how, level, cap, expected", [
    ("tis", "token", 2.0, [[2.0, 2.0, 0.5], [0.5, 1.6, 1.0]]),  # ratios 2, 3, 1/2; 1/2, 8/5
    ("mis", "token", 2.5, [[2.0, 0.0, 0.5], [0.5, 1.6, 1.0]]),
    ("tis", "token", math.inf, [[2.0, 3.0, 0.5], [0.5, 1.6, 1.0]]),
    ("tis", "sequence", 2.0, [[2.0, 2.0, 2.0], [0.8, 0.8, 1.0]]),  # products 3 and 4/5
    ("mis", "sequence", 2.0, [[0.0, 0.0, 0.0], [0.8, 0.8, 1.0]]),
    ("mis", "sequence", math.inf, [[3.0, 3.0, 3.0], [0.8, 0.8, 1.0]]),
    ("none", "token", 2.0, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])])
def test_weights_by_hand(how, level, cap, expected):
    found = Mismatch(how, cap, level)(TRAINER.clone().requires_grad_(), ENGINE, MASK)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-10)
    assert not found.requires_grad


def test_caps_and_weighted_engine_samples():
    assert Mismatch(cap=2.5).above(TRAINER, ENGINE, MASK).tolist() == [[False, True, False], [False] * 3]
    assert Mismatch(cap=2.5, level="sequence").above(TRAINER, ENGINE, MASK).tolist() == [[True] * 3, [False] * 3]
    # The engine's mean of w f is the sum of p f without a cap, of min(p, C q) f with one, of p f where p <= C q when
    # masked: closed forms over four tokens.
    p, q = (torch.tensor(row, dtype=F64) for row in ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]))
    f, mask = torch.tensor([3.0, -1.0, 2.0, 5.0], dtype=F64), torch.ones(4, 1, dtype=torch.bool)
    def mean(how, cap):
        return (q * Mismatch(how, cap)(p.log()[:, None], q.log()[:, None], mask)[:, 0] * f).sum()
    torch.testing.assert_close(mean("tis", math.inf), (p * f).sum(), rtol=0, atol=1e-10)
    torch.testing.assert_close(mean("tis", 2.0), (torch.minimum(p, 2 * q) * f).sum(), rtol=0, atol=1e-10)
    torch.testing.assert_close(mean("mis", 2.0), (p * f)[:3].sum(), rtol=0, atol=1e-10)
    for options, told in (({"how": "both"}, "how is 'both'"), ({"level": "word"}, "level 'word'"),
                          ({"cap": 0.5}, "cap is 0.5, expected 1 or more")):
        assert told in message(Mismatch, **options, error=ValueError)


# --- an engine that is there: the model's copy in another precision ---------------------------------------------------
def trainer(**options):
    """Engine in bf16, trainer in fp32, away from the base."""
    own = tiny.stir(tiny.policy(), 0.3)
    return tiny.trainer(own, {"short": many}, text__engine_precision="bf16", **options)


def parts(made):
    batch = made.prompts[:2]
    asked = made.rollouts.conditioning(batch)
    return [part for part, _ in made.rollouts.sample(asked, 0, None)], asked


def test_old_scores_are_the_trainers_and_weights_tell_them_from_the_engines():
    made = trainer(parts={"decoding": {"temperature": 0.8}}, train__generation_batch=4)  # as many as a part has rows:
    assert type(made.rollouts) is EngineRollouts  # bf16 scores differ with the size of the batch on some processors
    found, asked = parts(made)
    lowered = copy.deepcopy(made.policy)
    lowered.model.to(torch.bfloat16)
    lowered.dtype, of, largest = torch.bfloat16, seeder(0, 0), 0.0
    for part in found:
        [taken], group = part.transitions, made.geometry.group
        seeds = [of(int(p), i % group) for i, p in enumerate(part.prompts)]
        again = lowered.sample(asked.rows(part.prompts), Decoding(0.8), lowered.generators(seeds),
                               torch.zeros(len(seeds), dtype=torch.bool))
        assert torch.equal(again.ids, taken.ids) and torch.equal(again.mask, taken.old.mask)
        [(_, _, new)] = made.rollouts.replay(part, asked)
        torch.testing.assert_close(new.logp.detach(), taken.old.logp, rtol=0, atol=1e-6)
        apart = taken.old.logp - again.logp
        expected = apart.exp().clamp(max=2.0).masked_fill(~taken.old.mask, 1.0)
        torch.testing.assert_close(taken.importance, expected, rtol=0, atol=1e-6)
        largest = max(largest, apart.abs().max().item())
    assert largest > 1e-3
    told = made.rollouts.metrics()
    assert told["engine/max"] == pytest.approx(largest, abs=1e-6) and told["engine/above"] == 0
    assert 0.9 < told["engine/weight"] < 1.1
    made.rollouts.conditioning(made.prompts[:1])  # the epoch's prompts as they are learned
    assert made.rollouts.metrics() == told


def test_the_engine_has_the_present_weights():
    made = trainer()
    before = parts(made)[0][0].transitions[0]
    tiny.stir(made.policy, 0.5)
    after = parts(made)[0][0].transitions[0]
    assert not torch.equal(before.ids, after.ids)
    own = made.rollouts.engine.weights.named
    for key, parameter in made.policy.weights.named.items():
        assert torch.equal(own[key].data, parameter.data.to(torch.bfloat16)) and not own[key].requires_grad


def test_weights_are_1_on_average_and_greedy_ones_count_whole():
    """Given what stands before it, a token's ratio has the mean 1 under the engine that drew it."""
    made = trainer(train__group=128, train__prompts=2, train__micro_batch=128, text__correction_cap=1e9)
    found, _ = parts(made)
    ratio = torch.cat([part.transitions[0].importance[part.transitions[0].old.mask] for part in found])
    assert len(ratio) > 500 and ratio.std() > 1e-3
    assert abs(ratio.mean().item() - 1) < 4 * ratio.std().item() / len(ratio) ** 0.5
    made = trainer(method="remax")
    for part in parts(made)[0]:
        [taken] = part.transitions
        assert (taken.importance[::4] == 1).all() and (taken.importance[1::4] != 1).any()


def test_the_loss_of_a_token_is_multiplied_by_its_weight():
    """Weights of 2 double the gradient, weights of 0 leave none, and one row's weight is that row's alone."""
    made = trainer(parts={"kl": {"weight": 0.0}})
    credited, asked = updates.credited(made)
    tiny.stir(made.policy, 0.05)
    def gradient(weight) -> torch.Tensor:
        weighted = [replace(part, transitions=(replace(taken, importance=weight(taken.importance)),))
                    for part in credited for taken in part.transitions]
        return updates.gradient(made, weighted, asked)
    one, two, none = (gradient(lambda given, value=value: torch.full_like(given, value)) for value in (1.0, 2.0, 0.0))
    torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-8)
    assert one.norm() > 0 and none.norm() == 0
    first = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    pieces = [gradient(lambda given, row=row: first.roll(row, 0).expand_as(given)) for row in range(4)]
    torch.testing.assert_close(sum(pieces), one, rtol=1e-4, atol=1e-7)


def whole(settings, loaded):
    """(summary, metrics) of a run."""
    prompts = [tiny.Prompt(text) for text in tiny.PROMPTS]
    summary = run(settings, pipe=loaded, functions={"short": many}, prompts=prompts)
    return summary, [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_tells_how_far_engine_and_trainer_are_apart(tmp_path):
    summary, lines = whole(tiny.config(tmp_path, text__engine_precision="bf16", text__correction="mis"), tiny.model())
    assert len(lines) == 2 and all(0 < line["engine/max"] < 1 and line["engine/weight"] > 0 for line in lines)
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["rollout_evaluations_per_sample"] > 0
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_a_run_in_half_precision_tells_how_far_sampling_and_training_are_apart(tmp_path):
    model, tokenizer = tiny.model(layers=4, hidden_size=128, intermediate_size=256)
    narrow = {"low": 1e-4, "high": 1e-4}
    settings = tiny.config(tmp_path, precision="bf16", text__max_tokens=24, parts__surrogate=narrow)
    _, lines = whole(settings, (model.bfloat16(), tokenizer))
    assert len(lines) == 2 and all(0 < line["sampler/max"] < 1 and line["sampler/weight"] > 0 for line in lines)


def test_what_has_no_engine_or_weight():
    for options in ({}, {"text__engine_precision": "fp32"}):
        made = tiny.trainer(rewards={"short": many}, **options)
        assert type(made.rollouts) is TextRollouts
        assert all(part.transitions[0].importance is None for part in parts(made)[0])
    made, before, asked = halved(method="remax")
    for part in before:
        assert part.transitions[0].greedy is not None
        taken = made.rollouts.rescore(shifted(part, 1.5), asked).transitions[0]
        assert (taken.importance[taken.greedy] == 1).all() and (taken.importance[~taken.greedy] > 1).any()


# --- half precision, in which `generate` and the replay round differently ---------------------------------------------
def halved(**options):
    """A trainer of a model in bf16 without an engine, with the parts of its first epoch."""
    model, tokenizer = tiny.model()
    own = CausalLM(model.to(torch.bfloat16), tokenizer, Adapter(rank=2), Text(max_tokens=6), precision="bf16")
    made = tiny.trainer(own, {"short": many}, precision="bf16", **options)
    return made, *updates.credited(made)


def shifted(part, by):
    """The part as if `generate` had given its tokens probabilities `by` times smaller than the replay's."""
    [taken] = part.transitions
    old = replace(taken.old, logp=(taken.old.logp - math.log(by)).masked_fill(~taken.old.mask, 0.0))
    return replace(part, transitions=(replace(taken, old=old),))


@pytest.mark.parametrize("options, by, expected", [
    ({}, 1.5, 1.5), ({}, 3.0, 2.0), ({"text__correction": "mis"}, 3.0, 0.0), ({"text__correction_cap": 4}, 3.0, 3.0),
    ({"text__correction": "none"}, 3.0, 1.0)])
def test_tokens_drawn_in_half_precision_are_weighted_by_what_the_replay_gives_them(options, by, expected):
    """Old scores computed again are the trainer's: r = trainer / sampler = `by` for every drawn token."""
    made, before, asked = halved(**options)
    exact = [made.rollouts.rescore(part, asked) for part in before]  # the trainer's own, to the bit
    made.rollouts.mismatches = []
    said: list[str] = []
    found = made.first_ratio([shifted(part, by) for part in exact], asked, said.append)
    assert made.first_ratio.rescore and "are computed again" in said[0]
    for part, own in zip(found, exact, strict=True):
        [taken], [trained] = part.transitions, own.transitions
        torch.testing.assert_close(taken.old.logp, trained.old.logp, rtol=0, atol=1e-6)
        before_it = trained.importance  # of the rounding in `generate` itself
        weight = torch.full_like(taken.importance, expected).masked_fill(~taken.old.mask, 1.0)
        torch.testing.assert_close(taken.importance, weight * before_it, rtol=1e-5, atol=1e-6)
    told = made.rollouts.metrics()
    assert told["sampler/max"] == pytest.approx(math.log(by), abs=1e-5)
    assert told["sampler/kl"] == pytest.approx(-math.log(by), abs=1e-5)
    assert told["sampler/weight"] == pytest.approx(expected, abs=1e-5) and told["sampler/above"] == (expected < by)


# --- vLLM, which is not here ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, told", [
    ({}, "text.engine: vllm needs vllm (No module named 'vllm'): pip install 'flowgrpo[vllm]'"),
    ({"adapter__rank": 0}, "does not sample for adapter.rank 0 here: expected a LoRA"),
    ({"adapter__dora": True}, "does not sample for a DoRA")])
def test_what_vllm_needs_is_told(options, told):
    assert told in message(tiny.trainer, rewards={"short": many}, text__engine="vllm", **options)


def test_what_an_engine_cannot_is_told():
    assert ("method s_grpo samples the completions of a group by EarlyExits, which no engine does"
            in message(trainer, method="s_grpo"))
    masked = tiny_masked.policy()
    assert "one token after the other" in message(tiny.trainer, masked, {"short": many}, text__engine_precision="bf16")


def test_segments_are_valued_by_the_trainer_and_keep_the_engines_weights():
    made = trainer(method="spo_chain", parts__spread__interval=2, parts__spread__samples=2)
    batch = made.prompts[:2]
    asked = made.rollouts.conditioning(batch)
    [taken] = next(made.rollouts.sample(asked, 0, partial(made.scoring.total, batch)))[0].transitions
    assert isinstance(taken, Segmented) and taken.values.isfinite().any()
    assert taken.importance.shape == taken.ids.shape and not (taken.importance == 1).all()
    assert torch.equal(taken.rows(torch.tensor([1])).importance, taken.importance[1:2])


def test_tokens_of_requests_as_completions():
    """Outputs of requests as vLLM gives them: a token id to its log-probability at every step."""
    def output(*steps):
        return SimpleNamespace(token_ids=[token for token, _ in steps],
                               logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in steps])
    policy = tiny.policy(max_tokens=3)  # </s> is 2, the digits begin with 3
    outputs = [output((4, -0.5), (2, -0.25)), output((5, -1.0), (6, -2.0), (3, -3.0)), output((2, -0.1), (7, -9.0))]
    made = engines.pack_completions(policy, [""] * len(outputs), outputs)
    assert made.ids.tolist() == [[4, 2, 0], [5, 6, 3], [2, 0, 0]] and made.texts == ["1", "230", ""]
    assert made.logp.tolist() == [[-0.5, -0.25, 0.0], [-1.0, -2.0, -3.0], [pytest.approx(-0.1), 0.0, 0.0]]
    assert made.mask.tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    assert made.cut.tolist() == [False, True, False] and [text.tokens for text in made.texts] == [2, 3, 1]
