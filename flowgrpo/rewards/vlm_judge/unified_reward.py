"""UnifiedReward (2503.05236, 2508.20751): a vision-language model that marks and compares pictures and videos.

The wording is ours, the format of the answer that of the authors. For a model trained on one wording, use
`args: {template: question.txt}`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo.rewards.about import About
from flowgrpo.rewards.vlm_judge.judge import LICENCE, Judge, JudgePairs, filled

_CAPTIONED = ("{shown} was made from the text caption below. Judge the alignment with the caption (are its objects, "
              "their attributes and relations there?) and the quality (clarity, detail, colour, appeal).")


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedReward(Judge):
    """UnifiedReward's mark of a picture or video, 1 to 5 after "Final Score:" (2503.05236)."""

    template: str = (filled(_CAPTIONED, shown="This picture or video") + "\nName the caption's key elements with 1 "
                     "where they are there and 0 where not, and give a score from 1 to 5 after 'Final Score:'.\n"
                     "Text Caption: [{prompt}]")
    parse: str = "score in [1, 5]"
    max_tokens: int | None = 4096
    about = About(modality="image/video", range=(1, 5), needs="server", licence=LICENCE)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnifiedRewardPairs(JudgePairs):
    """UnifiedReward's choice between two pictures or videos, as win rates within a group (2503.05236, 2508.20751)."""

    template: str = (filled(_CAPTIONED, shown="Each of the two") + "\nCompare them and end with a clear conclusion: "
                     "'Image 1 is better than Image 2.', 'Image 2 is better than Image 1.' or 'Both images are equally "
                     "good.'\nText Caption: [{prompt}]")
    max_tokens: int | None = 4096
    about = About(modality="image/video", range=(0, 1), needs="server", licence=LICENCE)
