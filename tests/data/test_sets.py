"""Prompt sets by name: every packaged file loads, and training prompts are no held-out ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowgrpo.config import parse
from flowgrpo.data import sets, splits
from flowgrpo.data.suites import load_suite
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import names
from flowgrpo.rewards.images.geneval import require_judgeable

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import build_suites  # noqa: E402

PACKAGED = [name for name, one in sets.SETS.items() if one.packaged]
COUNTS = {"geneval": (2150, 553), "t2i_compbench": (5557, 2400), "partiprompts": (1469, 163), "ocr": (916, 102),
          "simple_animals": (41, 4), "dpg": (959, 106), "unigenbench": (540, 60), "vbench": (850, 94)}


@pytest.mark.parametrize("name", PACKAGED)
def test_a_set_splits_into_texts_that_are_on_one_side_alone(name):
    train, held_out = splits.resolve(parse.validate({"prompts": name}))
    assert not {prompt.key for prompt in train} & {prompt.key for prompt in held_out}
    if name in COUNTS:
        assert (len(train), len(held_out)) == COUNTS[name]
    assert set(sets.SETS[name].rewards) <= set(names())


def test_scenes_of_geneval_are_trained_on_in_no_order_of_words():
    """A pair in the other order, and `a left of b` for `b right of a`, are the same scene."""
    lines = [json.loads(line) for line in sets.SETS["geneval"].train.read_text().splitlines()]
    held_out = [json.loads(line) for line in sets.SETS["geneval"].held_out.read_text().splitlines()]
    assert not {build_suites.scene(line) for line in lines} & {build_suites.scene(line) for line in held_out}
    left = {"tag": "position", "include": [{"class": "cat"}, {"class": "dog", "position": ["left of", 0]}]}
    right = {"tag": "position", "include": [{"class": "dog"}, {"class": "cat", "position": ["right of", 0]}]}
    assert build_suites.scene(left) == build_suites.scene(right) == ("position", "left of", "dog", "cat")
    assert lines == build_suites.train(held_out)


def test_the_metadata_suit_their_rewards():
    for prompt in sets.load(sets.SETS["geneval"].train):
        require_judgeable(prompt.metadata, prompt.text)
    assert all(prompt.metadata["text"] in prompt.text for prompt in sets.load(sets.SETS["ocr"].train)
               if "text" in prompt.metadata)


@pytest.mark.parametrize("name, categories", [("geneval", 6), ("t2i_compbench", 8), ("partiprompts", 12),
                                              ("vbench", 16), ("unigenbench", 10)])
def test_a_packaged_set_is_a_suite_with_its_categories(name, categories):
    suite = load_suite(name.upper())
    assert suite.name == name and len(suite.categories) == categories


def test_a_share_of_a_set_with_held_out_prompts_is_refused():
    with pytest.raises(UserError, match="prompts: geneval brings held-out prompts of its own"):
        splits.require_no_share(parse.validate({"prompts": "geneval", "held_out": 0.3}))
    splits.require_no_share(parse.validate({"prompts": "ocr", "held_out": 0.3}))
