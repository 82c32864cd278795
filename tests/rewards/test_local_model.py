"""Rewards whose model runs in this process: common arguments, mistakes, precision, weights, placement and threads."""

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from flowgrpo import host_weights, rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.device import second_stream
from flowgrpo.errors import UserError
from flowgrpo.log import silence_errors
from flowgrpo.rewards import clip, local_model, placement
from flowgrpo.rewards.about import differentiable, lazily
from flowgrpo.rewards.clip import Aesthetic, ClipScore, HpsV2, PickScore
from flowgrpo.rewards.failures import within
from flowgrpo.rewards.find import BUILT_IN, find, locate
from flowgrpo.rewards.local_model import LocalModel
from flowgrpo.rewards.qwen2_vl import MARKS
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_runs import assert_same_weights
from tests.helpers.tiny_scorers import PROMPTS, pictures
from tests.rewards.test_guards import folder  # noqa: F401  # a fixture

WITH_MODELS = {name for name in BUILT_IN if inspect.isclass(locate(name)) and issubclass(locate(name), LocalModel)}
PASSING_ON = {"question_answers", "geneval", "geneval_fast", "t2i_compbench"}  # to models that they hold


class Mean(LocalModel):
    """Mean of an image by a linear model; `calls` holds the sizes of its batches."""

    reward, parameters = "mean_of_tests", 12

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", [])
        super().__post_init__()

    def _load(self) -> tuple[Any, ...]:
        linear = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(linear.weight, 1 / 3)
        torch.nn.init.zeros_(linear.bias)
        return (linear,)

    def __call__(self, images, prompts):
        return self.score_batches(self._scores, images, prompts)

    def _scores(self, images, prompts):
        self.calls.append((len(images), *images.shape[-2:]))
        return self.models[0](images.to(self.device).mean((2, 3)).to(self.float_type))[:, 0]


def test_common_arguments_and_batches():
    assert {"clip_score", "pickscore", "hpsv2.1", "imagereward", "reward_model", "text_scorer"} < WITH_MODELS
    for name in WITH_MODELS | PASSING_ON:
        assert {"dtype", "device", "batch_size"} <= set(inspect.signature(locate(name)).parameters), name
    reward = Mean(batch_size=2)
    images = torch.rand(5, 3, 4, 4)
    torch.testing.assert_close(reward(images, [""] * 5), images.mean((1, 2, 3)))
    assert [count for count, *_ in reward.calls] == [2, 2, 1]


@pytest.mark.parametrize("name", sorted((WITH_MODELS | PASSING_ON) - {"text_scorer"}))  # which reads its heads first
@pytest.mark.parametrize("wrong, told", [
    ({"dtype": "float32"}, "dtype is 'float32', expected fp32, bf16, fp16: take one"),
    ({"device": "cuda:99"}, "device is 'cuda:99', expected .*cpu: take one"),
    ({"device": "gpu"}, "device is 'gpu', expected .*cpu: take one"),
    ({"batch_size": 0}, "batch_size is 0, expected a number from 1"),
    ({"batch_size": True}, "batch_size is True, expected a number from 1")])
def test_wrong_arguments_are_refused_in_one_line_before_weights_are_read(name, wrong, told, tmp_path):
    further = dict.fromkeys(("reward_model", "semantic_similarity"), {"model": "/no/folder"})
    for other, marks in (("hpsv3", "<|Reward|>"), ("videoalign", "".join(MARKS))):
        (tmp_path / f"{other}.txt").write_text("{text_prompt}" + marks)
        further[other] = {"instruction": str(tmp_path / f"{other}.txt")}
    refused(f"(?=.*reward {name!r}).*{told}", find, name, wrong | further.get(name, {}))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_in_the_dtype_and_scores_are_near_those_of_fp32(folder, dtype):  # noqa: F811
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    half, full = (find("safety", {"model": folder, "device": "cpu", "dtype": name}) for name in (dtype, "fp32"))
    assert next(half.models[0].parameters()).dtype == local_model.DTYPES[dtype]
    scores, expected = half(images, [""] * 3), full(images, [""] * 3)
    assert scores.dtype == torch.float32 and 0 < (scores - expected).abs().max() < 0.05


def test_heads_and_buffers_stay_in_fp32():
    class Headed(Mean):
        def _load(self):
            return torch.nn.Linear(3, 1), clip.perceptron(4)

    model, head = Headed(dtype="bf16").models
    assert model.weight.dtype == torch.bfloat16 and head[0].weight.dtype == torch.float32
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_model.devices()[:2] == ["cuda:0", "cuda:1"] and local_model.devices()[-1] == "cpu"


def test_pickles_and_long_reasons(pick, tmp_path):
    torch.save({"weight": torch.nn.Linear(8, 1)}, tmp_path / "module.pth")
    refused("module.pth cannot be loaded .*args: {head: FILE}", Aesthetic, pick[2], head=str(tmp_path / "module.pth"))
    with pytest.raises(UserError, match=r"^weights cannot be loaded \(check your( \w+){29} \.\.\.\): fetch them$"), \
            local_model.loading("weights", "fetch them"):
        raise OSError("check your\n" + "link " * 40)


@pytest.mark.parametrize("name, arguments", [
    ("clip_score", {}), ("pickscore", {"model": "owner/name"}), ("safety", {"model": "owner/name"}),
    ("imagereward", {"checkpoint": "owner/name/file.pt"})])
def test_a_hub_that_does_not_answer_is_asked_once(name, arguments, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "not in the hub's cache, and no network (http://127.0.0.1:9 does not ans" in message(find, name, arguments)
    assert constants.HF_HUB_OFFLINE
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]  # of open_clip


def test_errors_of_another_program_are_logged_while_a_model_is_loaded(caplog):
    with silence_errors("open_clip"):
        logging.error("of another program")
    assert caplog.messages == ["of another program"]


def test_bf16_is_near_and_they_are_rewards_like_others(tiny, pick, encoder):
    images, head = pictures(5, 40, 40), clip.perceptron(8)
    for kind, parts in ((ClipScore, tiny[:2]), (HpsV2, tiny[:2]), (PickScore, pick[:2]), (Aesthetic, (encoder, head))):
        half, full = (kind(dtype=dtype, device="cpu", parts=copy.deepcopy(parts))(images, PROMPTS)
                      for dtype in ("bf16", "fp32"))
        assert half.dtype == torch.float32 and 0 < (half - full).abs().max() < 0.02 * full.abs().max() + 0.02, kind
    both = {"clip_score": ClipScore(device="cpu", parts=tiny[:2]), "pickscore": PickScore(device="cpu", parts=pick[:2])}
    columns = rewards.score(both, images, PROMPTS, [{}] * 5)
    assert columns.shape == (5, 2) and not columns.isnan().any()
    assert torch.equal(columns[:, 1], both["pickscore"](images, PROMPTS))


IMAGES = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def scored(functions) -> list[float]:
    return rewards.score(functions, IMAGES, [""] * 5, [{}] * 5)[:, 0].tolist()


def composed(function, away=True) -> dict[str, rewards.Composed]:
    return rewards.compose({"own": WatchRule()}, None, {"own": function}, away)


def test_weights_leave_or_stay_after_scoring():
    reward = Mean(device="cpu:0")
    weight, functions = reward.models[0].weight, composed(reward)
    expected = scored({"own": Mean()})
    for _ in range(2):
        assert reward.models[0].weight is weight  # the CPU's copy
        assert scored(functions) == expected
        assert reward.models[0].weight is not weight and torch.equal(reward.models[0].weight, weight)
        rewards.leave(functions.values())
    for reward, away in ((Mean(device="cpu:0"), False), (Mean(device="cpu"), True)):
        weight, functions = reward.models[0].weight, composed(reward, away)
        scored(functions)
        assert reward.models[0].weight is weight
        rewards.leave(functions.values())
        assert not functions["own"].placement.groups
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
    assert dict((type(module), str(device)) for module, device in placement.modules(gated)) == {torch.nn.Linear: "cpu"}
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
def test_a_run_is_the_same_with_weights_that_leave(method, kind, monkeypatch):
    metrics, weights, copied, copy_to = [], [], [], host_weights._copy_to
    monkeypatch.setattr(host_weights, "_copy_to", lambda *args: copied.append(args) or copy_to(*args))
    for away in (False, True):
        reward = kind(device="cpu:0")
        first, before = reward.models[0].weight, len(copied)
        trainer = tiny.trainer(rewards=composed(reward, away), method=method, reward="own", train__epochs=2)
        metrics.append([{key: value for key, value in trainer.run_epoch().items() if "seconds" not in key}
                        for _ in range(2)])
        assert reward.models[0].weight is first  # left after every epoch
        weights.append(trainer.policy.weights.snapshot())
        assert (len(copied) > before) == away
    for kept, left in zip(*metrics):
        assert kept == pytest.approx(left, nan_ok=True)
    assert_same_weights(*weights)


@pytest.fixture
def chosen(monkeypatch) -> Iterator[dict[int, SimpleNamespace]]:
    """The stream of every thread, by its identity, as torch.cuda would keep it; the main thread's is on the fourth GPU.
    """
    def stream(gpu: int | torch.device, name: str = "second") -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda", gpu) if isinstance(gpu, int) else gpu, name=name)

    def current() -> SimpleNamespace:
        return streams.get(threading.get_ident()) or stream(0, "default")

    streams = {threading.get_ident(): stream(3, "default")}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current().device.index)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.update({threading.get_ident(): stream}))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(record=int, synchronize=int))
    yield streams
    second_stream.cache_clear()


def test_a_reward_is_placed_on_its_processs_gpu(chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with rewards.lazily():
        assert Mean().device == "cuda:3" and Mean(device="cpu").device == "cpu"


@pytest.mark.fast
def test_calls_and_threads_are_on_their_gpu(chosen):
    """A call with a limit is on the stream of its thread, the rewards of a rollout on one of their own."""
    assert within(60, "it", torch.cuda.current_device) == within(None, "it", torch.cuda.current_device) == 3
    assert within(60, "it", torch.cuda.current_stream) is torch.cuda.current_stream()
    seen = []
    def score(images, prompts):
        seen.append((threading.get_ident(), torch.cuda.current_device(), torch.cuda.current_stream().name))
        return images[:, 0].mean((1, 2))
    trainer = tiny.trainer(rewards={"red": score})
    sampling.sample(trainer, trainer.prompts[:2])
    assert {(gpu, name) for _, gpu, name in seen} == {(3, "second")}
    assert threading.get_ident() not in {thread for thread, *_ in seen}


def test_without_cuda_no_thread_asks_for_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: pytest.fail("a GPU was asked for"))
    assert within(60, "it", lambda: 1) == 1
