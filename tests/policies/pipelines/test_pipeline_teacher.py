"""A teacher pipeline as the reference of a pipeline's KL."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.objectives.kl import Linear
from flowgrpo.objectives.references import Teacher
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.samplers.replay import replay
from flowgrpo.training import sampling
from tests.helpers import loop, tiny


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
    with pytest.raises(UserError, match="the teacher .* has transformer.* expected .* of the model's family"):
        trainer.run_epoch()
