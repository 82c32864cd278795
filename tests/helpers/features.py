"""Rare features of the training loop, and runs of tiny models with one or several of them.

A feature is the options that switch it on, as `tiny.config` takes them. `run` says what they make of a model: a hash
of its trained weights, and the metrics of each epoch. Two versions of the package are compared by these.
"""

import contextlib
import hashlib
import io
import itertools
import os
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from flowgrpo import rewards
from flowgrpo.config import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies import build
from flowgrpo.train import Trainer
from flowgrpo.training.checks import check
from tests.helpers import tiny, tiny_text
from tests.helpers.threads import one_thread

Options = dict[str, Any]

KINDS = ("image", "text")
# What every run has besides: an image run 4 steps of FLUX at 16 x 16, two of them trained; a text run 6 tokens.
BASE: dict[str, Options] = {
    "image": dict(method="mix_grpo", parts={"plan": {"size": 2}}, train__steps=4, image__height=16,
                  image__width=16, image__call={"max_sequence_length": 16}, train__lr=1e-3),
    "text": dict(method="grpo", parts={}, text__max_tokens=6, train__lr=1e-2)}
USUAL: Options = dict(model="tiny", reward={"score": 1.0}, train__micro_batch=8)
KL = {"weight": 0.1}

IMAGE: dict[str, Options] = {
    "phases_of_prompts": {"phases": [{"at": 1, "when": {"task": "b"}, "carry": 0.5}]},
    "phases_of_sizes": {"phases": [{"at": 1, "set": {"image.sizes": [[8, 8]]}}]},
    "two_sizes": {"image__sizes": [[8, 8], [16, 16]]},
    "staleness": {"train__staleness": 1},
    "extrapolate": {"train__extrapolate": 2, "train__extrapolate_every": 2},
    "dynamic_sampling": {"parts": {"redraw": {"type": "DynamicSampling"}}},
    "hints": {"parts": {"redraw": {"type": "Hints", "text": "{prompt}, {hint}", "fail": 0.2}}},
    "expansion": {"parts": {"expansion": {"type": "Expansion", "text": "{prompt}, red"}}},
    "self_teacher": {"parts": {"reference": {"type": "SelfTeacher", "feedback": "none", "template": "{prompt}, old"},
                               "kl": KL}},
    "rehearsal": {"parts": {"rehearsal": {"type": "Rehearsal", "weight": 0.1}}},
    "distillation": {"parts": {"distil": {"type": "DistributionMatching", "batch": 4, "fake_updates": 1}}},
    "consistency": {"parts": {"distil": {"type": "ConsistencyDistillation", "batch": 4}}},
    "group_replay": {"parts": {"replay": {"type": "GroupReplay", "more": 0.5}}},
    "supervised": {"parts": {"data": {"type": "FlowMatching", "source": {"type": "PassRate", "right": 0.1,
                                                                         "failed": False, "mastered": True}}}},
    "supervised_apart": {"parts": {"data": {"type": "FlowMatching", "apart": True, "batch": 2,
                                            "source": {"type": "PassRate", "right": 0.1, "failed": False,
                                                       "mastered": True}}}},
    "edits": {"method": "expo", "parts": {"edit": {"width": 8, "depth": 1}, "value": {"steps": 2, "batch": 4}}},
    "learned_noise": {"method": "reinflow", "parts": {"kernel": {"width": 8}}},
    "limit": {"reward": {"further": {"limit": {"at_least": 0.9, "rate": 1.0}}}},
    "base_pictures": {"reward": {"far": 0.5}},
    "categories": {"parts": {"curriculum": {"type": "CategoryBandit"}}},
    "progress": {"parts": {"progress": {"type": "Progress"}}},
    "previews": {"parts": {"preview": {"type": "Preview", "pool": 6, "steps": 2, "precision": "full"},
                           "roots": None}},
    "reference_credit": {"parts": {"advantage": {"type": "Confidence"}}},
    "inner_epochs_ema": {"train__inner_epochs": 2, "train__ema": 0.5, "eval__weights": "ema"},
    "one_pass": {"train__one_pass": True},
    "step_size": {"train__lr": {"updates": 2}},
    "guard": {"guard__window": 2},
}

TEXT: dict[str, Options] = {
    "phases_of_prompts": {"phases": [{"at": 1, "when": {"task": "b"}, "carry": 0.5}]},
    "phases_of_lengths": {"phases": [{"at": 1, "set": {"text.max_tokens": 3}}]},
    "staleness": {"train__staleness": 1},
    "over_provision": {"text__over_provision": 0.5, "text__chunk": 2},
    "extrapolate": {"train__extrapolate": 2, "train__extrapolate_every": 2},
    "dynamic_sampling": {"parts": {"redraw": {"type": "DynamicSampling"}}},
    "hints": {"parts": {"redraw": {"type": "Hints", "text": "{prompt}{hint}", "fail": 0.2}}},
    "expansion": {"parts": {"expansion": {"type": "Expansion", "text": "{prompt}7"}}},
    "self_teacher": {"parts": {"reference": {"type": "SelfTeacher", "template": "{prompt}{right}="}, "kl": KL}},
    "rehearsal": {"parts": {"rehearsal": {"type": "Rehearsal", "weight": 0.1}}},
    "group_replay": {"parts": {"replay": {"type": "GroupReplay", "more": 0.5}}},
    "chord": {"parts": {"data": {"type": "NextToken", "balance": {"type": "WarmupCosine", "warmup": 0},
                                 "token_weight": {"type": "Uncertain"}}}},
    "relift": {"parts": {"data": {"type": "NextToken", "apart": True, "batch": 1,
                                  "source": {"type": "PassRate", "solved": False, "right": 0.1}}}},
    "pairs": {"parts": {"data": {"type": "PreferencePairs", "source": {"path": tiny_text.PAIRS}}}},
    "critic": {"parts": {"value": {"type": "ValueHead", "decay": 0.95}, "advantage": {"type": "NoBaseline"}}},
    "outcome_critic": {"parts": {"value": {"type": "OutcomeHead", "bounds": [0.1]}}},
    "quality_head": {"parts": {"draws": {"type": "PrunedDraws", "tokens": 1, "right": 0.1}}},
    "limit": {"reward": {"further": {"limit": {"at_least": 0.9, "rate": 1.0}}}},
    "limited_cost": {"reward": {"cost": {"limit": {"at_most": 0.05, "rate": 1.0}}}},
    "variants": {"parts": {"curriculum": {"type": "Variations", "right": 0.1, "share": 1.0,
                                          "template": "{prompt}{solution}"}}},
    "norms": {"parts": {"curriculum": {"type": "GradientVariance", "each": 2, "right": 0.1},
                        "advantage": {"type": "Pooled"}}},
    "entropy_credit": {"parts": {"spread": {"type": "Exploring"}}},
    "drift_credit": {"parts": {"advantage": {"type": "ValueTracker"}}},
    "inner_epochs_ema": {"train__inner_epochs": 2, "train__ema": 0.5, "eval__weights": "ema"},
    "step_size": {"train__lr": {"updates": 2}},
    "guard": {"guard__window": 2},
}
TABLES = {"image": IMAGE, "text": TEXT}
TEXTS = {"image": tiny.PROMPTS, "text": tiny_text.PROMPTS}
FLAT = {"red", "a cat", "1+2=", "7+8="}  # prompts whose samples all score 0, one of each task


class Result(NamedTuple):
    """Outcome of a run. weights: hexadecimal SHA-256 of the trained weights; metrics: one dictionary per epoch."""

    weights: str
    metrics: list[dict[str, Any]]


def score(outputs: Any, prompts: list[str]) -> list[float]:
    """Red of an image, or share of digits in a text, 0 to 1; 0 for prompts of FLAT."""
    values = tiny.red(outputs, prompts).tolist() if isinstance(outputs, torch.Tensor) \
        else [sum(letter in "0123456789" for letter in text) / 6 for text in outputs]
    return [0.0 if prompt in FLAT else value for value, prompt in zip(values, prompts)]


def further(outputs: Any, prompts: list[str]) -> list[float]:
    """Blue of an image, or length of a text in units of 6 letters."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:, 2].mean((1, 2)).tolist()
    return [len(text) / 6 for text in outputs]


def far(images: torch.Tensor, prompts: list[str], base: torch.Tensor | None = None) -> list[float]:
    """Distance of an image to that of the base model."""
    return [0.0] * len(prompts) if base is None else (images - base).abs().flatten(1).mean(1).tolist()


far.base = True  # type: ignore[attr-defined]
FUNCTIONS = {"score": score, "further": further, "cost": further, "far": far}


def prompts(kind: str) -> list[Prompt]:
    """Training prompts of two tasks, with an answer, a solution and hints."""
    return [Prompt(text, metadata={"task": "ab"[place % 2], "answer": "7", "solution": "1+2",
                                   "hints": ["1", "2"] if kind == "text" else ["old", "cat"]})
            for place, text in enumerate(TEXTS[kind])]


def shared_key(kind: str, *names: str) -> str | None:
    """Return a key or part that two of the features set differently, so that they exclude each other; None: none."""
    for one, other in itertools.combinations((TABLES[kind][name] for name in names), 2):
        if key := _shared(one, other):
            return key
    return None


def _shared(one: Options, other: Options) -> str | None:
    for key in one.keys() & other.keys() - {"method"}:
        if key in ("parts", "reward"):
            if inner := _shared(one[key], other[key]):
                return f"{key}.{inner}"
        elif one[key] != other[key]:
            return key
    return None


def pairs(kind: str) -> list[tuple[str, str]]:
    """Return the pairs of features of a kind that do not exclude each other, in the table's order."""
    return [pair for pair in itertools.combinations(TABLES[kind], 2) if shared_key(kind, *pair) is None]


def exclusive(kind: str) -> list[tuple[str, str]]:
    """Return the pairs of features of a kind that set one key or part differently."""
    return [pair for pair in itertools.combinations(TABLES[kind], 2) if shared_key(kind, *pair) is not None]


def options(kind: str, *names: str) -> Options:
    """Return the options of a run with these features.

    Methods of features are joined by + and replace the base's; parts and rewards are merged by name. ValueError for
    features that exclude each other.
    """
    if key := shared_key(kind, *names):
        raise ValueError(f"{' and '.join(names)} both set {key}")
    given = [TABLES[kind][name] for name in names]
    found = USUAL | BASE[kind]
    for each in given:
        found = found | {key: found[key] | value if key in ("parts", "reward") else value
                         for key, value in each.items()}
    if methods := [each["method"] for each in given if "method" in each]:
        own = {name: part for each in given for name, part in each.get("parts", {}).items()}
        found |= {"method": "+".join(methods), "parts": own}
    return found


def configuration(kind: str, *names: str, epochs: int) -> Config:
    """Return the configuration of a run with these features."""
    make = tiny.config if kind == "image" else tiny_text.config
    nowhere = f"nowhere{os.getpid()}"  # the lock of a run's folder is held for a moment: not by two test processes
    return make(nowhere, train__epochs=epochs, **options(kind, *names))


def trainer(kind: str, *names: str, epochs: int) -> Trainer:
    """Return a checked run with these features, before its first epoch. Raises UserError where they are refused."""
    settings, listed = configuration(kind, *names, epochs=epochs), prompts(kind)
    loaded = tiny.flux() if kind == "image" else tiny_text.model()
    functions = {name: FUNCTIONS[name] for name in settings.trained}
    check(settings, pipe=loaded, functions=functions, prompts=listed)
    torch.manual_seed(settings.seed)
    policy = build.make_policy(settings, torch.device("cpu"), loaded)
    return Trainer(settings, Accelerator(cpu=True), policy, rewards.compose(settings.trained, None, functions),
                   (listed, []))


def run(kind: str, *names: str, epochs: int) -> Result:
    """Train a tiny model with these features for so many epochs. Raises UserError where they are refused."""
    with one_thread(), contextlib.redirect_stdout(io.StringIO()):  # hints of the run
        made, metrics = trainer(kind, *names, epochs=epochs), []
        for _ in range(epochs):
            metrics.append(timeless(made.run_epoch()))
            made.epoch += 1
        return Result(digest(made), metrics)


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without durations and rates."""
    return {key: value for key, value in metrics.items() if "second" not in key}


def digest(made: Trainer) -> str:
    """Return the hexadecimal SHA-256 of all trained weights, with their names, in sorted order."""
    found = hashlib.sha256()
    for name, tensor in sorted(made.policy.weights.named.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
