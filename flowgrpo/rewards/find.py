"""Lookup of rewards by name: registered, built in, in a file, in a trained reward's folder, or in a package."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flowgrpo import domains
from flowgrpo.errors import LIKE, UserError, nearest
from flowgrpo.rewards.about import TRAINED, RewardFunction
from flowgrpo.rewards.remote import exchange
from flowgrpo.user_code import call_user_code, definitions, from_file, group_entry_points

T = TypeVar("T")

GROUP = "flowgrpo.rewards"
NEAR, SLIP = 5, 0.85  # names that a message lists; likeness at which it names one alone
BUILT_IN = {
    "scene": "flowgrpo.rewards.starter.scene:scene",
    "scene_graded": "flowgrpo.rewards.starter.scene:scene_graded",
    "scene_edge_width": "flowgrpo.rewards.starter.scene:scene_edge_width",
    "scene_soft": "flowgrpo.rewards.starter.scene_soft:scene_soft",
    "scene_style": "flowgrpo.rewards.starter.scene_soft:scene_style",
    "motion": "flowgrpo.rewards.starter.motion:motion",
    "motion_graded": "flowgrpo.rewards.starter.motion:motion_graded",
    "appearance": "flowgrpo.rewards.starter.motion:appearance",
    "ocr": "flowgrpo.rewards.ocr:Ocr",
    "geneval": "flowgrpo.rewards.geneval.rules:GenEval",
    "geneval_fast": "flowgrpo.rewards.geneval.rules:GenEvalFast",
    "jpeg_compressibility": "flowgrpo.rewards.guards:jpeg_compressibility",
    "jpeg_incompressibility": "flowgrpo.rewards.guards:jpeg_incompressibility",
    "sharpness": "flowgrpo.rewards.guards:sharpness",
    "crispness": "flowgrpo.rewards.guards:crispness",
    "piqe": "flowgrpo.contrib.pixels:piqe",
    "safety": "flowgrpo.rewards.guards:Safety",
    "clip_score": "flowgrpo.rewards.clip:ClipScore",
    "clip_cosine": "flowgrpo.rewards.clip:ClipCosine",
    "subject_score": "flowgrpo.rewards.clip:SubjectScore",
    "preservation": "flowgrpo.contrib.edits:Preservation",
    "aesthetic": "flowgrpo.rewards.clip:Aesthetic",
    "pickscore": "flowgrpo.rewards.clip:PickScore",
    "hpsv2.0": "flowgrpo.rewards.clip:HpsV20",
    "hpsv2.1": "flowgrpo.rewards.clip:HpsV2",
    "hpsv3": "flowgrpo.rewards.qwen2_vl:HpsV3",
    "imagereward": "flowgrpo.rewards.image_reward:ImageReward",
    "vqascore": "flowgrpo.rewards.vqa_score:VqaScore",
    "question_answers": "flowgrpo.contrib.questions.question_answers:QuestionAnswers",
    "self_answers": "flowgrpo.contrib.questions.self_answers:SelfAnswers",
    "t2i_compbench": "flowgrpo.contrib.questions.t2i_compbench:T2ICompBench",
    "flow_amount": "flowgrpo.contrib.pixels:FlowAmount",
    "flow_direction": "flowgrpo.contrib.pixels:FlowDirection",
    "temporal_consistency": "flowgrpo.rewards.video_motion:TemporalConsistency",
    "temporal_flickering": "flowgrpo.contrib.vbench.dimensions:temporal_flickering",
    "subject_consistency": "flowgrpo.contrib.vbench.dimensions:SubjectConsistency",
    "background_consistency": "flowgrpo.contrib.vbench.dimensions:BackgroundConsistency",
    "vbench": "flowgrpo.contrib.vbench.dimensions:VBench",
    "videoalign": "flowgrpo.rewards.qwen2_vl:VideoReward",
    "http": "flowgrpo.contrib.json_api:Http",
    "judge": "flowgrpo.rewards.vlm_judge.judge:Judge",
    "judge_pairs": "flowgrpo.rewards.vlm_judge.judge:JudgePairs",
    "judge_rubric": "flowgrpo.contrib.criteria:JudgeRubric",
    "unified_reward": "flowgrpo.rewards.vlm_judge.released:UnifiedReward",
    "unified_reward_pairs": "flowgrpo.rewards.vlm_judge.released:UnifiedRewardPairs",
    "edit_judge": "flowgrpo.contrib.edits:EditJudge",
    "deqa": "flowgrpo.rewards.vlm_judge.released:DeQA",
    "frames": "flowgrpo.rewards.video_motion:Frames",
    "tiered": "flowgrpo.rewards.combine:Tiered",
    "gated": "flowgrpo.rewards.combine:Gated",
    "ternary": "flowgrpo.contrib.verdicts:Ternary",
    "checklist": "flowgrpo.contrib.verdicts:Checklist",
    "harmonic": "flowgrpo.rewards.combine:Harmonic",
    "corrected": "flowgrpo.contrib.verdicts:Corrected",
    "votes": "flowgrpo.contrib.verdicts:Votes",
    "flawed": "flowgrpo.contrib.verdicts:Flawed",
    "rechecked": "flowgrpo.contrib.verdicts:Rechecked",
    "scaled": "flowgrpo.contrib.verdicts:Scaled",
    "user_prompt": "flowgrpo.contrib.verdicts:UserPrompt",
    "progress": "flowgrpo.contrib.verdicts:Progress",
    "preferred": "flowgrpo.rewards.pairwise:preferred",
    "diversity": "flowgrpo.rewards.guards:Diversity",
    "base_similarity": "flowgrpo.rewards.guards:BaseSimilarity",
    "grid_artefacts": "flowgrpo.rewards.guards:GridArtefacts",
    "over_saturation": "flowgrpo.rewards.guards:OverSaturation",
    "text_judge_rubric": "flowgrpo.contrib.criteria:TextJudgeRubric",
    "caption_answers": "flowgrpo.contrib.questions.caption_answers:CaptionAnswers",
}
BUILT_IN |= {name: place for domain in domains.all() for name, place in domain.rewards.items()}
LEARNED = "flowgrpo.contrib.learned_rewards.preference:reward_factory"  # of a folder of `flowgrpo reward train`
# Names of earlier releases.
ALIASES = {"pick_score": "pickscore", "hps_v2": "hpsv2.1", "hps_v3": "hpsv3", "image_reward": "imagereward",
           "video_reward": "videoalign", "vqa_score": "vqascore"}
REMOVED = {name: "it asked any model a question of ours: choose videoalign, VideoAlign's own weights, with args: "
                 f"{{axes: {{{axis}: 1}}}}, or judge with a template of yours"
           for name, axis in (("videoalign_vq", "VQ"), ("videoalign_mq", "MQ"), ("videoalign_ta", "TA"))}
REMOTE = "flowgrpo.serving.client:Remote"  # of http://host:port/NAME
METRICS = "flowgrpo.contrib.metrics:find_adapter"
ADAPTED = ("imscore", "pyiqa", "torchmetrics")  # packages of PACKAGE:NAME
_told: set[str] = set()  # aliases whose new names were printed
_registered: dict[str, Any] = {}
_files: dict[str, str] = {}  # those of Python in which rewards were registered


def reward(name: str) -> Callable[[T], T]:
    """Decorator: register a function, an object or a class as the reward `name`, replacing an earlier one."""
    if name in BUILT_IN or name in ALIASES:
        raise UserError(f"the reward name {name!r} is taken by a built-in reward: choose another")
    file = sys._getframe(1).f_globals.get("__file__") or ""

    def register(thing: T) -> T:
        _registered[name] = thing
        _files[name] = str(Path(file).resolve()) if file.endswith(".py") else ""
        return thing

    return register


def place(name: str) -> str | None:
    """Return FILE.py:NAME of a registered reward, by which other commands load it; None without a file."""
    return f"{_files[name]}:{name}" if _files.get(name) else None


def code_hashes(functions: Mapping[str, Any]) -> dict[str, str]:
    """Return for each reward that is in a user's file, or made of what is in some, a hash of what these define."""
    found = {}
    for name, function in functions.items():
        rule: Any = getattr(function, "rule", None)
        origins = [getattr(rule, "use", None) or place(name) or name, *_texts(getattr(rule, "args", None))]
        files = dict.fromkeys(Path(origin.rpartition(":")[0]) for origin in origins if ".py:" in origin)
        found[name] = " ".join(definitions(file) for file in files if file.is_file())
    return {name: code for name, code in found.items() if code}


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in the arguments of a reward."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _texts(inner)


def edited_rewards(was: Mapping[str, str], functions: Mapping[str, Any]) -> list[str]:
    """Return the rewards whose file defines something else than at an earlier time. was: its `code_hashes`."""
    return [name for name, now in code_hashes(functions).items() if was.get(name, now) != now]


def names() -> list[str]:
    """Return every name that `find` knows, except files."""
    return sorted({*_registered, *BUILT_IN, *group_entry_points(GROUP)})


def source(name: str) -> str:
    """Return the origin of the reward of that name, for a table."""
    if name in _registered:
        return "registered"
    return "built in" if name in BUILT_IN else f"package {group_entry_points(GROUP)[name].dist.name}"


def find(name: str, arguments: dict[str, Any] | None = None) -> RewardFunction:
    """Return the reward of that name, ready to be called. arguments: those of its class.

    Raises UserError for an unknown name (with the nearest); for a file that is missing, does not import or lacks the
    function; for arguments that it does not take; and for anything not callable.
    """
    thing = locate(name)
    if arguments or _is_made(thing):
        _require_arguments(name, thing, arguments or {})
    if _is_made(thing):
        thing = call_user_code(f"reward {name!r} cannot be made", thing, **arguments or {})
    if not callable(thing):
        raise UserError(f"reward {name!r} is of type {type(thing).__name__}: expected a function of "
                        f"(images, prompts, metadata)")
    return thing


def locate(name: str) -> Any:
    """Return the object behind a name, with a class not yet instantiated: `find` without loading a model."""
    if name in _registered:
        return _registered[name]
    name = present(name)
    if name in BUILT_IN:
        return call_user_code(f"reward {name!r} does not import", _by_place, BUILT_IN[name])
    if exchange.is_address(name):
        exchange.addresses(name)
        return functools.partial(_by_place(REMOTE), name)
    if ".py" in name:
        return from_file(name, "reward", _in_file)
    if name.partition(":")[0] in ADAPTED and (
            made := call_user_code(f"reward {name!r} does not import", _find_adapter, name)):
        return made
    if point := group_entry_points(GROUP).get(name):
        return call_user_code(f"reward {name!r} does not import", point.load)
    return _from_folder(name)


def present(name: str) -> str:
    """Return the present name of a reward; the first use of an earlier one prints it.
    Raises UserError for a reward that was removed."""
    if name in REMOVED:
        raise UserError(f"the reward {name!r} was removed: {REMOVED[name]}")
    if name not in ALIASES:
        return name
    if name not in _told:
        _told.add(name)
        print(f"the reward {name!r} is now called {ALIASES[name]!r}", file=sys.stderr)
    return ALIASES[name]


def _by_place(place: str) -> Any:
    """Return the object of MODULE:NAME."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _find_adapter(name: str) -> Any:
    """Return the metric of another package, not yet made."""
    return _by_place(METRICS)(name)


def _in_file(path: Path) -> dict[str, Any]:
    """Return the rewards that a file registers, by name."""
    return {name: _registered[name] for name, file in _files.items() if file == str(path)}


def _is_made(thing: object) -> bool:
    """True if the object behind a name is a class, or a class with its first argument, the URL of a server."""
    return inspect.isclass(thing.func if isinstance(thing, functools.partial) else thing)


def _require_arguments(name: str, thing: Any, arguments: dict[str, Any]) -> None:
    if not _is_made(thing):
        raise UserError(f"reward {name!r} takes no args: it is not a class, got {', '.join(arguments)}")
    try:
        inspect.signature(thing).bind(**arguments)
    except TypeError:
        taken = inspect.signature(thing).parameters
        lacking = [key for key, parameter in taken.items()
                   if key not in arguments and parameter.default is parameter.empty
                   and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
        wrong = next((key for key in arguments if key not in taken), None)
        raise UserError(f"reward {name!r} needs args: {{{', '.join(f'{key}: ...' for key in lacking)}}}: give them in "
                        "its rule, or to `flowgrpo reward score` by --args" if wrong is None else
                        f"reward {name!r} takes no argument {wrong!r}{nearest(wrong, list(taken))}") from None
    except ValueError:  # compiled classes may have no signature
        pass


def _from_folder(name: str) -> Any:
    """Load `folder` or `folder:aspect`, written by `flowgrpo reward train`."""
    for folder, aspect in ((name, None), name.rpartition(":")[::2]):
        if folder and (Path(folder) / TRAINED).is_file():
            return _by_place(LEARNED)(Path(folder), aspect)
    if Path(name).is_dir():
        raise UserError(f"reward {name!r}: no {TRAINED} in it: expected one of `flowgrpo reward train`")
    near = f": no folder {name} is here" if "/" in name else _near(name)
    raise UserError(f"unknown reward {name!r}{near} (`flowgrpo list rewards` lists all; or "
                    "path/to/file.py:function; a function that was given from Python has to be in a file)")


def _near(name: str) -> str:
    """Return the names that are like an unknown one, or have it in them, as the end of a message; at most NEAR."""
    slips = difflib.get_close_matches(name, names(), NEAR, LIKE)
    if slips and difflib.SequenceMatcher(None, name, slips[0]).ratio() >= SLIP:
        return f": did you mean {slips[0]!r}?"
    parts = [known for known in names() if len(name) > 2 and (name in known or known in name)]
    near = [*dict.fromkeys([*slips, *parts])][:NEAR]
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""
