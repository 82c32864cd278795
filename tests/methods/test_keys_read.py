"""Keys of the configuration that a kind of model does not read: refused when they differ from their default."""

from __future__ import annotations

import operator

import pytest

from flowgrpo.config import Config, keys, load, validate
from flowgrpo.errors import UserError
from flowgrpo.methods import reads
from flowgrpo.policies import build
from flowgrpo.run import check
from tests.helpers import tiny, tiny_text

KINDS = (build.PIPELINE, build.CAUSAL_LM, build.VISION_LM, build.MASKED_LM)
# A value other than the default.
OTHER = {"load.config": "folder", "load.denoiser": "file.safetensors", "load.lora": ["file.safetensors"],
         "memory.weights": "int8", "memory.encoders": "cpu", "memory.vae": "tiled", "memory.states": "cpu",
         "load.controlnet": "folder", "load.ip_adapter": {"path": "folder", "weights": "a.safetensors"},
         "memory.rewards": "cpu",
         "memory.denoiser": "cpu", "memory.offload": "block_level", "picture.sizes": [[64, 64], [64, 128]],
         "memory.shard": True, "memory.attention": "native", "memory.context_parallel": 2,
         "picture.height": 64, "picture.width": 64,
         "picture.frames": 9,
         "picture.call": {"max_sequence_length": 7}, "cache": "folder", "negative_prompt": "grey",
         "preferences": "pairs.jsonl", "labels": "rewards", "adapter.encoder_targets": ["q"], "train.compile": True,
         "train.pack": True, "train.steps": 4, "train.guidance": 2.0, "train.grid": "stock", "train.shift": 1.0,
         "eval.steps": 4, "eval.guidance": 1.0, "text.max_tokens": 7, "text.system": "Be kind.", "text.template": True,
         "text.truncated": "mask", "text.penalty": 2.0, "text.shared_prefix": False, "text.eval_temperature": 0.5,
         "text.engine": "vllm", "text.engine_precision": "bf16", "text.engine_memory": 0.5, "text.correction": "none",
         "text.correction_cap": 3.0, "text.correction_level": "sequence",
         "text.over_provision": 0.5, "text.chunk": 8}


def of(key: str, value) -> Config:
    section, _, name = key.rpartition(".")
    return validate({section: {name: value}} if section else {name: value})


def unread(kind: str) -> set[str]:
    return {key for key in keys() if any(f"{key}.".startswith(f"{each}.") for each in reads.UNREAD[kind])}


def test_the_tables_name_keys_and_sections_that_there_are():
    for kind in KINDS:
        for each in reads.UNREAD[kind]:
            assert any(f"{key}.".startswith(f"{each}.") for key in keys()), each
    assert set().union(*map(unread, KINDS)) == {*OTHER}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_a_kind_of_model_does_not_read_is_refused_and_others_are_not(kind):
    reads.require_keys(Config(), kind)
    reads.require_keys(validate(Config().model_dump()), kind)  # all keys written out, as a run saves them
    for key, value in OTHER.items():
        if key not in unread(kind):
            if key not in reads.BESIDE:
                reads.require_keys(of(key, value), kind)
            continue
        config = of(key, value)
        with pytest.raises(UserError, match=rf"^{key} is set, which is about .*: leave it out for a ") as caught:
            reads.require_keys(config, kind)
        assert "\n" not in str(caught.value) and repr(operator.attrgetter(key)(config)) in str(caught.value)


def test_they_are_refused_before_a_run():
    with pytest.raises(UserError, match="^text.engine is set, which is about language models: leave it out for a pipe"):
        check(tiny.config(text__engine="vllm"), pipe=tiny.sd3())
    with pytest.raises(UserError, match="^train.extrapolate_every is 4, but train.extrapolate is 0"):
        check(tiny.config(train__extrapolate_every=4), pipe=tiny.sd3())
    for key, value in (("train__steps", 4), ("eval__guidance", 2.0), ("picture__height", 64)):
        name = key.replace("__", ".")
        with pytest.raises(UserError, match=f"^{name} is set, which is about denoisers: leave it out for a language"):
            check(tiny_text.config(**{key: value}), pipe=tiny_text.model())


@pytest.mark.parametrize("key, value, main", [
    ("text.chunk", 8, {"text.over_provision": 0.5}), ("train.staleness_cap", 2.0, {"train.staleness": 1}),
    ("train.staleness_cap", 2.0, {"text.over_provision": 0.5}),
    ("train.extrapolate_every", 4, {"train.extrapolate": 2})])
def test_a_key_that_is_read_beside_another_is_refused_alone(key, value, main):
    mains = "train.staleness and text.over_provision are" if key == "train.staleness_cap" else f"{[*main][0]} is"
    with pytest.raises(UserError, match=f"^{key} is {value}, but {mains} 0, so that the run does not read it: set .*, "
                                        f"or leave {key} out") as caught:
        reads.require_keys(load(None, {key: value}), build.CAUSAL_LM)
    assert "\n" not in str(caught.value)
    reads.require_keys(load(None, {key: value, **main}), build.CAUSAL_LM)
    reads.require_keys(load(None, main), build.CAUSAL_LM)
