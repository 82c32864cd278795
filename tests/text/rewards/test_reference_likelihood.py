"""Likelihood of a reference behind a reasoning: weights of tokens by hand, and values against the model's own."""

import math

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.text.rewards.models import ReferenceLikelihood, reflective
from tests.helpers import tiny_text
from tests.helpers.tables import close, f64


def test_tokens_that_do_not_vary_have_no_weight():
    """Deviations 0, 1 and 3: weights 0, 1/4 and 3/4."""
    close(reflective(f64([[-5, -1, -6], [-5, -3, 0]])), [-19 / 4, -3 / 4])
    close(reflective(f64([[-1, -3], [-1, -3]])), [-2, -2])


def expected(network, tokenizer, before: list[int], reference: str) -> list[float]:
    """Token by token, each from a pass of its own."""
    values, wanted = [], tokenizer(reference, add_special_tokens=False)["input_ids"]
    for i, token in enumerate(wanted):
        logits = network(input_ids=torch.tensor([before + wanted[:i]])).logits[0, -1]
        values.append(logits.log_softmax(-1)[token].item())
    return values


@torch.no_grad()
def test_the_policys_own_likelihood_behind_each_reasoning():
    trainer = tiny_text.trainer(rewards={"r": (reward := ReferenceLikelihood(before="="))})
    tiny_text.stir(trainer.policy)
    network, tokenizer = trainer.policy.model, trainer.policy.tokenizer
    texts = ["1+2=9", "7", "12+5-3=4=1"]
    begun = trainer.policy.encode(["1+2="]).ids[0].tolist()
    rows = [expected(network, tokenizer, begun + tokenizer(shown, add_special_tokens=False)["input_ids"], "37")
            for shown in ("1+2=", "7=", "12+5-3=4=")]
    torch.testing.assert_close(reward.log_probs("1+2=", texts, "37", trainer.policy), torch.tensor(rows), rtol=1e-4,
                               atol=1e-4)
    found = rewards.score({"r": reward}, [*texts, *texts], ["1+2="] * 6, [{"answer": ["37", "8"]}] * 3 + [{}] * 3, 3,
                          policy=trainer.policy)
    torch.testing.assert_close(found[:3, 0], reflective(torch.tensor(rows)), rtol=1e-4, atol=1e-4)
    assert found[3:].isnan().all()
    mean = ReferenceLikelihood(weighted=False, before="=", model="given", parts=tiny_text.model())
    own = mean([texts[0]], ["1+2="], [{"answer": "37"}], 1)
    network, tokenizer = tiny_text.model()
    plain = expected(network.eval(), tokenizer, tokenizer("1+2=1+2=")["input_ids"], "37")
    assert own == pytest.approx([sum(plain) / 2], abs=1e-4)


def test_it_needs_a_policy_or_a_model():
    reward = rewards.find("reference_likelihood")
    with pytest.raises(UserError, match="there is none here: set args"):
        rewards.score({"r": reward}, ["a"] * 2, ["p"] * 2, [{"answer": "b"}] * 2, 2)
    with pytest.raises(UserError, match="got object, expected a causal language model"):
        rewards.score({"r": reward}, ["a"] * 2, ["p"] * 2, [{"answer": "b"}] * 2, 2, policy=object())
    assert math.isnan(rewards.score({"r": reward}, ["a"] * 2, ["p"] * 2, [{}] * 2, 2)[0, 0])
