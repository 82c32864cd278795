"""Arguments of `flowgrpo.align`: their types, and the configuration that they make."""

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flowgrpo.config import recipes
from flowgrpo.config.options import Options
from flowgrpo.config.parse import read_recipe, require_own, validate
from flowgrpo.config.schema import Config
from flowgrpo.data import provenance
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.methods.method import Method
from flowgrpo.rewards.find import place
from flowgrpo.user_code import forget_changed, require_read

Reward: TypeAlias = str | Callable[..., Any]
Rewards: TypeAlias = Reward | dict[str, Any] | dict[Reward, Any]
Prompts: TypeAlias = str | Path | Sequence[str | dict[str, Any] | Prompt]


class Omitted(enum.Enum):
    """Argument of `align` that is not given: it is the recipe's, or has its default."""

    OMITTED = "..."

    def __repr__(self) -> str:
        return self.value


OMITTED = Omitted.OMITTED


def build_config(model: Any, rewards: Rewards | Omitted, prompts: Prompts | Omitted, method: str | Method | Omitted,
                 recipe: str | Path | None, options: Options,
                 trusted: bool = False) -> tuple[Config, dict[str, Callable[..., Any]]]:
    """Configuration of arguments of `align`, and the rewards among them that are functions, by name."""
    require_read()
    forget_changed()
    # Without a recipe a model is all that is needed: the starter's reward and prompts stand in.
    if recipe is None:
        if model is OMITTED:
            raise UserError("align: got no model and no recipe: expected one of them, such as recipe='starter'")
        rewards = "scene_graded" if rewards is OMITTED else rewards
        prompts = "starter" if prompts is OMITTED else prompts
    # Functions go by their names, which is how a configuration and its checkpoints tell them apart.
    weighted = [*rewards.items()] if isinstance(rewards, dict) else [] if rewards is OMITTED else [(rewards, 1.0)]
    _require_types(model, [reward for reward, _ in weighted], prompts)
    names = [key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__) for key, _ in weighted]
    if len(set(names)) < len(names):
        raise UserError(f"rewards {', '.join(names)}: two have the same name, expected functions of different names")
    functions = {name: key for name, (key, _) in zip(names, weighted) if callable(key)}
    rules = {name: provenance.rule(place(reward) if isinstance(reward, str) else provenance.place(reward), rule)
             for name, (reward, rule) in zip(names, weighted)}
    # A method that is an object is written as a preset and its parts, so that a checkpoint can make it again.
    if isinstance(method, Method):
        if "parts" in options:
            raise UserError("parts: the method is an object, which has its parts: method.having(NAME=PART) changes one")
        method, parts = overlay.preset_and_parts(method)
        options = options | {"parts": parts}
    # What cannot be written into a file, such as a loaded model, is named by its provenance.
    listed = prompts is not OMITTED and not isinstance(prompts, (str, Path))
    given = {"method": method, "reward": OMITTED if rewards is OMITTED else rules,
             "model": model if model is OMITTED else
             str(model) if isinstance(model, (str, Path)) else provenance.model(model),
             "prompts": OMITTED if listed or prompts is OMITTED else str(prompts)}
    raw = {key: value for key, value in given.items() if value is not OMITTED} | options
    # The arguments lie over the recipe; one from elsewhere may execute or send nothing that they do not name.
    if recipe is not None:
        base, own = read_recipe(recipe), recipes.keys_set(raw)
        raw = recipes.merge(base, {"name": base["name"], **raw})
        if not trusted:
            require_own(recipe, raw, own, given | options)
    config = validate(raw)
    if listed:
        config = config.model_copy(update={"prompts": str(config.folder / provenance.PROMPTS)})
    return config, functions


def _require_types(model: Any, named: list[Any], prompts: Any) -> None:
    """Raise UserError for arguments of `align` of an unsupported type; named: the rewards."""
    pair = isinstance(model, tuple) and len(model) == 2 and hasattr(model[0], "config")
    if not (model is OMITTED or isinstance(model, (str, Path)) or pair or hasattr(model, "components")):
        raise UserError(f"model: got {_short(model)}, expected a name, a folder, a loaded pipeline, or a tuple of a "
                        "loaded language model and its tokenizer or processor")
    if wrong := [reward for reward in named if not (isinstance(reward, str) or callable(reward))]:
        raise UserError(f"rewards: got {_short(wrong[0])}, expected a name, a function, or a dictionary of these to "
                        "weights, such as {'scene': 1.0}")
    if prompts is OMITTED or isinstance(prompts, (str, Path)):
        return
    wrong = [prompts]
    if isinstance(prompts, (list, tuple)):
        wrong = [prompt for prompt in prompts if not isinstance(prompt, (str, dict, Prompt))]
    if wrong:
        raise UserError(f"prompts: got {_short(wrong[0])}, expected a file, or a list of strings or dictionaries")


def _short(value: Any) -> str:
    return f"{type(value).__name__} {' '.join(repr(value).split())[:60]}"
