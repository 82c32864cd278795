"""Settings of the study of parts: both worlds, pools of prompts, and what a row is."""

from dataclasses import dataclass
from typing import Any

from flowgrpo.starter import EVAL
from flowgrpo.tools.bench import models

Options = dict[str, Any]  # dotted keys of a recipe

TEXTS: Options = {
    "model": "starter_text", "method": "grpo", "parts": {"kl": {"weight": 0.0}}, "reward": {"numeric_match": 1.0},
    "eval.rewards": ["numeric_match"], "text.max_tokens": 18, "adapter.rank": 16, "train.epochs": 12,
    "train.prompts": 32, "train.group": 8, "train.updates": 2, "train.micro_batch": 128, "train.lr": 1.5e-3,
    "train.schedule": "linear", "device": "cpu", "precision": "fp32", "tracker": "none", "eval.grid": 1}
CPS: Options = {"type": "CPS", "level": 0.9}
WINDOW: Options = {"size": 3, "order": "frozen"}
# The demo's settings for fewer epochs. The run's own evaluation has one prompt: study_measures.py has another.
IMAGES: Options = {key: value for key, value in models.common_settings("starter").items() if key != "eval.rewards"} | {
    "model": "starter", "method": "mix_grpo+grpo_guard", "parts": {"kernel": CPS, "plan": WINDOW}, "train.epochs": 16,
    "device": "cpu", "precision": "fp32", "tracker": "none", "eval.grid": 1, "eval.prompts": 1, "eval.steps": 10,
    "eval.guidance": EVAL["starter"]["guidance"]}
ALL, FIVE, KNOWN, SCENES = "all", "five", "known", "scenes"
POOLS = {ALL: "all", FIVE: "five numbers", KNOWN: "three in four mastered", SCENES: "scenes"}


@dataclass(frozen=True)
class Row:
    """One comparison of the study.

    name: of the part. method, parts and reward are what it changes in the run without; more: further options, dotted.
    base: what both runs change in the settings of their world; empty: the run without is that of the pool.
    claim: effect that its paper reports. quantity: one of `study_statistics.HIGHER`. pool: of prompts.
    setting: what was chosen on validation prompts, in words. rlg: weight by which the run with the part is drawn; it
    is the run without otherwise. seen: what the study found, for the page.
    """

    name: str
    claim: str
    quantity: str
    pool: str = ALL
    method: str = ""
    parts: Options | None = None
    reward: Options | None = None
    more: Options | None = None
    base: Options | None = None
    setting: str = ""
    rlg: float | None = None
    seen: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the name, the setting and the name of the pool, which no two rows share."""
        return self.name, self.setting, POOLS[self.pool]

    @property
    def world(self) -> Options:
        """Return the settings of all runs in the world of its prompts."""
        return IMAGES if self.pool == SCENES else TEXTS

    @property
    def without(self) -> Options:
        """Return the options of the run without the part."""
        return joined(self.world, self.base or {})

    @property
    def options(self) -> Options:
        """Return the options of the run with the part."""
        changes: Options = {"parts": self.parts or {}} | (self.more or {})
        if self.method:
            changes["method"] = f"{self.without['method']}+{self.method}"
        return joined(self.without, changes | ({"reward": self.reward} if self.reward else {}))


def joined(options: Options, changes: Options) -> Options:
    """Return options with changes: `parts` part by part, where None takes one away, any other key as a whole."""
    parts = options["parts"] | changes.get("parts", {})
    return options | changes | {"parts": {name: part for name, part in parts.items() if part is not None}}


REPLAYED: Options = {"replay": {"type": "GroupReplay"}}
ALONE: Options = {"parts": {"advantage": {"type": "NoBaseline"}}}
SINGLE: Options = ALONE | {"train.prompts": 256, "train.group": 1}
PARTIAL: Options = {"numeric_match": 1.0, "step_match": 0.0}
STRICT: Options = {"scene": 1.0}
GRADED: Options = {"scene": 1.0, "scene_graded": 1.0}
DEMONSTRATIONS = "{prompts}/scenes-images.jsonl"  # in the study's folder of prompts
