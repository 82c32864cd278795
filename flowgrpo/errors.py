"""Error that the user can fix: printed as one line without a traceback, exit code 2."""

import difflib
import re
from collections.abc import Iterable
from os.path import commonprefix

LIKE = 0.6  # likeness from 0 to 1 at which one word is taken for a slip of another
LONGEST = 4000  # characters of an error; a longer one loses its middle
COMPARED = 200  # characters of a word that are compared with others
EXCERPT = 200  # characters of a value of the user within an error
# Control characters, line ends, changes of a text's direction, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object in memory, in its repr


class UserError(ValueError):
    """One line with what was got, what was expected and the fix.

    Line ends become spaces, control characters are written out, such as \\x1b, and addresses in memory are left out. Of
    a text of more than LONGEST characters the middle is left out.
    """

    def __init__(self, text: object = "") -> None:
        text = str(text)
        if len(text) > LONGEST:
            text = f"{text[:LONGEST * 2 // 3]} [...] {text[-LONGEST // 4:]}"
        text = _ADDRESS.sub("", text)
        super().__init__(_CONTROL.sub(lambda match: " " if match[0] in "\n\r\t" else ascii(match[0])[1:-1], text))

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows in place of a traceback; `%debug` has the frames."""
        return [f"flowgrpo: error: {self}"]


class NotFinite(UserError):
    """Samples that hold NaN or an infinity, found before a reward sees them. found: what was found; then an advice."""

    def __init__(self, found: str, advice: str = "") -> None:
        self.found = found
        super().__init__(found + f": {advice}" * bool(advice))


def excerpt(value: object) -> str:
    """Repr of a value for an error; of one of more than EXCERPT characters, such as bytes, both ends."""
    text = repr(value)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT * 3 // 4]} [...] {text[-EXCERPT // 8:]}"


def nearest(word: str, choices: list[str]) -> str:
    """End of an error about an unknown word: the nearest valid one, or all choices. The last part of dotted words
    counts first, so `lr` finds `train.lr`, and `eval.stepss` finds `eval.steps`."""
    word = word[:COMPARED]

    def likeness(choice: str) -> tuple[float, float]:
        ends = word.rpartition(".")[2], choice.rpartition(".")[2]
        return difflib.SequenceMatcher(None, *ends).ratio(), difflib.SequenceMatcher(None, word, choice).ratio()

    best = max(choices, key=likeness, default="")
    near = likeness(best)[0] >= LIKE
    return f": did you mean {best!r}?" if near else f"; there are: {', '.join(choices) or 'none'}"


def slip(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a word is one letter off: one too many, one too few, another, or two exchanged; None for any
    other word. Upper case and lower case are alike, and a digit is no slip."""
    def near(one: str, other: str) -> bool:
        for _ in range(2):  # off with the common begin, and with the common end
            begin = len(commonprefix([one, other]))
            one, other = one[begin:][::-1], other[begin:][::-1]
        return max(len(one), len(other)) < 2 and not one.isdigit() or len(one) == 2 and one == other[::-1]

    return next((choice for choice in choices if near(word.lower(), choice.lower())), None)
