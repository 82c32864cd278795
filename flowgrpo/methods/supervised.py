"""Supervised terms added to the reinforcement loss: targets, examples and weights.

`training.extensions.supervised` adds their gradient in every optimizer step; `rollouts.data_losses` computes it.
"""

from __future__ import annotations

import math
from typing import Annotated

from flowgrpo.methods.data_sources import PassRate, Recorded, Source
from flowgrpo.methods.parts import Times
from flowgrpo.objectives.balance import Balance, FixedWeights
from flowgrpo.objectives.pair_losses import PairLoss
from flowgrpo.objectives.supervised_weights import EqualTokens, TokenWeight
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.samplers.noised_finals import Stratified

DISTANCES = ("squared", "smooth_l1")
SPACES = ("output", "data")


@part()
class DataLoss:
    """Supervised term; base class.

    source: where its examples come from.
    balance: the weights of the reinforcement gradient and of this one.
    batch: examples per optimizer step, on all processes together; fewer where the source has fewer.
    apart: with a source that collects, examples wait until there are `batch` of them; these get an optimizer step of
        their own, in place of a share of every step, and leave the source (ReLIFT, 2506.07527).
    beta: an example of reward r weighs exp((r - 1) / beta) (OpenChat's C-RLFT, 2309.11235); inf: all weigh 1.
    condition: the prompt of an example as the model reads it, with {prompt} and {source}.
    """

    source: Source = PassRate()
    balance: Balance = FixedWeights()
    batch: Annotated[int, AtLeast(1)] = 8
    apart: bool = False
    beta: Annotated[float, Above(0)] = math.inf
    condition: str = "{prompt}"

    def __post_init__(self) -> None:
        name = type(self).__name__
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


@part("data", target="tokens")
class NextToken(DataLoss):
    """Cross entropy of the next token of answers, at temperature 1: a mean over the batch's tokens.

    token_weight: how much each token counts.
    """

    source: Source = Recorded()
    token_weight: TokenWeight = EqualTokens()


@part("data", target="tokens")
class PreferencePairs(DataLoss):
    """Preference loss of recorded pairs of completions, a mean over the batch's pairs: HyPO's offline term
    (2406.01462).

    source: a file of pairs (`data.pairs`); the margin of a line is its reward's difference, 1 without one.
    loss: of the pairs; its reference is the base model.
    """

    source: Source = Recorded()
    balance: Balance = FixedWeights(data=1.0)
    loss: PairLoss = PairLoss()

    def __post_init__(self) -> None:
        _require_pairs(self)


@part("data", jointly={"contrast temperature": "0 or more, and above 0"})
class AlignedChains(NextToken):
    """NextToken, plus `contrast` times a contrastive loss of an answer's representation: InfoNCE of cosines over
    `temperature`, towards its prompt's annotated answer among the batch's others (CARFT, 2508.15868).

    A representation is the mean of the last hidden states before an answer's tokens; the annotated one, the prompt's
    `solution` or `answer`, has no gradient. With a PassRate source the answers are the run's own right samples. The
    negatives are those of a micro-batch. The forms of representation and negatives are a reconstruction.
    """

    source: Source = PassRate()
    contrast: Annotated[float, AtLeast(0)] = 0.1
    temperature: Annotated[float, Above(0)] = 0.1


@part(target="denoiser")
class NoisedData(DataLoss):
    """Term of a pipeline on noised examples; base class.

    times: when they are noised, drawn anew in every optimizer step.
    guidance: the scale at which the trained model predicts; 1 is without guidance.
    distance: "squared", the mean squared error over the values of a latent, or "smooth_l1" (Huber's, with 1).
    space: where it is taken: of the model's "output", or of the "data" that it predicts.
    """

    times: Times = Stratified(1)
    guidance: float = 1.0
    distance: Annotated[str, OneOf(DISTANCES)] = "squared"
    space: Annotated[str, OneOf(SPACES)] = "output"


@part("data")
class FlowMatching(NoisedData):
    """Flow matching to examples: the velocity at x_t = (1-t) x0 + t eps is eps - x0. The noise is eps of a
    variance-preserving process.

    With `distance: smooth_l1` and `space: data` it is Gen-Drive's data term (2410.05582).
    """


@part("data")
class GuidanceDistillation(NoisedData):
    """Distillation of guidance (2210.03142): the prediction at `guidance` learns the prediction at `scale`, at the same
    noised examples.

    scale: the guidance scale of the teacher.
    base: the teacher is the base model; otherwise the present weights.
    """

    scale: float = 4.5
    base: bool = True

    def __post_init__(self) -> None:
        if self.base is False and self.scale == self.guidance:
            raise ValueError(f"GuidanceDistillation: the teacher has the student's weights and its guidance, "
                             f"{self.scale}: set data.scale, or data.base: true")


@part("data")
class PicturePairs(NoisedData):
    """Preference loss of recorded pairs of images, a mean over the batch's pairs, at noised examples with one noise
    for both: Diffusion-DPO's (2311.12908) beside another loss, as HyPO's of texts.

    source: a file of pairs (`data.pairs`); the margin of a line is its reward's difference, 1 without one.
    loss: of the pairs, with minus half the error as log-probability; its reference is the base model.
    """

    source: Source = Recorded()
    balance: Balance = FixedWeights(data=1.0)
    loss: PairLoss = PairLoss(100.0)

    def __post_init__(self) -> None:
        _require_pairs(self)


def _require_pairs(part: PreferencePairs | PicturePairs) -> None:
    """ValueError for a source that collects, and for weights by reward, which pairs have none of."""
    if not isinstance(part.source, Recorded) or part.beta != math.inf:
        raise ValueError(f"{type(part).__name__}: its source is a file of pairs and it weighs no rewards: expected "
                         "source {type: Recorded, path: FILE.jsonl}, and no beta beside that of loss")


@part("data", target="denoiser")
class SelfAnswers(DataLoss):
    """Answers of the trained denoiser about its own images (UniRL, 2505.23380).

    A head on the denoiser's states learns the answers to the questions of the pictures' prompts. Its gradient reaches
    the weights that draw. The reward `self_answers` scores by these answers in the same run.

    time: when the clean picture is read: sigma, or the share of the timesteps of a variance-preserving process.
    width: of the head's hidden layer.
    samples: answers drawn to each question and compared by GRPO; 0: cross entropy.
    """

    source: Source = PassRate(failed=False, mastered=True)
    time: float = 0.1
    width: int = 64
    samples: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.time < 1 or self.width < 1 or self.samples < 0 or self.samples == 1:
            raise ValueError(f"SelfAnswers: time is {self.time}, width {self.width} and samples {self.samples}, "
                             "expected between 0 and 1, 1 or more, and 0 or at least 2")
        if not isinstance(self.source, PassRate) or self.source.path or not self.source.collects_own:
            raise ValueError("SelfAnswers learns only from the run's own images: set data.source: {type: PassRate}, "
                             "with solved or mastered and without a path")
        if self.condition != "{prompt}":
            raise ValueError("SelfAnswers reads images under the empty prompt: leave data.condition out")
