"""Typed configuration: the keys of a recipe, validated before anything is loaded.

A recipe is a YAML file that states differences from these defaults. Dotted overrides (`--train.lr=1e-4`) pass the same
validation. An unknown key is an error that gives its path and the nearest valid key. After parsing only `precision:
auto` is replaced, by the precision that suits the device. The resolved configuration is saved with every run and can be
run again unchanged.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from flowgrpo.config.base import DENOISERS, LEFT_TO_RIGHT, Section, When, key
from flowgrpo.config.reward_rules import RewardRule, WatchRule, Weighted
from flowgrpo.config.sections import Adapter, Eval, Guard, Image, Load, Memory, Rollout, Text, Train
from flowgrpo.config.yaml_text import Dumper
from flowgrpo.escaped import plain
from flowgrpo.starter import CALLS, RATES

# Texts that keys do not take: what is expected, the keys, and whether a text is refused.
REFUSED: tuple[tuple[str, tuple[str, ...], Callable[[str], bool]], ...] = (
    ("the name of one folder, without slashes", ("name",),
     lambda text: text in (".", "..") or Path(text).name != text),
    ("a prompt set, a file of this machine, or hub:OWNER/NAME: download a file first", ("prompts",),
     lambda text: "://" in text),
    ("the path of a folder: $HOME, or ./~ for a folder of that name", ("output",), lambda text: text == "~"),
    ("a text that is not blank, without control characters and changes of direction", ("name", "output"),
     lambda text: plain(text) != text or "\n" in text or "\t" in text or not text.strip()))


class Config(Section):
    """All settings of a run; see the sections for their fields."""

    name: str = Field("run", min_length=1, description="the run's folder below `output`; a recipe's file name, unless "
                                                       "it sets another")
    model: str = Field("starter", description="`starter`, `starter_consistency`, `starter_video`, `starter_text`, "
                                              "`starter_unified`, a local directory, a pipeline's .safetensors file, "
                                              "or a hub id")
    method: str = Field("mix_grpo", description="presets joined by +, applied from left to right")
    parts: dict[str, Any] = Field({}, description="fields of the method's parts, such as {plan: {size: 2}}")
    reward: str | dict[str, Weighted] = Field("scene_graded", min_length=1,
                                              description="a reward, or rewards with their weights or rules")
    prompts: str = Field("starter", min_length=1, description="a set that `flowgrpo list prompts` lists, a .txt, "
                                                              ".jsonl, .csv or .parquet file, or hub:OWNER/NAME")
    held_out: float | str = Field(0.1, description="share of the prompts that is never trained on, or a file of "
                                                 "them; sets with held-out prompts of their own take no share")
    train_on_test_set: bool = Field(False, description="train on `prompts` even if they are a published test set")
    preferences: str | None = key(None, of=(*DENOISERS, *LEFT_TO_RIGHT), min_length=1, description="a .jsonl of pairs "
                                  "of images or completions, trained on without sampling; see docs/taste.md")
    labels: Literal["file", "rewards"] = key(
        "file", of=(*DENOISERS, *LEFT_TO_RIGHT), description="which side of a pair is better: as the file or the "
                                                             "rewards say")
    negative_prompt: str = key("", of=DENOISERS, description="of prompts that bring none of their own")
    cache: str | None = key(
        None, When(lambda c, m: not m.for_tokens or any(rule.cache for rule in (c.trained | c.extra_rewards).values()),
                   "prompts of a language model are not kept, and no reward keeps its scores",
                   "set cache: true of a reward"),
        description="folder for encoded prompts and kept scores, shared by runs; None: memory only")
    output: str = Field("runs", min_length=1, description="the folder of all runs")
    seed: int = Field(0, ge=0, lt=2**32, description="of noise, order of prompts, adapter's first weights")
    device: Literal["auto", "cuda", "mps", "cpu"] = Field("auto", description="`auto`: the first that works")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="of frozen weights and of the arithmetic; `auto`: bf16 where the device computes in it "
                            "natively, else fp32")
    tracker: Literal["tensorboard", "wandb", "trackio", "none"] = Field(
        "tensorboard", description="beside `metrics.jsonl`: metrics, configuration and samples")
    trust_remote_code: bool = Field(False, description="run code that comes with a model from a hub")
    load: Load = Load()
    image: Image = Image()
    text: Text = Text()
    rollout: Rollout = Rollout()
    adapter: Adapter = Adapter()
    memory: Memory = Memory()
    train: Train = Train()
    guard: Guard = Guard()
    eval: Eval = Eval()

    @field_validator("name", "prompts", "output")
    @classmethod
    def _fits(cls, text: str, info: ValidationInfo) -> str:
        for expected, of, wrong in REFUSED:
            if info.field_name in of and wrong(text):
                raise ValueError(expected)
        return text

    @field_validator("reward")
    @classmethod
    def _some_weight(cls, reward: str | dict[str, float | RewardRule]) -> str | dict[str, float | RewardRule]:
        rules = list(reward.values()) if isinstance(reward, dict) else []
        if rules and not any(rule.weight or rule.limit if isinstance(rule, RewardRule) else rule for rule in rules):
            raise ValueError("a weight other than 0 for one of them; eval.rewards names rewards that are only measured")
        return reward

    @property
    def rewards(self) -> dict[str, float]:
        """Reward names with their weights."""
        return {name: rule.weight for name, rule in self.trained.items()}

    @property
    def trained(self) -> dict[str, RewardRule]:
        """Rules of the rewards that are trained on, by name."""
        return {"preferred": RewardRule()} if self._has_labels else self._rules

    @property
    def _has_labels(self) -> bool:
        return self.preferences is not None and self.labels == "file"

    @property
    def _rules(self) -> dict[str, RewardRule]:
        given = {self.reward: 1.0} if isinstance(self.reward, str) else self.reward
        return {name: rule if isinstance(rule, RewardRule) else RewardRule(weight=rule) for name, rule in given.items()}

    @property
    def extra_rewards(self) -> dict[str, WatchRule]:
        """Rules of the additional measured rewards; given by name alone, a trained reward keeps its rule."""
        given, rules = self.eval.rewards, self._rules
        further = given if isinstance(given, dict) else {name: WatchRule() for name in given if name not in rules}
        return rules | further if self._has_labels else further

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of every pipeline call in addition to prompts and latents: `image`, over the starter's own."""
        image = self.image
        height, width = image.sizes[0] if image.sizes else (None, None)
        sizes = {"height": image.height or height, "width": image.width or width, "num_frames": image.frames}
        defaults = CALLS.get(self.model, {})
        return defaults | {key: size for key, size in sizes.items() if size is not None} | image.call

    @property
    def fps(self) -> float | None:
        """Frames per second of clips: `image.fps`, or a starter's; None: the pipeline's own."""
        return self.image.fps or RATES.get(self.model)

    @property
    def eval_call(self) -> dict[str, Any]:
        """Arguments of every pipeline call of an evaluation."""
        return self.call | ({} if self.eval.frames is None else {"num_frames": self.eval.frames})

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    def having(self, values: Mapping[str, Any]) -> "Config":
        """Configuration with other values of dotted keys such as `memory.vae`, which are not validated."""
        config = self
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            config = config.model_copy(update={
                section: getattr(config, section).model_copy(update={key: value})} if section else {key: value})
        return config

    def yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


@functools.cache
def fields(section: type[Section] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """All dotted keys of the configuration with their fields, in order. `features.add` clears what is kept."""
    dotted: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None) is not None
        kind = cast("type[Section]", field.annotation)
        dotted |= fields(kind, f"{prefix}{name}.") if inner else {prefix + name: field}
    return dotted


def keys() -> list[str]:
    return list(fields())


def owner(path: str) -> str | None:
    """Key that a dotted path sets: itself, or the key whose value contains it (`parts` for parts.plan.size)."""
    return next((key for key in keys() if path == key or path.startswith(key + ".")), None)


def sections() -> list[str]:
    return sorted({key.rpartition(".")[0] for key in keys()} - {""})
