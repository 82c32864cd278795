"""Clips on pages and on disk: frames beside each other, animated WebP, and what is read back."""

import io

import pytest
import torch
from PIL import Image, ImageSequence

from flowgrpo.evaluation.pages import grid
from flowgrpo.evaluation.pages.clips import MOMENTS, moving, save_clip, still, tall, untall
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.report import snapshots


def clip(*greys: float, height: int = 64, width: int = 64) -> torch.Tensor:
    """Frames [F, 3, H, W] of one grey each."""
    return torch.tensor(greys)[:, None, None, None].expand(-1, 3, height, width)


GREYS = (0.0, 0.2, 0.4, 0.6, 0.8)
BYTES = (0, 51, 102, 153, 204)


def test_a_strip_has_every_frame_in_its_place():
    strip = grid._strip(clip(*GREYS))
    side = 128  # twice as large
    assert strip.size == (5 * side + 4 * grid.BETWEEN_FRAMES, side)
    middles = [i * (side + grid.BETWEEN_FRAMES) + side // 2 for i in range(5)]
    assert [strip.getpixel((x, 64))[0] for x in middles] == list(BYTES)


@pytest.mark.parametrize("frames, shown", [(1, [0]), (2, [0, 1]), (5, [0, 1, 2, 3, 4]), (81, [0, 20, 40, 60, 80])])
def test_of_a_long_clip_first_last_and_some_between_are_shown(frames, shown):
    strip = grid._strip(clip(*(i / 255 for i in range(frames)), height=16, width=16))
    side = (strip.width + grid.BETWEEN_FRAMES) // len(shown)
    assert [strip.getpixel((i * side + 3, 3))[0] for i in range(len(shown))] == shown


def frames_of(path) -> list[Image.Image]:
    picture = Image.open(path)
    found = []
    for i in range(picture.n_frames):
        picture.seek(i)
        found.append(picture.convert("RGB"))
    return found


def test_a_clip_is_saved_without_loss(tmp_path):
    frames = frames_of(save_clip(tmp_path / "deep" / "a.webp", clip(*GREYS)))
    assert [frame.size for frame in frames] == [(64, 64)] * 5
    assert [frame.getpixel((9, 50)) for frame in frames] == [(value,) * 3 for value in BYTES]


def test_a_page_of_clips_lies_beside_the_same_page_animated(tmp_path):
    rows = [Row("x", [clip(*GREYS), clip(*reversed(GREYS))], [{"r": 0.0}, {"r": 1.0}])] * 2
    page = Image.open(draw_grid(tmp_path / "a.png", ["before", "after"], rows))
    moments = frames_of(tmp_path / "a.webp")
    assert len(moments) == 5 and page.width > moments[0].width
    at = (grid.MARGIN + 9, grid.MARGIN + grid.HEADING.height + 20)
    other = (at[0] + 192 + grid.BETWEEN_IMAGES, at[1])  # an image of 64 pixels is shown three times as large
    assert [frame.getpixel(at)[0] for frame in moments] == list(BYTES)
    assert [frame.getpixel(other)[0] for frame in moments] == list(reversed(BYTES))


def test_a_page_of_images_is_not_animated(tmp_path):
    draw_grid(tmp_path / "a.png", [""], [Row("x", [clip(0.5)[0]], [{}])])
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("frames, fps, milliseconds", [(5, 16, 312), (49, 16, 3062), (121, 24, 5042), (81, 30, 2700)])
def test_a_clip_takes_the_seconds_of_its_frames(tmp_path, frames, fps, milliseconds):
    """On disk, and on a page and in a report, which show fewer frames of a long clip."""
    shown = clip(*(i / 255 for i in range(frames)), height=8, width=8)
    page = draw_grid(tmp_path / "page.png", [""], [Row("x", [shown], [{}])], fps=fps).with_suffix(".webp")
    for file in (save_clip(tmp_path / "a.webp", shown, fps=fps), page):
        with Image.open(file) as picture:
            assert abs(sum(each.info["duration"] for each in frames_read(picture)) - milliseconds) <= 1
    kept = snapshots.content(snapshots.sample_as_json(shown, fps))
    assert abs(kept.seconds - frames / fps) < 0.001
    with Image.open(io.BytesIO(kept.gif())) as picture:
        assert abs(sum(each.info["duration"] for each in frames_read(picture)) - milliseconds) <= 10


def frames_read(picture):
    for frame in ImageSequence.Iterator(picture):
        frame.load()
        yield frame


def test_moments():
    picture, long = clip(0.5)[0], clip(*(i / 255 for i in range(81)), height=2, width=2)
    assert moving([picture]) == [] and moving([picture, clip(*GREYS)]) == [0, 0.25, 0.5, 0.75, 1]
    assert moving([clip(0.5)]) == [0] and len(moving([long])) == MOMENTS
    assert torch.equal(still(picture, 0.7), picture)
    shown = [round(still(long, at)[0, 0, 0].item() * 255) for at in (0, 0.5, 1)]
    assert shown == [0, 40, 80]


@pytest.mark.parametrize("frames", [None, 3])
def test_what_is_kept_on_disk_is_read_back(frames):
    image = torch.rand(*(() if frames is None else (frames,)), 3, 8, 6)
    assert tall(image).shape == (3, 8 * (frames or 1), 6)
    assert torch.equal(untall(tall(image), frames), image)
    if frames:
        assert torch.equal(tall(image)[:, 8:16], image[1])
