"""Bytes of the reward models that stay on the GPU, by the names of their rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowgrpo.config.schema import Config

CLIP_VIT_L, CLIP_VIT_H = 4 * 0.428e9, 4 * 0.986e9  # bytes in fp32: 428 and 986 million weights
# Other rewards hold nothing there: rules, packages on the CPU, and judges behind an address.
BYTES = {
    "clip_score": CLIP_VIT_L, "subject_score": CLIP_VIT_L, "aesthetic": CLIP_VIT_L,
    "pick_score": CLIP_VIT_H, "hps_v2": CLIP_VIT_H,
    "image_reward": 4 * 0.447e9,  # BLIP with a ViT-L
    "hps_v3": 2 * 8.29e9,  # Qwen2-VL-7B in bf16
    "vqa_score": 2 * 4.02e9,  # InstructBLIP with Flan-T5-XL in bf16
    "safety": 4 * 0.086e9,  # a ViT-B
}


def reward_bytes(config: Config) -> float:
    """Return the bytes of a recipe's rewards, trained and measured; a model that several of them use counts once each.
    """
    return sum(BYTES.get(name, 0) for name in _names(config))


def _names(config: Config) -> Iterable[str]:
    rules = config.trained | config.watched
    return {inner for name, rule in rules.items() for inner in (rule.use or name, *_inner(rule.args))}


def _inner(value: Any) -> Iterable[str]:
    """Yield the rewards that a reward's arguments name."""
    if isinstance(value, dict):
        named = [value.get("reward"), value.get("use")]
        listed = value.get("rewards")
        yield from (name for name in (*named, *(listed if isinstance(listed, list) else ())) if isinstance(name, str))
        for inner in value.values():
            yield from _inner(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _inner(inner)
