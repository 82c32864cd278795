"""The video starter's world, and the rewards that read its clips."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy import ndimage
from starter_clips import FRAMES, STYLES, TASKS, clips, is_held_out, render

from flowgrpo.rewards.starter.motion import appearance, motion, motion_graded, read_clips, track
from flowgrpo.rewards.starter.scene import scene
from flowgrpo.starter.motion import MOTIONS, PHRASES, Clip, parse
from flowgrpo.starter.scenes import COLOURS, SHAPES, SIZE, coverage
from tests.helpers.refusals import message, refused

GROUND = 0.96


def draw(clip: Clip, rng: np.random.Generator, jolted: bool = False) -> torch.Tensor:
    return torch.from_numpy(render(clip, rng, jolted)).float()


def frame(shape: str = "circle", colour: str = "red", centre=(32.0, 32.0), radius: float = 10.0) -> torch.Tensor:
    mask = coverage(shape, radius, centre)
    return torch.from_numpy(GROUND * (1 - mask) + np.array(COLOURS[colour])[:, None, None] * mask).float()


def moved(path, **look) -> torch.Tensor:
    """A clip whose object is at each of these centres."""
    return torch.stack([frame(centre=centre, **look) for centre in path])


def all_three(clip: torch.Tensor, prompt: str) -> tuple[float, float, float]:
    (strict,), (graded,), (shown,) = (reward(clip[None], [prompt]) for reward in (motion, motion_graded, appearance))
    assert 0 <= graded <= 1 and strict == float(graded == 1)
    return strict, graded, shown


# --- the world -------------------------------------------------------------------------------------------------------
def test_captions_tracks_and_sizes():
    for clip in clips(held=True) + clips(held=False):
        captions = [clip.caption(style) for style in range(STYLES)]
        assert len(set(captions)) == STYLES and {parse(caption) for caption in captions} == {clip}
    assert parse("  A red   circle is MOVING left. ") == Clip("circle", "red", "left")
    path = [(20.0 + 3 * i, 40.0 - 2 * i) for i in range(5)]
    found = track(read_clips(moved(path)[None])[0])
    assert found.legible == 1
    np.testing.assert_allclose(found.centres, path, atol=0.05)
    np.testing.assert_allclose(found.velocities, [[3, -2]] * 4, atol=0.1)
    grown = track(read_clips(torch.stack([frame(radius=8 * 1.15**i) for i in range(4)])[None])[0])
    np.testing.assert_allclose(grown.growths, np.log(1.15), atol=0.04)
    growing = torch.stack([frame(radius=8 * 1.12**i) for i in range(5)])
    for claimed in MOTIONS:
        prompt = Clip("circle", "red", claimed).caption()
        assert all_three(growing, prompt)[0] == (claimed == "grow")
        assert all_three(growing.flip(0), prompt)[0] == (claimed == "shrink")
        assert all_three(growing[:1].repeat(5, 1, 1, 1), prompt)[0] == (claimed == "stay")


def test_other_prompts_are_refused():
    for prompt in ("", "a red circle", "red circle moves left", "a pink circle moves left",
                   "a red circle moves left and grows", "a red circle flies"):
        refused("expected 'a COLOUR SHAPE DOES', such as 'a red circle moves left'", parse, prompt, error=ValueError)


def test_prompts_tasks_and_frames():
    held, known = clips(held=True), clips(held=False)
    assert (len(held), len(known)) == (42, 210) and all(map(is_held_out, held)) and not any(map(is_held_out, known))
    for name, values in (("shape", SHAPES), ("colour", COLOURS), ("motion", MOTIONS)):
        assert Counter(getattr(clip, name) for clip in held) == {value: 42 // len(values) for value in values}
    assert {(c.shape, c.colour) for c in known} == set(product(SHAPES, COLOURS))
    assert {(c.shape, c.motion) for c in known} == set(product(SHAPES, MOTIONS))
    assert {(c.colour, c.motion) for c in known} == set(product(COLOURS, MOTIONS))
    assert {name: Clip("ring", "red", name).task for name in MOTIONS} == {
        "left": "direction", "right": "direction", "up": "direction", "down": "direction", "grow": "size",
        "shrink": "size", "stay": "still"}
    assert TASKS == ("direction", "size", "still") and set(PHRASES) == set(MOTIONS)
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        drawn = render(Clip(shape, "black", "stay"), rng)
        assert drawn.shape == (FRAMES, 3, SIZE, SIZE) and 0 <= drawn.min() < 0.2 and 0.9 < drawn.max() <= 1
        assert (drawn == drawn[0]).all()
        border = np.concatenate([drawn[..., [0, -1], :].ravel(), drawn[..., [0, -1]].ravel()])
        assert border.min() > 0.89  # nothing is cut off


# --- the rewards on drawn clips ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def drawn() -> tuple[list[Clip], torch.Tensor]:
    rng, every = np.random.default_rng(0), clips(held=False) + clips(held=True)
    chosen = [every[i] for i in rng.integers(len(every), size=500)]
    return chosen, torch.stack([draw(clip, rng) for clip in chosen])


def other(value, values, step: int):
    values = list(values)
    return values[(values.index(value) + 1 + step % (len(values) - 1)) % len(values)]


def test_true_captions_are_accepted_and_one_changed_fact_is_refused(drawn):
    chosen, frames = drawn
    prompts = [clip.caption(i % STYLES) for i, clip in enumerate(chosen)]
    assert np.mean(motion(frames, prompts)) >= 0.99 and np.mean(appearance(frames, prompts)) >= 0.99
    wrong = {
        "motion": [Clip(c.shape, c.colour, other(c.motion, MOTIONS, i)) for i, c in enumerate(chosen)],
        "colour": [Clip(c.shape, other(c.colour, COLOURS, i), c.motion) for i, c in enumerate(chosen)],
        "shape": [Clip(other(c.shape, SHAPES, i), c.colour, c.motion) for i, c in enumerate(chosen)]}
    told = {name: [clip.caption() for clip in claims] for name, claims in wrong.items()}
    assert np.mean(motion(frames, told["motion"])) <= 0.01
    assert 0.1 < np.mean(motion_graded(frames, told["motion"])) < 0.5
    for name in ("colour", "shape"):
        assert np.mean(appearance(frames, told[name])) <= 0.01
        assert np.mean(motion(frames, told[name])) >= 0.99  # the motion does not ask what moves
    assert np.mean(appearance(frames, told["motion"])) >= 0.99


def with_third(clip: np.ndarray, frame) -> np.ndarray:
    clip = clip.copy()
    clip[2] = frame
    return clip


DAMAGES = {  # and what a clip is worth then at most
    "blurred": (lambda clip, rng: ndimage.gaussian_filter(clip, (0, 0, 3, 3)), 0.2),
    "noisy": (lambda clip, rng: np.clip(clip + rng.normal(0, 0.3, clip.shape), 0, 1), 0.05),
    "cut out": (lambda clip, rng: with_third(clip, GROUND), 0.0),
    "shaken": (lambda clip, rng: with_third(clip, np.roll(clip[2], rng.permutation([5, 0]), (1, 2))), 0.6),
    "backwards and forwards": (lambda clip, rng: clip[[0, 2, 1, 3, 4]], 0.9)}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_clips_are_not_rewarded(drawn, name):
    (damage, worth), rng = DAMAGES[name], np.random.default_rng(1)
    order = name == "backwards and forwards"
    moving = [(clip, v) for clip, v in zip(*drawn) if not order or clip.motion != "stay"][:40]
    made = torch.from_numpy(np.stack([damage(v.numpy(), rng) for _, v in moving])).float()
    prompts = [clip.caption() for clip, _ in moving]
    assert max(motion(made, prompts)) == 0 and np.mean(motion_graded(made, prompts)) <= worth


def test_still_jolted_and_cut_clips_are_not_rewarded(drawn):
    moving = [(clip, frames) for clip, frames in zip(*drawn) if clip.motion != "stay"][:40]
    prompts, rng = [clip.caption() for clip, _ in moving], np.random.default_rng(2)
    still = torch.stack([frames[:1].expand(FRAMES, -1, -1, -1) for _, frames in moving])
    jolted = torch.stack([draw(clip, rng, jolted=True) for clip, _ in moving])
    scenes = torch.stack([torch.cat([frames[:2], draw(clip, rng)[2:]]) for clip, frames in moving])  # cut to another
    for made in (still, jolted):
        assert max(motion(made, prompts)) == 0 and np.mean(motion_graded(made, prompts)) < 0.6
    assert np.mean(motion(scenes, prompts)) <= 0.05  # where the second scene happens to go on from the first


# --- clips made by hand ----------------------------------------------------------------------------------------------
LEFT = [(44.0 - 4 * i, 30.0) for i in range(5)]


@pytest.mark.parametrize("way, step", [("left", (-4, 0)), ("right", (4, 0)), ("up", (0, -4)), ("down", (0, 4))])
def test_the_direction_is_that_of_the_track(way, step):
    clip = moved([(32.0 + step[0] * (i - 2), 32.0 + step[1] * (i - 2)) for i in range(5)])
    for claimed in MOTIONS:
        assert all_three(clip, Clip("circle", "red", claimed).caption())[0] == (claimed == way)


def test_the_grade_falls_with_the_angle_the_pace_and_the_jolt():
    prompt = "a red circle moves left"
    def turned(degrees: float) -> torch.Tensor:
        step = 4 * np.array([-np.cos(np.radians(degrees)), np.sin(np.radians(degrees))])
        return moved([tuple(32 + step * (i - 2)) for i in range(5)])
    angles = [all_three(turned(angle), prompt)[1] for angle in (0, 12, 40, 90, 180)]
    assert angles[:2] == [1, 1] and angles[1:] == sorted(angles[1:], reverse=True) and 0.2 < angles[-1] < 0.3
    paces = [all_three(moved([(40.0 - pace * i, 30.0) for i in range(5)]), prompt)[1] for pace in (4, 2.2, 1.2, 0.4)]
    assert paces[:2] == [1, 1] and paces[1:] == sorted(paces[1:], reverse=True) and paces[-1] < 0.6
    jolts = [all_three(moved([(x, y + jolt * (i > 1)) for i, (x, y) in enumerate(LEFT)]), prompt)[1]
             for jolt in (0, 1, 3, 5, 8)]
    assert jolts[:2] == [1, 1] and jolts[1:] == sorted(jolts[1:], reverse=True) and jolts[-1] < 0.4


def test_uneven_paces_wrong_frames_further_objects_and_empty_clips():
    clip, prompt = moved(LEFT), "a red circle moves left"
    assert all_three(clip, prompt) == (1, 1, 1)
    strict, graded, shown = all_three(moved([(44.0, 30.0)] * 3 + [(36.0, 30.0), (28.0, 30.0)]), prompt)
    assert strict == 0 and 0.2 < graded < 0.8 and shown == 1  # the course is right
    both = torch.minimum(clip, moved([(54.0, 54.0)] * 5, radius=7.0))
    assert all_three(both, prompt)[::2] == (0, 0)
    turned = torch.cat([clip[:3], moved(LEFT[3:], colour="blue")])
    assert all_three(turned, prompt)[0] == 0
    clip[3] = frame("square", centre=LEFT[3])
    assert all_three(clip, prompt)[::2] == (1, 0) and scene(clip, ["a red circle"] * 5) == [1, 1, 1, 0, 1]
    assert all_three(moved(LEFT)[[4, 1, 3, 0, 2]], prompt)[::2] == (0, 1)
    assert all_three(torch.full((5, 3, 64, 64), 0.95), prompt) == (0, 0, 0)


def test_mistakes_are_told():
    clip, prompt = moved(LEFT)[None], ["a red circle moves left"]
    for reward in (motion, motion_graded, appearance):
        for given, asked, told in (
                (clip[0], prompt, "got videos of shape [5, 3, 64, 64], expected [B, F, 3, 64, 64]"),
                (clip[:, :2], prompt, "at least 3 frames"), (clip, prompt * 2, "1 videos and 2 prompts"),
                (clip, ["a dog"], "cannot read the prompt 'a dog'")):
            assert told in message(reward, given, asked, error=ValueError)
        assert reward(clip, prompt) == [1.0]
