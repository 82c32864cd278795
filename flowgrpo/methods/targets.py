"""Targets: what the loss of a method scores. One class each, with the parts that it leaves unread and those that it
takes. `rollouts.targets` samples, records and replays them; `text.targets` has those of language models."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from flowgrpo.advantages.baselines import Paired
from flowgrpo.methods.groups import Credit, Denoising, Loss
from flowgrpo.methods.parts import Backprop, GroupDraw, Times
from flowgrpo.objectives import ratios, supervised, surrogates
from flowgrpo.objectives.surrogates import ActorCritic
from flowgrpo.parts import part
from flowgrpo.samplers import latent_edits, noised_finals, old_policy, reward_gradient
from flowgrpo.samplers.rollout import RolloutSpec


class TokenRollout(Protocol):
    """Rollout of a language model.

    decoding: how a token is drawn. draws: how the completions of a group are.
    """

    of_text: ClassVar[bool]
    strides: ClassVar[tuple[int, ...]]
    lag: ClassVar[old_policy.Lag]
    preview: ClassVar[None]
    pruning: ClassVar[None]

    @property
    def decoding(self) -> Any: ...

    @property
    def draws(self) -> GroupDraw: ...

    def fits(self, method: Any, process: str) -> bool:
        """True if it samples models of this process under a method."""

    def on(self, method: Any, process: str, given: Collection[str]) -> Any:
        """The method as that process samples it. given: names of parts that the user set."""


Rollout: TypeAlias = Denoising | TokenRollout


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
    recorded: True if it scores recorded pairs, and nothing is sampled.
    has_logp: True if its decisions have a log-probability, under the reference as well.
    offers: what a part can be for, which says so by its `reads_target` (a part without one goes with any target):
        "tokens", of completions; "texts", whose lengths differ; "steps", the transition of each step; "noise", samples
        by the noise that they grow from; "gaussians", decisions with a mean and a deviation; "noised finals"; "edits";
        "likelihood", of samples as they were drawn; "decisions", several of a sample, each with a loss; "model", scores
        by the weights of another whole model; "denoiser", its training on data; "images", by a model that also reads
        them; "reward gradient".
    """

    trains: ClassVar[str]
    of: ClassVar[type] = Denoising
    unread: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[dict[str, type]] = {}
    trains_steps: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    follows_reward: ClassVar[bool] = False
    scores_sampling: ClassVar[bool] = True
    has_logp: ClassVar[bool] = False
    offers: ClassVar[frozenset[str]] = frozenset()
    recorded: ClassVar[bool] = False

    @property
    def reads_grid(self) -> bool:
        """True if a run's sampling or noising follows the grid of its steps."""
        return True

    def of_pairs(self) -> "Target":
        """The target that scores recorded pairs in its place; itself where there is none."""
        return self

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        """Raise ValueError for parts that do not go together.
        explorations: an epoch's of a pipeline, none of a language model. group: samples per prompt."""


_OF_TEXT = frozenset({"spread", "reduction"})  # one decision per sample: nothing to spread or to average


@part("target")
class RecordedSteps(Target):
    """Stochastic steps of a rollout, by their log-probability.

    tuning: a supervised term towards the best sample.
    """

    tuning: supervised.LayerTuning = supervised.LayerTuning()

    trains: ClassVar[str] = "recorded steps"
    offers: ClassVar[frozenset[str]] = frozenset({"steps", "noise", "gaussians", "likelihood", "decisions", "model",
                                                  "denoiser"})
    trains_steps: ClassVar[bool] = True
    has_logp: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = frozenset({"reduction", "value"})
    packs: ClassVar[bool] = True

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        if credit.progress is not None and len(rollout.strides) > 1:
            raise ValueError("progress is measured along one grid, and strides finish samples on several: set "
                             "parts.strides: [1], or progress: null")


@part("target")
class JointDensity(Target):
    """All recorded steps of a sample as one decision, by their joint density (ReinFlow, 2505.22094)."""

    trains: ClassVar[str] = "a joint density"
    offers: ClassVar[frozenset[str]] = frozenset({"noise", "likelihood", "model", "denoiser"})
    trains_steps: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "strides", "step_weight",
                                                   "rehearsal", "distil", "replay"}

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        if any(spec.splits for spec in explorations):
            raise ValueError("a joint density takes samples that share no state: set parts: {roots: null} and a plan "
                             "without splits")
        if loss.reads_means:
            raise ValueError("a joint density has no mean: set parts.kl: {type: SampledKL}, or its weight to 0")


@part("target")
class NoisedFinals(Target):
    """Final states, noised to sampled times and scored by the old policy (DiffusionNFT and its variants).

    times: when they are noised.
    """

    times: Times = noised_finals.GridTimes()

    trains: ClassVar[str] = "noised finals"
    offers: ClassVar[frozenset[str]] = frozenset({"noised finals", "decisions", "model", "denoiser"})
    scores_sampling: ClassVar[bool] = False
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "strides", "distil", "replay"}
    packs: ClassVar[bool] = True

    def of_pairs(self) -> Target:
        return RecordedPairs(self.times)


@dataclass(frozen=True)
class RecordedPairs(NoisedFinals):
    """Noised finals of recorded pairs, without sampling: the target of a run with `preferences`."""

    trains: ClassVar[str] = "recorded pairs"
    recorded: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = NoisedFinals.unread | {"kernel", "plan", "solver", "tail", "roots", "redraw",
                                                                "expansion", "pruning", "rehearsal"}

    @property
    def reads_grid(self) -> bool:
        return not isinstance(self.times, noised_finals.Stratified)


@part("target")
class RewardGradient(Target):
    """Reward gradient, followed back through the last denoising steps (DRaFT, AlignProp, ReFL).

    backprop: how the steps from the plan's one on become the data.
    """

    backprop: Backprop = reward_gradient.Unroll()

    trains: ClassVar[str] = "a reward's gradient"
    offers: ClassVar[frozenset[str]] = frozenset({"reward gradient", "denoiser"})
    trains_steps: ClassVar[bool] = True
    follows_reward: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"value", "progress", "pruning", "tail", "strides", "step_weight",
                                                   "kl", "reference", "redraw", "expansion", "rehearsal",
                                                   "distil", "replay"}
    takes: ClassVar[dict[str, type]] = {"surrogate": surrogates.RewardAscent, "log_ratio": ratios.PlainRatio}

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        if len(explorations) > 1 or len(explorations[0].schedule.trained) > 1 or explorations[0].splits:
            raise ValueError("a reward's gradient takes a plan with one trained step, where its graph begins, and "
                             "samples that share no noise: set parts: {plan: {type: LastSteps}, roots: null}")


@part("target")
class LatentEdits(Target):
    """Edits of final states by a small policy, and the critic's choice among them and their bases (EXPO, 2507.07986).

    edit: the small policy.
    """

    edit: latent_edits.Edit = latent_edits.Edit()

    trains: ClassVar[str] = "latent edits"
    offers: ClassVar[frozenset[str]] = frozenset({"edits", "gaussians"})
    scores_sampling: ClassVar[bool] = False
    unread: ClassVar[frozenset[str]] = _OF_TEXT | {"progress", "strides", "preview", "pruning", "lag", "adapted",
                                                   "step_weight", "rehearsal", "data", "distil", "replay"}
    takes: ClassVar[dict[str, type]] = {"surrogate": ActorCritic}

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        assert isinstance(loss.surrogate, ActorCritic), "the only kind that fits"
        if loss.surrogate.ratio and self.edit.acting != "pairs":
            raise ValueError(f"surrogate.ratio is {loss.surrogate.ratio:g}, but samples are chosen by the critic: set "
                             "parts.edit.acting: pairs, or surrogate: {ratio: 0, through: 1}")
        if loss.surrogate.ratio and not isinstance(credit.advantage, Paired):
            raise ValueError(f"the advantage {type(credit.advantage).__name__} gives bases some, which no policy "
                             "sampled: set parts.advantage: {type: Paired}, or surrogate: {ratio: 0, through: 1}")
        if not loss.surrogate.critic and credit.value is None:
            raise ValueError("surrogate.critic is 0 and there is no value part: the critic would learn nothing, set "
                             "parts.value: {type: Recall}")
        if group % 2 and self.edit.acting == "pairs":
            raise ValueError(f"train.group is {group}: half of the samples are bases, the others their edits: use an "
                             "even number")
