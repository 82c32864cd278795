"""Targets: what the loss of a method scores. One class each, with the parts that it leaves unread and those that it
takes. `rollouts.targets` and `text.rollouts.targets` sample, record and replay them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flowgrpo import objectives
from flowgrpo.advantages.baselines import Paired
from flowgrpo.methods.groups import Credit, Denoising, Loss, TextGeneration
from flowgrpo.methods.parts import Backprop, Times
from flowgrpo.objectives import best_path
from flowgrpo.objectives.actor_critic import ActorCritic
from flowgrpo.samplers import latent_edits, noised_finals, reward_gradient
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.text.credit.expert_reward import ExpertReward
from flowgrpo.text.losses import token_losses
from flowgrpo.text.samplers import gumbel_softmax, pruned
from flowgrpo.text.samplers.decoding import Unmasking


@dataclass(frozen=True)
class Target:
    """Targets of a method: the decisions that its loss scores.

    trains: its name in messages.
    of: the rollouts that have it.
    unread: fields of the other groups that it leaves without effect.
    takes: by such a field, the only kind of part that fits.
    trains_steps: True if it needs steps that draw noise.
    packs: True if `train.pack` can put its decisions into one call.
    follows_reward: True if it is the reward's gradient.
    scores_sampling: True if old scores are those of sampling; False: a score of finished samples.
    """

    trains: ClassVar[str]
    of: ClassVar[type] = Denoising
    unread: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[dict[str, type]] = {}
    trains_steps: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    follows_reward: ClassVar[bool] = False
    scores_sampling: ClassVar[bool] = True

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        """Raise ValueError for parts that do not go together.

        explorations: an epoch's of a pipeline, none of a language model. group: samples per prompt.
        """


_OF_TEXT = frozenset({"spread", "reduction"})  # one decision per sample: nothing to spread or to average


@dataclass(frozen=True)
class RecordedSteps(Target):
    """Stochastic steps of a rollout, by their log-probability.

    tuning: a supervised term towards the best sample.
    """

    tuning: best_path.LayerTuning = best_path.LayerTuning()

    trains: ClassVar[str] = "recorded steps"
    trains_steps: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = frozenset({"reduction", "value"})
    packs: ClassVar[bool] = True

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        if credit.progress is not None and len(rollout.strides) > 1:
            raise ValueError("progress is measured along one grid, and strides finish samples on several: set "
                             "parts.strides: [1], or progress: null")


@dataclass(frozen=True)
class JointDensity(Target):
    """All recorded steps of a sample as one decision, by their joint density (ReinFlow, 2505.22094)."""

    trains: ClassVar[str] = "a joint density"
    trains_steps: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "strides", "step_weight",
                                                   "rehearsal", "replay"}

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        if any(spec.splits for spec in explorations):
            raise ValueError("a joint density takes samples that share no state: set parts: {roots: null} and a plan "
                             "without splits")
        if loss.reads_means:
            raise ValueError("a joint density has no mean: set parts.kl: {type: SampledKL}, or its weight to 0")


@dataclass(frozen=True)
class NoisedFinals(Target):
    """Final states, noised to drawn times and scored by the old policy (DiffusionNFT and its variants).

    times: when they are noised.
    """

    times: Times = noised_finals.GridTimes()

    trains: ClassVar[str] = "noised finals"
    scores_sampling: ClassVar[bool] = False
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "strides", "replay"}
    packs: ClassVar[bool] = True


@dataclass(frozen=True)
class RecordedPairs(NoisedFinals):
    """Noised finals of recorded pairs, without sampling: the target of a run with `preferences`."""

    trains: ClassVar[str] = "recorded pairs"
    unread: ClassVar[frozenset[str]] = NoisedFinals.unread | {"kernel", "plan", "solver", "tail", "roots", "redraw",
                                                                "expansion", "pruning", "rehearsal"}


@dataclass(frozen=True)
class RewardGradient(Target):
    """Reward gradient, followed back through the last denoising steps (DRaFT, AlignProp, ReFL).

    backprop: how the steps from the plan's one on become the data.
    """

    backprop: Backprop = reward_gradient.Unroll()

    trains: ClassVar[str] = "a reward's gradient"
    trains_steps: ClassVar[bool] = True
    follows_reward: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "pruning", "tail", "strides", "step_weight",
                                                   "kl", "reference", "redraw", "expansion", "rehearsal",
                                                   "replay"}
    takes: ClassVar[dict[str, type]] = {"surrogate": objectives.RewardAscent, "log_ratio": objectives.PlainRatio}

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        if len(explorations) > 1 or len(explorations[0].schedule.trained) > 1 or explorations[0].splits:
            raise ValueError("a reward's gradient takes a plan with one trained step, where its graph begins, and "
                             "samples that share no noise: set parts: {plan: {type: LastSteps}, roots: null}")


@dataclass(frozen=True)
class LatentEdits(Target):
    """Edits of final states by a small policy, and the critic's choice among them and their bases (EXPO, 2507.07986).

    edit: the small policy.
    """

    edit: latent_edits.Edit = latent_edits.Edit()

    trains: ClassVar[str] = "latent edits"
    scores_sampling: ClassVar[bool] = False
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"progress", "strides", "preview", "pruning", "lag", "adapted",
                                                   "step_weight", "rehearsal", "data", "replay"}
    takes: ClassVar[dict[str, type]] = {"surrogate": ActorCritic}

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        assert isinstance(loss.surrogate, ActorCritic), "the only kind that fits"
        if loss.surrogate.ratio and self.edit.acting != "pairs":
            raise ValueError(f"surrogate.ratio is {loss.surrogate.ratio:g}, but samples are chosen by the critic: set "
                             "parts.edit.acting: pairs, or surrogate: {ratio: 0, through: 1}")
        if loss.surrogate.ratio and not isinstance(credit.advantage, Paired):
            raise ValueError(f"the advantage {type(credit.advantage).__name__} gives bases some, which no policy drew: "
                             "set parts.advantage: {type: Paired}, or surrogate: {ratio: 0, through: 1}")
        if not loss.surrogate.critic and credit.value is None:
            raise ValueError("surrogate.critic is 0 and there is no value part: the critic would learn nothing, set "
                             "parts.value: {type: Recall}")
        if group % 2 and self.edit.acting == "pairs":
            raise ValueError(f"train.group is {group}: half of the samples are bases, the others their edits: use an "
                             "even number")


@dataclass(frozen=True)
class Completions(Target):
    """Tokens of completions, by their log-probability."""

    trains: ClassVar[str] = "completions"
    of: ClassVar[type] = TextGeneration
    unread: ClassVar[frozenset[str]] = frozenset({"step_weight", "progress"})

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        _require_samples(rollout, loss, group)
        if credit.value is not None and credit.spread is not None:
            raise ValueError(f"value and spread ({type(credit.spread).__name__}) both make advantages of tokens: set "
                             "parts.spread: null, or leave the value model out")
        if group % rollout.draws.leaves:
            raise ValueError(f"draws is {type(rollout.draws).__name__} with {rollout.draws.leaves} leaves: expected a "
                             "train.group that is a multiple of them")
        if isinstance(rollout.draws, pruned.PrunedDraws) and (rollout.decoding.greedy or credit.value is not None):
            raise ValueError("draws is PrunedDraws, whose samples are all drawn by lot and whose head is the run's "
                             "only one: set parts.decoding.greedy: 0 and parts.value: null, or leave it out")
        mixed = isinstance(loss.surrogate, (token_losses.ExpertMixture, token_losses.Calibrated))
        of_experts = {f"surrogate {type(loss.surrogate).__name__}": mixed,
                      "shaping ExpertReward": isinstance(credit.shaping, ExpertReward)}
        for part in (part for part, is_set in of_experts.items() if is_set and not rollout.decoding.expert):
            raise ValueError(f"the {part} is about answers that join their group: set parts.decoding.expert: 1")
        spreads = credit.spread or credit.value
        if loss.surrogate.reads_advantages and spreads is not None:
            raise ValueError(f"the surrogate {type(loss.surrogate).__name__} reads one advantage per completion, but "
                             f"{type(spreads).__name__} spreads it: set parts.{'spread' if credit.spread else 'value'}"
                             ": null")


@dataclass(frozen=True)
class RecordedCompletions(Completions):
    """Tokens of recorded pairs of texts, without sampling: the target of a run with `preferences`.
    """

    trains: ClassVar[str] = "recorded pairs of texts"
    unread: ClassVar[frozenset[str]] = Completions.unread | {"draws", "spread", "value", "redraw", "replay",
                                                             "rehearsal"}


@dataclass(frozen=True)
class Traces(Completions):
    """Tokens of an unmasking's trace: what completions are of a masked language model."""

    trains: ClassVar[str] = "traces of an unmasking"


@dataclass(frozen=True)
class RelaxedTraces(Target):
    """Reward gradient, followed back through the unmasking of an answer (DRAKES, 2410.13643).

    relaxation: what stands for drawn tokens.
    """

    relaxation: gumbel_softmax.GumbelSoftmax = gumbel_softmax.GumbelSoftmax()

    trains: ClassVar[str] = "a relaxed unmasking"
    follows_reward: ClassVar[bool] = True
    of: ClassVar[type] = TextGeneration
    unread: ClassVar[frozenset[str]] = frozenset({"step_weight", "reduction", "kl", "reference", "draws", "spread",
                                                  "redraw", "expansion", "value", "progress", "rehearsal",
                                                  "data", "replay"})
    takes: ClassVar[dict[str, type]] = {"surrogate": objectives.RewardAscent, "log_ratio": objectives.PlainRatio,
                                        "decoding": Unmasking}

    def validate(self, rollout: Denoising | TextGeneration, credit: Credit, loss: Loss,
                 explorations: Sequence[RolloutSpec], group: int) -> None:
        _require_samples(rollout, loss, group)
        decoding = rollout.decoding
        assert isinstance(decoding, Unmasking), "the only kind that fits"
        fits = {"order: random": decoding.order == "random", "shrink: 1": decoding.shrink == 1,
                "greedy: 0": not decoding.greedy,
                "top_p: 1, top_k: 0, min_p: 0": (decoding.top_p, decoding.top_k, decoding.min_p) == (1, 0, 0)}
        if wrong := [cure for cure, fit in fits.items() if not fit]:
            raise ValueError("a process whose KL is known chooses places by lot and cuts no token: set parts.decoding: "
                             f"{{{', '.join(wrong)}}}")


# Targets whose decisions have a log-probability, under the reference as well.
WITH_LOGP = (RecordedSteps, Completions)


def _require_samples(rollout: Denoising | TextGeneration, loss: Loss, group: int) -> None:
    if loss.reads_means:
        raise ValueError("a part reads means of transitions, which tokens have none of: use SampledKL and Clip")
    if rollout.decoding.greedy + rollout.decoding.expert >= group:
        given = {"greedy samples": rollout.decoding.greedy, "answers": rollout.decoding.expert}
        reserved = " and ".join(f"{count} {what}" for what, count in given.items() if count)
        raise ValueError(f"{reserved} leave none of the group to train")
