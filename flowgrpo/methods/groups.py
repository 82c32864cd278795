"""Groups of a method's parts: the rollout of a pipeline with the modules that are trained, the credit, and the loss."""

from dataclasses import dataclass
from typing import Any, ClassVar

from flowgrpo.advantages import group, token_credit
from flowgrpo.advantages.gae import OutcomeHead, Recall, ValueHead
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods.distillation import Distillation
from flowgrpo.methods.parts import Kernel, Plan, Reduction, Reference, Rehearsal, Selection, Solver, StepWeight
from flowgrpo.methods.supervised import DataLoss
from flowgrpo.objectives import ratios, reductions, references, surrogates
from flowgrpo.objectives.kl import GaussianKL, Penalty, is_active
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.parts import part
from flowgrpo.samplers import kernels, old_policy, plans
from flowgrpo.samplers.grids import TailPoints
from flowgrpo.samplers.kernels import LearnedNoise
from flowgrpo.samplers.preview import Preview, Pruning


@part("adapted")
class Adapted:
    """Trained modules: denoisers, text encoders, which are then in the graph of every replay (TexForce, 2311.15657), or
    both.
    """

    denoisers: bool = True
    encoders: bool = False

    def __post_init__(self) -> None:
        if not self.denoisers and not self.encoders:
            raise ValueError("Adapted: denoisers and encoders are both false, expected one of them to be trained")

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for options that conflict with the training of text encoders."""
        if not self.encoders:
            return
        wrong = {"adapter.rank: 0, which trains all of a denoiser: set a rank": not config.adapter.rank,
                 "adapter.dora, which is for denoisers: use false": config.adapter.dora,
                 f"memory.encoders: {config.memory.encoders}, where they would be moved out of the graph: use keep":
                     config.memory.encoders != "keep",
                 "memory.shard, whose processes meet in the denoiser alone: use false": config.memory.shard}
        for option in (option for option, applies in wrong.items() if applies):
            raise UserError(f"text encoders are trained (parts.adapted.encoders), which does not go with {option}")


OF_TEXT = ("tokens", "masks", "image tokens")  # the processes of language models: causal, masked, drawing


@dataclass(frozen=True)
class Denoising:
    """Rollout of a pipeline.

    kernel: the transition of stochastic steps.
    plan: which steps are stochastic and which are trained.
    solver: of the deterministic steps.
    tail: share of the steps kept after the last stochastic one, or `TailPoints`; 1 keeps the sigma grid.
    roots: initial noises per prompt, from which its samples grow (1: all share it, None: each has its own).
    strides: granularities of the sigma grid behind the last split.
    preview: how initial noises are chosen; None: they are not.
    pruning: which of many samples are finished; None: all are.
    lag: how slowly the old policy follows.
    adapted: which modules are trained.
    """

    kernel: Kernel = kernels.FlowSDE(0.7)
    plan: Plan = plans.AllSteps()
    solver: Solver = kernels.Euler()
    tail: float | TailPoints = 1.0
    roots: int | None = None
    strides: tuple[int, ...] = (1,)
    preview: Preview | None = None
    pruning: Pruning | None = None
    lag: old_policy.Lag = old_policy.Lag()
    adapted: Adapted = Adapted()

    of_text: ClassVar[bool] = False

    def fits(self, method: Any, process: str) -> bool:
        return process not in OF_TEXT

    @property
    def noisy(self) -> str:
        """Which steps draw noise, as the plan says: "every", "none" or, where it says nothing, "some"."""
        return str(getattr(self.plan, "noisy", "some"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", tuple(self.strides))  # a recipe gives a list
        if not isinstance(self.tail, TailPoints) and not 0 < self.tail <= 1:
            raise ValueError(f"tail is {self.tail}, expected above 0 and at most 1")

    @property
    def learned_noise(self) -> LearnedNoise | None:
        """The kernel if a network that is trained gives the std of every latent value; None for another."""
        return self.kernel if isinstance(self.kernel, LearnedNoise) else None


@dataclass(frozen=True)
class Credit:
    """From rewards to the advantages of decisions.

    shaping: change of the rewards before they are compared; None: none.
    advantage: comparison of the rewards of a group.
    selection: choice of the samples that are trained; None: all.
    spread: distribution of a sample's advantage over its tokens, or its recorded steps; None: each has it.
    value: the value model of a language model, or how the critic of edits learns; None: none.
    progress: the credit of the steps of a rollout, from their clean predictions; None: each has the sample's.
    """

    shaping: Shaping | None = None
    advantage: AdvantageRule = group.Advantage(scale="batch", order="rewards")
    selection: Selection | None = None
    spread: TokenCredit | None = None
    value: ValueHead | OutcomeHead | Recall | None = None
    progress: token_credit.Progress | None = None

    @property
    def teaches(self) -> bool:
        """True where a group whose samples earn the same may be trained: by a history, lengths, steps, labels."""
        return self.progress is not None or any(part is not None and part.teaches for part in (
            self.shaping, self.advantage, self.spread))


@dataclass(frozen=True)
class Loss:
    """From scores and advantages to the scalar that is minimised.

    log_ratio: how far the policy has moved on a decision.
    surrogate: the loss of a decision.
    step_weight: weight of a step of the sigma grid.
    reduction: what the loss is a mean over.
    kl: the regulariser, and reference: the policy that it holds to.
    rehearsal: divergence from the base model on its own recorded samples; None: none.
    data: a supervised term beside the loss; None: none.
    distil: the loss that draws a few-step student to its teacher; None: none.
    """

    log_ratio: LogRatio = ratios.PlainRatio()
    surrogate: Surrogate = surrogates.Clip(1e-4, 1e-4)
    step_weight: StepWeight = reductions.Uniform()
    reduction: Reduction = reductions.TokenMean()
    kl: Penalty = GaussianKL(0.0)
    reference: Reference = references.Base()
    rehearsal: Rehearsal | None = None
    data: DataLoss | None = None
    distil: Distillation | None = None

    @property
    def reads_means(self) -> bool:
        """True where it needs the transitions' means or deviations, not their log-probabilities alone."""
        return self.reads_old_means or self.log_ratio.reads_deviations \
            or self.kl.reads_means and is_active(self.kl)

    @property
    def reads_old_means(self) -> bool:
        """True where it needs the old policy's means too; a KL reads those of the present one and of the reference."""
        return self.log_ratio.reads_means or self.surrogate.reads_means
