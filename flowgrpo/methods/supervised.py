"""Supervised terms added to the reinforcement loss: their targets, weights, checks, and sources of examples.

`training.extensions.supervised` adds their gradient in every optimizer step; `rollouts.data_losses` computes it.

Examples are recorded ones, or those that the run collects by the pass rate of a prompt. A recorded example is a line of
a file (`data.pairs`) or, without a file, the `solution` or `answer` in a prompt's metadata. No example of a
held-out prompt is trained on.
"""

import math
from typing import Annotated

from flowgrpo.methods.parts import Times
from flowgrpo.objectives.references import names_in
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.objectives.supervised import Balance, EqualTokens, FixedWeights, TokenWeight
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.samplers.noised_finals import Stratified


@part("data.source")
class Recorded:
    """All recorded examples, sampled anew for every optimizer step.

    path: the file; empty: the answers of the run's prompts.
    """

    path: str = ""


@part("data.source")
class PassRate:
    """Examples collected by a group's pass rate p: the share of samples that are right.

    Right is a sample whose weighted reward reaches `right`. A prompt that is sampled again is classified anew, and its
    earlier examples leave.
    failed: prompts with p = 0 give their recorded example (ReLIFT, 2506.07527, with solved false).
    solved: prompts with 0 < p < 1 give their own right samples (Metis-RISE, 2506.13056, with both).
    mastered: prompts with p = 1 give theirs too.
    path: the file of recorded examples; empty: the answers of the run's prompts.
    kept: the most examples that are kept; the oldest leave first.
    """

    path: str = ""
    right: float = 1.0
    failed: bool = True
    solved: bool = True
    mastered: bool = False
    kept: Annotated[int, AtLeast(1)] = 256

    def __post_init__(self) -> None:
        if not (self.failed or self.collects_own):
            raise ValueError("PassRate: failed, solved and mastered are all false, expected one of them to be true")

    @property
    def collects_own(self) -> bool:
        return self.solved or self.mastered

    def takes(self, right: int, count: int) -> str:
        """Kind of answer from a prompt with `right` of `count` samples: "recorded", "own" or "" for none."""
        if not count:
            return ""
        if not right:
            return "recorded" if self.failed else ""
        return "own" if (self.mastered if right == count else self.solved) else ""


@part("data.source")
class Explained(PassRate):
    """Verified explanations of prompts with 0 < p < 1 (SSB, 2512.05105): the policy reads a right sample and the most
    common wrong one in `template` and answers; the first of `tries` answers that is right itself is learned from the
    plain prompt, so that the student never reads the hint. The cross-entropy of tokens that the hinted policy drew is
    the paper's match of its logits, of one draw. Language models alone.

    The other fields: as of PassRate.
    """

    failed: bool = False
    template: str = ("{prompt}\n\nA correct solution:\n{right}\n\nA wrong solution:\n{wrong}\n\nExplain the correct "
                     "solution step by step, and answer:")
    tries: int = 2

    def __post_init__(self) -> None:
        named = names_in(self.template)
        if named != {"prompt", "right", "wrong"} or self.tries < 1 or not self.solved:
            raise ValueError(f"Explained: template has {', '.join(sorted(named)) or 'no field'}, tries is {self.tries} "
                             f"and solved {self.solved}, expected prompt, right and wrong, 1 or more, and true")


Source = Recorded | PassRate


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
        return math.exp((reward - 1) / self.beta)


@part("data", target="texts")
class NextToken(DataLoss):
    """Cross entropy of the next token of answers, at temperature 1: a mean over the batch's tokens.

    token_weight: how much each token counts.
    """

    source: Source = Recorded()
    token_weight: TokenWeight = EqualTokens()


@part("data", target="texts")
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
    distance: Annotated[str, OneOf(("squared", "smooth_l1"))] = "squared"
    space: Annotated[str, OneOf(("output", "data"))] = "output"


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
    if not isinstance(part.source, Recorded) or part.beta != math.inf:
        raise ValueError(f"{type(part).__name__}: its source is a file of pairs and it weighs no rewards: expected "
                         "source {type: Recorded, path: FILE.jsonl}, and no beta beside that of loss")


@part("data", target="images")
class SelfAnswers(DataLoss):
    """Answers about the run's own images, by the weights that draw them (UniRL, 2505.23380): for models that read and
    draw images.

    source: which images are asked about; those that the reward found right show what their prompts say.
    reader: where right answers come from. "prompt": questions of an image's prompt, with the prompt's answers. "scene":
        balanced questions about what an image of the starter's world shows, right or not, answered from its pixels.
    questions: of each image, in every step.
    samples: answers drawn to each question, and compared by GRPO without division by the group's std; 0: cross entropy.
    images: weight of the images' own cross entropy beside 1 of the answers'; the source should hold right ones alone.
    length: most tokens of an answer.
    condition: the question as the model reads it.
    """

    source: Source = PassRate(failed=False, mastered=True)
    reader: Annotated[str, OneOf(("prompt", "scene"))] = "prompt"
    questions: Annotated[int, AtLeast(1)] = 1
    samples: Annotated[int, AtLeast(0)] = 0
    images: Annotated[float, AtLeast(0)] = 0.0
    length: Annotated[int, AtLeast(1)] = 8

    def __post_init__(self) -> None:
        if self.samples == 1:
            raise ValueError("SelfAnswers: samples is 1, expected 0 or at least 2, which are compared")
        if not isinstance(self.source, PassRate) or self.source.path or not self.source.collects_own:
            raise ValueError("SelfAnswers learns only from the run's own images: set data.source: {type: PassRate}, "
                             "with solved or mastered and without a path")
