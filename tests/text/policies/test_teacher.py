"""A teacher model as the reference of a language model's KL."""

import pytest
import torch

from flowgrpo.config.sections import Text
from flowgrpo.errors import UserError
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives import at_epoch, k2
from flowgrpo.objectives.references import Teacher
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling
from flowgrpo.types import RunState
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message
from tests.helpers.tables import close


def teacher(folder, extra=()) -> str:
    """The tiny model with other weights where a LoRA has its own, saved."""
    model, tokenizer = tiny_text.model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokenizer.add_tokens(list(extra))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def trainer(folder, rewards=None, **options):
    parts = {"reference": {"model": str(folder)}, **options.pop("parts", {})}
    return tiny_text.trainer(rewards=rewards, method="kdrl", parts=parts, **options)


def test_the_weight_falls_from_the_first_epoch_to_the_last():
    kl, reference = preset("kdrl").parts()["kl"], preset("kdrl").parts()["reference"]
    assert reference == Teacher() and reference([{}], dict, 3) == []
    assert [at_epoch(kl, RunState(epoch, 5)).weight for epoch in (0, 2, 4)] == pytest.approx(
        [5e-3, 3e-3, 1e-3])


def test_the_reference_is_the_teacher(tmp_path):
    own = trainer(teacher(tmp_path))
    batch = own.prompts[:2]
    parts, asked, scores = sampling.sample(own, batch)
    [part] = loop.credit(own, parts[:1], scores, [p.text for p in batch])
    own.kl_reference.start_epoch(loop.epoch(own), own.rollouts, 0, 2)
    before, spent = own.policy.model, own.policy.evaluations
    [found] = loop.reference(own, part, asked)
    assert own.policy.model is before and own.policy.evaluations > spent and not found.logp.requires_grad
    [taken] = part.transitions
    model, tokenizer = tiny_text.model()
    alone = CausalLM(type(model).from_pretrained(tmp_path), tokenizer, None, Text(max_tokens=6))
    expected = alone.log_probs(asked, taken.prompts, taken.ids, taken.old.mask, Decoding())
    torch.testing.assert_close(found.logp, expected.logp, rtol=0, atol=1e-5)
    assert (found.logp - taken.old.logp).abs().max() > 1e-2
    [again] = loop.reference(own, part, asked)
    assert torch.equal(again.logp, found.logp) and len(own.policy.teacher.known) == 1


def test_without_a_reward_the_policy_moves_to_its_teacher(tmp_path):
    own = trainer(teacher(tmp_path), {"short": lambda texts, prompts: [0.0] * len(texts)}, adapter__rank=8,
                  train__lr=1e-2, train__epochs=12, train__group=8, train__micro_batch=16,
                  parts={"kl": {"weight": 1.0, "schedule": None}})
    told = []
    for own.epoch in range(12):
        told.append(own.run_epoch()["kl"])
    assert sum(told[-3:]) < 0.6 * sum(told[:3])


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    own = trainer(teacher(tmp_path, extra=["zz"]))
    assert "another tokenizer than the model" in message(own.run_epoch)


def test_a_teacher_is_for_what_has_decisions_of_a_model():
    teacher = {"reference": {"type": "Teacher", "model": "x"}}
    with pytest.raises(UserError, match="got Teacher, which reads a joint density or .*completions or"):
        resolve(tiny.config(method="expo", parts=teacher))
    assert resolve(tiny.config(method="flow_grpo", parts=teacher)).loss.reference == Teacher("x")


def test_the_estimators_mean_gradient_is_that_of_the_kl():
    # Over all tokens of a distribution, each counted by its probability.
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    [sampled] = torch.autograd.grad((policy.exp().detach() * k2(policy, other)).sum(), logits, retain_graph=True)
    [exact] = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits)
    close(sampled, exact.tolist())
