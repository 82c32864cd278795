"""Where the weights of rewards are: loaded at the first scoring, off their device between scorings.

A second name of the CPU, "cpu:0", stands in for a GPU: to torch it is another device, on which scores are computed.
"""

import functools

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.rewards import placement
from flowgrpo.rewards.about import differentiable
from tests.helpers import tiny
from tests.rewards.test_local_model import Mean

IMAGES = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def scored(functions) -> list[float]:
    return rewards.score(functions, IMAGES, [""] * 5, [{}] * 5)[:, 0].tolist()


def composed(function, away=True) -> dict[str, rewards.Composed]:
    return rewards.compose({"own": WatchRule()}, None, {"own": function}, away)


def test_weights_leave_after_scoring_and_come_back_before_the_next():
    reward = Mean(device="cpu:0")
    weight, functions = reward.models[0].weight, composed(reward)
    expected = scored({"own": Mean()})
    for _ in range(2):
        assert reward.models[0].weight is weight  # the CPU's copy
        assert scored(functions) == expected
        assert reward.models[0].weight is not weight and torch.equal(reward.models[0].weight, weight)
        rewards.leave(functions.values())


def test_weights_stay_without_the_option_and_on_the_cpu():
    for reward, away in ((Mean(device="cpu:0"), False), (Mean(device="cpu"), True)):
        weight, functions = reward.models[0].weight, composed(reward, away)
        scored(functions)
        assert reward.models[0].weight is weight
        rewards.leave(functions.values())
        assert not functions["own"].placement.groups


def test_weights_that_are_not_loaded_are_loaded_before_the_first_scoring():
    with rewards.lazily():
        reward = Mean(device="cpu:0")
        functions = composed(reward)
    assert reward.parts is None
    assert scored(functions) == scored({"own": Mean()}) and reward.parts is not None


def test_modules_are_those_of_attributes_and_of_parts():
    class Held:
        def __init__(self):
            self.inner = {"model": [torch.nn.Linear(2, 2)]}

        def score(self, images, prompts):
            return [0.0] * len(prompts)

    one, model = Held(), Mean(device="cpu:0")
    gated = rewards.find("gated", {"rewards": [model, one.score], "thresholds": [0.5]})
    assert dict((type(module), str(device)) for module, device in placement.modules(gated)) \
        == {torch.nn.Linear: "cpu"}
    assert [str(device) for _, device in placement.modules(gated)] == ["cpu:0", "cpu"]
    assert placement.local_models(functools.partial(gated, 1)) == [model]
    assert placement.modules(lambda images, prompts: None) == []


COUNTS = {"clip_score": 151e6, "clip_cosine": 428e6, "subject_score": 428e6, "pickscore": 986e6, "hpsv2.0": 986e6,
          "imagereward": 447e6, "vqascore": 4.02e9 / 2, "question_answers": 4.02e9 / 2, "geneval_fast": 43.7e6,
          "geneval": (68.7 + 428) * 1e6, "subject_consistency": 86.4e6, "background_consistency": 87.8e6,
          "t2i_compbench": (361 + 155 + 151) * 1e6}  # in fp32; half in bf16
PARTS = [("geneval", {"colours": "pixels"}, 68.7e6), ("geneval_fast", {"colours": "clip"}, (43.7 + 428) * 1e6),
         ("geneval", {"detector": "http://127.0.0.1:1/", "dtype": "bf16"}, 214e6),
         ("t2i_compbench", {"dimension": "shape", "dtype": "fp16"}, 180.5e6),
         ("t2i_compbench", {"dimension": "numeracy", "detector": "mask2former"}, 68.7e6),
         ("t2i_compbench", {"dimension": "non_spatial", "clip": {"dtype": "bf16"}}, 75.5e6)]


@pytest.mark.parametrize("name, args, count", [*((name, {}, count) for name, count in COUNTS.items()), *PARTS])
def test_weights_are_counted_without_loading_them(name, args, count):
    with rewards.lazily():
        reward = rewards.find(name, {"device": "cpu"} | args)
    assert placement.weight_bytes(reward) == {"cpu": 4 * count}
    assert all(model.parts is None for model in placement.local_models(reward))


class Rows(Mean):
    def __call__(self, images, prompts):
        return self._scores(images, prompts)


@pytest.mark.parametrize("method, kind", [("mix_grpo", Mean), ("refl", differentiable(Rows))])
def test_a_run_is_the_same_with_weights_that_leave(method, kind):
    metrics, weights = [], []
    for away in (False, True):
        reward = kind(device="cpu:0")
        first, moved = reward.models[0].weight, []
        functions = composed(reward, away)
        if away:
            host = functions["own"].placement.groups[torch.device("cpu:0")]._weights
            host._copy = lambda tensor, moved=moved, come=host._copy: moved.append(tensor.shape) or come(tensor)
        trainer = tiny.trainer(rewards=functions, method=method, reward="own", train__epochs=2)
        metrics.append([{key: value for key, value in trainer.run_epoch().items() if "seconds" not in key}
                        for _ in range(2)])
        assert reward.models[0].weight is first  # left after every epoch
        weights.append({key: value.clone() for key, value in trainer.policy.weights.named.items()})
        assert bool(moved) == away
    for kept, left in zip(*metrics):
        assert kept == pytest.approx(left, nan_ok=True)
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key])
