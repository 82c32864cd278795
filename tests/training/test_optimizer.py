"""Steps of the optimizer in closed form, factors on the loss of a decision, and the gradient of large groups."""

from dataclasses import replace

import pytest
import torch

from flowgrpo.advantages import group_relative
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions, update_average
from tests.helpers import loop, tiny, tiny_runs, tiny_text


@pytest.mark.parametrize("most", [0.5, 1e6], ids=["clipped", "whole"])
def test_a_step_takes_the_gradient_scaled_to_the_largest_norm(most):
    """AdamW's first moment after one step from 0 is (1 - beta_1) g min(1, most / |g|)."""
    trainer = tiny.trainer(train__clip_grad=most)
    optimization = trainer.optimization
    torch.manual_seed(1)
    gradients = [torch.randn_like(parameter) for parameter in optimization.parameters]
    for parameter, gradient in zip(optimization.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(optimization.step(), norm)
    assert norm > 0.5
    factor = (1 - trainer.config.train.betas[0]) * min(1.0, most / norm.item())
    for parameter, gradient in zip(optimization.parameters, gradients, strict=True):
        torch.testing.assert_close(optimization.optimizer.state[parameter]["exp_avg"], factor * gradient,
                                   rtol=1e-4, atol=1e-7)


def test_a_moving_average_is_that_of_each_weight():
    generator = torch.Generator().manual_seed(0)
    named = {name: torch.nn.Parameter(torch.randn(3, size, generator=generator)) for name, size in (("a", 2), ("b", 5))}
    average = {name: torch.randn(parameter.shape, generator=generator) for name, parameter in named.items()}
    expected = {name: value.clone().lerp_(named[name].detach(), 0.25) for name, value in average.items()}
    update_average(average, named, 0.75)
    assert all(torch.equal(average[name], expected[name]) for name in named)
    update_average({}, {}, 0.75)


@pytest.mark.parametrize("ema, averages", [
    (0.9999, [0.9, 1.8, 2.7, 3.6, 4.5]),  # decays of 1/10, 2/11, 3/12, 4/13, 5/14
    (0.25, [0.9, 1.8, 2.7, 3.675, 4.66875]), (0.05, [0.95, 1.9475, 2.947375, 3.94736875, 4.9473684375])])
def test_a_moving_average_of_1_to_5_warms_up_as_that_of_diffusers_and_flow_grpo(ema, averages):
    optimization = tiny.trainer(train__ema=ema).optimization
    kept, stored = [*optimization.ema.values()], []
    for value in kept:
        value.zero_()
    for number in range(1, 6):
        with torch.no_grad():
            for parameter in optimization.parameters:
                parameter.fill_(number)
        optimization.step()
        stored.append(kept[0].flatten()[0].item())
    assert stored == pytest.approx(averages, rel=1e-6) and all((value == stored[-1]).all() for value in kept)


def many(completions, prompts):
    """Of several values, so that groups differ."""
    return [len(text) + text.count("7") / 2 for text in completions]


def corrected(part, factors):
    """The part with a random correction from 0.5 to 2 of each decision; they are appended to `factors`."""
    transitions = []
    for taken in part.transitions:
        generator = torch.Generator().manual_seed(len(factors))
        factors.append(0.5 + 1.5 * torch.rand(taken.old.logp.shape, generator=generator))
        transitions.append(replace(taken, importance=factors[-1]))
    return replace(part, transitions=tuple(transitions))


@pytest.mark.parametrize("made, options", [(tiny, {"method": "mix_grpo"}), (tiny_text, {"method": "dapo"})])
def test_each_decision_weighs_its_step_and_its_correction_in_loss_and_gradient(made, options):
    """Before the first update every ratio is 1: the loss of decision i is -w_i A_i, and the gradient of the whole
    -sum_i w_i A_i grad log p_i / n, where w_i is the product of both factors."""
    trainer = made.trainer(rewards={"many": many} if made is tiny_text else None, **options)
    batch = trainer.prompts[:trainer.geometry.prompts]
    parts, conditioning, scores = sampling.sample(trainer, batch)
    credited = loop.credit(trainer, parts, scores, [prompt.key for prompt in batch])
    parts = [part for part in credited if part is not None]
    factors: list[torch.Tensor] = []
    parts = [corrected(part, factors) for part in parts]
    weights = {taken.step: 1.5 + taken.step / 4 for part in parts for taken in part.transitions}
    count, stats, expected, summed = decisions(parts), UpdateStats(), [], torch.zeros(())
    assert trainer.kl_reference.kl.weight == 0
    trainer.optimization.zero_grad()
    for part in parts:
        loop.backward(trainer, part, conditioning, weights, count, stats)
    found = [parameter.grad.clone() for parameter in trainer.optimization.parameters]
    trainer.optimization.zero_grad()
    for part in parts:
        for k, rows, new in trainer.rollouts.replay(part, conditioning):
            weighed = part.transitions[k].importance[rows] * part.advantage(k, rows).expand(new.logp.shape)
            weighed = weighed * weights[part.transitions[k].step]
            expected.append(-weighed[new.mask])
            summed = summed - (weighed * new.logp * new.mask).sum() / count
    summed.backward()
    losses = torch.stack(stats.batches)[:, 2]
    torch.testing.assert_close(losses, torch.stack([each.sum() for each in expected]).float(), rtol=1e-4, atol=1e-5)
    assert max(each.abs().max().item() for each in found) > 0
    for gradient, parameter in zip(found, trainer.optimization.parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()) + 1e-9)


def gradient(micro_batch: int) -> torch.Tensor:
    made = tiny_runs.trainer("flow", tiny_runs.config("flow", "flow_grpo", train__steps=2, train__prompts=1,
                                                      train__group=64, train__micro_batch=micro_batch))
    made.prompts = made.prompts[1:2]
    tiny_runs.epochs(made, 1)
    return torch.cat([parameter.grad.flatten() for parameter in made.policy.weights.parameters()])


def test_a_group_of_64_in_micro_batches_of_8_has_the_gradient_of_one_batch():
    whole, parts = gradient(64), gradient(8)
    assert whole.norm() > 1e-6 and (whole - parts).norm() <= 1e-3 * whole.norm()


def lifted(group: int, seed: int) -> float:
    """The share of the right ones of 20 answers whose probability a small step of the group's gradient raises."""
    generator = torch.Generator().manual_seed(seed)
    logits = 0.3 * torch.randn(20, generator=generator, dtype=torch.float64)
    right = torch.arange(20) < 6
    before = logits.softmax(0)
    taken = before.multinomial(group, replacement=True, generator=generator)
    advantages = group_relative(right[taken][None].double(), "none")[0]
    step = torch.zeros(20, dtype=torch.float64).index_add(0, taken, advantages / group) - before * advantages.mean()
    return ((logits + 1e-3 * step).softmax(0) > before)[right].double().mean().item()


def test_the_share_of_right_answers_that_rise_goes_to_one_with_the_group():
    shares = [sum(lifted(group, seed) for seed in range(40)) / 40 for group in (8, 64, 512)]
    assert shares[0] < 0.75 < shares[1] < shares[2] and shares[2] > 0.97, shares
