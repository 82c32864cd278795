"""Sources of supervised examples: recorded ones, and those that the run collects by the pass rate of a prompt.

A recorded example is a line of a file (`data.pairs`) or, without a file, the `solution` or `answer` in a
prompt's metadata. No example of a held-out prompt is trained on.
"""

from __future__ import annotations

import string
from typing import Annotated

from flowgrpo.parts import AtLeast, part


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
        """True if it collects samples of the run."""
        return self.solved or self.mastered

    def takes(self, right: int, count: int) -> str:
        """Return what a prompt with `right` of `count` samples gives: "recorded", "own" or "" for nothing."""
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
        named = {name for _, name, *_ in string.Formatter().parse(self.template) if name is not None}
        if named != {"prompt", "right", "wrong"} or self.tries < 1 or not self.solved:
            raise ValueError(f"Explained: template has {', '.join(sorted(named)) or 'no field'}, tries is {self.tries} "
                             f"and solved {self.solved}, expected prompt, right and wrong, 1 or more, and true")


Source = Recorded | PassRate
