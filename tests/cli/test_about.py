"""The table of rewards: what each says of itself, what is installed, and files scored from the command line."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.utils import save_image

from flowgrpo import packages, rewards
from flowgrpo.cli import reward_table as table
from flowgrpo.rewards import About
from tests.data.test_untrusted import png as png_head
from tests.helpers.refusals import only_line, printed


# --- what a reward says of itself ------------------------------------------------------------------------------------
def test_functions_and_built_in_rewards_say_what_they_are():
    assert rewards.about(len) == About() and About().installed is None
    row = {"name": "mine", "modality": None, "range": None, "needs": None, "licence": None, "installed": None,
           "does": "", "broken": None}
    assert table.cells(row) == ["mine", "", "?"]
    for row in table.list_rewards():
        if row["name"] in rewards.BUILT_IN:
            assert None not in (row["modality"], row["range"], row["needs"], row["licence"]), row
            assert len(row["does"].split()) > 4 and row["does"].count("(") == row["does"].count(")"), row  # whole


# What a user calls a thing, and the rewards for it that he should be shown.
CALLED = {"sharp": "sharpness crispness deqa", "blurry": "sharpness crispness", "style": "likeness scene_style judge",
          "likeness": "likeness subject_score", "example": "likeness semantic_similarity", "face": "judge likeness",
          "hands": "judge judge_rubric question_answers", "nsfw": "safety", "spelling": "ocr",
          "count": "geneval t2i_compbench", "colour": "geneval over_saturation", "color": "geneval over_saturation",
          "aesthetic": "aesthetic pickscore hpsv3", "beautiful": "aesthetic hpsv2.1", "flicker": "temporal_flickering",
          "prompt following": "vqascore geneval clip_score", "variety": "diversity text_diversity",
          "math": "math_answer numeric_match", "short": "text_length", "gpt": "judge text_judge",
          "motion": "flow_amount"}


@pytest.mark.parametrize("said", CALLED)
def test_rewards_are_found_by_what_people_call_things(said, capsys):
    found = {row["name"] for row in json.loads(printed(capsys, "rewards", *said.split(), "--json"))}
    assert set(CALLED[said].split()) <= found and len(found) <= 25


@pytest.mark.parametrize("bounds, cell", [
    ((0, 1), "0 to 1"), ((-0.5, 2.25), "-0.5 to 2.25"), ((None, 0), "-inf to 0"), ((0, None), "0 to inf")])
def test_a_range_is_told(bounds, cell):
    row = {"name": "mine", "modality": "image", "range": bounds, "needs": "", "licence": "MIT", "installed": True,
           "does": "Mine", "broken": None}
    assert table.cells(row) == ["mine", "Mine", f"image, {cell}, MIT"]
    lacking = row | {"needs": "no_such_package", "installed": False}
    assert table.cells(lacking) == ["mine", "Mine", f"image, {cell}, needs no_such_package (not installed), MIT"]


@pytest.fixture
def metadata(tmp_path, monkeypatch):
    """A package that says that it is installed, and a module without such a record."""
    info = tmp_path / "is_here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: is_here\nVersion: 1.0\n")
    (tmp_path / "a_module_alone.py").write_text("raise ImportError('nobody may import this')\n")
    for extra, modules in {"here": ("torch", "a_module_alone"), "gone": ("torch", "is_gone"),
                           "server": ("is_gone",)}.items():
        monkeypatch.setitem(packages.EXTRAS, extra, modules)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("needs, there", [
    ("", True), (None, None), ("here", True), ("gone", False), ("here, gone", False), ("is-here", True),
    ("a-module-alone", True), ("server", True), ("server, gone", False),
    ("no-such-package", False), ("here, a_module_alone", True)])
def test_what_is_installed_is_seen_without_an_import(metadata, needs, there):
    assert About(needs=needs).installed is there


def test_the_table(capsys):
    out = printed(capsys, "rewards")
    [line] = [line for line in out.splitlines() if line.startswith(" scene_graded")]
    assert line.split()[:2] == ["scene_graded", "Degree"] and line.split()[-4:] == ["image,", "0", "to", "1"]
    [scene] = [row for row in json.loads(printed(capsys, "rewards", "--json")) if row["name"] == "scene"]
    assert scene == {"name": "scene", "modality": "image", "range": [0, 1], "needs": "", "licence": "Apache-2.0",
                     "installed": True, "does": "1.0 where an image shows exactly what its prompt claims and nothing "
                                                "else, otherwise 0.0", "found_by": "count counting colour color shape",
                     "source": "built in", "broken": None}


def test_a_broken_package_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowgrpo.rewards]\nbroken_one = no_such_module_at_all:f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = printed(capsys, "rewards")
    assert "scene_graded" in out and "reward 'broken_one' does not import: ModuleNotFoundError" in out
    [line] = [line for line in out.splitlines() if line.startswith(" broken_one")]
    assert line.split() == ["broken_one", "broken"]


# --- files -----------------------------------------------------------------------------------------------------------
REWARD = """
from flowgrpo.rewards.about import About

def level(images, prompts, metadata):
    assert images.shape[1] == 3 and images.dtype.is_floating_point
    return [None if p == "skip" else float(i.mean()) + m.get("more", 0) for i, p, m in zip(images, prompts, metadata)]

def frames(videos, prompts):
    return [float(len(video)) + float(video[0].mean()) for video in videos]

frames.about = About(modality="video")

class Length:
    def __init__(self, per=1):
        self.per = per
    def __call__(self, completions, prompts):
        return [len(text) / self.per for text in completions]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Images of two sizes and four levels, in PNG; a reward; a working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    for i, size in enumerate((4, 6, 4, 6)):
        save_image(torch.full((3, size, size), i / 5), f"{i}.png")
    return ["0.png", "1.png", "2.png", "3.png"]


def scores(out: str) -> list:
    return [row["score"] for row in json.loads(out)["scores"]]


def test_files_of_any_size_and_grey_of_sixteen_bits_are_scored_in_their_order(files, capsys):
    out = printed(capsys, "reward", "score", "mine.py:level", *files, "--prompt", "a cat", "--json")
    assert scores(out) == pytest.approx([0, 0.2, 0.4, 0.6], abs=1e-6)
    assert [row["file"] for row in json.loads(out)["scores"]] == files
    assert {row["prompt"] for row in json.loads(out)["scores"]} == {"a cat"}
    lines = printed(capsys, "reward", "score", "mine.py:level", *files[1:3]).splitlines()
    assert [line.split() for line in lines if ".png" in line] == [["1.png", "0.2000"], ["2.png", "0.4000"]]
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save("deep.png")
    found = scores(printed(capsys, "reward", "score", "mine.py:level", "deep.png", "--json"))
    assert found == pytest.approx([40000 / 65535], abs=1e-6)


def test_each_file_has_the_prompt_and_metadata_of_its_line(files, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "metadata": {"more": 5}}\n{"prompt": "skip"}\n')
    found = scores(printed(capsys, "reward", "score", "mine.py:level", *files[:2], "--prompts", "p.jsonl", "--json"))
    assert found == [5, None]
    assert "p.jsonl has 2 prompts for 4 files, expected one for each" in only_line(
        capsys, "reward", "score", "mine.py:level", *files, "--prompts", "p.jsonl")


def test_videos_and_texts_are_scored_likewise(files, tmp_path, capsys):
    (tmp_path / "clip").mkdir()
    for i in range(3):
        save_image(torch.full((3, 4, 4), 0.4), f"clip/{i}.png")
    pictures = [Image.new("RGB", (4, 4), (51 * i, 0, 0)) for i in range(5)]
    pictures[0].save("moving.gif", save_all=True, append_images=pictures[1:])
    found = scores(printed(capsys, "reward", "score", "mine.py:frames", "clip", "moving.gif", "--json"))
    assert found == pytest.approx([3.4, 5.0], abs=1e-6)
    assert "reward 'mine.py:frames' judges video, but what is generated here is image" in only_line(
        capsys, "reward", "score", "mine.py:frames", "0.png")
    (tmp_path / "answer.txt").write_text("four")
    found = scores(printed(capsys, "reward", "score", "mine.py:Length", "answer.txt", "--json", "--args", "{per: 2}"))
    assert found == [2]


@pytest.mark.parametrize("arguments, line", [
    (["mine.py:level", "huge.png"], "huge.png has more than 33,554,432 pixels: scale it down"),
    (["gated", "0.png"], "reward 'gated' needs args: {rewards: ...}: give them in its rule, or to "),
    (["scen", "0.png"], "unknown reward 'scen': did you mean 'scene'?"),
    (["mine.py:level"], "IMAGES"),
    (["mine.py:level", "no.png"], "no file at no.png"),
    (["mine.py:level", "mine.py"], "mine.py cannot be read as an image (it is damaged, or no image)"),
    (["mine.py:level", "empty"], "empty: no file in it, expected frames of one size"),
    (["mine.py:level", "0.png", "--prompt", "a", "--prompts", "p.txt"], "got --prompt and --prompts, expected one"),
    (["mine.py:level", "0.png", "--prompts", "p.txt"], "prompts p.txt: no such file"),
    (["mine.py:Length", "0.png", "--args", "{pre: 2}"], "takes no argument 'pre': did you mean 'per'?"),
    (["mine.py:Length", "0.png", "--args", "{per"], "--args: '{per' is not valid YAML"),
    (["mine.py:Length", "0.png", "--args", "2"], "args: got 2, expected a valid dictionary"),
    (["mine.py:level", "0.png", "--jsn"], "--jsn")])
def test_mistakes_are_told(files, tmp_path, arguments, line, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "huge.png").write_bytes(png_head(20_000, 20_000))
    assert line in only_line(capsys, "reward", "score", *arguments)
