"""Clips on pages and on disk, as animated WebP and as mp4."""

import base64
import io
import re

import pytest
import torch
from PIL import Image, ImageSequence

from flowgrpo.evaluation.columns import write_page
from flowgrpo.evaluation.pages import clips, grid
from flowgrpo.evaluation.pages.clips import MOMENTS, moving, save_clip, still, tall, untall
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.report import snapshots
from tests.helpers import ffmpeg
from tests.helpers.refusals import refused


def clip(*greys: float, height: int = 64, width: int = 64) -> torch.Tensor:
    """Frames [F, 3, H, W] of one grey each."""
    return torch.tensor(greys)[:, None, None, None].expand(-1, 3, height, width)


GREYS = (0.0, 0.2, 0.4, 0.6, 0.8)
BYTES = (0, 51, 102, 153, 204)


def test_strips_and_moments():
    strip = grid._strip(clip(*GREYS))
    side = 128  # twice as large
    assert strip.size == (5 * side + 4 * grid.BETWEEN_FRAMES, side)
    middles = [i * (side + grid.BETWEEN_FRAMES) + side // 2 for i in range(5)]
    assert [strip.getpixel((x, 64))[0] for x in middles] == list(BYTES)
    picture, long = clip(0.5)[0], clip(*(i / 255 for i in range(81)), height=2, width=2)
    assert moving([picture]) == [] and moving([picture, clip(*GREYS)]) == [0, 0.25, 0.5, 0.75, 1]
    assert moving([clip(0.5)]) == [0] and len(moving([long])) == MOMENTS
    assert torch.equal(still(picture, 0.7), picture)
    assert [round(still(long, at)[0, 0, 0].item() * 255) for at in (0, 0.5, 1)] == [0, 40, 80]


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


@pytest.mark.parametrize("frames", [None, 3])
def test_what_is_kept_on_disk_is_read_back(frames):
    image = torch.rand(*(() if frames is None else (frames,)), 3, 8, 6)
    assert tall(image).shape == (3, 8 * (frames or 1), 6)
    assert torch.equal(untall(tall(image), frames), image)
    if frames:
        assert torch.equal(tall(image)[:, 8:16], image[1])


CLIP = torch.tensor([0.0, 1.0, 0.2])[:, None, None, None].expand(3, 3, 5, 4)
ODD = torch.tensor([0.0, 1.0, 0.2])[:, None, None, None].expand(3, 3, 81, 2)  # too large to be enlarged


@pytest.fixture(autouse=True)
def fresh():
    clips._warn.cache_clear()


@pytest.fixture
def log(tmp_path, monkeypatch):
    return ffmpeg.install(tmp_path / "bin", monkeypatch)


def test_clips_are_webp_and_mp4_singly_and_on_pages(tmp_path, log):
    assert save_clip(tmp_path / "a.webp", ODD, "a cät\nSteps: 3", fps=24) == tmp_path / "a.webp"
    assert (tmp_path / "a.mp4").read_bytes() == ffmpeg.BYTES and Image.open(tmp_path / "a.webp").n_frames == 3
    arguments, pixels = ffmpeg.call(log)
    options = dict(zip(arguments, arguments[1:]))
    assert options["-s"] == "2x82" and options["-r"] == "24" and options["-c:v"] == "libx264"
    assert options["-pix_fmt"] == "yuv420p" and options["-metadata"] == "comment=a cät\nSteps: 3"
    size = 2 * 82 * 3
    assert pixels == [0] * size + [255] * size + [51] * size
    draw_grid(tmp_path / "page.png", ["a"], [Row("x", [CLIP], [{}])])
    assert {path.name for path in tmp_path.glob("page.*")} == {"page.png", "page.webp", "page.mp4"}
    assert save_clip(tmp_path / "deep" / "b.mp4", CLIP) == tmp_path / "deep" / "b.mp4"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["b.mp4"]


def test_pages_show_the_video_with_the_webp_as_fallback(tmp_path, log):
    text = write_page(tmp_path / "p.html", "t", ["a"], [Row("x", [CLIP], [{}])]).read_text()
    [(video, picture)] = re.findall(r'<video [^>]* muted playsinline><source type="video/mp4" src="([^"]+)">'
                                    r'<img [^>]* src="data:image/webp;base64,([^"]+)"></video>', text)
    assert base64.b64decode(video.partition(",")[2]) == ffmpeg.BYTES and base64.b64decode(picture)[8:12] == b"WEBP"
    card = snapshots.sample_as_json(CLIP)
    assert card["video"] == clips.TYPE.join(("data:", ";base64,")) + base64.b64encode(ffmpeg.BYTES).decode()
    assert dict(zip(*[ffmpeg.call(log)[0][at:] for at in (0, 1)]))["-s"] == "128x160"  # enlarged 32 times
    kept = snapshots.content(card)
    assert kept.mp4 == ffmpeg.BYTES and [frame.getpixel((1, 1))[0] for frame in kept.frames] == [0, 255, 51]
    assert "video" not in snapshots.sample_as_json(CLIP[0])


def test_without_an_encoder_one_line_says_so_and_the_webp_remains(tmp_path, monkeypatch, capsys):
    ffmpeg.remove(monkeypatch)
    for name in "ab":
        save_clip(tmp_path / f"{name}.webp", CLIP)
    assert {path.name for path in tmp_path.iterdir()} == {"a.webp", "b.webp"}
    assert capsys.readouterr().err == ("clips are saved as WebP alone: mp4 needs ffmpeg with H.264: pip install "
                                       "'flowgrpo[mp4]'\n")
    assert "<video" not in write_page(tmp_path / "p.html", "t", ["a"], [Row("x", [CLIP], [{}])]).read_text()
    assert set(snapshots.sample_as_json(CLIP)) == {"picture"}
    refused(r"b.mp4 cannot be written: mp4 needs ffmpeg .*flowgrpo\[mp4\]", save_clip, tmp_path / "b.mp4", CLIP)


def test_an_encoder_that_fails_leaves_the_webp(tmp_path, monkeypatch, capsys):
    ffmpeg.install(tmp_path / "bin", monkeypatch, status=1)
    save_clip(tmp_path / "a.webp", CLIP)
    assert not (tmp_path / "a.mp4").exists() and (tmp_path / "a.webp").exists()
    assert "failed (Unknown encoder 'libx264'); mp4 needs" in capsys.readouterr().err
