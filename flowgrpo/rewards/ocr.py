"""Text in an image, read by PP-OCRv6 (small; rapidocr includes its weights) and compared with the text that the prompt
asks for.

That text is the metadata's `text`, one or a list, or else the first part of the prompt in quotation marks: double ones,
else single ones, else title marks. Spaces and case do not count, as in Flow-GRPO (2505.05470, its reward "ocr"), whose
formula this is; nor do other forms of a character (`plain`). Its engine is another one, PaddleOCR's English model, so
that numbers differ where the two read differently.
"""

import os
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.remote.exchange import side_by_side

MOST = 16  # engines of a process: each holds its own copy of the weights and its workspace

# Quotation marks (Unicode's property of that name, primes, accents in their place), dashes and tildes are one each.
FORMS = {'"': "“”„‟«»″‶〝〞〟״❝❞「」『』｢｣﹁﹂﹃﹄⹂＂", "'": "‘’‚‛‹›′‵`´ʼ׳❛❜＇", "~": "〜～∼",
         "-": "‐‑‒–—―−⁃⸺⸻︱︲﹘﹣－"}
ONE = {ord(form): mark for mark, forms in FORMS.items() for form in forms}

# The marks that may close a quotation, by the mark that opens it.
DOUBLE = {'"': '"', "“": "”“\"", "”": "”", "„": "“”\"", "‟": "”", "«": "»", "»": "«»", "「": "」", "『": "』",
          "〝": "〞〟", "״": "״", "″": "″", "｢": "｣", "﹁": "﹂", "﹃": "﹄", "＂": "＂"}
SINGLE = {"'": "'’", "‘": "’'‘", "’": "’", "‚": "‘’'", "‹": "›", "›": "‹›", "`": "`'´", "＇": "＇"}
TITLES = {"《": "》", "〈": "〉"}
LETTER = r"[^\W\u2e80-\u9fff\uac00-\ud7af\uff66-\uff9f]"  # or digit, of scripts that put spaces between words
ELIDED = r"(?!(?:n|tis|twas|til|till|em|cause|cuz|bout|round|\d\ds)(?!\w))"  # words that begin with an apostrophe


def _pattern(marks: dict[str, str], pair: str) -> re.Pattern[str]:
    return re.compile("|".join(pair.format(start=start, ends=ends) for start, ends in marks.items()), re.S | re.I)


QUOTED = (_pattern(DOUBLE, r"(?<!\d){start}([^{ends}]+)[{ends}]"),  # a digit: inches
          _pattern(SINGLE, f"(?<!{LETTER}){{start}}{ELIDED}(\\S(?:.*?\\S)?)[{{ends}}](?!{LETTER})"),
          _pattern(TITLES, "{start}([^{ends}]+)[{ends}]"))


def target_text(prompt: str, metadata: dict[str, Any]) -> tuple[str, ...]:
    """Texts that a prompt asks to be written: of its metadata, or else in quotes; empty without any.
    Raises UserError for metadata of another type."""
    given = metadata.get("text")
    if given is None:
        found = next((found for pattern in QUOTED if (found := pattern.search(prompt))), None)
        given = found[found.lastindex or 0] if found else ()
    texts = given if isinstance(given, (list, tuple)) else (given,)
    if any(isinstance(text, bool) or not isinstance(text, (str, int, float)) for text in texts):
        raise UserError(f"reward 'ocr': a prompt's text is {given!r}, expected a text or a list of them")
    return tuple(str(text) for text in texts if plain(str(text)))


def plain(text: str) -> str:
    """Text without what does not count: spaces, case (folded) and marks of format; characters in Unicode's form NFKC,
    quotation marks, dashes and tildes in one form each."""
    folded = unicodedata.normalize("NFKC", text.translate(ONE)).casefold()
    return "".join(letter for letter in unicodedata.normalize("NFKC", folded)
                   if not letter.isspace() and unicodedata.category(letter) != "Cf")


def _distances(text: str, target: str, anywhere: bool) -> list[int]:
    """Distances to `target` of the beginnings of `text`, or (anywhere) of their nearest ends."""
    row = [0 if anywhere else i for i in range(len(text) + 1)]
    for done, letter in enumerate(target, 1):
        before, row = row, [done]
        for i, other in enumerate(text, 1):
            row.append(min(before[i] + 1, row[-1] + 1, before[i - 1] + (letter != other)))
    return row


def edits(text: str, target: str, anywhere: bool = False) -> int:
    """Edit distance: the least number of inserted, deleted and substituted characters from `text` to `target`;
    anywhere: from the nearest part of `text` (Sellers 1980)."""
    row = _distances(text, target, anywhere)
    return min(row) if anywhere else row[-1]


def whole(text: str, targets: Sequence[str]) -> str:
    """Wanted texts as one, in the order in which their nearest parts stand in `text`."""
    def place(target: str) -> int:
        row = _distances(text, target, True)
        return row.index(min(row))

    return "".join(sorted(targets, key=place))


def contains(text: str, targets: Sequence[str]) -> bool:
    """True if `text` has all the wanted texts, each at a place of its own."""
    for target in sorted(targets, key=len, reverse=True):
        if target not in text:
            return False
        text = text.replace(target, " ", 1)
    return True


def exact(text: str, *targets: str) -> float:
    """1 if exactly the wanted texts are read, in any order, else 0."""
    text = plain(text)
    return float(text == whole(text, [plain(target) for target in targets]))


def edit(text: str, *targets: str) -> float:
    """Flow-GRPO's score: 1 - min(d, n) / n with edit distance d and length n of the text; 1 if it is contained.

    Several texts are one, in the order in which they are read.
    """
    text, wanted = plain(text), [plain(target) for target in targets]
    target = whole(text, wanted)
    return 1.0 if contains(text, wanted) else 1 - min(edits(text, target), len(target)) / len(target)


def partial(text: str, *targets: str) -> float:
    """1 - d / n with the edit distance d to the nearest part of the read text: other writing costs nothing.

    Of several texts d and n are sums.
    """
    text, wanted = plain(text), [plain(target) for target in targets]
    return 1 - sum(edits(text, target, anywhere=True) for target in wanted) / sum(map(len, wanted))


SCORES = {"edit": edit, "exact": exact, "partial": partial}


@built_in("ocr", "spelling letters words typography sign writing render")
class Ocr:
    """Share of the wanted text that an image shows, read by PP-OCRv6; None if the prompt asks for none.

    The text is the prompt's `text`, one or a list, else its first part in quotation marks.

    score: `edit`, `exact` or `partial`.
    Raises UserError for another score, for a `text` that is none, and if rapidocr or onnxruntime is missing.
    """

    score: str = "edit"
    about = About(modality="image", range=(0, 1), needs="ocr", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward 'ocr': score is {self.score!r}, expected {', '.join(SCORES)}")
        _package()

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        texts = [target_text(prompt, entry) for prompt, entry in zip(prompts, metadata)]
        lines = iter(read([image for image, wanted in zip(eight_bit(images), texts) if wanted]))
        return [SCORES[self.score](next(lines), *wanted) if wanted else None for wanted in texts]


def read(images: Sequence[np.ndarray]) -> list[str]:
    """Lines of text in each image, bytes [H, W, 3], from top to bottom.

    Images are read by several engines at a time, each on one core. Upside-down text is not turned, as in Flow-GRPO.
    """
    return side_by_side(_read, images, engines())


def engines() -> int:
    """Number of images that are read at a time: this process's share of the cores, at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


_IDLE: list[Any] = []  # engines that read nothing now


def _read(image: np.ndarray) -> str:
    try:
        engine = _IDLE.pop()
    except IndexError:
        # A detector and a recogniser of one thread, of this version of PP-OCR whatever the package's default is.
        package = _package()
        weights = {"ocr_version": package.OCRVersion.PPOCRV6, "model_type": package.ModelType.SMALL}
        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        engine = package.RapidOCR(params={"Global.log_level": "error", **threads} | {
            f"{part}.{key}": value for part in ("Det", "Rec") for key, value in weights.items()})
    try:
        found = engine(image[..., ::-1], use_cls=False)  # it takes blue, green, red
    finally:
        _IDLE.append(engine)
    return " ".join(found.txts or ())


def _package() -> Any:
    import_optional("onnxruntime", "ocr", "reward 'ocr'")
    return import_optional("rapidocr", "ocr", "reward 'ocr'")
