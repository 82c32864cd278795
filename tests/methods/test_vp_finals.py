"""Noised finals of variance-preserving models: Diffusion-DPO and RPO on a tiny Stable Diffusion 1.5."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.samplers.kernels import DDIM
from flowgrpo.samplers.noised_finals import Stratified
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.data.test_recorded_pairs import pairs_file
from tests.helpers import loop, tiny
from tests.test_train import align, epoch, gradient

DDIM_V = DDIMScheduler(prediction_type="v_prediction", clip_sample=False, **tiny.SD15_NOISE)


def made(method="diffusion_dpo", stock=None, **options):
    """A trainer on pairs that the tiny SD1.5 draws, its LoRA off its start."""
    policy = tiny.stir(tiny.policy(tiny.sd15(stock or tiny.pndm())), 0.03)
    options = dict(train__group=2, parts__surrogate={"similarity": 0.0}, parts__times={"count": 3}) | options
    return tiny.trainer(policy, method=method, **options)


@pytest.mark.parametrize("method", ["diffusion_dpo", "rpo"])
def test_finals_are_noised_as_the_stock_scheduler_noises_them(method):
    trainer = made(method)
    [part], _ = epoch(trainer)
    stock = DDPMScheduler.from_config(trainer.policy.stock.config)
    wanted = [int(1000 * t) for t in Stratified(3)(trainer.rollouts.grid, 0, 0).tolist()]
    assert part.exploration.timesteps.tolist() == wanted and [t // 334 for t in wanted] == [2, 1, 0]
    for time, taken in zip(wanted, part.transitions, strict=True):
        noised = stock.add_noise(part.finals[0], taken.x_next, torch.tensor([time]))
        torch.testing.assert_close(taken.x, noised, rtol=1e-5, atol=1e-5)
        assert abs(taken.x_next.mean()) < 0.15 and abs(taken.x_next.std() - 1) < 0.1  # the noise itself


def published(trainer, part, beta: float) -> torch.Tensor:
    """The loss of the released Diffusion-DPO script, by the U-Net's own calls: of every time the pairs' mean of
    -log sigmoid(-beta/2 (winner's error less the reference's, less the loser's less its reference's)), with mean
    errors, which fold T and the number of values into beta."""
    policy, losses = trainer.policy, []
    text = policy.pipe.encode_prompt([trainer.prompts[i].text for i in part.prompts], "cpu", 1, False)[0]
    for k, time in enumerate(part.exploration.timesteps.tolist()):
        taken, better = part.transitions[k], part.advantages[k] > 0
        def errors() -> torch.Tensor:
            predicted = policy.pipe.unet(taken.x, torch.tensor(time), encoder_hidden_states=text).sample
            return (predicted - taken.x_next).pow(2).mean((1, 2, 3))
        model = errors()
        with torch.no_grad(), policy.reference():
            reference = errors()
        gap = model - reference
        losses.append(-torch.nn.functional.logsigmoid(-beta / 2 * (gap[better] - gap[~better])).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("beta", [100.0, 5000.0])
def test_the_loss_and_its_gradient_are_those_of_the_released_script(beta):
    trainer = made(parts__surrogate={"beta": beta})
    [part], conditioning = epoch(trainer)
    weights, stats = tiny.step_weights(trainer, [part]), UpdateStats()
    assert weights == {0: 1.0, 1: 1.0, 2: 1.0} and len(part.prompts) == 4
    found = gradient(trainer, [part], conditioning)
    loop.backward(trainer, part, conditioning, weights, decisions([part]), stats)
    trainer.optimization.optimizer.zero_grad()
    loss = published(trainer, part, beta)
    loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.policy.weights.parameters()])
    assert abs(loss.item() - math.log(2)) > 1e-3 and wanted.norm() > 1e-4  # off the reference
    stats.norms.append(found.norm())
    assert stats.summary()["loss"] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(found / wanted.norm(), wanted / wanted.norm(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("stock", [tiny.pndm(), DDIM_V])
@pytest.mark.parametrize("method", ["diffusion_dpo", "rpo"])
def test_an_epoch_has_the_first_ratio_one_and_moves_the_lora_alone(method, stock):
    trainer = made(method, stock)
    before = {key: value.clone() for key, value in trainer.policy.pipe.unet.state_dict().items()}
    metrics = trainer.run_epoch()
    after = trainer.policy.pipe.unet.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all("lora_" in key for key in changed)
    assert trainer.first_ratio.max_log_ratio <= 1e-6
    assert trainer.optimization.update == 1 and math.isfinite(metrics["loss"])


def test_a_run_on_recorded_pairs(tmp_path):
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in tiny.PROMPTS))
    settings = tiny.config(tmp_path, model="tiny", method="diffusion_dpo", preferences=file, train__group=2,
                           train__steps=10)
    settings.image.call.clear()  # what is there is for SD3
    pipe = tiny.sd15()
    pipe.vae.register_to_config(shift_factor=0.0)  # which such pipelines do not read
    summary = align(settings, pipe=pipe)
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["before"] != summary["after"]


def test_other_noised_finals_are_refused_in_one_line():
    for method in (resolve(tiny.config(method="rpo"), "vp"), preset("diffusion_dpo").on("vp")):
        assert method.rollout.kernel == DDIM(0.0)
    for options in (dict(method="diffusion_nft"), dict(method="dgpo"), dict(method="awm"),
                    dict(method="diffusion_dpo", parts__times={"type": "GridTimes"}),
                    dict(method="diffusion_dpo", parts__step_weight={"type": "Sigma"})):
        with pytest.raises(UserError, match="variance-preserving .* flow matching") as caught:
            resolve(tiny.config(**options), "vp")
        assert "\n" not in str(caught.value)
