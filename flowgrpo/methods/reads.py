"""Parts of a method that its target reads. A part that the user set and that the run would not read is an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flowgrpo import objectives
from flowgrpo.advantages import baselines, gae, shaping, token_credit
from flowgrpo.contrib.consistency import parts as consistency
from flowgrpo.contrib.policy_shaping import parts as policy_shaping
from flowgrpo.contrib.variants import parts as variations
from flowgrpo.errors import UserError
from flowgrpo.methods import registry, supervised, targets
from flowgrpo.methods.method import Method
from flowgrpo.objectives import actor_critic, forward_process, kl, ratios, references, sequence_losses
from flowgrpo.samplers import plans
from flowgrpo.text import teacher_answers as teachers
from flowgrpo.text.credit import expert_reward, length_shaping, step_scores
from flowgrpo.text.losses import token_losses

# Parts that fewer targets read than their place says.
_TEXTS = (targets.Completions,)
TYPES: dict[type, tuple[type[targets.Target], ...]] = {
    **dict.fromkeys((ratios.SequenceRatio, ratios.CompletionRatio, objectives.DynamicClip, gae.ValueHead,
                     gae.OutcomeHead, variations.Variations,
                     sequence_losses.GroupLoss, token_losses.LikelihoodFloor, shaping.Overlong,
                     length_shaping.LengthSwitch, length_shaping.ExitDecay, consistency.LikelihoodConsistency,
                     token_credit.SegmentChain, token_credit.SegmentTree, token_credit.StepGroups,
                     token_credit.MergedSteps, token_credit.Exploring, step_scores.StepScores, supervised.NextToken,
                     supervised.PreferencePairs,
                     expert_reward.ExpertReward, teachers.TeacherAnswers, kl.SpanKL), _TEXTS),
    policy_shaping.PolicyShaping: (targets.Completions, targets.RecordedSteps, targets.JointDensity),
    sequence_losses.SampleLoss: (targets.Completions, targets.RecordedSteps, targets.NoisedFinals),
    **dict.fromkeys((references.Teacher, references.SelfTeacher, references.Soup), (
        targets.Completions, targets.RecordedSteps, targets.JointDensity, targets.NoisedFinals)),
    **dict.fromkeys((forward_process.OfNoised, ratios.Matching), (targets.NoisedFinals,)),
    **dict.fromkeys((actor_critic.ActorCritic, baselines.Paired, gae.Recall), (targets.LatentEdits,)),
    **dict.fromkeys((supervised.NoisedData, supervised.SelfAnswers), (
        targets.RecordedSteps, targets.JointDensity, targets.NoisedFinals, targets.RewardGradient)),
    baselines.SameNoise: (targets.RecordedSteps, targets.JointDensity),
    objectives.Guard: (targets.RecordedSteps, targets.LatentEdits),
    **dict.fromkeys((objectives.SquaredErrorRatio, objectives.InverseDelta, objectives.NoiseLevel),
                    (targets.RecordedSteps,)),
    objectives.RewardAscent: (targets.RewardGradient, targets.RelaxedTraces)}

# Plans by which every step draws noise, all of them or all but the last; a single step is Euler's of any solver.
_NOISY = {plans.AllSteps, plans.RandomSubset, plans.Branches, plans.GrowingTail, plans.LastSteps, plans.RandomLast,
          plans.LateStep}


def _by_critic(method: Method) -> bool:
    """Return True for a method of edits whose loss reads the critic alone."""
    return isinstance(method.loss.surrogate, actor_critic.ActorCritic) and not method.loss.surrogate.ratio


# Of a part that is read, what leaves it without effect: a test of the method, and its cure.
_IDLE: dict[str, tuple[Callable[[Method], bool], str]] = {
    "kernel": (lambda m: isinstance(m.denoising.plan, plans.NoSteps), "its plan NoSteps draws no noise"),
    **dict.fromkeys(("solver", "tail"), (
        lambda m: type(m.denoising.plan) in _NOISY, "its plan leaves no two deterministic steps in a row")),
    "reference": (lambda m: not objectives.is_active(m.loss.kl) and not m.compares_with_reference,
                  "it is read by a KL alone, whose weight is 0: set parts.kl.weight"),
    "advantage": (lambda m: (isinstance(m.target, targets.RewardGradient) or _by_critic(m)) and
                  m.credit.selection is None,
                  "its surrogate follows the reward itself or a critic of it, and its selection keeps all samples"),
    "shaping": (lambda m: isinstance(m.target, targets.RewardGradient) and m.credit.selection is None,
                "its surrogate follows the reward itself, and its selection keeps all samples")}


def names(method: Method) -> list[str]:
    """Return the names of the parts that the method's target reads, in the order of the groups."""
    return [name for name in method.parts() if name not in method.target.unread]


def places(method: Method) -> list[str]:
    """Return the names of the parts that are read and have an effect, in the order of the groups."""
    return [name for name in names(method) if not (name in _IDLE and _IDLE[name][0](method))]


def require_set(host: Method, requested: Method, method: Method, overlays: dict[str, tuple[Method, Method]]) -> None:
    """Raise UserError for a part that the user set and that the method does not read.

    host: what the presets make, over which `parts` made the one that is asked for; method: what a run makes of it.
    overlays: of presets that change another, by name,
    the method before and after; one is refused where nothing that it changes is read.
    """
    read = places(method)
    for name, (before, after) in overlays.items():
        changed = _changed(before, after)
        if changed and not set(changed) & set(read):
            raise UserError(refusal(method, changed[0], f"the preset {name}"))
    for name in _changed(host, requested):
        if name not in read:
            why = f" ({_IDLE[name][1]})" if name in _IDLE and name in names(method) else ""
            raise UserError(refusal(method, name, f"parts.{name} {_short(requested.parts()[name])}{why}"))


def refusal(method: Method, name: str, got: str) -> str:
    """Return the message for a part that the method does not read."""
    return (f"a method that trains {method.target.trains} reads no {name}: got {got}, leave it out; it has: "
            f"{', '.join(places(method))}")


def require_types(method: Method) -> None:
    """Raise UserError for a part that the target cannot read, though another one in its place can be read."""
    parts = method.parts()
    for name in places(method):
        part = parts[name]
        if part is not None and not _reads(type(part), name, method.target):
            fitting = [other for other in registry.of_place(name) if _reads(registry.TYPES[other], name, method.target)]
            by = next((f", which reads {' or '.join(sorted(_kinds(TYPES[kind])))}" for kind in type(part).__mro__
                       if kind in TYPES), "")
            raise UserError(f"parts.{name}: got {type(part).__name__}{by}, but the method trains "
                            f"{method.target.trains}: expected one of {', '.join(fitting)}")


def _kinds(by: tuple[type[targets.Target], ...]) -> set[str]:
    """Return the names of what these targets, and those made of them, train."""
    return {target.trains for kind in by for target in (kind, *kind.__subclasses__())}


def _reads(part: type, name: str, target: targets.Target) -> bool:
    by = next((TYPES[kind] for kind in part.__mro__ if kind in TYPES), (object,))  # what its nearest kind says
    return (isinstance(target, by)
            and issubclass(part, target.takes.get(name, object)))


def _changed(before: Method, after: Method) -> list[str]:
    old = before.parts()
    return [name for name, part in after.parts().items() if name not in old or old[name] != part]


def _short(part: Any) -> str:
    return type(part).__name__ if dataclasses.is_dataclass(part) else repr(part)
