"""Read and validate a configuration: YAML recipes, dotted overrides, one-line errors with the nearest valid key."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flowgrpo import trust
from flowgrpo.config import features, recipes, yaml_text
from flowgrpo.config.base import Section, facts, types
from flowgrpo.config.reward_rules import KEYED, Change, Limit, Retry
from flowgrpo.config.schema import Config, fields, keys, owner, sections
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import at_home, unfit, unsafe


def load(recipe: str | Path | None, overrides: dict[str, Any] | None = None, trusted: bool = True) -> Config:
    """Read a recipe and apply dotted overrides (`{"train.lr": "1e-4"}`; values in YAML's notation).

    A recipe is a file, or the name of a packaged one, and may extend another one: see recipes.py.
    trusted: it may execute code and reach addresses wherever it comes from; a run's folder is governed by
    `trust.opening`. Raises UserError for a missing or broken file, an unknown key, a wrong type or range, and for what
    it may not; the error names the recipe, or the option of an override.
    """
    raw = read_recipe(recipe) if recipe else {}
    given = {path: parse_value(path, value) if isinstance(value, str) else value
             for path, value in (overrides or {}).items()}
    for path, value in given.items():
        _assign(raw, path, value)
    if recipe and not trusted:
        require_own(recipe, raw, given, given)
    return validate(raw)


def require_own(recipe: str | Path, raw: dict[str, Any], given: Iterable[str] = (), named: object = (),
                flag: str | None = trust.RECIPE_FLAG) -> None:
    """Raise UserError if a recipe, or one that it extends, does more than train here, without the user's agreement.

    raw: its keys, with `given`, the dotted ones of the command line, in place. named: their values. flag: the
    command's that allows it.
    """
    files = [file for file, _ in _chain(recipes.locate(recipe)) if not recipes.is_packaged(file)]
    if files:
        first = next(filter(recipes.foreign, files), files[0])
        written = [key for key, field in fields().items() if facts(field).writes]
        trust.require_own(first, files, raw, recipes.foreign(first), given, named, flag, written)


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Keys of a recipe, with those of recipes that it extends and its name. Raises UserError as `load`."""
    path, raw = recipes.locate(recipe), dict[str, Any]()
    for file, own in reversed([*_chain(path)]):
        raw = recipes.merge(raw, own)
        if file == path:
            raw.setdefault("name", path.stem)
        validate(raw, where=str(file))
    return raw


def _chain(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A recipe with its own keys, then the one that it extends, and so on."""
    below: list[Path] = []
    file: Path | None = path
    while file is not None:
        raw = read_yaml(file)
        base = recipes.base_of(raw, file, below)
        yield file, raw
        below, file = [*below, file], base


def validate(raw: dict[str, Any], where: str = "the options") -> Config:
    """Validate a nested dictionary, with the home folder in place of each ~/ that begins a text or a key. Raises
    UserError with the path of the first wrong key."""
    def checked(text: str, path: str) -> str:
        if why := unsafe(text):
            raise UserError(f"{where}: {path}: got {text!r}, expected a text without {why}")
        try:
            return text if path in TEXTS else at_home(text)
        except UserError as error:
            raise UserError(f"{where}: {path}: {error}") from None

    features.require()
    try:
        return Config.model_validate(_with_texts(raw, checked))
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error.errors())}") from None


TEXTS = ("name", "negative_prompt", "text.system")  # keys of texts that are no path


def _with_texts(value: Any, change: Callable[[str, str], str], path: str = "") -> Any:
    """A nested value with change(text, path) in place of each text, also of keys. path: dotted, of the value."""
    if isinstance(value, dict):
        return {_with_texts(key, change, path): _with_texts(inner, change, f"{path}.{key}".lstrip("."))
                for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(inner, change, f"{path}.{place}") for place, inner in enumerate(value)]
    return change(value, path) if isinstance(value, str) else value


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe as nested dictionaries, unchecked.

    The configuration that a run wrote comes with the keys of today, and with the files of the run's folder where that
    is now, copied or renamed.
    Raises UserError for a missing or broken file.
    """
    if why := unfit(path):
        packaged = f": did you mean the packaged recipe {path.stem}?" if path.stem in recipes.names() else \
            "; expected a YAML file, or a packaged recipe such as starter" + \
            f" (a model is --model={path})" * (re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
                                              and path.suffix not in (".yaml", ".yml"))
        raise UserError(f"no recipe at {path}: it {why}{packaged}")
    raw = yaml_text.read(path)
    if not isinstance({} if raw is None else raw, dict):
        raise UserError(f"{path}: expected keys with values at the top, got a {type(raw).__name__}")
    return _in_place(migrate(raw), path.parent) if raw and WRITTEN <= raw.keys() else raw or {}


RENAMED = {"picture": "image"}  # sections by the names that they had before
WRITTEN = {"name", "model", "method", "reward", "prompts", "output", "seed", "device", "train", "eval"}  # by every run


def migrate(raw: dict[str, Any]) -> dict[str, Any]:
    """Rename the sections of a recorded configuration, and the keys that its phases set, to today's names.

    Earlier versions evaluated completions at `text.eval_temperature: 0` by default. That default is None now.
    """
    raw = {RENAMED.get(key, key): value for key, value in raw.items()}
    if isinstance(text := raw.get("text"), dict) and "generates" not in text and text.get("eval_temperature") == 0:
        raw["text"] = text | {"eval_temperature": None}
    if isinstance(phases := raw.get("phases"), list):
        raw["phases"] = [phase | {"set": {new_name(key) or key: value for key, value in phase["set"].items()}}
                         if isinstance(phase, dict) and isinstance(phase.get("set"), dict) else phase
                         for phase in phases]
    return raw


def _in_place(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace the run's former folder by `folder` in every path of a recorded configuration, where that file exists."""
    was = Path(str(raw["output"]), str(raw["name"]))
    if was.resolve() == folder.resolve():
        return raw

    def moved(text: str, path: str) -> str:
        for begin in (f"{was}/", f"{was.resolve()}/") if path not in (*TEXTS, "output") else ():
            if (name := text.removeprefix("./")).startswith(begin):
                place = folder / name[len(begin):]
                file = str(place).rpartition(":")[0] if ".py:" in place.name else place
                return str(place) if Path(file).exists() else text
        return text

    return _with_texts(raw, moved)


def new_name(key: object) -> str | None:
    """Name of today of a dotted key that was renamed with its section; None for any other."""
    section, dot, rest = str(key).partition(".")
    return RENAMED[section] + dot + rest if section in RENAMED else None


def parse_value(path: str, text: str) -> Any:
    """Parse an override's value in YAML's notation; if the key holds text, return the text unchanged."""
    if path in fields() and fields()[path].annotation is str:
        return text
    try:
        return yaml_text.parse(text)
    except yaml.YAMLError as error:
        raise UserError(f"--{path}: {text!r} is not valid YAML: {yaml_text.describe_error(error)}") from None


def _assign(raw: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = re.split(r"\.(?!\d+(?:\.|$))", path)  # no key is a number: hpsv2.1 is one name
    for part in sections:
        if raw.get(part) is None:
            raw[part] = {}
        raw = raw[part]
        if not isinstance(raw, dict):
            raise UserError(f"--{path}: {part} is a value, not a section, and has no key {key!r}")
    raw[key] = value


def _explain(errors: Sequence[Any]) -> str:
    first = _key_path(errors[0]["loc"])
    if "." in first and errors[0]["loc"] == (first,) and first in keys():
        section, _, name = first.rpartition(".")
        return f"unknown key {first!r}: in a file, write {name!r} below {section!r}"
    # The names of a union's branches stand in an error's path; an unknown key, at its end, may look like one.
    errors = [error | {"loc": tuple(part for place, part in enumerate(error["loc"])
                                    if place in (0, len(error["loc"]) - (error["type"] == "extra_forbidden"))
                                    or not _UNION_TAG.match(str(part)))} for error in errors]
    key = owner(_key_path(errors[0]["loc"])) or first
    # A union reports every type it tried; the deepest path is the likely one.
    tried = [error for error in errors if f"{_key_path(error['loc'])}.".startswith(f"{key}.")] or list(errors)
    deepest = max(len(error["loc"]) for error in tried)
    tried = [error for error in tried if len(error["loc"]) == deepest]
    unknown = next((error["loc"] for error in tried if error["type"] == "extra_forbidden"), None)
    if unknown:
        return f"unknown key {_key_path(unknown)!r}{_nearest_of(unknown)}"
    expected = []
    for message in (error["msg"] for error in tried):
        for pattern, words in _PHRASES:
            message = re.sub(pattern, words, message)
        expected.append(message[0].lower() + message[1:])
    return f"{_key_path(tried[0]['loc'])}: got {tried[0]['input']!r}, expected {' or '.join(dict.fromkeys(expected))}"


# pydantic's names of the branches of a union
_UNION_TAG = re.compile(r"(bool|str|(constrained-)?(int|float)|Fused|IPAdapter|AutoRate)$|<|(dict|list|literal)\[")


def _nearest_of(unknown: tuple[str | int, ...]) -> str:
    """`nearest` for an unknown key by its path, which may be within a reward's rule."""
    path = _key_path(unknown)
    key = owner(path)
    annotation = fields()[key].annotation if key in fields() else None
    # The section within the key's value: in a list, by names, or in place of a number.
    rule = next((kind for kind in types(annotation) if isinstance(kind, type) and issubclass(kind, Section)), None)
    if rule is None:
        return nearest_key(path, keys() if "." in path else [*keys(), *sections()])
    within = next(part for part in reversed(unknown[:-1]) if isinstance(part, str))  # a transform's index is in between
    choices = {"on_error": [*Retry.model_fields], "transform": [*KEYED], "limit": [*Limit.model_fields],
               **dict.fromkeys(KEYED, [*Change.model_fields])}.get(within, [*rule.model_fields])
    return nearest(str(unknown[-1]), choices)


def _key_path(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in location)


# pydantic's messages, made to follow "expected"
_PHRASES = (
    (r"^Input should be a valid dictionary or instance of .*", "keys with values"),
    (r"^Input should be (?=greater|less)", "a number "),
    (r"^(Input|Keys) should be |, unable to .*|, got a number .*", ""),
    (r"^\w+ should have (.*?)( after validation.*)?$", r"\1"),
    (r"^Value error, ", ""),
    (r"^Field required$", "one more value"),
)


# What trainers of other libraries call a key, by the last part of its name.
ELSEWHERE = {
    "model": ("base_model", "model_name_or_path", "pretrained_model_name_or_path", "pretrained"),
    "prompts": ("dataset", "dataset_name", "prompt_fn"), "reward": ("reward_fn", "reward_funcs", "reward_model"),
    "output": ("logdir", "output_dir", "save_dir"), "tracker": ("logger", "report_to"),
    "precision": ("bf16", "dtype", "fp16", "mixed_precision", "weight_dtype"),
    "adapter.rank": ("lora_r", "lora_rank", "network_dim"),
    "adapter.targets": ("lora_target_modules", "target_modules"),
    "train.lr": ("learning_rate",), "train.epochs": ("num_epochs", "num_train_epochs"),
    "train.group": ("group_size", "num_generations", "num_image_per_prompt", "num_images_per_prompt"),
    "train.micro_batch": ("batch_size", "per_device_train_batch_size", "train_batch_size"),
    "train.inner_epochs": ("num_inner_epochs", "num_iterations"),
    "train.steps": ("num_inference_steps", "num_steps", "sampling_steps"),
    "train.guidance": ("cfg", "cfg_scale", "guidance_scale"), "train.clip_grad": ("grad_clip", "max_grad_norm"),
    "train.checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "train.schedule": ("lr_scheduler", "lr_scheduler_type"), "train.warmup": ("lr_warmup_steps", "warmup_steps"),
    "image.sizes": ("aspect_ratios", "buckets", "resolutions"),
    "memory.offload": ("enable_group_offload", "group_offload", "offload_type"),
    "train.save_every": ("save_freq", "save_steps"), "eval.every": ("eval_freq", "eval_steps"),
    "text.max_tokens": ("max_completion_length", "max_new_tokens", "max_tokens"),
    "parts.kl.weight": ("beta", "kl_beta", "kl_coef", "kl_coeff"),
    "parts.surrogate.high": ("clip_range", "cliprange", "epsilon"),
    "parts.advantage.clamp": ("adv_clip_max",), "parts.kernel.level": ("eta", "noise_level"),
    "parts.decoding.temperature": ("temperature",)}
_KEY_OF = {name: key for key, names in ELSEWHERE.items() for name in names}


def nearest_key(path: str, choices: list[str]) -> str:
    """`nearest` for an unknown key; if none is near, the keys of its section. A name that other libraries have for a
    key finds it, and so does the one that it had before."""
    if now := new_name(path):
        return f": it is called {now!r} now"
    if known := _KEY_OF.get(path.rpartition(".")[2]):
        return f": did you mean {known!r}?"
    inside = [key for key in keys() if key.startswith((path if path in sections() else path.rpartition(".")[0]) + ".")]
    hint = nearest(path, choices)
    if hint.startswith(":") and path not in sections():
        return hint
    return f"; there are: {', '.join(inside or [key for key in [*keys(), *sections()] if '.' not in key])}"
