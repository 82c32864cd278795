"""Common arguments of rewards whose model runs in this process."""

import functools
import inspect
from typing import Any

import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.rewards import clip, local_model
from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.find import BUILT_IN, find, locate
from flowgrpo.rewards.local_model import LocalModel
from flowgrpo.rewards.qwen2_vl import MARKS
from tests.rewards.test_safety import folder  # noqa: F401  # a fixture

WITH_MODELS = {"safety", "clip_score", "clip_cosine", "subject_score", "aesthetic", "pickscore", "hpsv2.0", "hpsv2.1",
               "hpsv3", "imagereward",
               "vqascore", "reference_likelihood", "reward_model", "subject_consistency", "background_consistency",
               "videoalign", "reasoning_depth", "text_scorer", "semantic_similarity"}
PASSING_ON = {"question_answers", "geneval", "geneval_fast", "t2i_compbench"}  # to models that they hold


class Mean(LocalModel):
    """Mean of an image by a linear model; `calls` holds the sizes of its batches."""

    reward, parameters = "mean_of_tests", 12

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", [])
        super().__post_init__()

    def _loaded(self) -> tuple[Any, ...]:
        linear = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(linear.weight, 1 / 3)
        torch.nn.init.zeros_(linear.bias)
        return (linear,)

    def __call__(self, images, prompts):
        return self.batched(self._scores, images, prompts)

    def _scores(self, images, prompts):
        self.calls.append((len(images), *images.shape[-2:]))
        return self.models[0](images.to(self.device).mean((2, 3)).to(self.float_type))[:, 0]


def test_every_reward_with_a_model_takes_the_same_arguments():
    assert {name for name in BUILT_IN if inspect.isclass(locate(name)) and issubclass(locate(name), LocalModel)} \
        == WITH_MODELS
    for name in WITH_MODELS | PASSING_ON:
        assert {"dtype", "device", "batch_size"} <= set(inspect.signature(locate(name)).parameters), name


@pytest.mark.parametrize("name", sorted((WITH_MODELS | PASSING_ON) - {"text_scorer"}))  # which reads its heads first
@pytest.mark.parametrize("wrong, told", [
    ({"dtype": "float32"}, "dtype is 'float32', expected fp32, bf16, fp16: take one"),
    ({"device": "cuda:99"}, "device is 'cuda:99', expected .*cpu: take one"),
    ({"device": "gpu"}, "device is 'gpu', expected .*cpu: take one"),
    ({"batch_size": 0}, "batch_size is 0, expected a number from 1"),
    ({"batch_size": True}, "batch_size is True, expected a number from 1"),
])
def test_wrong_arguments_are_refused_in_one_line_before_weights_are_read(name, wrong, told, tmp_path):
    further = dict.fromkeys(("reward_model", "semantic_similarity"), {"model": "/no/folder"})
    for other, marks in (("hpsv3", "<|Reward|>"), ("videoalign", "".join(MARKS))):
        (tmp_path / f"{other}.txt").write_text("{text_prompt}" + marks)
        further[other] = {"instruction": str(tmp_path / f"{other}.txt")}
    with pytest.raises(UserError, match=told) as error:
        find(name, wrong | further.get(name, {}))
    assert "\n" not in str(error.value) and f"reward {name!r}" in str(error.value)


def test_images_go_through_the_model_batch_by_batch():
    reward = Mean(batch_size=2)
    images = torch.rand(5, 3, 4, 4)
    torch.testing.assert_close(reward(images, [""] * 5), images.mean((1, 2, 3)))
    assert [count for count, *_ in reward.calls] == [2, 2, 1]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_in_the_dtype_and_scores_are_near_those_of_fp32(folder, dtype):  # noqa: F811
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    half, full = (find("safety", {"model": folder, "device": "cpu", "dtype": name}) for name in (dtype, "fp32"))
    assert next(half.models[0].parameters()).dtype == local_model.DTYPES[dtype]
    scores, expected = half(images, [""] * 3), full(images, [""] * 3)
    assert scores.dtype == torch.float32 and 0 < (scores - expected).abs().max() < 0.05


def test_a_head_stays_in_fp32():
    class Headed(Mean):
        def _loaded(self):
            return torch.nn.Linear(3, 1), clip.perceptron(4)

    model, head = Headed(dtype="bf16").models
    assert model.weight.dtype == torch.bfloat16 and head[0].weight.dtype == torch.float32


def test_a_network_in_the_dtype_keeps_its_buffers_in_fp32():
    class Turned(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("frequencies", torch.tensor([0.001]))

    [loaded], [cast] = (Mean(dtype="bf16", parts=(part,)).models for part in (Turned().bfloat16(), Turned()))
    loaded.frequencies = torch.tensor([0.001])  # as a model of transformers in bf16 has them
    assert Mean(dtype="bf16", parts=(loaded,)).models[0].frequencies.dtype == torch.float32
    assert cast.weight.dtype == cast.frequencies.dtype == torch.bfloat16


def test_weights_are_loaded_at_the_first_call_where_that_is_asked():
    with lazily():
        reward = Mean()
    assert reward.parts is None
    assert reward(torch.ones(1, 3, 2, 2), [""]).tolist() == pytest.approx([1.0])
    assert reward.parts is not None and Mean().parts is not None
    with lazily(), pytest.raises(UserError, match="dtype is 'int8'"):
        Mean(dtype="int8")


def test_devices_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 2))
    assert local_model.devices()[:2] == ["cuda:0", "cuda:1"] and local_model.devices()[-1] == "cpu"
