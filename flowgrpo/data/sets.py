"""Prompt sets by name: packaged files, and datasets of the hub whose licence does not allow packaging.

`prompts: NAME` trains on a set, `flowgrpo eval --suite NAME` measures on its held-out side. `flowgrpo prompts` lists
them. Packaged files are written by scripts/build_prompt_sets.py from the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowgrpo.data import hub
from flowgrpo.data.prompts import STARTER, Prompt, load_prompts

FOLDER = Path(__file__).parent / "packaged"


@dataclass(frozen=True)
class PromptSet:
    """Prompt set.

    about: what its prompts try. kind: image, video or text.
    train: packaged file, or the hub's name of the set. held_out: file of its held-out side, or None where the run's
    share (`held_out: 0.1`) is held out. licence, source: of the published prompts.
    rewards: those that read its metadata.
    """

    about: str
    kind: str
    train: Path | str
    held_out: Path | str | None = None
    licence: str = "Apache-2.0"
    source: str = "flowgrpo"
    rewards: tuple[str, ...] = ()

    @property
    def packaged(self) -> bool:
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
    "geneval": PromptSet("pairs, counts, colours, positions, bindings; GenEval's own 553 are held out, and none of "
                         "their scenes is trained on", "image", FOLDER / "geneval_train.jsonl",
                         FOLDER / "geneval.jsonl", "MIT", "djghosh13/geneval (2310.11513)", ("geneval",)),
    "geneval_coco": PromptSet("535 further prompts of GenEval's six tasks, in correct English", "image",
                              FOLDER / "geneval_coco.jsonl", rewards=("geneval",)),
    "t2i_compbench": PromptSet("compositions of eight kinds; the published training and validation prompts", "image",
                               FOLDER / "t2i_compbench_train.jsonl", FOLDER / "t2i_compbench.jsonl", "MIT",
                               "Karine-Huang/T2I-CompBench (2307.06350)", ("t2i_compbench",)),
    "partiprompts": PromptSet("1,632 prompts of 12 categories and 11 challenges", "image",
                              FOLDER / "partiprompts.jsonl", None, "Apache-2.0", "google-research/parti (2206.10789)"),
    "ocr": PromptSet("a text in quotes that the picture has to show", "image", FOLDER / "ocr.jsonl", None, "MIT",
                     "yifan123/flow_grpo (2505.05470)", ("ocr",)),
    "simple_animals": PromptSet("45 animals, DDPO's first task", "image", FOLDER / "simple_animals.jsonl", None, "MIT",
                                "kvablack/ddpo-pytorch (2305.13301)"),
    "dpg": PromptSet("1,065 long prompts, for evaluation", "image", FOLDER / "dpg.jsonl", None, "Apache-2.0",
                     "TencentQQGYLab/ELLA (2403.05135)"),
    "unigenbench": PromptSet("600 prompts with test points of ten dimensions, for evaluation", "image",
                             FOLDER / "unigenbench.jsonl", None, "CC-BY-4.0", "CodeGoat24/UniGenBench (2510.18701)"),
    "vbench": PromptSet("944 prompts of 16 dimensions of video quality", "video", FOLDER / "vbench.jsonl", None,
                        "Apache-2.0", "Vchitect/VBench (2311.17982)"),
    "drawbench": PromptSet("200 prompts of 11 categories, for evaluation; fetched from the hub", "image",
                           "hub:shunk031/DrawBench?revision=refs/convert/parquet&column=prompts&split=test", None,
                           "not stated", "2205.11487"),
    "pickapic": PromptSet("prompts that users wrote, explicit ones and names of persons among them; fetched from the "
                          "hub", "image", "hub:yuvalkirstain/pickapic_v1_no_images?column=caption&split=test_unique",
                          None, "MIT", "2305.01569"),
    "gsm8k": PromptSet("word problems of primary school; fetched from the hub", "text",
                       "hub:openai/gsm8k:main?column=question&split=train",
                       "hub:openai/gsm8k:main?column=question&split=test", "MIT", "openai/gsm8k (2110.14168)",
                       ("math_answer",)),
}


def load(source: Path | str) -> list[Prompt]:
    """Return the prompts of a file, or of the hub (`hub:OWNER/NAME`).
    Raises UserError if there are none."""
    return hub.load(str(source)) if hub.named(source) else load_prompts(source)
