"""Motion and consistency of clips whose motion is known, rewards of images lifted to clips, and a clip's trial."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.rewards import About, compose, require_clips, score
from flowgrpo.rewards.video_motion import Frames
from tests.helpers.refusals import message, refused

SIDE, FRAMES = 64, 5


def texture(seed: int, size: int) -> np.ndarray:
    rough = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(size, size)), 1.5)
    return np.clip(0.5 + 0.2 * rough / rough.std(), 0, 1)


def square(step: tuple[float, float], first=(20.0, 20.0), seed: int = 0, frames: int = FRAMES) -> torch.Tensor:
    """A clip [F, 3, 64, 64]: a textured square of 20 pixels moves by `step` pixels (right, down) on a still ground."""
    ground, patch, clip = texture(99, SIDE), texture(seed, 20), []
    for i in range(frames):
        frame = ground.copy()
        left, top = (round(start + i * move) for start, move in zip(first, step))
        frame[top:top + 20, left:left + 20] = patch
        clip.append(frame)
    return torch.from_numpy(np.stack(clip)).float()[:, None].expand(-1, 3, -1, -1)


def scored(name: str, clips: list[torch.Tensor], metadata: list[dict] | None = None, **args) -> list[float]:
    count, reward = len(clips), rewards.find(name, args)
    return rewards.score({name: reward}, torch.stack(clips), [""] * count, metadata or [{}] * count)[:, 0].tolist()


# --- how much --------------------------------------------------------------------------------------------------------
def test_speeds_and_functions_of_single_images():
    still, two, three, diagonal = scored("flow_amount", [square((0, 0)), square((2, 0)), square((0, 3)),
                                                         square((3, -4), (10, 36))])
    assert still < 0.1 / SIDE
    assert two == pytest.approx(2 / SIDE, rel=0.05) and three == pytest.approx(3 / SIDE, rel=0.05)
    assert diagonal == pytest.approx(5 / SIDE, rel=0.05)
    small = square((2, 1))
    large = torch.nn.functional.interpolate(small, (128, 160), mode="bicubic", antialias=True)
    [one], [other] = scored("flow_amount", [small]), scored("flow_amount", [large[..., :128]])
    # The image is 2 times as high and 2.5 times as wide.
    assert one == pytest.approx(5**0.5 / 64, rel=0.05) and other == pytest.approx((5**2 + 2**2)**0.5 / 128, rel=0.05)
    fitting = {"any": lambda images, prompts: images.flatten(1).mean(1),
               "key": lambda images, prompts, metadata: [images[0].mean() * entry["strength"] for entry in metadata]}
    require_clips(compose(dict.fromkeys(fitting, WatchRule()), None, fitting), "red", {})
    by_place = compose({"still": WatchRule()}, None, {"still": lambda images, prompts: images[:, 0].mean((1, 2))})
    refused("'still' judges images, .* video .*returned .*: score its frames", require_clips, by_place, "red", {})


# --- consistency -----------------------------------------------------------------------------------------------------
def test_consistency_of_changes_and_pans():
    still, moving = square((0, 0)), square((2, 0))
    flicker = (moving * torch.tensor([1.0, 0.7, 1.0, 0.7, 1.0])[:, None, None, None]).clone()
    other = torch.stack([square((0, 0), seed=i)[0] for i in range(FRAMES)])
    none, smooth, brightness, patches = scored("temporal_consistency", [still, moving, flicker, other])
    assert none == 1 and smooth > 0.97 and smooth - 0.01 > max(brightness, patches)
    # Half the light of a mean of 0.5 lost at every step, up or down: about 0.15 of difference that no flow mends.
    assert brightness == pytest.approx(1 - 0.3 * 0.5, abs=0.05)
    # The whole image moves by 3 pixels: what the flow explains and what leaves the image does not count.
    wide = torch.from_numpy(texture(5, 80)).float()
    clip = torch.stack([wide[:64, 3 * i:3 * i + 64] for i in range(FRAMES)])[:, None].expand(-1, 3, -1, -1)
    unwarped = 1 - (clip[1:] - clip[:-1]).abs().mean().item()
    [warped] = scored("temporal_consistency", [clip])
    assert warped > 0.98 and unwarped < 0.9


@pytest.mark.parametrize("name", ["flow_amount", "flow_direction", "temporal_consistency"])
def test_single_frames_and_images_are_refused(name):
    args = {"direction": "up"} if name == "flow_direction" else {}
    assert "with at least two frames" in message(scored, name, [square((0, 0), frames=1)], **args)
    assert "judges video, but what is generated here is image" in message(scored, name, [torch.zeros(3, 8, 8)])


# --- frames ----------------------------------------------------------------------------------------------------------
def level(images, prompts, metadata):
    """The light of an image; none where it is black, twice as much where the prompt is bold."""
    values = images.mean((1, 2, 3)).tolist()
    return [None if value == 0 else value * (1 + (prompt == "bold")) + entry.get("more", 0)
            for value, prompt, entry in zip(values, prompts, metadata)]


@pytest.mark.parametrize("args, expected", [
    ({}, [0.4, 1.0, 3.5, None]), ({"frames": "min"}, [0.2, 0.5, 3.5, None]), ({"every": 2}, [0.4, 1.0, None, None])])
def test_the_mean_or_the_worst_frame_counts(args, expected):
    lights = torch.tensor([[0.2, 0.4, 0.6], [0.25, 0.5, 0.75], [0, 0.5, 0], [0, 0, 0]])
    clips = lights[:, :, None, None, None].expand(-1, -1, 3, 4, 4)
    found = Frames(level, **args)(rewards.Batch(clips, ["", "bold", "", ""], [{}, {}, {"more": 3}, {}]))
    assert [None if value is None else pytest.approx(value) for value in expected] == found


def test_rewards_by_name_and_what_cannot_be_lifted():
    clips = torch.stack([square((2, 0))])
    reward = rewards.find("frames", {"reward": "grid_artefacts", "args": {"period": 8}, "frames": "min"})
    expected = rewards.find("grid_artefacts", {"period": 8})(clips[0], [""] * FRAMES).min().item()
    assert rewards.score({"it": reward}, clips, [""], [{}]).tolist() == [[pytest.approx(expected)]]
    assert rewards.about(Frames(level)).modality == "video" and About().modality is None


README = Path(__file__).parents[2] / "README.md"


def test_readmes_reward_on_a_video_model(tmp_path, capsys):
    file = tmp_path / "red.py"
    file.write_text(re.search(r"```python\n(# red.py\n.*?)```", README.read_text(), re.DOTALL)[1])
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
