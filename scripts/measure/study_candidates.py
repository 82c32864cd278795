"""Settings of the study of parts that are compared on validation prompts, with one seed of their own.

    python scripts/measure/study_parts.py --output runs/tried --side validation --seeds 1

Rows of study_rows.py with a setting have one of these.
"""

from typing import Any

from study_settings import (
    ALL,
    CPS,
    DEMONSTRATIONS,
    FIVE,
    GRADED,
    KNOWN,
    SCENES,
    STRICT,
    WINDOW,
    Options,
    Row,
)


def settings(name: str, claim: str, quantity: str, pool: str, fields: dict[str, dict[str, Any]]) -> tuple[Row, ...]:
    """Return a row per setting. fields: of `Row`, by the setting in words."""
    return tuple(Row(name, claim, quantity, pool, setting=words, **changed) for words, changed in fields.items())


def data(kind: str, balance: Options, **source: Any) -> dict[str, Any]:
    """Return the field of a supervised term on 16 recorded examples a step."""
    return {"parts": {"data": {"type": kind, "batch": 16, "balance": balance, **source}}}


SHOWN: Options = {"source": {"type": "Recorded", "path": DEMONSTRATIONS}}
NEAR, COVERED = "the policy stays near its base", "a divergence on the base's own samples keeps the policy near it"
KEPT = "images of a prompt stay different"
TAUGHT = "the cross-entropy of solutions, beside the loss and fading, teaches hard prompts"
CANDIDATES = (
    *settings("SampledKL", NEAR, "kl", ALL, {
        f"weight {weight}": {"parts": {"kl": {"weight": weight}}} for weight in (0.2, 0.5)}),
    *settings("Rehearsal", COVERED, "kl", ALL, {
        f"weight {weight}": {"parts": {"rehearsal": {"type": "Rehearsal", "weight": weight}}}
        for weight in (0.3, 1.0)}),
    *settings("EntropyBonus", "the policy keeps entropy", "entropy", ALL, {
        f"weight {weight}": {"method": "entropy_bonus", "parts": {"surrogate": {"weight": weight}}}
        for weight in (0.1, 0.2)}),
    *settings("Signed", "right samples pull a tenth as strongly as wrong ones push, so entropy stays", "entropy", ALL, {
        "0.1 and 1": {"parts": {"advantage": {"type": "Signed"}}}}),
    *settings("CategoryBandit", "prompts come from the category with the largest advantages: faster learning",
              "accuracy", KNOWN, {f"temperature {value}": {"parts": {"curriculum": {
                  "type": "CategoryBandit", "key": "source", "temperature": value}}} for value in (0.05, 0.1)}),
    *settings("rl_plus", "the solution joins its group, with a ratio to a mixture of both policies", "accuracy", FIVE, {
        "as published": {"method": "rl_plus"}}),
    *settings("chord", TAUGHT, "accuracy", FIVE, {
        f"peak {peak}": {"method": "chord"} | {"parts": {"data": {
            "batch": 16, "balance": {"peak": peak, "warmup": 2, "decay": 40}}}} for peak in (0.6, 0.9)}),
    *settings("GradientNorms", "steps on solutions and on rewards, drawn by the norms of their gradients, teach more",
              "accuracy", FIVE, {f"gamma {gamma}": data("NextToken", {"type": "GradientNorms", "gamma": gamma})
                                 for gamma in (1.0, 0.3)}),
    *settings("ValueTracker", "256 single samples with a tracked baseline teach more than 32 groups of 8", "accuracy",
              FIVE, {"group 1": {"parts": {"advantage": {"type": "ValueTracker"}},
                                 "more": {"train.prompts": 256, "train.group": 1}}}),
    *settings("GaussianKL", NEAR, "kl", SCENES, {
        f"weight {weight}": {"parts": {"kl": {"type": "GaussianKL", "weight": weight}}} for weight in (0.01, 0.1)}),
    *settings("diversity", KEPT, "diversity", SCENES, {
        f"weight {weight}": {"reward": GRADED | {"diversity": weight}} for weight in (0.5, 2.0)}),
    *settings("limit", "a reward that is bounded from below, in place of a weight, ends above its bound", "diversity",
              SCENES, {"diversity": {"reward": GRADED | {"diversity": {"limit": {"at_least": 0.25, "rate": 10.0}}}}}),
    *settings("scene_graded", "nearly right images earn too, so groups without a right one differ", "accuracy",
              SCENES, {"": {"base": {"reward": STRICT}, "reward": GRADED}}),
    *settings("FlowMatching", "right images, learned beside the reward, teach what samples rarely show", "accuracy",
              SCENES, {f"weight {weight}": data("FlowMatching", {"data": weight}, **SHOWN) for weight in (0.3, 1.0)}),
    *settings("rlg", "drawing with more than the tuned change raises the reward, without training", "accuracy", SCENES,
              {f"weight {weight}": {"rlg": weight} for weight in (1.5, 2.0)}),
    *settings("CPS", "noise that keeps the schedule's leaves no grain, so rewards tell more", "accuracy", SCENES, {
        "level 0.9": {"base": {"parts": {"kernel": None}}, "parts": {"kernel": CPS}}}),
    *settings("grpo_guard", "regulated ratios and equal weights of steps: faster learning", "accuracy", SCENES, {
        "": {"base": {"method": "mix_grpo"}, "method": "grpo_guard"}}),
    *settings("Sliding", "noise in the first half of the steps alone: faster learning for the same evaluations",
              "accuracy", SCENES, {"three of six steps": {
                  "base": {"parts": {"plan": {"type": "AllSteps"}}}, "parts": {"plan": {"type": "Sliding"} | WINDOW}}}),
)
