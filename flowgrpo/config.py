"""The one typed configuration: what a recipe may say, checked before anything is loaded.

A recipe is a YAML file that states differences from these defaults. Dotted overrides (`--train.lr=1e-4`) go through the
same check. An unknown key is an error that gives its path and the nearest right key. After parsing only `precision:
auto` is replaced, by what the machine suits: the resolved configuration is saved with every run and runs again as it
is.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from flowgrpo.errors import UserError
from flowgrpo.reward_rule import Retry, RewardRule, WatchRule, Weighted
from flowgrpo.section import Section
from flowgrpo.settings import Adapter, EarlyStop, Eval, Memory, Picture, Text, Train
from flowgrpo.starter import CALLS


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number: YAML 1.1 asks for 1.0e-4 and would leave the text "1e-4"."""


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                                list("-+.0123456789"))


class Config(Section):
    """Everything a run needs; see the sections for their fields."""

    name: str = Field("run", min_length=1, description="the run's folder below `output`")
    model: str = Field("starter", description="`starter`, `starter_consistency`, `starter_video`, `starter_text`, a "
                                              "local directory, or a hub id")
    method: str = Field("mix_grpo", description="presets joined by +, applied from left to right")
    parts: dict[str, Any] = Field({}, description="fields of the method's parts, such as {plan: {size: 2}}")
    reward: str | dict[str, Weighted] = Field("scene_graded", min_length=1,
                                              description="a reward, or rewards with their weights or rules")
    prompts: str = Field("starter", description="`starter`, `starter_video`, `starter_text`, or a .txt, .jsonl, .csv "
                                              "or .parquet file")
    held_out: float | str = Field(0.1, description="share of the prompts that is never trained on, or a file of "
                                                 "them; packaged prompts bring their own, and take no share")
    preferences: str | None = Field(None, min_length=1, description="a .jsonl of pairs of pictures that are trained "
                                                                    "on: none is drawn; see docs/preferences.md")
    labels: Literal["file", "rewards"] = Field("file", description="who says which picture of such a pair is better; "
                                               "with `file` the rewards are only measured")
    negative_prompt: str = Field("", description="of prompts that bring none of their own")
    cache: str | None = Field(None, description="folder for encoded prompts and kept scores, shared by runs; None: "
                                                "memory only")
    output: str = Field("runs", description="the folder of all runs")
    seed: int = Field(0, ge=0, lt=2**32, description="of noise, order of prompts, adapter's first weights")
    device: Literal["auto", "cuda", "mps", "cpu"] = Field("auto", description="`auto`: the first that works")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="of frozen weights and of the arithmetic; with fp16 the loss is scaled; `auto`: bf16 where "
                            "the device computes in it natively, else fp32, which the run prints and keeps")
    tracker: Literal["tensorboard", "wandb", "none"] = Field("tensorboard", description="beside `metrics.jsonl`")
    trust_remote_code: bool = Field(False, description="run code that comes with a model from a hub")
    picture: Picture = Picture()
    text: Text = Text()
    adapter: Adapter = Adapter()
    memory: Memory = Memory()
    train: Train = Train()
    eval: Eval = Eval()

    @property
    def rewards(self) -> dict[str, float]:
        """Reward names with their weights."""
        return {name: rule.weight for name, rule in self.trained.items()}

    @property
    def trained(self) -> dict[str, RewardRule]:
        """The rules of the rewards that are trained on, by name."""
        return {"preferred": RewardRule()} if self._labelled else self._rules

    @property
    def _labelled(self) -> bool:
        """Whether recorded pairs say themselves what is better."""
        return self.preferences is not None and self.labels == "file"

    @property
    def _rules(self) -> dict[str, RewardRule]:
        given = {self.reward: 1.0} if isinstance(self.reward, str) else self.reward
        return {name: rule if isinstance(rule, RewardRule) else RewardRule(weight=rule) for name, rule in given.items()}

    @property
    def watched(self) -> dict[str, WatchRule]:
        """The rules of the rewards that are measured besides; one that is trained on and merely named keeps its own."""
        given, own = self.eval.rewards, self._rules
        further = given if isinstance(given, dict) else {name: WatchRule() for name in given if name not in own}
        return own | further if self._labelled else further

    @property
    def call(self) -> dict[str, Any]:
        """What every call of the pipeline gets beside prompts and latents: `picture`, over the starter's own."""
        picture = self.picture
        sizes = {"height": picture.height, "width": picture.width, "num_frames": picture.frames}
        own = CALLS.get(self.model, {})
        return own | {key: size for key, size in sizes.items() if size is not None} | picture.call

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    def yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def load(recipe: str | Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """Read a recipe and lay dotted overrides (`{"train.lr": "1e-4"}`; values in YAML's notation) over it.

    Raises UserError, in one line, for a missing or broken file, an unknown key, a wrong type or range; a mistake in the
    recipe is told with the recipe's name, one in an override with the option's.
    """
    raw = read_yaml(Path(recipe)) if recipe else {}
    if recipe:
        raw.setdefault("name", Path(recipe).stem)
        validate(raw, where=str(recipe))
    for path, given in (overrides or {}).items():
        _assign(raw, path, parse_value(path, given) if isinstance(given, str) else given)
    return validate(raw)


def validate(raw: dict[str, Any], where: str = "the options") -> Config:
    """Check a nested dictionary; UserError names the first wrong key with its path."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error.errors())}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A recipe as nested dictionaries, unchecked. UserError for a missing or broken file."""
    if not path.is_file():
        raise UserError(f"no recipe at {path}: expected a YAML file, such as configs/starter.yaml")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {_broken(error)}") from None
    if not isinstance({} if raw is None else raw, dict):
        raise UserError(f"{path}: expected keys with values at the top, got a {type(raw).__name__}")
    return raw or {}


def fields(section: type[Section] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """All dotted keys of the configuration with what they hold, in order."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None) is not None
        found |= fields(field.annotation, f"{prefix}{name}.") if inner else {prefix + name: field}
    return found


def keys() -> list[str]:
    """All dotted keys of the configuration."""
    return list(fields())


def owner(path: str) -> str | None:
    """The key that a dotted path sets: itself, or the one whose value it reaches into (`parts` for parts.plan.size)."""
    return next((key for key in keys() if path == key or path.startswith(key + ".")), None)


def parse_value(path: str, text: str) -> Any:
    """An override's value in YAML's notation; where the key holds text, the text as it stands."""
    if path in fields() and fields()[path].annotation is str:
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"--{path}: {text!r} is not valid YAML: {_broken(error)}") from None


def _broken(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else " ".join(str(error).split())


def _assign(raw: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for part in sections:
        if raw.get(part) is None:
            raw[part] = {}
        raw = raw[part]
        if not isinstance(raw, dict):
            raise UserError(f"--{path}: {part} is a value, not a section, and has no key {key!r}")
    raw[key] = value


def _explain(errors: list[dict[str, Any]]) -> str:
    first = _dotted(errors[0]["loc"])
    if "." in first and errors[0]["loc"] == (first,) and first in keys():
        section, _, name = first.rpartition(".")
        return f"unknown key {first!r}: in a file, write {name!r} below {section!r}"
    errors = [error | {"loc": tuple(part for part in error["loc"] if not _UNION_TAG.match(str(part)))}
              for error in errors]
    key = owner(_dotted(errors[0]["loc"])) or first
    # A union reports every type it tried; the one that went deepest was meant.
    tried = [error for error in errors if f"{_dotted(error['loc'])}.".startswith(f"{key}.")]
    tried = [error for error in tried if len(error["loc"]) == max(len(other["loc"]) for other in tried)]
    unknown = next((error["loc"] for error in tried if error["type"] == "extra_forbidden"), None)
    if unknown:
        return f"unknown key {_dotted(unknown)!r}{_nearest_of(unknown)}"
    expected = " or ".join(dict.fromkeys(_expected(error["msg"]) for error in tried))
    return f"{_dotted(tried[0]['loc'])}: got {tried[0]['input']!r}, expected {expected}"


_UNION_TAG = re.compile(r"(str|float)$|<|(dict|list)\[")  # the names that pydantic gives to the branches of a union
_RULES = {"reward": RewardRule, "eval.rewards": WatchRule, "eval.stop": EarlyStop}


def _nearest_of(unknown: tuple[str | int, ...]) -> str:
    """`nearest` for an unknown key by its place, which may be within a reward's rule."""
    path = _dotted(unknown)
    rule = _RULES.get(owner(path) or "")
    if rule is None:
        return nearest_key(path, keys() if "." in path else [*keys(), *sections()])
    within = next(part for part in reversed(unknown[:-1]) if isinstance(part, str))  # a transform has its place between
    choices = {"on_error": [*Retry.model_fields], "transform": ["clip", "threshold"]}.get(within, [*rule.model_fields])
    return nearest(str(unknown[-1]), choices)


def _dotted(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in location)


def _expected(message: str) -> str:
    """Pydantic's message as the end of a sentence that begins with "expected"."""
    for pattern, words in _PHRASES:
        message = re.sub(pattern, words, message)
    return message[0].lower() + message[1:]


_PHRASES = (
    (r"^Input should be a valid dictionary or instance of .*", "keys with values"),
    (r"^Input should be (?=greater|less)", "a number "),
    (r"^(Input|Keys) should be |, unable to .*|, got a number .*", ""),
    (r"^\w+ should have (.*?)( after validation.*)?$", r"\1"),
    (r"^Value error, ", ""),
    (r"^Field required$", "one more value"),
)


def sections() -> list[str]:
    """The dotted names of the configuration's sections."""
    return sorted({key.rpartition(".")[0] for key in keys()} - {""})


def nearest_key(path: str, choices: list[str]) -> str:
    """`nearest` for an unknown key; where none is near, the keys of the section that was meant."""
    inside = [key for key in keys() if key.startswith((path if path in sections() else path.rpartition(".")[0]) + ".")]
    told = nearest(path, choices)
    if told.startswith(":") and path not in sections():
        return told
    return f"; there are: {', '.join(inside or [key for key in [*keys(), *sections()] if '.' not in key])}"


def nearest(word: str, choices: list[str]) -> str:
    """The end of an error about an unknown word: its nearest right one, or all there are.

    Of dotted words the last part counts first, so that `lr` finds `train.lr`, and `eval.stepss` finds `eval.steps`.
    """
    def likeness(choice: str) -> tuple[float, float]:
        ends = word.rpartition(".")[2], choice.rpartition(".")[2]
        return difflib.SequenceMatcher(None, *ends).ratio(), difflib.SequenceMatcher(None, word, choice).ratio()

    best = max(choices, key=likeness, default="")
    return f": did you mean {best!r}?" if likeness(best)[0] >= 0.5 else f"; there are: {', '.join(choices) or 'none'}"
