"""Checks of a method against a configuration: parts that do not go together are a UserError."""

from __future__ import annotations

import torch

from flowgrpo import objectives
from flowgrpo.advantages.baselines import NoBaseline
from flowgrpo.advantages.trackers import PriorBlend
from flowgrpo.config.schema import Config
from flowgrpo.curriculum.resampling import AdditionalGroups
from flowgrpo.errors import UserError, nearest
from flowgrpo.gaussian import log_prob
from flowgrpo.methods import reads, recorded_pairs, registry
from flowgrpo.methods.method import OF_TEXT, Method
from flowgrpo.methods.overlay import overlays, preset, with_parts
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.targets import (
    RewardGradient,
)
from flowgrpo.objectives.references import SelfTeacher, Teacher
from flowgrpo.samplers import plans
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.learned_noise import LearnedNoise
from flowgrpo.samplers.preview import require_choice
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.types import Context


def resolve(config: Config, process: str = "flow") -> Method:
    """Return the method a configuration asks for, its parts tried on the configuration's number of steps and samples.

    Raises UserError where they do not go together, and for a part that the user set and the method does not read.
    """
    base, train = preset(config.method), config.train
    requested = with_parts(base, config.parts)
    method = requested.on(process, given=config.parts)
    if config.preferences is not None:
        method = recorded_pairs.of(method)
    reads.require_set(base, requested, method, overlays(config.method))
    reads.require_types(method)
    _require_limits(config, method)
    _require_names(config, method)
    try:
        _require_credit(method, train.group)
        method.credit.advantage.require(list(config.rewards.values()) * len(method.rollout.strides))
        explorations = [] if process in OF_TEXT else _explorations(method, config, process)
        if method.credit.selection is not None:
            splits = explorations[0].listed if explorations else ()
            method.credit.selection(torch.zeros(1, train.group), Context(splits=splits))
        method.target.validate(method.rollout, method.credit, method.loss, explorations, train.group)
        _require_loss(config, method)
    except (TypeError, ValueError) as error:
        steps = "" if process in OF_TEXT else f"train.steps {train.steps}, "
        raise UserError(f"method {config.method} with {steps}train.group {train.group} and parts {config.parts}: "
                        f"{error}") from None
    return method


def _require_credit(method: Method, group: int) -> None:
    """ValueError for a group of one whose samples are compared, or for a measurement that the target does not have."""
    advantage, target = method.credit.advantage, method.target
    if group < 2 and not advantage.single:
        parts = registry.of_place("advantage")
        singles = [name for name in parts if getattr(registry.TYPES[name], "single", False) is True]
        raise ValueError(f"{type(advantage).__name__} compares the samples of a group: set train.group to 2 or more, "
                         f"or parts.advantage to one of {', '.join(singles)}")
    if isinstance(method.redraw, AdditionalGroups) and not isinstance(advantage, PriorBlend):
        raise ValueError("AdditionalGroups reads the prior values of PriorBlend: set parts.advantage: {type: "
                         "PriorBlend}")
    measures = sorted(method.needs & {"entropy", "lengths"})
    if measures and not method.for_tokens:
        raise ValueError(f"the credit reads {' and '.join(measures)} of completions: the steps of a denoiser all have "
                         "the same")
    if "reference" in method.needs and not target.has_logp:
        raise ValueError(f"the credit reads log-probabilities under the reference, and {target.trains} have none")


def _require_limits(config: Config, method: Method) -> None:
    """Raise UserError for constraints without a reward to raise, or with a part that weighs rewards itself."""
    limited = {name: rule.limit for name, rule in config.trained.items() if rule.limit is not None}
    if limited and len(limited) == len(config.trained):
        raise UserError(f"reward: {', '.join(limited)} has a limit, but nothing else is trained on: add a reward "
                        "with a weight")
    if limited and method.credit.advantage.adapts_weights:
        raise UserError(f"reward.{next(iter(limited))}.limit and parts.advantage "
                        f"{type(method.credit.advantage).__name__} both set the weights of rewards: leave one out")


def _require_names(config: Config, method: Method) -> None:
    """Raise UserError for a part that names an unknown reward."""
    for place, part in method.parts().items():
        for name in getattr(part, "rewards", ()):
            if name not in config.rewards:
                raise UserError(f"parts.{place}.rewards: unknown reward {name!r}{nearest(name, list(config.rewards))}")


def _require_loss(config: Config, method: Method) -> None:
    """Raise ValueError for parts of the loss that do not go with the method's others."""
    loss, teacher = method.loss, method.loss.reference
    if loss.rehearsal is not None and method.rollout.lag.most:
        raise ValueError("the samples of parts.rehearsal are drawn by the base model, and this method's by an old "
                         "policy that lags: set parts.lag: {most: 0}, or parts.rehearsal: null")
    if isinstance(loss.surrogate, objectives.KLOnly) and not objectives.is_active(loss.kl):
        raise ValueError("the surrogate KLOnly trains nothing beside a KL of weight 0: set parts.kl.weight")
    if loss.surrogate.reads_uniform and "entropy" in method.needs:
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} measures mean log-probabilities in place "
                         "of the entropy that the credit reads: leave one of them out")
    if loss.surrogate.reads_labels and not isinstance(method.credit.advantage, NoBaseline):
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} reads rewards as labels, and "
                         f"{type(method.credit.advantage).__name__} compares them: set parts.advantage: "
                         "{type: NoBaseline}")
    if loss.surrogate.reads_guided and not method.off_policy:
        answers = ", or parts.decoding.expert: 1" if method.for_tokens else ""
        raise ValueError(f"the surrogate {type(loss.surrogate).__name__} is about samples that another policy drew, "
                         f"and none are: set learned: false of parts.redraw or parts.expansion{answers}")
    if method.expansion is not None and not method.expansion.changes:
        raise ValueError("parts.expansion changes nothing: set its text, key or scale")
    if method.for_tokens:
        from flowgrpo.text.teacher_answers import TeacherAnswers

        if isinstance(method.redraw, TeacherAnswers) and not method.generation.decoding.expert:
            raise ValueError("TeacherAnswers puts answers into groups that fail: set parts.decoding.expert to their "
                             "number")
        _require_no_scale(method)
        return
    if getattr(method.redraw, "noise", 0):
        raise ValueError("parts.redraw.noise is about pictures that language models read, and a pipeline reads its "
                         "own: leave it out")
    if isinstance(teacher, SelfTeacher) and teacher.feedback in ("sibling", "contrast"):
        raise ValueError(f"parts.reference.feedback is {teacher.feedback}, texts of the group, and pictures have none: "
                         "set it to none, with a template such as '{prompt}, in sharp focus'")
    if isinstance(teacher, Teacher) and teacher.model and (config.memory.shard or config.memory.context_parallel > 1):
        raise ValueError("parts.reference.model is a teacher, which memory.shard and memory.context_parallel do not "
                         "share out: leave them out")


def _require_no_scale(method: Method) -> None:
    """Raise ValueError for a guidance scale of a language model."""
    for place in ("expansion", "redraw"):
        if (scale := getattr(getattr(method, place), "scale", None)) is not None:
            raise ValueError(f"parts.{place}.scale is {scale}, the guidance of pipelines, and a language model has "
                             "none: leave it out")


def substituted(config: Config, method: Method) -> str | None:
    """Return a line on the parts that a variance-preserving process has in place of the requested ones, or None."""
    if method.for_tokens or method.of_flows_alone():  # it stayed as it was
        return None
    requested = with_parts(preset(config.method), config.parts)
    before, after = requested.parts(), method.parts()
    changes = [f"{name} {before[name]} -> {after[name]}" for name in requested.of_flows_alone()]
    return f"the model is variance-preserving: {', '.join(changes)}" if changes else None


def _explorations(method: Method, config: Config, process: str) -> list[RolloutSpec]:
    """Return an epoch's explorations on the configuration's steps and samples. Raises ValueError where they, or the
    transitions of their trained steps, cannot be."""
    train, rollout = config.train, method.denoising
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    if process == "vp":
        grid = torch.linspace(0.01, 0.99, train.steps + 1)  # alpha-bars, as good as any for a trial
    if train.pack and not method.target.packs:
        raise ValueError("train.pack puts recorded steps into one call, and these have none of their own: set it to "
                         "false")
    if method.target.trains_steps and isinstance(rollout.plan, plans.NoSteps):
        raise ValueError("the plan NoSteps records no step to be trained: set parts.target: {type: NoisedFinals}, or "
                         "another plan")
    method.noised(grid, train.group, 0, config.seed)
    explorations = method.explorations(grid, train.group, train.shift, 0, config.seed)
    if rollout.preview:
        require_choice(explorations, rollout.preview.pool)
    if rollout.pruning is not None:
        rollout.pruning.require(explorations, train.group)
    if method.credit.advantage.reads_baseline and max(rollout.strides) > 1:
        raise ValueError("the advantage SameNoise compares samples finished on one grid: set parts.strides: [1]")
    if method.redraw is not None and len(explorations) > 1:
        raise ValueError(f"redraw is {type(method.redraw).__name__}, which goes with methods that sample a group per "
                         "prompt and compare its rewards: set parts.redraw: null")
    _require_learned_noise(method, explorations)
    for exploration in () if isinstance(method.target, RewardGradient) else explorations:
        for step in exploration.schedule.trained:
            log_prob(exploration.transition(x, x, exploration.grid, step), x)
    return explorations


def require_adapted(setup: Setup) -> None:
    """Raise UserError for options that conflict with the training of text encoders."""
    config, method = setup.config, setup.method
    if method.for_tokens or not method.denoising.adapted.encoders:
        return
    wrong = {"adapter.rank: 0, which trains all of a denoiser: set a rank": not config.adapter.rank,
             "adapter.dora, which is for denoisers: use false": config.adapter.dora,
             "memory.encoders: cpu, where they would be moved out of the graph: use keep":
                 config.memory.encoders != "keep",
             "memory.shard, whose processes meet in the denoiser alone: use false": config.memory.shard}
    for option in (option for option, applies in wrong.items() if applies):
        raise UserError(f"text encoders are trained (parts.adapted.encoders), which does not go with {option}")


def require_expert_reward(setup: Setup) -> None:
    """Raise UserError for a name of `parts.shaping.without` that is no reward of the run."""
    config, method = setup.config, setup.method
    if not method.for_tokens:
        return
    from flowgrpo.text.credit.expert_reward import ExpertReward

    shaping = method.credit.shaping
    for name in shaping.without if isinstance(shaping, ExpertReward) else ():
        if name not in config.rewards:
            raise UserError(f"parts.shaping.without names {name!r}, which is no reward of the run: expected names "
                            f"among {', '.join(config.rewards)}")


def _require_learned_noise(method: Method, explorations: list[RolloutSpec]) -> None:
    """ValueError where a method whose deviations differ from value to value has parts that read one per step."""
    if not isinstance(method.denoising.kernel, LearnedNoise):
        return
    grows = any(spec.schedule.noise for spec in explorations)
    wrong = {"a part that reads means or deviations (kl GaussianKL, Guard, SquaredErrorRatio, DivergenceMask, tuning) "
             "with a KL of samples, PlainRatio or none": method.reads_means,
             "step_weight NoiseLevel with Uniform": isinstance(method.loss.step_weight, objectives.NoiseLevel),
             "a plan whose noise grows with one whose noise does not": grows}
    for part in (part for part, applies in wrong.items() if applies):
        raise ValueError(f"the kernel LearnedNoise has a deviation for every latent value: replace {part}")
