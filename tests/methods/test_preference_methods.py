"""Methods of preferences: RPO (2407.12164), and Diffusion-DPO on variance-preserving models."""

import math

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler

from flowgrpo.advantages.group import Advantage
from flowgrpo.advantages.shaping import BradleyTerry
from flowgrpo.config import load
from flowgrpo.data.pairs import in_place
from flowgrpo.methods import preset, validate
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.forward_process import Preference
from flowgrpo.rewards.combine import Harmonic
from flowgrpo.samplers.kernels import DDIM
from flowgrpo.samplers.noised_finals import Stratified
from flowgrpo.samplers.rollout import Part
from flowgrpo.train import Trainer
from flowgrpo.training.credit import credit
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import Context, PromptGroups, RewardColumns, RunState, Scored, Transitions
from tests.data.test_recorded_pairs import pairs_file
from tests.helpers import loop, tiny
from tests.helpers.tables import close, f64
from tests.objectives.test_forward_objectives import value as value_of
from tests.objectives.test_forward_objectives import with_error
from tests.test_train import align, epoch, gradient, metrics

NAN = math.nan


# --- the harmonic reward ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share, image, text, value", [
    (0.5, 0.8, 0.2, 0.32),                # 1 / (0.625 + 2.5), far below the mean 0.5
    (0.3, 0.8, 0.2, 1 / 3.875),           # 1 / (0.375 + 3.5)
    (0.7, 0.8, 0.2, 1 / 2.375),           # 1 / (0.875 + 1.5)
    (0.3, 0.6, 0.6, 0.6),                 # of equals the same
    (0.5, 1.0, 0.5, 2 / 3),
    (0.5, 0.0, 0.9, 0.0),                 # one that is 0 makes 0, and no division by 0
    (0.5, 0.9, 0.0, 0.0),
    (1.0, 0.8, 0.2, 0.8), (0.0, 0.8, 0.2, 0.2),  # the ends are one of the two alone:
    (1.0, 0.8, 0.0, 0.8), (0.0, 0.0, 0.2, 0.2),  # 0 / 0 of the other says nothing,
    (1.0, 0.0, 0.9, 0.0), (0.0, 0.9, 0.0, 0.0),
    (1.0, 0.8, NAN, 0.8), (0.0, NAN, 0.2, 0.2),  # nor does one that does not apply
])
def test_the_harmonic_reward_by_hand(share, image, text, value):
    close(Harmonic([red, red], share=share).combine(f64([[image, text]])), [value])
    if 0 < share < 1:  # as released: 1e-8 beside each similarity
        released = 1 / (share / (image + 1e-8) + (1 - share) / (text + 1e-8))
        assert released == pytest.approx(value, abs=1e-7)


def red(images, prompts):
    return images[:, 0].mean((1, 2))


def test_cosines_become_similarities_first():
    plain = Harmonic([red, red], share=0.3)
    cosines = Harmonic([red, red], share=0.3, cosines=True)
    scores = f64([[0.6, -0.6], [1.0, 1.0], [-1.0, 0.9], [NAN, 0.5]])
    found = cosines.combine(scores)
    close(found[:3], [1 / 3.875, 1.0, 0.0])
    assert found[3].isnan()
    close(plain.combine(scores)[:2], [0.0, 1.0])  # a cosine below 0 would count as nothing


# --- labels ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("one, two, scale", [(0.7, 0.2, 1.0), (0.2, 0.7, 1.0), (0.5, 0.5, 1.0), (0.3, 0.2, 10.0)])
def test_labels_are_drawn_as_bradley_and_terry_say(one, two, scale):
    pairs = 40_000
    labels = BradleyTerry(scale)(f64([one, two]).view(1, 2, 1).expand(pairs, 2, 1), Context(RunState(3)))
    assert labels.shape == (pairs, 2, 1) and torch.equal(labels.unique(), f64([0, 1]))
    assert torch.equal(labels.sum(1), torch.ones(pairs, 1, dtype=torch.float64))
    wanted = 1 / (1 + math.exp(scale * (two - one)))
    assert labels[:, 0].mean().item() == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / pairs) ** 0.5)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 0.5], [1.0, -1.0]])
def test_several_rewards_are_labelled_by_their_weighted_sum(weights):
    """Differences of 0.5 and -0.2. The label takes their place as the one reward, whatever the weights add up to."""
    pairs, context = 40_000, Context(RunState(3), rewards=RewardColumns(weights=weights))
    labels = BradleyTerry()(f64([[0.7, 0.1], [0.2, 0.3]]).expand(pairs, 2, 2), context)
    assert labels.shape == (pairs, 2, 1) and torch.equal(labels.unique(), f64([0, 1]))
    wanted = 1 / (1 + math.exp(-(weights[0] * 0.5 - weights[1] * 0.2)))
    assert labels[:, 0].mean().item() == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / pairs) ** 0.5)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, -1.0]])
def test_the_label_is_the_advantages_reward(weights):
    """Scores so far apart that the labels are sure: the first sample is above where the first reward is larger."""
    scores = torch.stack([f64([[9e3, 0], [0, 9e3]]), f64([[1.0, 0], [1, 0]])], 2)
    method = preset("rpo").having(selection=None)
    ones = torch.zeros(4, 1)
    taken = Transitions(0, torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), torch.arange(4), torch.zeros(4, 1),
                        Scored(ones, ones == 0))
    part = Part(range(2), taken.prompts, None, (taken,), ())
    context = Context(rewards=RewardColumns(weights=weights), groups=PromptGroups(["a", "b"]))
    [found] = credit(method, [part], scores, weights, context, lambda values: values)
    expected = Advantage("batch", "rewards")(f64([[1, 0], [0, 1]])[..., None], [1.0])
    torch.testing.assert_close(found.advantages[0].double(), expected.flatten(), rtol=0, atol=1e-6)


def test_labels_of_larger_groups_are_one_order_and_agree_with_pairs():
    rewards = f64([0.9, 0.4, 0.1]).view(1, 3, 1).expand(40_000, 3, 1)
    labels = BradleyTerry()(rewards, Context(RunState(1)))[..., 0]
    assert torch.equal(labels.sort(dim=1).values.unique(dim=0), f64([[0, 0.5, 1]]))
    above = (labels[:, 0] > labels[:, 2]).double().mean().item()
    assert above == pytest.approx(1 / (1 + math.exp(-0.8)), abs=0.01)


def test_labels_depend_on_the_epoch_alone():
    rewards, shape = torch.zeros(50, 2, 1), BradleyTerry()
    assert torch.equal(shape(rewards, Context(RunState(1))), shape(rewards, Context(RunState(1))))
    assert not torch.equal(shape(rewards, Context(RunState(1))), shape(rewards, Context(RunState(2))))
    assert torch.equal(shape(rewards), shape(rewards, Context(RunState(0))))
    rewards[0, 0] = NAN
    found = shape(rewards, Context(RunState(1)))
    assert found[0].isnan().all() and torch.equal(found[1:], shape(torch.zeros(50, 2, 1), Context(RunState(1)))[1:])


# --- the loss --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", [1.0, -1.0])
def test_the_loss_by_hand(label):
    """-log sigmoid(+-d), d = (0.5 - 0.4) - (0.6 - 0.65) = 0.15, and the error of the subject's image, 0.4, as it is:
    a pair's loss is the mean of its two rows."""
    new, reference = with_error([0.4, 0.65], grad=True), with_error([0.5, 0.6])
    surrogate = preset("rpo").parts()["surrogate"]
    loss = value_of(surrogate, [label, -label], new, new, None, reference)
    value, slope = math.log(1 + math.exp(-label * 0.15)), label / (1 + math.exp(label * 0.15))
    close(loss.detach(), [[value + 2 * 0.4], [value]])
    [found] = torch.autograd.grad(loss.mean(), new.logp)
    close(found, [[-2 * (slope + 1)], [2 * slope]])  # e = -2 logp


def test_the_first_image_of_every_group_is_the_subjects():
    errors, surrogate = [0.3, 0.9, 0.5, 0.8], Preference(2.0, similarity=0.5)
    new, reference = with_error(errors), with_error(errors)
    loss = value_of(surrogate, [0.0] * 4, new, new, [7, 7, 2, 2], reference)
    close(loss, [[math.log(2) + 0.3], [math.log(2)], [math.log(2) + 0.5], [math.log(2)]])


def test_what_is_left_of_a_pair_has_no_loss():
    new, surrogate = with_error([0.3, 0.5, 0.8], grad=True), Preference(2.0, similarity=0.5)
    loss = value_of(surrogate, [0.0] * 3, new, new, [7, 2, 2], new)
    close(loss.detach(), [[0.0], [math.log(2) + 0.5], [math.log(2)]])
    assert torch.autograd.grad(loss.sum(), new.logp)[0][0] == 0


@pytest.mark.parametrize("missing", ["subject", "drawn", "none"])
def test_a_pair_of_which_a_reward_is_missing_teaches_nothing(tmp_path, missing):
    file = pairs_file(tmp_path, ("red", "a.png", "b.png"))
    settings = tiny.config(preferences=file, labels="rewards", method="rpo", train__group=2, train__prompts=1)
    left_out = ["subject", "drawn", "none"].index(missing)
    def some(images, prompts):
        return [None if i == left_out else score for i, score in enumerate(red(images, prompts).tolist())]
    trainer = Trainer(settings, Accelerator(cpu=True), tiny.stir(tiny.policy()), {"red": some},
                      in_place(settings, ([], [])))
    assert (gradient(trainer, *epoch(trainer)).norm() > 0) == (missing == "none")


# --- the preset ------------------------------------------------------------------------------------------------------
def test_recorded_pairs_or_no_similarity_are_accepted():
    for more in ({"parts.surrogate.similarity": 0}, {"preferences": "pairs.jsonl", "labels": "rewards"}):
        config = load(None, {"method": "rpo", "train.group": 2} | more)
        assert validate.check_recorded_pairs(loop.setup(config)) is None


def test_a_run_is_chosen_and_stopped_by_its_validation_value(tmp_path):
    """Labels by the second reward alone, as released, and the best weights by both: a learning rate of nothing brings
    no second best, so that the run stops."""
    (tmp_path / "two.py").write_text("def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n\n\n"
                                     "def green(images, prompts):\n    return images[:, 1].mean((1, 2))\n")
    parts = [f"{tmp_path}/two.py:red", f"{tmp_path}/two.py:green"]
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in tiny.PROMPTS))
    settings = tiny.config(
        tmp_path, method="rpo", preferences=file, labels="rewards", train__group=2, train__epochs=5, train__lr=1e-12,
        train__steps=10,
        reward={"train": {"use": "harmonic", "args": {"rewards": parts, "share": 0}}}, eval__every=1,
        eval__rewards={"val": {"use": "harmonic", "args": {"rewards": parts, "share": 0.3}}},
        eval__best="val", eval__stop={"reward": "val", "patience": 2})
    summary = align(settings, {})
    lines = metrics(settings.folder)
    assert len(lines) == 3 and summary["kept"].startswith("kept the weights of epoch 1, the best by held-out val (")
    assert summary["kept"].endswith("stopped: 2 evaluations without a better held-out val than that of epoch 1")
    assert summary["rewards"] == {"trained": {"train": 1.0}, "measured": ["train", "val"]}
    assert all(line["reward/train/std"] > 0 and math.isfinite(line["loss"]) for line in lines)
    # At the base -log sigmoid(0), and the error of the subject's image.
    assert lines[0]["loss"] > math.log(2)


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


def test_a_run_on_recorded_pairs(tmp_path):
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in tiny.PROMPTS))
    settings = tiny.config(tmp_path, model="tiny", method="diffusion_dpo", preferences=file, train__group=2,
                           train__steps=10)
    settings.image.call.clear()  # what is there is for SD3
    pipe = tiny.sd15()
    pipe.vae.register_to_config(shift_factor=0.0)  # which such pipelines do not read
    summary = align(settings, pipe=pipe)
    assert summary["max_first_log_ratio"] <= 1e-6 and summary["before"] != summary["after"]


def test_pairs_of_samples_are_drawn_by_deterministic_ddim():
    for method in (resolve(tiny.config(method="rpo"), "vp"), preset("diffusion_dpo").on("vp")):
        assert method.rollout.kernel == DDIM(0.0)
