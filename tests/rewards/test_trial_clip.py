"""A function that judges images, in a recipe of a video model: one line with the cure, before the model is loaded."""

import re
from pathlib import Path

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import compose, require_clips, score

WATCH = WatchRule()
README = Path(__file__).parents[2] / "README.md"


def shown() -> str:
    """README's own reward."""
    return re.search(r"```python\n(# red.py\n.*?)```", README.read_text(), re.DOTALL)[1]


def test_readmes_reward_on_a_video_model(tmp_path, capsys):
    file = tmp_path / "red.py"
    file.write_text(shown())
    assert main(["train", "--model=starter_video", "--prompts=starter_video", f"--reward={file}:red",
                 f"--output={tmp_path}/runs"]) == 2
    out, err = capsys.readouterr()
    assert "loading" not in out and len(err.splitlines()) == 1 and "but what is generated here is video" in err
    assert "ValueError: too many values to unpack (expected 3" in err
    cure = f'{{red: {{use: frames, args: {{reward: "{file}:red"}}}}}}'
    assert err.rstrip().endswith(f"score its frames, reward: {cure}")
    (tmp_path / "recipe.yaml").write_text(f"model: starter_video\nreward: {cure}\n")
    cured = compose(load(tmp_path / "recipe.yaml").trained)
    clip = torch.zeros(1, 2, 3, 4, 4)
    clip[:, 0, 0] = 1.0  # one of two frames is red
    assert score(cured, clip, ["red"], [{}]).tolist() == [[0.5]]
    require_clips(cured, "red", {})


def by_place(images, prompts):
    return images[:, 0].mean((1, 2))


def any_form(images, prompts):
    return images.flatten(1).mean(1)


def of_a_key(images, prompts, metadata):
    return [images[0].mean() * entry["strength"] for entry in metadata]


def test_only_a_function_that_scores_a_image_and_no_clip_is_told():
    rules = {name: WATCH for name in ("any", "key", "still")}
    require_clips(compose(rules, None, {"any": any_form, "key": of_a_key, "still": any_form}), "red", {})
    with pytest.raises(UserError, match=r"'still' judges images, .* video .*returned .*: score its frames"):
        require_clips(compose({"still": WATCH}, None, {"still": by_place}), "red", {})
