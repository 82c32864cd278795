"""Rows of the study of parts, which are trained on with and without their part and measured on held-out prompts.

Runs without are shared by all rows of a pool of prompts. Rows with a setting have one of study_candidates.py; held-out
prompts choose nothing.
"""

from dataclasses import replace

from study_candidates import CANDIDATES
from study_settings import ALL, ALONE, FIVE, KNOWN, PARTIAL, REPLAYED, SCENES, SINGLE, Row

FRESH = "fresh prompts replace groups without variance, so an update teaches more"
RECORDED = "recorded groups replace those without variance: an epoch teaches more, at no cost of sampling"
CATEGORY = "prompts come from the category with the largest advantages: faster learning"


def chosen(name: str, setting: str, pool: str, seen: str) -> Row:
    """Return the candidate of this name, setting and pool, with what the study found."""
    [row] = [row for row in CANDIDATES if (row.name, row.setting, row.pool) == (name, setting, pool)]
    return replace(row, seen=seen)


ROWS = (
    Row("DynamicSampling", FRESH, "accuracy", method="dynamic_sampling", more={"train.epochs": 10},
        seen="About a quarter of the groups agree here. For the same tokens there were 20 updates in place of 24, "
             "and every seed lost, 0.02 to 0.06: the better updates did not pay for the missing ones."),
    Row("GroupReplay", RECORDED, "accuracy", parts=REPLAYED,
        seen="Nothing shown: it replaces about a quarter of the groups, by ones whose prompts the run has trained."),
    Row("CategoryBandit", CATEGORY, "accuracy", parts={"curriculum": {"type": "CategoryBandit", "temperature": 0.2}},
        seen="It drew fewer sums of two numbers, whose mean advantages are half as large, but the others are "
             "alike. One seed gained, two lost."),
    Row("relift", "prompts that all samples fail are learned from their solutions", "accuracy", FIVE, "relift",
        {"data": {"batch": 16}},
        seen="Every seed gained, 0.09 to 0.31, for 1 % more tokens, most where the run without was weakest."),
    Row("chord", "the cross-entropy of solutions, beside the loss and fading, teaches hard prompts", "accuracy", FIVE,
        "chord", {"data": {"batch": 16, "balance": {"peak": 0.3, "warmup": 8, "decay": 40}}},
        seen="Every seed gained, 0.08 to 0.17. The seeds of the run without lie further apart than that."),
    Row("visurf", "the solution is a sample of its group, so that no group fails", "accuracy", FIVE, "visurf",
        seen="A large effect, 0.16 to 0.45: hardly a group agrees any more, where a third did."),
    Row("step_match", "right partial sums earn too, so groups without a right answer differ", "accuracy", FIVE,
        reward={"numeric_match": 1.0, "step_match": 0.5},
        seen="Every seed gained, 0.07 to 0.29, most where the run without was weakest."),
    Row("StepScores", "a process reward gives every step a credit of its own", "accuracy", FIVE,
        parts={"spread": {"type": "StepScores", "ends": ";", "rewards": ["step_match"]}}, reward=PARTIAL,
        seen="Every seed gained, 0.12 to 0.33. It was not tested against `step_match`, which uses the same scores."),
    Row("SampledKL", "the policy stays near its base", "kl", parts={"kl": {"weight": 0.04}},
        seen="With GRPO's weight of 0.04 two seeds ended nearer to the base, one did not. Against 24 large "
             "updates the weight is small."),
    Row("EntropyBonus", "the policy keeps entropy", "entropy", method="entropy_bonus",
        seen="The weight of 0.01 moved the entropy of a completion by 0.02 nats, up or down."),
    Row("Advantage", "the group's mean and deviation make a baseline: less variance", "accuracy",
        parts={"advantage": None}, base=ALONE,
        seen="Without a baseline one seed lost 0.16, but one gained 0.03: with rewards of 0 and 1 every right "
             "sample is pulled up, which is enough here."),
    Row("ValueTracker", "the tracked rate of a prompt is the baseline of a single sample", "accuracy",
        parts={"advantage": {"type": "ValueTracker"}}, base=SINGLE,
        seen="The run without ends at 0.93, above all runs with groups of 8: 256 different prompts an epoch "
             "taught more than 32. A prompt is drawn twice in a run, so its tracked rate is still near the "
             "prior."),
    Row("GroupReplay", RECORDED, "accuracy", KNOWN, parts=REPLAYED,
        seen="Half of the groups agree here, yet seeds gained 0.02 at most: what is replayed was trained before."),
    Row("CategoryBandit", CATEGORY, "accuracy", KNOWN,
        parts={"curriculum": {"type": "CategoryBandit", "key": "source", "temperature": 0.2}},
        seen="It drew the recipe's prompts for 56 to 77 % of the groups, against a quarter. Every seed gained, 0.01 to "
             "0.14, too unevenly for three seeds."),
    Row("Rehearsal", "a divergence on the base's own samples keeps the policy near it", "kl",
        parts={"rehearsal": {"type": "Rehearsal"}},
        seen="Every seed ended nearer to the base, by 0.05 to 0.29 nats, at accuracies from 0.06 below to 0.01 above."),
    Row("Hints", "groups that all fail are drawn again behind half of the solution: hard prompts are learned",
        "accuracy", FIVE, "scaf_grpo", {"redraw": {"text": "{prompt}{hint}"}}, more={"train.epochs": 10},
        seen="Nothing shown. Behind a hint a group trains the second half of a solution alone, and two epochs "
             "fewer pay for its samples."),
    chosen("rl_plus", "as published", FIVE,
           "Two seeds gained 0.10 and 0.18, one lost 0.04. `visurf`, which has the same answers, gained more."),
    chosen("ValueTracker", "group 1", FIVE,
           "Every seed gained, 0.03 to 0.45, for nearly twice the tokens."),
    chosen("SampledKL", "weight 0.2", ALL,
           "Every seed ended nearer to the base, by 0.23 to 0.56 nats. Accuracy fell by 0.03 in the mean."),
    chosen("Rehearsal", "weight 0.3", ALL,
           "Every seed ended nearer to the base, by 0.26 to 0.41 nats. Accuracy fell by 0.03 in the mean."),
    chosen("GradientNorms", "gamma 1.0", FIVE,
           "The largest effect of all rows: every seed gained, 0.20 to 0.46, for 8 % more tokens."),
    chosen("chord", "peak 0.6", FIVE,
           "With twice the peak of the row above every seed gained, 0.23 to 0.36."),
    chosen("EntropyBonus", "weight 0.1", ALL,
           "Ten times the weight moved every seed up, by 0.10 to 0.20 nats, and p is just above 0.05."),
    chosen("Signed", "0.1 and 1", ALL,
           "Every seed kept more entropy, 0.18 to 0.28 nats, at an accuracy that is 0.14 lower."),
    chosen("CategoryBandit", "temperature 0.05", KNOWN,
           "Every seed gained, 0.04 to 0.20, for 19 % more tokens."),
    chosen("GaussianKL", "weight 0.1", SCENES,
           "Nothing moved: the run without ends at 0.02, which is little to hold back."),
    chosen("diversity", "weight 2.0", SCENES,
           "Every seed kept more, 0.004 to 0.011 of 0.24, at an accuracy that is 0.06 lower."),
    chosen("limit", "diversity", SCENES,
           "Every seed kept more, 0.004 to 0.008 of 0.24, at an accuracy that is 0.07 lower. None reached the "
           "bound of 0.25."),
    chosen("scene_graded", "", SCENES,
           "Nothing shown: single images are right half of the time, so few groups of 24 have none."),
    chosen("FlowMatching", "weight 0.3", SCENES,
           "Every seed lost, 0.11 to 0.18. The cause was not looked into: the data term may "
           "outweigh the reward's."),
    chosen("rlg", "weight 1.5", SCENES,
           "Every seed gained, 0.02 to 0.07, too little for three seeds."),
    chosen("CPS", "level 0.9", SCENES,
           "Nothing shown: seeds differ more than the kernels do."),
    chosen("grpo_guard", "", SCENES,
           "Seeds gained 0.00 to 0.04. With one update an epoch its clip never acts, and what differs are the "
           "weights of steps."),
    chosen("Sliding", "three of six steps", SCENES,
           "No difference shown, for 77 % of the evaluations."),
)
