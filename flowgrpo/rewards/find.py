"""Lookup of rewards by name: registered, built in, in a file, in a trained reward's folder, or in a package."""

import difflib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flowgrpo import packages, trust
from flowgrpo.errors import LIKE, UserError, nearest
from flowgrpo.rewards.about import TRAINED, RewardFunction
from flowgrpo.rewards.remote import exchange
from flowgrpo.user_code import call_user_code, definitions, from_file, group_entry_points

T = TypeVar("T")

GROUP = "flowgrpo.rewards"
# Facts of the package's rewards by name, and their places, each "module:object": scripts/docs/build_docs.py writes the
# file from the decorators `flowgrpo.rewards.about.built_in`.
FACTS = json.loads(Path(__file__).with_name("built_in.json").read_text(encoding="utf-8"))
BUILT_IN: dict[str, str] = {name: facts["place"] for name, facts in FACTS.items()}
NEAR, SLIP = 5, 0.85  # names that a message lists; likeness at which it names one alone
LEARNED = "flowgrpo.contrib.learned_rewards.preference:reward_factory"  # of a folder of `flowgrpo reward train`
# Names of earlier releases.
ALIASES = {"pick_score": "pickscore", "hps_v2": "hpsv2.1", "hps_v3": "hpsv3", "image_reward": "imagereward",
           "video_reward": "videoalign", "vqa_score": "vqascore"}
REMOVED = {name: "it asked any model a question of ours: choose videoalign, VideoAlign's own weights, with args: "
                 f"{{axes: {{{axis}: 1}}}}, or judge with a template of yours"
           for name, axis in (("videoalign_vq", "VQ"), ("videoalign_mq", "MQ"), ("videoalign_ta", "TA"))}
REMOTE = "flowgrpo.serving.client:Remote"  # of http://host:port/NAME
ADAPTERS = {kind.lower(): f"flowgrpo.contrib.metrics:{kind}" for kind in ("Imscore", "Pyiqa", "Torchmetrics")}
_told: set[str] = set()  # aliases whose new names were printed
_registered: dict[str, tuple[Any, str]] = {}  # by name, with the file of Python in which it was registered


def reward(name: str) -> Callable[[T], T]:
    """Decorator: register a function, an object or a class as the reward `name`, replacing an earlier one."""
    if name in BUILT_IN or name in ALIASES:
        raise UserError(f"the reward name {name!r} is taken by a built-in reward: choose another")
    file = sys._getframe(1).f_globals.get("__file__") or ""

    def register(thing: T) -> T:
        _registered[name] = thing, str(Path(file).resolve()) if file.endswith(".py") else ""
        return thing

    return register


def place(name: str) -> str | None:
    """FILE.py:NAME of a registered reward, by which other commands load it; None without a file."""
    file = _registered[name][1] if name in _registered else ""
    return f"{file}:{name}" if file else None


def code_hashes(functions: Mapping[str, Any]) -> dict[str, str]:
    """For each reward that is in a user's file, or made of what is in some, a hash of what these define."""
    found = {}
    for name, function in functions.items():
        rule: Any = getattr(function, "rule", None)
        origins = [getattr(rule, "use", None) or place(name) or name, *trust.texts(getattr(rule, "args", None))]
        files = dict.fromkeys(file for origin in origins for file in trust.code_files(origin))
        found[name] = " ".join(definitions(file) for file in files if file.is_file())
    return {name: code for name, code in found.items() if code}


def edited_rewards(was: Mapping[str, str], functions: Mapping[str, Any]) -> list[str]:
    """Rewards whose file defines something else than at an earlier time. was: its `code_hashes`."""
    return [name for name, now in code_hashes(functions).items() if was.get(name, now) != now]


def names() -> list[str]:
    """Every name that `find` knows, except files."""
    return sorted({*_registered, *BUILT_IN, *group_entry_points(GROUP)})


def source(name: str) -> str:
    if name in _registered:
        return "registered"
    return "built in" if name in BUILT_IN else f"package {group_entry_points(GROUP)[name].dist.name}"


def find(name: str, arguments: dict[str, Any] | None = None) -> RewardFunction:
    """Reward of that name, ready to be called. arguments: those of its class.

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
    """Object behind a name, with a class not yet instantiated: `find` without loading a model."""
    if name in _registered:
        return _registered[name][0]
    name = present(name)
    if name in BUILT_IN:
        return call_user_code(f"reward {name!r} does not import", packages.load, BUILT_IN[name])
    if exchange.is_address(name):
        exchange.addresses(name)
        return functools.partial(packages.load(REMOTE), name)
    if ".py" in name:
        return from_file(name, "reward", lambda path: {registered: thing for registered, (thing, file)
                                                       in _registered.items() if file == str(path)})
    package, _, metric = name.partition(":")
    if metric and package in ADAPTERS:
        adapter = call_user_code(f"reward {name!r} does not import", packages.load, ADAPTERS[package])
        return functools.partial(adapter, metric=metric)
    if point := group_entry_points(GROUP).get(name):
        return call_user_code(f"reward {name!r} does not import", point.load)
    for folder, aspect in ((name, None), name.rpartition(":")[::2]):  # written by `flowgrpo reward train`
        if folder and (Path(folder) / TRAINED).is_file():
            return packages.load(LEARNED)(Path(folder), aspect)
    if Path(name).is_dir():
        raise UserError(f"reward {name!r}: no {TRAINED} in it: expected one of `flowgrpo reward train`")
    near = f": no folder {name} is here" if "/" in name else _near(name)
    raise UserError(f"unknown reward {name!r}{near} (`flowgrpo list rewards` lists all; or "
                    "path/to/file.py:function; a function that was given from Python has to be in a file)")


def present(name: str) -> str:
    """Present name of a reward; an earlier one is printed once. Raises UserError for a reward that was removed."""
    if name in REMOVED:
        raise UserError(f"the reward {name!r} was removed: {REMOVED[name]}")
    if name not in ALIASES:
        return name
    if name not in _told:
        _told.add(name)
        print(f"the reward {name!r} is now called {ALIASES[name]!r}", file=sys.stderr)
    return ALIASES[name]


def _is_made(thing: object) -> bool:
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


def _near(name: str) -> str:
    slips = difflib.get_close_matches(name, names(), NEAR, LIKE)
    if slips and difflib.SequenceMatcher(None, name, slips[0]).ratio() >= SLIP:
        return f": did you mean {slips[0]!r}?"
    parts = [known for known in names() if len(name) > 2 and (name in known or known in name)]
    near = [*dict.fromkeys([*slips, *parts])][:NEAR]
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""
