"""The script that makes preference pairs for the starter: what it calls better is."""

import sys
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from flowgrpo.config import load
from flowgrpo.data import sets
from flowgrpo.data.pairs import OVERALL, Pair, in_place, load_pairs
from flowgrpo.methods import validate
from flowgrpo.rewards.starter.scene import scene
from tests.helpers import loop

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "build"))

import make_starter_pairs  # noqa: E402


def marks(pairs: list[Pair], side: str) -> list[float]:
    """What `scene` says of one side's images."""
    return scene(torch.stack([to_tensor(Image.open(getattr(pair, side))) for pair in pairs]),
                 [pair.prompt for pair in pairs])


def test_pairs_are_labelled_by_scene_and_train_the_starter(tmp_path):
    file = make_starter_pairs.make(tmp_path, prompts=3, rendered=8)
    pairs, subjects = load_pairs(file), load_pairs(tmp_path / "subjects.jsonl")
    assert file == tmp_path / "pairs.jsonl" and len(pairs) >= 8
    for pair, one, two in zip(pairs, marks(pairs, "chosen"), marks(pairs, "rejected")):
        assert (one, two) == (1, 0) if pair.verdicts[OVERALL] == 1 else one == two
    config = load(ROOT / "configs" / "starter_dpo.yaml", {"preferences": str(file)})
    validate.check_recorded_pairs(loop.setup(config))
    train, held = in_place(config, sets.resolve(config))
    assert len(train) == sum(pair.verdicts[OVERALL] == 1 for pair in pairs) > 4  # no prompt of theirs is held out
    assert config.rewards == {"preferred": 1.0} and list(config.watched) == ["scene", "scene_graded"] and held
    assert len(subjects) == 3 * make_starter_pairs.GROUP == len({pair.rejected for pair in subjects})
    assert set(marks(subjects, "chosen")) == {1} and len({pair.prompt for pair in subjects}) == 3
    shown = {pair.rejected: pair.prompt for pair in subjects}  # the same images stand in both files
    assert all(shown.get(picture, pair.prompt) == pair.prompt for pair in pairs
               for picture in (pair.chosen, pair.rejected))
    config = load(ROOT / "configs" / "starter_rpo.yaml", {"preferences": str(tmp_path / "subjects.jsonl")})
    validate.check_recorded_pairs(loop.setup(config))
    assert len(in_place(config, sets.resolve(config))[0]) == len(subjects)
