"""Names (folder, hub id, FILE.py:NAME) of objects passed to `align`, so that other commands can load them."""

import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.config.schema import Config
from flowgrpo.data.inputs import KEYS, SCALE
from flowgrpo.data.prompts import Prompt, as_line
from flowgrpo.errors import UserError
from flowgrpo.files import WEIGHTS
from flowgrpo.starter import FOLDERS

PROMPTS = "prompts.jsonl"  # in the run's folder, for a list of prompts
CLASS = re.compile(r"[A-Z]\w*(Pipeline|Model|ModelLM|For[A-Z]\w*)")
OUTPUT = Config.model_fields["output"].default


def model(loaded: object) -> str:
    """Folder or hub id of a pipeline, or of the model of a tuple; without one its class name."""
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    return str(getattr(loaded, "name_or_path", None) or type(loaded).__name__)


def require_place(model: str) -> None:
    """Raise UserError for a model that is named by its class alone, which is neither a folder nor a hub id."""
    if CLASS.fullmatch(model) and not Path(model).exists():
        raise UserError(f"cannot load the model {model!r}: that is a class, as a run says that was made from Python "
                        "with an object that has no file; save it (save_pretrained), and set model to its folder")


def require_no_slip(model: str) -> None:
    """Raise UserError for a near miss of a packaged model's or a local folder's name. A hub's owner/name is one if a
    folder of the owner's name here has a similar entry, or if it is below OUTPUT."""
    if model in FOLDERS or Path(model).exists() or Path(model).suffix in WEIGHTS:
        return
    inside = Path(model).parent if "/" in model else None
    of_runs = inside == Path(OUTPUT)
    if inside and (inside.is_dir() or of_runs):
        others = [path.name for path in inside.iterdir() if path.is_dir()] if inside.is_dir() else []
        near = difflib.get_close_matches(Path(model).name, others, n=1, cutoff=0.85)
        if near or of_runs or len(Path(model).parts) > 2:
            raise UserError(f"no model or run {model!r}: {inside} has no folder of that name"
                            + (f": did you mean {str(inside / near[0])!r}?" if near else ""))
    if model.startswith(("/", ".", "~")):
        raise UserError(f"no model or run {model!r}: there is no such folder")
    near = [] if inside else difflib.get_close_matches(model, FOLDERS, n=1, cutoff=0.75)
    if near:
        raise UserError(f"no model {model!r}, and no folder of that name: did you mean {near[0]!r}?")


def place(thing: object) -> str | None:
    """FILE.py:NAME of a function or class at the top level of a user's file; None for others."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file, name = getattr(module, "__file__", None) or "", getattr(thing, "__name__", "")
    if not file.endswith(".py") or getattr(module, name, None) is not thing \
            or module.__name__.startswith("flowgrpo."):  # ours are found by name
        return None
    return f"{Path(file).resolve()}:{name}"


def rule(use: str | None, given: object) -> object:
    """Rule of a reward: a weight or keys, with the place of its function, if it has one."""
    if use is None:
        return given
    if isinstance(given, RewardRule):
        given = given.model_dump(exclude_unset=True)
    return {"use": use} | (given if isinstance(given, dict) else {"weight": given})


def prompt_lines(config: Config, prompts: Sequence[Prompt] | None) -> str | None:
    """Content of the run's own prompt file, before its folder is archived; None if the configuration names another
    file. Files in the run's folder have paths relative to it, which hold where it is copied to."""
    path = config.folder / PROMPTS
    if Path(config.prompts) != path:
        return None
    if prompts is None:
        return path.read_text(encoding="utf-8")
    begin, lines = f"{config.folder.resolve()}/", [as_line(prompt) for prompt in prompts]
    for prompt, line in zip(prompts, lines):
        if any(str(Path(file).resolve()).startswith(begin) for _, file in prompt.inputs.paths()):
            facts = prompt.inputs.metadata()  # which reading the line adds again
            line["metadata"] = {key: value for key, value in prompt.metadata.items() if facts.get(key) != value}
            line |= {key: [each.removeprefix(begin) for each in value] if isinstance(value, (list, tuple)) else
                     value.removeprefix(begin) for key, value in line.items() if key in KEYS and key != SCALE}
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
