"""Rewards by their name: registered, built in, in a file, a trained one's folder, or in a package that is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from flowgrpo.config import nearest
from flowgrpo.errors import UserError
from flowgrpo.rewards import client
from flowgrpo.rewards.failures import guarded

GROUP = "flowgrpo.rewards"
TRAINED = "reward.json"  # what makes a folder a reward
BUILT_IN = {
    "scene": "flowgrpo.rewards.scene:scene",
    "scene_graded": "flowgrpo.rewards.scene:scene_graded",
    "scene_soft": "flowgrpo.rewards.scene_soft:scene_soft",
    "motion": "flowgrpo.rewards.motion:motion",
    "motion_graded": "flowgrpo.rewards.motion:motion_graded",
    "appearance": "flowgrpo.rewards.motion:appearance",
    "ocr": "flowgrpo.rewards.ocr:Ocr",
    "geneval": "flowgrpo.rewards.geneval:GenEval",
    "jpeg_compressibility": "flowgrpo.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "flowgrpo.rewards.jpeg:jpeg_incompressibility",
    "sharpness": "flowgrpo.rewards.sharpness:sharpness",
    "piqe": "flowgrpo.rewards.piqe:piqe",
    "safety": "flowgrpo.rewards.safety:Safety",
    "clip_score": "flowgrpo.rewards.clip_score:ClipScore",
    "subject_score": "flowgrpo.rewards.subject_score:SubjectScore",
    "aesthetic": "flowgrpo.rewards.aesthetic:Aesthetic",
    "pick_score": "flowgrpo.rewards.pick_score:PickScore",
    "hps_v2": "flowgrpo.rewards.hps_v2:HpsV2",
    "hps_v3": "flowgrpo.rewards.hps_v3:HpsV3",
    "image_reward": "flowgrpo.rewards.image_reward:ImageReward",
    "vqa_score": "flowgrpo.rewards.vqa_score:VqaScore",
    "question_answers": "flowgrpo.rewards.question_answers:QuestionAnswers",
    "flow_amount": "flowgrpo.rewards.optical_flow:FlowAmount",
    "flow_direction": "flowgrpo.rewards.optical_flow:FlowDirection",
    "temporal_consistency": "flowgrpo.rewards.optical_flow:TemporalConsistency",
    "judge": "flowgrpo.rewards.judge:Judge",
    "judge_pairs": "flowgrpo.rewards.judge:JudgePairs",
    "judge_rubric": "flowgrpo.rewards.judge:JudgeRubric",
    "unified_reward": "flowgrpo.rewards.judge_forms:UnifiedReward",
    "unified_reward_pairs": "flowgrpo.rewards.judge_forms:UnifiedRewardPairs",
    "deqa": "flowgrpo.rewards.judge_forms:DeQA",
    "videoalign_vq": "flowgrpo.rewards.judge_forms:VideoQuality",
    "videoalign_mq": "flowgrpo.rewards.judge_forms:MotionQuality",
    "videoalign_ta": "flowgrpo.rewards.judge_forms:TextAlignment",
    "frames": "flowgrpo.rewards.frames:Frames",
    "tiered": "flowgrpo.rewards.combine:Tiered",
    "gated": "flowgrpo.rewards.combine:Gated",
    "ternary": "flowgrpo.rewards.combine:Ternary",
    "checklist": "flowgrpo.rewards.combine:Checklist",
    "harmonic": "flowgrpo.rewards.combine:Harmonic",
    "corrected": "flowgrpo.rewards.combine:Corrected",
    "preferred": "flowgrpo.rewards.preferred:preferred",
    "diversity": "flowgrpo.rewards.guards:Diversity",
    "base_similarity": "flowgrpo.rewards.guards:BaseSimilarity",
    "grid_artefacts": "flowgrpo.rewards.guards:GridArtefacts",
    "over_saturation": "flowgrpo.rewards.guards:OverSaturation",
    "exact_match": "flowgrpo.rewards.text_exact:ExactMatch",
    "numeric_match": "flowgrpo.rewards.text_numeric:NumericMatch",
    "math_answer": "flowgrpo.rewards.text_math:MathAnswer",
    "format_tags": "flowgrpo.rewards.text_format:FormatTags",
    "text_length": "flowgrpo.rewards.text_length:Length",
    "overlong": "flowgrpo.rewards.text_length:Overlong",
    "repetition": "flowgrpo.rewards.text_repetition:Repetition",
    "distinct": "flowgrpo.rewards.text_repetition:Distinct",
    "json_schema": "flowgrpo.rewards.text_json:JsonSchema",
    "code_run": "flowgrpo.rewards.text_code:CodeRun",
    "rubric": "flowgrpo.rewards.text_rubric:Rubric",
    "text_judge": "flowgrpo.rewards.text_judge:TextJudge",
    "text_judge_rubric": "flowgrpo.rewards.text_judge:TextJudgeRubric",
    "reward_model": "flowgrpo.rewards.text_reward_model:RewardModel",
}
_registered: dict[str, Any] = {}
_reading: list[Path] = []


def reward(name: str) -> Callable[[Any], Any]:
    """Register a function, an object or a class as the reward `name`; a later one of that name takes its place."""
    if name in BUILT_IN:
        raise UserError(f"the reward name {name!r} is taken by a built-in reward: choose another")

    def register(thing: Any) -> Any:
        _registered[name] = thing
        return thing

    return register


def names() -> list[str]:
    """Every name that `find` knows, without those of files."""
    return sorted({*_registered, *BUILT_IN, *_entry_points()})


def source(name: str) -> str:
    """Where the reward of that name comes from, for a table."""
    if name in _registered:
        return "registered"
    return "built in" if name in BUILT_IN else f"package {_entry_points()[name].dist.name}"


def find(name: str, arguments: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The reward of that name, ready to be called; `arguments` are those that its class is made with.

    Raises UserError for an unknown name (with the nearest), for a file that is missing, does not import or lacks the
    function, for arguments that it does not take, and for what cannot be called.
    """
    found = locate(name)
    if arguments or _is_made(found):
        _require_arguments(name, found, arguments or {})
    if _is_made(found):
        found = guarded(f"reward {name!r} cannot be made", found, **arguments or {})
    if not callable(found):
        raise UserError(f"reward {name!r} is of type {type(found).__name__}: expected a function of "
                        f"(images, prompts, metadata)")
    return found


def locate(name: str) -> Any:
    """What stands behind a name, a class not yet made into an object: `find` without loading a model."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(guarded(f"reward {name!r} does not import", importlib.import_module, module), attribute)
    if client.is_address(name):
        client.addresses(name)
        return functools.partial(client.Remote, name)
    if ".py" in name:
        return _from_file(name)
    if name in _entry_points():
        return guarded(f"reward {name!r} does not import", _entry_points()[name].load)
    return _from_folder(name)


def _is_made(found: Any) -> bool:
    """Whether what stands behind a name is a class, or one with its first argument, the URL of a server."""
    return inspect.isclass(found.func if isinstance(found, functools.partial) else found)


def _require_arguments(name: str, found: Any, arguments: dict[str, Any]) -> None:
    if not _is_made(found):
        raise UserError(f"reward {name!r} takes no args: it is not a class, got {', '.join(arguments)}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError:
        taken = inspect.signature(found).parameters
        lacking = [key for key, each in taken.items() if key not in arguments and each.default is each.empty
                   and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        wrong = next((key for key in arguments if key not in taken), None)
        raise UserError(f"reward {name!r} needs args: {{{', '.join(f'{key}: ...' for key in lacking)}}}: give them in "
                        "its rule, or to `flowgrpo score` by --args" if wrong is None else
                        f"reward {name!r} takes no argument {wrong!r}{nearest(wrong, list(taken))}") from None
    except ValueError:  # compiled classes may tell no signature
        pass


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _from_folder(name: str) -> Any:
    """`folder` or `folder:aspect`, of what `flowgrpo train-reward` wrote."""
    for folder, aspect in ((name, None), name.rpartition(":")[::2]):
        if folder and (Path(folder) / TRAINED).is_file():
            from flowgrpo.rewards import preference

            return preference.named(Path(folder), aspect)
    if Path(name).is_dir():
        raise UserError(f"reward {name!r}: no {TRAINED} in it: expected one of `flowgrpo train-reward`")
    raise UserError(f"unknown reward {name!r}{nearest(name, names())} (or path/to/file.py:function; what a "
                    "run was given from Python in no file is not found again)")


def _from_file(name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute:
        raise UserError(f"reward {name!r}: expected path/to/file.py:function")
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"reward {name!r}: no file at {file}")
    module = guarded(f"reward file {file} does not import", _module, path)
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"reward file {file} has no {attribute!r}{nearest(attribute, own)}")
    return getattr(module, attribute)


def _module(path: Path) -> Any:
    """Import a file by its path, once; modules beside it can be imported by it."""
    name = "flowgrpo_reward" + re.sub(r"\W", "_", str(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    _reading.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _reading.pop()
    return module


def reading() -> list[Path]:
    """The files of rewards that are being imported now, each by the one before it."""
    return _reading
