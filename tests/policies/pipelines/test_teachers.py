"""Teachers: one pipeline as the reference of a KL, and one per source of prompts."""

import re

import pytest
import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import preset
from flowgrpo.methods.setup import check_parts
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.kl import Linear
from flowgrpo.objectives.references import Teacher, Teachers
from flowgrpo.policies.options import check_method
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.samplers.growth import replay
from flowgrpo.training import sampling
from flowgrpo.training.kl_reference import join_rows
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.types import Scored
from tests.helpers import loop, tiny
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import assert_same_weights, next_epochs, resume

PROMPTS = [Prompt("red", metadata={"task": "a"}), Prompt("a cat", metadata={"task": "b"})]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Two teachers: LoRAs of ranks 2 and 3."""
    folder, found = tmp_path_factory.mktemp("teachers"), {}
    for source, rank, scale in (("a", 2, 0.3), ("b", 3, -0.3)):
        tiny.stir(tiny.policy(rank=rank), scale).weights.save(folder / source)
        found[source] = str(folder / source)
    return found


def made(reference, rewards=None, **options):
    """A run of the tiny SD3 off its start, on a prompt of each source, that a KL alone trains."""
    trainer = tiny.trainer(tiny.stir(tiny.policy(), 0.05), rewards=rewards, **dict(
        method="flow_grpo+diffusion_opd", parts={"reference": reference}, train__micro_batch=8, train__steps=4,
        train__epochs=20) | options)
    trainer.prompts = PROMPTS
    return trainer


def gradient(trainer, groups: tuple[int, ...]) -> torch.Tensor:
    """The gradient of an epoch's samples of some groups, whose parts hold no others; all have one divisor."""
    parts, conditioning, scores = sampling.sample(trainer, PROMPTS)
    credited = [part for part in loop.credit(trainer, parts, scores, [prompt.key for prompt in PROMPTS]) if part]
    epoch, stats = loop.epoch(trainer, credited, conditioning, own=PROMPTS), UpdateStats()
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, trainer.config.train.epochs)
    trainer.optimization.zero_grad()
    for part in credited:
        if set(part.prompts.tolist()) <= set(groups):
            loop.backward(trainer, part, conditioning, trainer.rollouts.step_weights([part], 0), 100, stats)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.weights.parameters()])


def test_the_gradient_is_that_of_each_sources_teacher_alone(models):
    both = gradient(made({"models": models}), (0, 1))
    alone = [gradient(made({"type": "Soup", "models": [models[source]]}, train__micro_batch=4), (place,))
             for place, source in enumerate("ab")]
    torch.testing.assert_close(both, alone[0] + alone[1], rtol=1e-4, atol=1e-6 * both.abs().max().item())
    swapped = gradient(made({"models": {"a": models["b"], "b": models["a"]}}), (0, 1))
    assert (both - swapped).norm() > 0.1 * both.norm() and alone[0].norm() > 0 < alone[1].norm()


def test_the_policy_moves_to_its_teachers(models):
    lines = next_epochs(made({"models": models}, train__lr=0.02), 20)
    assert lines[-1]["kl"] < 0.5 * lines[0]["kl"]


def test_rewards_are_measured_and_train_nothing(models):
    def blue(images, prompts):
        return -tiny.red(images, prompts)
    ends = []
    for reward in (tiny.red, blue):
        trainer = made({"models": models}, {"red": reward})
        [line] = next_epochs(trainer, 1)
        ends.append((line["reward/red/mean"], trainer.policy.weights.snapshot()))
    assert ends[0][0] == -ends[1][0] != 0
    assert all(torch.equal(value, ends[1][1][key]) for key, value in ends[0][1].items())


def test_a_resumed_run_has_its_teachers(models, tmp_path):
    one, other = (made({"models": models}, train__inner_epochs=2) for _ in range(2))
    next_epochs(one, 2)
    resume(one, other, tmp_path)
    assert len(other.kl_reference.snapshots) == 2
    next_epochs(one, 1)
    next_epochs(other, 1)
    assert_same_weights(one, other)


def test_rows_of_two_scores_are_joined():
    one, two = (Scored(torch.full((3, 1), value), torch.ones(3, 1, dtype=torch.bool), torch.full((3, 1, 2), value),
                       torch.tensor([0.5])) for value in (1.0, 2.0))
    found = join_rows(one, two, torch.tensor([False, True, False]))
    assert found.logp.flatten().tolist() == [1, 2, 1] and found.mean[:, 0, 0].tolist() == [1, 2, 1]
    assert found.std.tolist() == [0.5] and found.entropy is None


@pytest.mark.parametrize("reference, told", [
    ({}, "parts.reference.models is empty: expected a teacher per source of prompts, such as"),
    ({"models": {"a": "A"}}, "parts.reference.models has no teacher for task 'b' of the prompt 'a cat': expected one "
                             "of a, or add its teacher$"),
    ({"models": {"a": "A", "b": "B"}, "key": "source"}, "no teacher for source None of the prompt 'red'")])
def test_a_source_without_a_teacher_is_refused_in_one_line(reference, told):
    settings = tiny.config(method="flow_grpo+diffusion_opd", parts={"reference": reference})
    assert re.search(told, message(check_parts, loop.setup(settings, prompts=PROMPTS)))


def test_a_teacher_that_is_not_there_is_refused(tmp_path):
    reference = {"models": {"a": str(tmp_path / "none")}}
    settings = tiny.config(method="flow_grpo+diffusion_opd", parts={"reference": reference})
    assert "parts.reference.models" in message(check_method, settings, "pipeline", "cpu")


def test_the_preset(models):
    method = preset("flow_grpo", "diffusion_opd")
    assert method.loss.kl.weight == 1 and method.loss.reference == Teachers()
    kept = resolve(tiny.config(method="flow_grpo+diffusion_opd", parts={"reference": {"models": models}}))
    assert kept.loss.reference == Teachers((("a", models["a"]), ("b", models["b"]))) and hash(kept.loss.reference)


def teacher(folder, pipe=None) -> str:
    """The tiny SD3 with other weights, saved."""
    pipe = pipe or tiny.sd3()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return str(tiny.save(pipe, folder))


def test_the_reference_is_the_teacher(tmp_path):
    name = teacher(tmp_path)
    trainer = tiny.trainer(method="mix_grpo+kdrl", parts={"reference": {"model": name}})
    batch = trainer.prompts[:2]
    parts, asked, scores = sampling.sample(trainer, batch)
    part = next(part for part in loop.credit(trainer, parts, scores, [p.key for p in batch]) if part)
    trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 2)
    module = trainer.policy.pipe.transformer
    before = module.forward
    found = loop.reference(trainer, part, asked)
    assert module.forward == before and len(trainer.policy.teacher.known) == 1
    alone = tiny.policy(load_pipeline(name))
    with torch.no_grad():
        expected = [score for _, _, score in replay(alone, alone.encode([p.text for p in batch]), part, 4)]
        own = [score for _, _, score in trainer.rollouts.replay(part, asked)]
    for one, other, plain in zip(found, expected, own, strict=True):
        torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-5)
        assert (one.mean - plain.mean).abs().max() > 1e-3


def test_over_images_the_hosts_kl_fades_and_a_teacher_of_another_family_is_refused(tmp_path):
    loss = preset("flow_grpo", "kdrl").loss
    assert loss.kl == type(loss.kl)(5e-3, Linear(1e-3)) and loss.reference == Teacher()
    assert preset("kdrl").for_tokens
    name = teacher(tmp_path, tiny.flux())
    trainer = tiny.trainer(method="flow_grpo+kdrl", parts={"reference": {"model": name}})
    assert re.search("the teacher .* has transformer.* expected .* of the model's family", message(trainer.run_epoch))
