"""Runs on recorded pairs of texts: what is read, what it teaches, and that nothing is drawn for it."""

import json
import math

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.config import load
from flowgrpo.data.pairs import Pair, in_place, load_pairs
from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.rewards.pairwise import preferred
from flowgrpo.run import run
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.targets import RecordedCompletions
from flowgrpo.train import Trainer
from flowgrpo.training import sampling
from tests.helpers import loop, tiny_text
from tests.helpers.refusals import message

RIGHT = [("1+2=", "3", "4"), ("33+4=", "37", "1"), ("5;66=", ";61", "61"), ("7+8=", "15", "78")]
DPO = dict(method="dpo", train__group=2, train__prompts=4, train__micro_batch=8, train__updates=1)


def pairs_file(folder, lines=RIGHT) -> str:
    rows = [dict(zip(("prompt", "chosen", "rejected"), line)) for line in lines]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "pairs.jsonl")


def trainer(file: str, **options) -> Trainer:
    settings = tiny_text.config(preferences=file, **DPO | options)
    torch.manual_seed(settings.seed)
    policy = CausalLM(*tiny_text.model(), settings.adapter, settings.text)
    return Trainer(settings, Accelerator(cpu=True), policy, {"preferred": preferred},
                   in_place(settings, ([], []), text=True))


def test_a_file_of_texts_and_its_mistakes(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "", "margins": {"overall": 2, "tone": -0.5},
                                "aspects": {"tone": "rejected"}}))
    assert load_pairs(file, text=True) == [Pair("a", "b", "", {"overall": 1.0, "tone": 0.0},
                                                {"overall": 2.0, "tone": -0.5})]
    assert "no image at" in message(load_pairs, file)
    for row, told in (({"chosen": "b", "rejected": "b"}, "chosen and rejected are the same text, b"),
                      ({"chosen": 1, "rejected": "b"}, "expected a text under 'chosen', got 1"),
                      ({"chosen": "b\0", "rejected": "b"}, "the text under 'chosen' holds"),
                      ({"chosen": "a", "rejected": "b", "margins": {"tone": "1"}}, "finite numbers under 'margins'")):
        file.write_text(json.dumps({"prompt": "a"} | row))
        with pytest.raises(UserError, match=told):
            load_pairs(file, text=True)


def test_the_recorded_texts_are_the_groups_with_their_log_probabilities(tmp_path):
    run = trainer(pairs_file(tmp_path))
    assert isinstance(run.method.target, RecordedCompletions)
    [part], conditioning, scores = sampling.sample(run, run.prompts)
    [taken] = part.transitions
    told = {(prompt, chosen, rejected) for prompt, chosen, rejected in RIGHT}
    texts = run.policy.written(taken.ids, taken.old.mask)
    assert {(prompt.text, texts[2 * i], texts[2 * i + 1]) for i, prompt in enumerate(run.prompts)} == told
    ends = taken.ids.gather(1, taken.old.mask.sum(1, keepdim=True) - 1)[:, 0]
    assert (ends == run.policy.ends[0]).all() and scores[..., 0].tolist() == [[1, 0]] * 4
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    torch.testing.assert_close(new.logp.detach(), taken.old.logp, rtol=0, atol=1e-5)
    assert run.rollouts.rollout_evaluations == 0 and run.policy.evaluations > 0


def shown(losses: torch.Tensor, mask: torch.Tensor) -> float:
    """The metric `loss` of the losses [pairs]: a mean over tokens, mask [2 * pairs, L]."""
    lengths = mask.sum(1).view(-1, 2).sum(1)
    return ((losses * lengths).sum() / lengths.sum()).item()


def margins(run: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the chosen texts less that of the rejected ones, less the same of the base: [pairs]; and the mask."""
    [part], conditioning, _ = sampling.sample(run, run.prompts)
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    with run.policy.reference():
        [(_, _, base)] = run.rollouts.replay(part, conditioning)
    gained = (new.logp - base.logp).sum(1).detach()
    return gained[::2] - gained[1::2], new.mask


@pytest.mark.parametrize("parts", [{}, {"surrogate": {"form": "squared"}}, {"surrogate": {"likelihood": 0.1}}])
def test_training_moves_the_texts_apart_by_the_loss_of_the_paper(tmp_path, parts):
    run = trainer(pairs_file(tmp_path), parts=parts, train__epochs=6, train__lr=0.02)
    losses = []
    for run.epoch in range(6):
        apart, mask = margins(run)
        losses.append(run.run_epoch()["loss"])
        if not parts:  # 2305.18290, equation 7
            expected = shown(torch.nn.functional.softplus(-0.1 * apart), mask)
            assert losses[-1] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] and margins(run)[0].min() > 0.5


def test_simpo_reads_no_reference_and_starts_at_its_margin(tmp_path):
    run = trainer(pairs_file(tmp_path), method="simpo")
    [part], conditioning, _ = sampling.sample(run, run.prompts)
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    mean = (new.logp.detach().sum(1) / new.mask.sum(1))
    expected = shown(torch.nn.functional.softplus(1.0 - 2.0 * (mean[::2] - mean[1::2])), new.mask)
    assert not run.method.compares_with_reference
    assert run.run_epoch()["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("options, told", [
    ({"method": "remax"}, "keeps 1 greedy samples and 0 answers per group"),
    ({"text.engine_precision": "bf16"}, "text.engine or text.engine_precision is set too"),
    ({"train.group": 4}, "train.group is 4, but preferences brings pairs: set train.group: 2")])
def test_what_does_not_go_with_recorded_texts_is_refused(options, told):
    config = load(None, {"model": "starter_text", "method": "dpo", "preferences": "pairs.jsonl", "train.group": 2}
                  | options)
    with pytest.raises(UserError, match=told):
        validate.check_recorded_pairs(loop.setup(config, "causal_lm"))


def test_a_masked_model_and_a_part_that_draws_are_refused():
    config = load(None, {"method": "dpo", "preferences": "pairs.jsonl", "train.group": 2})
    with pytest.raises(UserError, match="trains traces of an unmasking, which recorded completions have none of"):
        validate.check_recorded_pairs(loop.setup(config, "masked_lm"))
    drawn = config.model_copy(update={"parts": {"spread": {"type": "StepGroups"}}})
    assert "trains recorded pairs of completions reads no spread" in message(resolve, drawn, "tokens")


def test_a_text_that_is_too_long_is_refused_before_training(tmp_path):
    run = trainer(pairs_file(tmp_path, [("1+2=", "1234567", "4")]), train__prompts=1)
    with pytest.raises(UserError, match=r"the chosen text of the prompt '1\+2=' has 8 tokens, its end included, and "
                                        "text.max_tokens is 6"):
        run.rollouts.require(run.prompts)


def test_a_whole_run_measures_the_rewards_and_draws_nothing_to_train_on(tmp_path):
    settings = load(None, {
        "model": "starter_text", "method": "dpo", "preferences": pairs_file(tmp_path), "prompts": "starter_text",
        "reward": "exact_match", "output": str(tmp_path), "name": "run", "device": "cpu", "precision": "fp32",
        "tracker": "none", "text.max_tokens": 5, "adapter.rank": 2, "train.group": 2, "train.prompts": 4,
        "train.micro_batch": 8, "train.epochs": 1, "eval.prompts": 2, "eval.grid": 2})
    assert resolve(settings, "tokens").loss.surrogate == PairLoss()
    summary = run(settings)
    assert summary["rewards"] == {"trained": {"preferred": 1.0}, "measured": ["exact_match"]}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["reward/preferred/mean"] == 0.5
