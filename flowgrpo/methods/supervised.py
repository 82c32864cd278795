"""Supervised terms beside the reinforcement loss: what is learned, from which examples, and with which weight.

`training.data_term` adds their gradient in every optimiser step; `rollouts.data_losses` computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowgrpo.methods.data_sources import PassRate, Recorded, Source
from flowgrpo.methods.parts import Times
from flowgrpo.objectives.balance import Balance, FixedWeights
from flowgrpo.objectives.supervised_weights import EqualTokens, TokenWeight
from flowgrpo.samplers.noised_finals import Stratified

DISTANCES = ("squared", "smooth_l1")
SPACES = ("output", "data")


@dataclass(frozen=True)
class DataLoss:
    """Supervised term; base class.

    source: where its examples come from.
    balance: the weights of the reinforcement gradient and of this one.
    batch: examples per optimiser step, on all processes together; fewer where the source has fewer.
    apart: with a source that collects, examples wait until there are `batch` of them; these get an optimiser step of
        their own, in place of a share of every step, and leave the source (ReLIFT, 2506.07527).
    beta: an example of reward r weighs exp((r - 1) / beta) (OpenChat's C-RLFT, 2309.11235); inf: all weigh 1.
    condition: the prompt of an example as the model reads it, with {prompt} and {source}.
    """

    source: Source = PassRate()
    balance: Balance = FixedWeights()
    batch: int = 8
    apart: bool = False
    beta: float = math.inf
    condition: str = "{prompt}"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.batch < 1 or not self.beta > 0:
            raise ValueError(f"{name}: batch is {self.batch} and beta {self.beta}, expected 1 or more, and above 0")
        if self.apart and not isinstance(self.source, PassRate):
            raise ValueError(f"{name}: apart is about examples that a run collects: set data.source: {{type: "
                             "PassRate}")
        if self.apart and self.balance != FixedWeights():
            raise ValueError(f"{name}: a step of its own (apart) has no balance: leave data.balance out")
        try:
            written = self.condition.format(prompt="\0", source="")
        except (KeyError, IndexError, ValueError):
            written = ""
        if "\0" not in written:
            raise ValueError(f"{name}: condition is {self.condition!r}, expected a text with {{prompt}}, and "
                             "{{source}} at most besides")

    def weight(self, reward: float) -> float:
        """Return the weight of an example of this reward."""
        return math.exp((reward - 1) / self.beta)


@dataclass(frozen=True)
class NextToken(DataLoss):
    """Cross entropy of the next token of answers, at temperature 1: a mean over the batch's tokens.

    token_weight: how much each token counts.
    """

    source: Source = Recorded()
    token_weight: TokenWeight = EqualTokens()


@dataclass(frozen=True)
class AlignedChains(NextToken):
    """NextToken, plus `contrast` times how far an answer's representation is from that of its prompt's annotated answer
    among those of the batch's other prompts (CARFT, 2508.15868): InfoNCE of cosines over `temperature`.

    A representation is the mean of the last hidden states before an answer's tokens; the annotated one, the prompt's
    `solution` or `answer`, has no gradient. With a PassRate source the answers are the run's own right samples. The
    negatives are those of a micro-batch. The forms of representation and negatives are a reconstruction.
    """

    source: Source = PassRate()
    contrast: float = 0.1
    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.contrast >= 0 or not self.temperature > 0:
            raise ValueError(f"AlignedChains: contrast is {self.contrast} and temperature {self.temperature}, expected "
                             "0 or more, and above 0")


@dataclass(frozen=True)
class NoisedData(DataLoss):
    """Term of a pipeline on noised examples; base class.

    times: when they are noised, drawn anew in every optimiser step.
    guidance: the scale at which the trained model predicts; 1 is without guidance.
    distance: "squared", the mean squared error over the values of a latent, or "smooth_l1" (Huber's, with 1).
    space: where it is taken: of the model's "output", or of the "data" that it predicts.
    """

    times: Times = Stratified(1)
    guidance: float = 1.0
    distance: str = "squared"
    space: str = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("distance", self.distance, DISTANCES), ("space", self.space, SPACES)):
            if value not in known:
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}, expected one of {', '.join(known)}")


@dataclass(frozen=True)
class FlowMatching(NoisedData):
    """Flow matching to examples: the velocity at x_t = (1-t) x0 + t eps is eps - x0. The noise is eps of a
    variance-preserving process.

    With `distance: smooth_l1` and `space: data` it is Gen-Drive's data term (2410.05582).
    """


@dataclass(frozen=True)
class GuidanceDistillation(NoisedData):
    """Distillation of guidance (2210.03142): the prediction at `guidance` learns the prediction at `scale`, at the same
    noised examples.

    scale: the guidance scale of the teacher.
    base: the teacher is the base model; otherwise the present weights.
    """

    scale: float = 4.5
    base: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is False and self.scale == self.guidance:
            raise ValueError(f"GuidanceDistillation: the teacher has the student's weights and its guidance, "
                             f"{self.scale}: set data.scale, or data.base: true")
