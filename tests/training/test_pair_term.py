"""HyPO: the preference loss of recorded pairs beside a KL on samples of the run."""

import json

import pytest
import torch

from flowgrpo.methods.supervised import PicturePairs, PreferencePairs
from flowgrpo.objectives.kl import SampledKL
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.objectives.supervised import FixedWeights
from flowgrpo.rollouts.data_losses import at_guidance, seed_of
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import CompletionBatch, GroupStatistics, Scored
from tests.helpers import loop, tiny_runs
from tests.helpers.refusals import message
from tests.policies.pipelines.test_image_latents import saved

PAIRS = {"1+2=": ("3", "12"), "33+4=": ("37", "7"), "5;66=": (";61", "6"), "7+8=": ("15", "1")}


def made(**options):
    return tiny_runs.trainer("tokens", tiny_runs.config("tokens", "hypo", **options))


def grads(trainer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.weights.parameters()])


def test_the_term_has_the_value_and_gradient_of_dpo_in_any_micro_batch():
    trainer = made()
    term = loop.term(trainer)
    examples = [example for several in term.examples.recorded.values() for example in several]
    assert {each.prompt.text: (each.content, each.rejected) for each in examples} == PAIRS  # turned, without the tie
    assert [each.reward for each in examples] == [1.0, 1.0, 1.0, 0.5]
    loop.term(trainer)._backward(examples, 0)
    found, [value] = grads(trainer), loop.term(trainer).losses
    def whole(text: str, prompt: str) -> torch.Tensor:
        row = trainer.policy.answer(text)[None]
        return trainer.policy.log_probs(trainer.policy.encode([prompt]), torch.zeros(1).long(), row,
                                        torch.ones_like(row).bool(), trainer.method.generation.decoding).logp.sum()
    losses = []
    for prompt, (chosen, rejected) in PAIRS.items():
        with trainer.policy.reference():
            base = whole(chosen, prompt) - whole(rejected, prompt)
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (whole(chosen, prompt) - whole(rejected, prompt) - base)))
    expected = torch.stack(losses).mean()
    trainer.optimization.optimizer.zero_grad()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-6) and found.norm() > 1e-3
    torch.testing.assert_close(found, grads(trainer), rtol=1e-3, atol=1e-6)
    small = made(train__micro_batch=2)
    loop.term(small)._backward(examples, 0)
    torch.testing.assert_close(grads(small), found, rtol=1e-3, atol=1e-6)


def test_an_epoch_trains_the_pairs_and_the_kl_of_its_own_samples():
    trainer = made(train__updates=1)
    before = trainer.policy.weights.snapshot()
    metrics = trainer.run_epoch()
    assert metrics["kl"] > 0 and metrics["data/examples"] == 4 and metrics["data/loss"] > 0
    assert trainer.rollouts.rollout_evaluations > 0
    assert any(not torch.equal(before[name], value) for name, value in trainer.policy.weights.snapshot().items())


def test_with_partial_coverage_the_kl_on_own_samples_keeps_the_policy_near():
    """Three actions with logits x, 0 and 2 x. Pairs prefer the first to the second; the third, which shares the
    feature, is in no pair. Offline all mass goes to it; with the KL on samples of the policy it does not."""
    base = torch.log_softmax(torch.zeros(3, dtype=torch.float64), 0)
    def trained(weight: float) -> torch.Tensor:
        x = torch.zeros((), dtype=torch.float64, requires_grad=True)
        part, kl = PairLoss(0.5), SampledKL(weight, "k2")
        for _ in range(400):
            logp = torch.log_softmax(torch.stack([x, 0 * x, 2 * x]), 0)
            there = torch.ones(2, 1).bool()
            pair = Scored(logp[:2, None], there)
            batch = CompletionBatch(pair, pair, torch.zeros(2, 1, dtype=torch.float64), torch.arange(2),
                                    there.long(), there, Scored(base[:2, None], there))
            better = torch.tensor([1.0, 0.0], dtype=torch.float64)
            peers = GroupStatistics(part.statistic(batch).detach(), better, torch.zeros(2).long())
            loss = part(batch.log_ratio, better[:, None], CompletionBatch(
                pair, pair, batch.log_ratio, batch.rows, batch.ids, batch.mask, batch.reference, peers)).mean()
            if weight:  # the mean over the policy's own actions
                every = torch.ones(3, 1).bool()
                distance = kl(Scored(logp[:, None], every), Scored(base[:, None], every))[:, 0]
                loss = loss + (logp.detach().exp() * distance).sum()
            [gradient] = torch.autograd.grad(loss, x)
            x = (x - 0.2 * gradient).detach().requires_grad_()
        return torch.log_softmax(torch.stack([x, 0 * x, 2 * x]), 0).detach().exp()
    offline, hybrid = trained(0.0), trained(0.5)
    assert offline[2] > 0.97 and hybrid[2] < 0.7 and hybrid[0] > hybrid[1]


def test_pairs_have_a_weight_of_their_own_and_long_texts_are_refused_before_training():
    assert PreferencePairs().balance == PicturePairs().balance == FixedWeights(data=1.0)
    assert "the recorded text of the prompt '1+2=' has 3 tokens, its end included" in message(made, text__max_tokens=2)


def test_of_images_it_is_diffusion_dpo_at_one_noise_for_both(tmp_path):
    for name, seed in (("a.png", 1), ("b.png", 2)):
        saved(tmp_path / name, seed=seed)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "red", "chosen": "a.png", "rejected": "b.png"}))
    data = {"type": "PicturePairs", "source": {"path": str(file)}, "loss": {"beta": 20.0}}
    trainer = tiny_runs.trainer("flow", tiny_runs.config("flow", "mix_grpo", {"data": data}))
    [example] = loop.term(trainer).examples.recorded["red"]
    loop.term(trainer)._backward([example], 0)
    found, [value], policy, loss = grads(trainer), loop.term(trainer).losses, trainer.policy, loop.term(trainer).loss
    encoded = trainer.rollouts.conditioning([example.prompt]).rows(torch.tensor([0, 0]))
    x0 = torch.cat([loss.encoder(str(tmp_path / name), encoded.rows(torch.tensor([row])))[0]
                    for row, name in enumerate(("a.png", "b.png"))])
    noise = noise_like(x0[:1], policy.generators([seed_of(trainer.config.seed, 0, 0)]))
    times = loss.times(0)
    t = times.grid[0].item()
    def errors() -> torch.Tensor:
        with at_guidance(policy, 1.0):
            output = policy.replay(encoded, (1 - t) * x0 + t * noise, times.grid, 0, times.timesteps)
        return (output - (noise - x0)).flatten(1).square().mean(1)
    with policy.reference():
        base = errors()
    apart = errors() - base
    expected = torch.nn.functional.softplus(10 * (apart[0] - apart[1]))
    trainer.optimization.optimizer.zero_grad()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-6) and found.norm() > 1e-4
    torch.testing.assert_close(found, grads(trainer), rtol=1e-3, atol=1e-6)
