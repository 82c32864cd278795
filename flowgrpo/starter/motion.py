"""World of the video starter: claims of a prompt.

A clip is five images of 64x64 pixels: one flat shape of `scenes` on a light ground. It moves at an even pace in one of
four directions, grows, shrinks, or stays unchanged (`scripts/build/starter_clips.py` draws it).
"""

import re
from dataclasses import dataclass

from flowgrpo.starter.scenes import COLOURS, SHAPES

MOTIONS = {  # the sign of (x, y, size); y is down
    "left": (-1, 0, 0), "right": (1, 0, 0), "up": (0, -1, 0), "down": (0, 1, 0),
    "grow": (0, 0, 1), "shrink": (0, 0, -1), "stay": (0, 0, 0),
}
PHRASES = {
    **{way: (f"moves {way}", f"is moving {way}", f"goes {way}") for way in ("left", "right", "up", "down")},
    "grow": ("grows", "is growing", "becomes larger"),
    "shrink": ("shrinks", "is shrinking", "becomes smaller"),
    "stay": ("stays", "is standing still", "does not move"),
}


@dataclass(frozen=True)
class Clip:
    """Content of a prompt: a coloured shape and a key of MOTIONS."""

    shape: str
    colour: str
    motion: str

    @property
    def task(self) -> str:
        x, y, size = MOTIONS[self.motion]
        return "direction" if x or y else "size" if size else "still"

    @property
    def still(self) -> str:
        """Prompt of `scenes` that describes every frame."""
        return f"a {self.colour} {self.shape}"

    def caption(self, style: int = 0) -> str:
        return f"{self.still} {PHRASES[self.motion][style]}"


_MEANING = {phrase: motion for motion, phrases in PHRASES.items() for phrase in phrases}
_PROMPT = re.compile(rf"a (?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}) "
                     rf"(?P<does>{'|'.join(_MEANING)})")


def parse(prompt: str) -> Clip:
    """Read a prompt such as "a red circle moves left". Raises ValueError if it is outside the grammar."""
    match = _PROMPT.fullmatch(" ".join(prompt.lower().strip().rstrip(".").split()))
    if not match:
        raise ValueError(f"the motion reward cannot read the prompt {prompt!r}: expected 'a COLOUR SHAPE DOES', such "
                         f"as 'a red circle moves left'; colours: {', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}; "
                         f"does: {', '.join(_MEANING)}")
    return Clip(match["shape"], match["colour"], _MEANING[match["does"]])
