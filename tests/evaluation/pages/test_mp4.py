"""Clips as mp4: what ffmpeg gets, where the file lies, and what remains without an encoder."""

import base64
import re

import pytest
import torch
from PIL import Image

from flowgrpo.errors import UserError
from flowgrpo.evaluation.columns import write_page
from flowgrpo.evaluation.pages import clips
from flowgrpo.evaluation.pages.clips import save_clip
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.report import snapshots
from tests.helpers import ffmpeg

CLIP = torch.tensor([0.0, 1.0, 0.2])[:, None, None, None].expand(3, 3, 5, 4)
ODD = torch.tensor([0.0, 1.0, 0.2])[:, None, None, None].expand(3, 3, 81, 2)  # too large to be enlarged


@pytest.fixture(autouse=True)
def fresh():
    clips._warn.cache_clear()


@pytest.fixture
def log(tmp_path, monkeypatch):
    return ffmpeg.install(tmp_path / "bin", monkeypatch)


def test_a_clip_is_saved_as_webp_and_mp4(tmp_path, log):
    assert save_clip(tmp_path / "a.webp", ODD, "a cät\nSteps: 3", fps=24) == tmp_path / "a.webp"
    assert (tmp_path / "a.mp4").read_bytes() == ffmpeg.BYTES and Image.open(tmp_path / "a.webp").n_frames == 3
    arguments, pixels = ffmpeg.call(log)
    options = dict(zip(arguments, arguments[1:]))
    assert options["-s"] == "2x82" and options["-r"] == "24" and options["-c:v"] == "libx264"
    assert options["-pix_fmt"] == "yuv420p" and options["-metadata"] == "comment=a cät\nSteps: 3"
    size = 2 * 82 * 3
    assert pixels == [0] * size + [255] * size + [51] * size


def test_a_page_of_clips_and_a_single_file(tmp_path, log):
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
    with pytest.raises(UserError, match=r"b.mp4 cannot be written: mp4 needs ffmpeg .*flowgrpo\[mp4\]"):
        save_clip(tmp_path / "b.mp4", CLIP)


def test_an_encoder_that_fails_leaves_the_webp(tmp_path, monkeypatch, capsys):
    ffmpeg.install(tmp_path / "bin", monkeypatch, status=1)
    save_clip(tmp_path / "a.webp", CLIP)
    assert not (tmp_path / "a.mp4").exists() and (tmp_path / "a.webp").exists()
    assert "failed (Unknown encoder 'libx264'); mp4 needs" in capsys.readouterr().err
