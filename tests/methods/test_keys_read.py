"""Keys of the configuration that a kind of model does not read: refused when they differ from their default."""

import operator
import re
from typing import Any

import pytest

from flowgrpo.config import Config, keys, load
from flowgrpo.config import validate as validated
from flowgrpo.config.base import facts
from flowgrpo.config.schema import fields
from flowgrpo.contrib.features import On
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read, validate
from flowgrpo.policies import build
from tests.helpers import loop, tiny
from tests.helpers.refusals import refused

KINDS = (build.PIPELINE, build.CAUSAL_LM, build.VISION_LM, build.MASKED_LM, build.IMAGE_TOKENS)
# A value other than the default.
OTHER = {"load.config": "folder", "load.denoiser": "file.safetensors", "load.lora": ["file.safetensors"],
         "memory.weights": "int8", "memory.encoders": "cpu", "memory.vae": "tiled", "memory.states": "cpu",
         "load.scheduler": {"timestep_spacing": "trailing"},
         "load.controlnet": "folder", "load.ip_adapter": {"path": "folder", "weights": "a.safetensors"},
         "memory.denoiser": "cpu", "memory.offload": "block_level", "image.sizes": [[64, 64], [64, 128]],
         "memory.shard": True, "memory.attention": "native", "memory.context_parallel": 2,
         "image.height": 64, "image.width": 64,
         "image.frames": 9, "image.fps": 12.0,
         "image.call": {"max_sequence_length": 7}, "negative_prompt": "grey",
         "rollout.engine": "http://127.0.0.1:1", "rollout.timeout": 9.0, "rollout.retries": 9,
         "rollout.folder": "folder", "rollout.release": True, "guard.edge_width": 1.1, "guard.diversity": 0.9,
         "rollout.cache": "mag", "rollout.cache_threshold": 0.5, "rollout.cache_interval": 2,
         "preferences": "pairs.jsonl", "labels": "rewards", "adapter.encoder_targets": ["q"], "train.compile": True,
         "train.pack": True, "train.one_pass": True, "train.steps": 4, "train.guidance": 2.0, "train.grid": "stock",
         "train.shift": 1.0, "train.generation_batch": 4, "train.sibling": "replay",
         "eval.on": {"model": "starter_consistency"},
         "eval.steps": 4, "eval.guidance": 1.0, "eval.frames": 9,
         "text.generates": "image", "text.max_tokens": 7, "text.system": "Be kind.", "text.template": True,
         "text.truncated": "mask", "text.penalty": 2.0, "text.shared_prefix": False, "text.eval_temperature": 0.5,
         "text.engine": "vllm", "text.engine_precision": "bf16", "text.engine_memory": 0.5, "text.correction": "none",
         "text.correction_cap": 3.0, "text.correction_level": "sequence",
         "text.over_provision": 0.5, "text.chunk": 8}


def of(key: str, value) -> Config:
    section, _, name = key.rpartition(".")
    return validated({section: {name: value}} if section else {name: value})


def unread(kind: str) -> set[str]:
    return {key for key in keys() if keys_read.kinds(key) and kind not in keys_read.kinds(key)}


def test_keys_of_one_kind_of_model_name_kinds_that_there_are():
    assert set().union(*map(keys_read.kinds, keys())) == {*KINDS}
    assert set().union(*map(unread, KINDS)) == {*OTHER}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_a_kind_of_model_does_not_read_is_refused_and_others_are_not(kind):
    keys_read.require_kind(Config(), kind)
    keys_read.require_kind(validated(Config().model_dump()), kind)  # all keys written out, as a run saves them
    for key, value in OTHER.items():
        if key not in unread(kind):
            keys_read.require_kind(of(key, value), kind)
            continue
        config = of(key, value)
        with pytest.raises(UserError, match=rf"^{key} is set, which is about .*: leave it out for a ") as caught:
            keys_read.require_kind(config, kind)
        assert "\n" not in str(caught.value) and repr(operator.attrgetter(key)(config)) in str(caught.value)


# Keys with a value, what leaves them unread beside it, the reason that is given, and what has them read instead.
TEXT, PAIRS = {"method": "grpo", "model": "starter_text"}, {"preferences": "pairs.jsonl", "train.group": 2}
DPO = {"method": "diffusion_dpo", **PAIRS}
ON = {"eval.on": {"model": "starter_consistency"}}
IDLE = [
    ("cache", "folder", TEXT, "no reward keeps its scores",
     TEXT | {"reward": {"numeric_match": {"cache": True}}}),
    ("text.chunk", 8, TEXT, "text.over_provision is 0", TEXT | {"text.over_provision": 0.5}),
    ("text.truncated", "mask", TEXT | PAIRS | {"method": "dpo"}, "preferences is set", TEXT),
    ("text.truncated", "mask", {"method": "drakes", "model": "a/masked"}, "trains a relaxed unmasking",
     {"method": "trace_rl", "model": "a/masked"}),
    ("text.penalty", 2.0, TEXT, "text.truncated is 'keep'", TEXT | {"text.truncated": "penalise"}),
    ("text.engine_memory", 0.5, TEXT | {"text.engine_precision": "bf16"}, "text.engine is 'transformers'",
     TEXT | {"text.engine": "vllm"}),
    ("text.correction", "none", TEXT | {"precision": "fp32"}, "the model itself draws",
     TEXT | {"text.engine": "vllm"}),
    ("text.correction", "none", TEXT | {"precision": "fp32"}, "the model itself draws", TEXT | {"precision": "bf16"}),
    ("text.correction_cap", 3.0, TEXT | {"precision": "fp32", "text.engine_precision": "fp32"},
     "the model itself draws", TEXT | {"precision": "fp32", "text.engine_precision": "bf16"}),
    ("text.correction_level", "sequence", TEXT | {"text.engine": "vllm", "text.correction": "none"},
     "text.correction is 'none'", TEXT | {"text.engine": "vllm", "text.correction": "mis"}),
    *((f"rollout.{key}", value, {}, "the pipeline itself draws", {"rollout.engine": "http://127.0.0.1:1"})
      for key, value in (("timeout", 9.0), ("retries", 9), ("folder", "folder"), ("release", True))),
    ("rollout.cache", "mag", DPO, "no image is sampled", {"method": "diffusion_nft"}),
    ("rollout.cache_threshold", 0.5, {}, "rollout.cache is None", {"rollout.cache": "mag"}),
    ("rollout.cache_threshold", 0.5, {"rollout.cache": "taylorseer"}, "rollout.cache is 'taylorseer'",
     {"rollout.cache": "first_block"}),
    ("rollout.cache_interval", 2, {"rollout.cache": "mag"}, "rollout.cache is 'mag'", {"rollout.cache": "taylorseer"}),
    ("train.steps", 8, DPO, "no image is sampled", {"method": "diffusion_dpo"}),
    ("train.grid", "stock", DPO, "parts.times Stratified reads no grid",
     DPO | {"method": "diffusion_nft", "parts": {"times": {"type": "GridTimes"}}}),
    ("train.shift", 2.0, {"train.grid": "stock"}, "train.grid is 'stock'", {}),
    ("train.shift", 2.0, {"train.grid": "stock", "method": "mix_grpo_flash"}, "train.grid is 'stock'",
     {"method": "mix_grpo_flash"}),
    ("train.staleness_cap", 2.0, {}, "train.staleness and text.over_provision are 0", {"train.staleness": 1}),
    ("train.staleness_cap", 2.0, TEXT, "text.over_provision are 0", TEXT | {"text.over_provision": 0.5}),
    ("train.rollout_ranks", 1, {}, "train.staleness is 0", {"train.staleness": 1}),
    ("train.extrapolate_every", 4, {}, "train.extrapolate is 0", {"train.extrapolate": 2}),
    *((f"guard.{key}", value, {}, "guard.window is 0", {"guard.window": 2, "eval.every": 1})
      for key, value in (("false_alarms", 0.1), ("reward", "red"), ("lr", 0.1), ("best", False))),
    *((f"guard.{key}", value, {"guard.window": 2}, "eval.every is 0", {"guard.window": 2, "eval.every": 1})
      for key, value in (("reward", "red"), ("best", False), ("edge_width", 1.1), ("diversity", 0.9))),
    ("eval.on", On(model="starter_consistency"), {"eval.prompts": 0}, "eval.prompts is 0", {}),
    ("train.sibling", "replay", {}, "eval.on is not set", ON),
    ("train.sibling_share", 0.3, ON | {"train.sibling": "orthogonal"}, "train.sibling is 'orthogonal'",
     ON | {"train.sibling": "replay"}),
    ("train.sibling_rank", 8, ON | {"train.sibling": "replay"}, "train.sibling is 'replay'",
     ON | {"train.sibling": "orthogonal"}),
    ("train.ema", 0.9, {}, "eval.weights is 'current'", {"eval.weights": "ema"}),
    ("adapter.alpha", 8.0, {"adapter.rank": 0}, "adapter.rank is 0", {}),
    ("adapter.targets", ["to_q"], {"adapter.rank": 0}, "adapter.rank is 0", TEXT),
    ("adapter.targets", ["to_q"], {"parts": {"adapted": {"denoisers": False, "encoders": True}}},
     "parts.adapted.denoisers is false", {"parts": {"adapted": {"encoders": True}}}),
    ("adapter.encoder_targets", ["q"], {}, "trains no text encoder", {"parts": {"adapted": {"encoders": True}}})]


def require(key: str, value: Any, beside: dict[str, Any]) -> None:
    config = load(None, {key: value, **beside})
    kind = build.kind(config)
    keys_read.check(loop.setup(config, kind))


@pytest.mark.parametrize("key, value, without, why, beside", IDLE)
def test_a_key_that_is_read_on_a_condition_is_refused_without_it(key, value, without, why, beside):
    with pytest.raises(UserError, match=f"^{key} is {re.escape(repr(value))}, but .*{re.escape(why)}.*, so that the "
                                        f"run does not read it: .*, or leave {key} out .expected the default") as error:
        require(key, value, without)
    assert "\n" not in str(error.value)
    require(key, value, beside)
    require("seed", 1, without)  # a default is no mistake


def test_every_condition_is_tried():
    assert {key for key, field in fields().items() if facts(field).when} == {key for key, *_ in IDLE}


def test_a_model_with_a_grid_of_its_own_reads_no_shift():
    with pytest.raises(UserError, match="^train.shift is 2.0, but this model is variance-preserving"):
        build.make_policy(tiny.config(image__call={}, train__shift=2.0), "cpu", tiny.sd15())
    build.make_policy(tiny.config(train__shift=2.0), "cpu", tiny.sd3())


def test_a_text_run_reads_where_reward_models_wait():
    assert require("memory.rewards", "cpu", TEXT) is None


@pytest.mark.parametrize("key, value", [("limit", {"at_most": 0.1}), ("transform", ["rank"])])
def test_training_keys_of_a_reward_that_is_only_measured_are_refused(key, value):
    beside = DPO | {"reward": {"sharpness": {key: value}, "scene": 1.0}}
    refused(f"^reward.sharpness.{key} is set, but labels is 'file'", measured, beside)
    measured(DPO | {"reward": {"sharpness": 0.1}})
    measured(beside | {"labels": "rewards"})


def measured(beside: dict[str, Any]) -> None:
    config = load(None, beside)
    validate.check_recorded_pairs(loop.setup(config))
