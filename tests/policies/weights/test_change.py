"""Change of trained weights against the matrices themselves."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.policies.weights.change import Change
from flowgrpo.policies.weights.trainable import TrainableWeights
from tests.helpers import tiny


def largest(weights, key: str = "default") -> float:
    """The largest |scale B A| / sqrt(outputs) of all layers, from whole matrices."""
    return max((layer.scaling[key] * (layer.lora_B[key].weight @ layer.lora_A[key].weight)).norm().item()
               / layer.out_features**0.5 for layer in weights.layers().values())


def test_a_lora_changes_by_the_product_of_its_sides():
    pipe = tiny.sd3()
    weights = TrainableWeights(pipe, {"transformer": pipe.transformer}, Adapter(rank=2))
    change = Change(weights)
    assert change(Processes()) == 0.0
    with torch.no_grad():
        for number, (key, parameter) in enumerate(weights.named.items()):
            if "lora_B" in key:
                parameter.normal_(std=0.1 + number / 100)
    assert change(Processes()) == pytest.approx(largest(weights), rel=1e-5)
    with torch.no_grad():
        next(parameter for key, parameter in weights.named.items() if "lora_B" in key).fill_(1e30)
    assert 1e29 < change(Processes()) < 1e32
    with torch.no_grad():
        next(iter(weights.named.values())).fill_(torch.nan)
    assert change(Processes()) != change(Processes())  # NaN


@pytest.mark.parametrize("targets, told", [
    (["to_q", "to_kk"], r"adapter\.targets: 'to_kk' matches no module of the transformer: did you mean 'to_k'\?"),
    (["to_out.0", "attn.to_v", "nothing_like_it"], r"'nothing_like_it' matches no module of the transformer; ")])
def test_a_target_that_matches_nothing_is_refused(targets, told):
    pipe = tiny.sd3()
    with pytest.raises(UserError, match=told):
        TrainableWeights(pipe, {"transformer": pipe.transformer}, Adapter(rank=2, targets=targets))
    assert not hasattr(pipe.transformer, "peft_config")
    right = Adapter(rank=2, targets=["to_out.0", "attn.to_v"])
    weights = TrainableWeights(pipe, {"transformer": pipe.transformer}, right)
    assert len(weights.layers()) == 4


def test_whole_weights_change_by_their_difference():
    pipe = tiny.sd3()
    weights = TrainableWeights(pipe, {"transformer": pipe.transformer}, Adapter(rank=0))
    change = Change(weights)
    assert change(Processes()) == 0.0
    key, parameter = next((key, value) for key, value in weights.named.items() if value.ndim == 2)
    with torch.no_grad():
        parameter += 0.5
    assert change(Processes()) == pytest.approx(0.5 * parameter.shape[1] ** 0.5, rel=1e-5), key
