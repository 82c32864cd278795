"""Prompt sets by name, packaged files and datasets of the hub whose licence does not allow packaging; and the splits of
prompts into training and held-out parts.

`prompts: NAME` trains on a set, `flowgrpo eval --suite NAME` measures on its held-out side. `flowgrpo list prompts`
lists them. Packaged files are written by scripts/build: build_prompt_sets.py from the published ones, and those of
our own by build_training_prompts.py and build_word_problems.py. A set of the role `test` is a published benchmark, or
has its prompts: training on it is an error, unless the user says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import hub
from flowgrpo.data.prompts import STARTER, Prompt, load_prompts
from flowgrpo.errors import UserError, nearest

FOLDER = Path(__file__).parent / "packaged"
LEAST = 1e-9  # share of the largest factor that replaces a factor of 0
SPLIT_SEED = 0  # not the run's seed: runs with other seeds share the held-out prompts


@dataclass(frozen=True)
class PromptSet:
    """Prompt set.

    about: what its prompts try. kind: image, video or text.
    train: packaged file, or the hub's name of the set. held_out: file of its held-out side, or None where the run's
    share (`held_out: 0.1`) is held out. licence, source: of the published prompts.
    rewards: those that read its metadata.
    role: train, for a set that is trained on; test, for one that models are compared on. A held-out side is a test.
    """

    about: str
    kind: str
    train: Path | str
    held_out: Path | str | None = None
    licence: str = "Apache-2.0"
    source: str = "flowgrpo"
    rewards: tuple[str, ...] = ()
    role: Literal["train", "test"] = "train"

    @property
    def tests(self) -> tuple[Path | str, ...]:
        """Files and hub names that models are compared on."""
        return tuple(side for side in (self.held_out, self.train if self.role == "test" else None) if side)

    @property
    def is_packaged(self) -> bool:
        return isinstance(self.train, Path)

    @property
    def suite(self) -> Path | None:
        """Packaged file that `eval --suite` reads: the held-out side, or all prompts."""
        side = self.held_out or self.train
        return side if isinstance(side, Path) else None


SETS: dict[str, PromptSet] = {
    "starter": PromptSet("six tasks of coloured shapes, for the starter", "image", STARTER / "train.jsonl",
                         STARTER / "held_out.jsonl", rewards=("scene", "scene_graded")),
    "starter_video": PromptSet("moving shapes, for the video starter", "video", STARTER / "video_train.jsonl",
                               STARTER / "video_held_out.jsonl", rewards=("motion",)),
    "starter_text": PromptSet("sums, for the text starter", "text", STARTER / "text_train.jsonl",
                              STARTER / "text_held_out.jsonl", rewards=("numeric_match", "step_match")),
    "general": PromptSet("600 varied prompts of ten kinds, for rewards of preference and aesthetics", "image",
                         FOLDER / "general.jsonl"),
    "general_video": PromptSet("300 prompts of ten kinds of motion, for the same rewards", "video",
                               FOLDER / "general_video.jsonl"),
    "pickapic": PromptSet("prompts that users wrote, without the explicit ones, each once; fetched from the hub",
                          "image", "hub:CarperAI/pickapic_v1_no_images_training_sfw?column=caption&split=train"
                          "&unique=true", None, "MIT", "CarperAI, of Pick-a-Pic (2305.01569)"),
    "geneval": PromptSet("pairs, counts, colours, positions, bindings; GenEval's own 553 are held out, and none of "
                         "their scenes is trained on", "image", FOLDER / "geneval_train.jsonl",
                         FOLDER / "geneval.jsonl", "MIT", "djghosh13/geneval (2310.11513)", ("geneval",)),
    "t2i_compbench": PromptSet("compositions of eight kinds; the published training and validation prompts", "image",
                               FOLDER / "t2i_compbench_train.jsonl", FOLDER / "t2i_compbench.jsonl", "MIT",
                               "Karine-Huang/T2I-CompBench (2307.06350)", ("t2i_compbench",)),
    "ocr": PromptSet("a text in quotes that the image has to show; Flow-GRPO's 1,018 test prompts are held out, and "
                     "none of their texts is trained on", "image", FOLDER / "ocr_train.jsonl", FOLDER / "ocr.jsonl",
                     "Apache-2.0, held out MIT", "flowgrpo; held out yifan123/flow_grpo (2505.05470)", ("ocr",)),
    "simple_animals": PromptSet("45 animals, DDPO's first task", "image", FOLDER / "simple_animals.jsonl", None, "MIT",
                                "kvablack/ddpo-pytorch (2305.13301)"),
    "gsm8k": PromptSet("word problems of primary school; fetched from the hub", "text",
                       "hub:openai/gsm8k:main?column=question&split=train",
                       "hub:openai/gsm8k:main?column=question&split=test", "MIT", "openai/gsm8k (2110.14168)",
                       ("math_answer",)),
    "word_problems": PromptSet("word problems of one or two steps and small numbers, for small language models; no "
                               "held-out problem has the kind and the numbers of a training problem", "text",
                               FOLDER / "word_problems_train.jsonl", FOLDER / "word_problems.jsonl",
                               rewards=("numeric_match",)),
    "arithmetic": PromptSet("sums, differences and products of two numbers, for the smallest chat models; held-out "
                            "problems as above", "text", FOLDER / "arithmetic_train.jsonl",
                            FOLDER / "arithmetic.jsonl", rewards=("numeric_match",)),
    "geneval_coco": PromptSet("535 further prompts of GenEval's six tasks, in correct English", "image",
                              FOLDER / "geneval_coco.jsonl", rewards=("geneval",), role="test"),
    "partiprompts": PromptSet("1,632 prompts of 12 categories and 11 challenges", "image",
                              FOLDER / "partiprompts.jsonl", None, "Apache-2.0", "google-research/parti (2206.10789)",
                              role="test"),
    "dpg": PromptSet("1,065 long prompts", "image", FOLDER / "dpg.jsonl", None, "Apache-2.0",
                     "TencentQQGYLab/ELLA (2403.05135)", role="test"),
    "unigenbench": PromptSet("600 prompts with test points of ten dimensions", "image", FOLDER / "unigenbench.jsonl",
                             None, "CC-BY-4.0", "CodeGoat24/UniGenBench (2510.18701)", role="test"),
    "vbench": PromptSet("944 prompts of 16 dimensions of video quality", "video", FOLDER / "vbench.jsonl", None,
                        "Apache-2.0", "Vchitect/VBench (2311.17982)", role="test"),
    "drawbench": PromptSet("200 prompts of 11 categories; fetched from the hub", "image",
                           "hub:shunk031/DrawBench?revision=refs/convert/parquet&column=prompts&split=test", None,
                           "not stated", "2205.11487", role="test"),
}
# What a user may train on in place of a test set, by kind.
INSTEAD = {"image": "general, pickapic or ocr", "video": "general_video", "text": "gsm8k or word_problems"}


def test_set(prompts: str) -> str | None:
    """Name of the test set that `prompts` is: by its name, its file or its place on the hub."""
    if prompts in SETS:
        return prompts if SETS[prompts].role == "test" else None
    given = prompts if hub.is_dataset(prompts) else Path(prompts).resolve()
    return next((name for name, one in SETS.items() for side in one.tests
                 if given == (side.resolve() if isinstance(side, Path) else side)), None)


def note_on_test_sets(prompts: str) -> str | None:
    """Note for files that are made from a test set, which no run can refuse any more; None for others."""
    return f"note: {prompts} is a test set: evaluate on what is made of it, and do not train on it" \
        if test_set(prompts) else None


def caution(prompts: str) -> str:
    """Warning in the report and the model card of a run with `train_on_test_set`."""
    name = Path(prompts).name if test_set(prompts) != prompts else prompts
    return (f"Trained on {name}, a test set (train_on_test_set): no score on it, held-out prompts included, can be "
            "compared with that of a model that was not")


def load(source: Path | str) -> list[Prompt]:
    """Prompts of a file, or of the hub (`hub:OWNER/NAME`). Raises UserError if there are none."""
    return hub.load(str(source)) if hub.is_dataset(source) else load_prompts(source)


def resolve_prompts(prompts: Path | str) -> list[Prompt]:
    """Prompts of --prompts: a set's training side, a file, or hub:OWNER/NAME. Raises UserError if there are none."""
    name = str(prompts)
    if name in SETS:
        return load(SETS[name].train)
    if not hub.is_dataset(name) and not Path(name).suffix and not Path(name).exists():
        raise UserError(f"prompts {name!r}: no such set{nearest(name, list(SETS))}; expected a set that `flowgrpo list "
                        "prompts` lists, or a .txt, .jsonl, .csv or .parquet file")
    return load(prompts)


def prompts_to_show(config: Config, prompts: Path | str | None) -> list[Prompt]:
    """Prompts of a file or a set (`given`), or the configuration's held-out ones."""
    return resolve_prompts(prompts) if prompts else resolve(config)[1]


def split(prompts: list[Prompt], held_out: float | str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into (train, held out); no text with the same image is ever on both sides.

    A share holds out that part of the different texts (rounded, at least one), chosen by a permutation that depends on
    the texts and the seed alone. A path is read as the held-out prompts, and their texts leave the training side.
    Raises UserError if a side is left empty.
    """
    if isinstance(held_out, str):
        held = load(held_out)
        keys = {prompt.key for prompt in held}
    else:
        if not 0 < held_out < 1:
            raise UserError(f"held_out: got {held_out!r}, expected a share between 0 and 1, or a prompt file")
        texts = sorted({prompt.key for prompt in prompts})
        if len(texts) < 2:
            raise UserError(f"held_out: {len(texts)} different prompts cannot be parted into training and held-out "
                            "ones: give more prompts, or a file of held-out prompts")
        count = max(1, round(held_out * len(texts)))
        keys = {texts[i] for i in np.random.default_rng(seed).permutation(len(texts))[:count]}
        held = [prompt for prompt in prompts if prompt.key in keys]
    train = [prompt for prompt in prompts if prompt.key not in keys]
    if not train:
        raise UserError(f"held_out: {held_out!r} holds out every prompt and leaves none to train on")
    return train, held


def draw(prompts: list[Prompt], count: int, epoch: int, seed: int,
         factors: Sequence[float] | None = None) -> list[Prompt]:
    """Prompts of one epoch: a pure function of its arguments, the same on every process and after a resume.

    No prompt is repeated in an epoch unless `count` exceeds their number n. Then each occurs count // n times, and only
    the rest is drawn. With equal weights, epochs walk through the data: every n draws in a row, counted from the start,
    are one permutation. Otherwise an epoch is drawn with probabilities in proportion to the weights.

    factors: the method's factors on the prompts' weights, 0 or more. Equal factors change nothing; a prompt of factor 0
    is drawn only if the others do not suffice.
    """
    whole, rest = divmod(count, len(prompts))
    weights = np.array([prompt.weight for prompt in prompts])
    if factors is not None and min(factors) < max(factors):
        weights = weights * np.maximum(factors, LEAST * max(factors))
    if (weights == weights[0]).all():
        chosen = _walk(len(prompts), rest, epoch, seed)
    else:
        rng = np.random.default_rng([seed, epoch])
        chosen = rng.choice(len(prompts), rest, replace=False, p=weights / weights.sum())
    return prompts * whole + [prompts[i] for i in chosen]


def _walk(n: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """Indices [count] at `epoch * count` of an endless sequence of permutations of n > count. If an epoch crosses the
    end of one permutation, the next begins with indices that the epoch does not have yet."""
    if not count:
        return np.empty(0, int)
    start, order = epoch * count, np.empty(0, int)
    last = (start + count - 1) // n
    for number in range(last + 1):
        before, order = order, np.random.default_rng([seed, number]).permutation(n)
        given = number * n % count  # how many of this epoch came from the previous permutation
        fresh = order[~np.isin(order, before[n - given:])][:count - given]
        order = np.concatenate([fresh, order[~np.isin(order, fresh)]])
    offset = start - max(last - 1, 0) * n
    return np.concatenate([before, order])[offset:offset + count]


def require_suited(config: Config) -> None:
    """Raise UserError for a test set that is trained on, unless `train_on_test_set`; and for a held-out share of a set
    that brings held-out prompts, where it would have no effect.

    The default share is accepted: a run's saved configuration has it. Recorded pairs replace the training prompts.
    """
    if not config.train_on_test_set and config.preferences is None and (name := test_set(config.prompts)):
        one = SETS[name]
        raise UserError(f"prompts: {config.prompts} is a test set ({one.source}), on which a model that trained on it "
                        f"cannot be compared: train on {INSTEAD[one.kind]}, or on your own; `eval --suite {name}` "
                        "measures on it. With train_on_test_set: true the run goes ahead, and its report and card say "
                        "so")
    usual = config.held_out == Config.model_fields["held_out"].default
    if _held_out_side(config.prompts) and isinstance(config.held_out, float) and not usual:
        raise UserError(f"held_out: got {config.held_out!r}, but prompts: {config.prompts} brings held-out prompts of "
                        "its own: leave it out, or name a file")


def resolve(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts of a configuration. `prompts` names a set of `sets.SETS`, a file, or a dataset of
    the hub. The held-out side of a set replaces a share."""
    named = SETS.get(config.prompts)
    prompts = load(named.train if named else config.prompts)
    share = isinstance(config.held_out, float)
    return split(prompts, (_held_out_side(config.prompts) if share else None) or config.held_out, SPLIT_SEED)


def _held_out_side(prompts: str) -> str | None:
    side = SETS[prompts].held_out if prompts in SETS else None
    return None if side is None else str(side)
