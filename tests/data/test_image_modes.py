"""Every mode and sample format that Pillow returns: read as it was meant, or refused in one line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from flowgrpo.data.images import Clip, frame_count, image_size, read_image
from flowgrpo.errors import UserError
from flowgrpo.rewards.preprocessing import read_output, read_tensor

RAMP = np.linspace(0, 255, 64).reshape(8, 8)  # black to white
RED, CLEAR = (255, 0, 0, 255), (255, 0, 255, 0)


def grey(values, dtype=np.uint8):
    return Image.fromarray(values.astype(dtype))


def two(one, other, mode="RGBA"):
    """An image whose upper half has one colour, and the lower the other."""
    picture = Image.new(mode, (8, 8), one)
    picture.paste(other, (0, 4, 8, 8))
    return picture


@pytest.mark.parametrize("name, picture", [
    ("l.png", grey(RAMP)), ("i16.png", grey(RAMP * 257, np.uint16)), ("i16.tif", grey(RAMP * 257, np.uint16)),
    ("i16b.tif", grey(RAMP * 257, ">u2")), ("i.tif", grey(RAMP * 257, np.int32)), ("i.pgm", grey(RAMP * 257, np.int32)),
    ("f.tif", grey(RAMP / 255, np.float32)), ("f.pfm", grey(RAMP / 255, np.float32)),
])
def test_a_grey_ramp_goes_from_black_to_white(name, picture, tmp_path):
    picture.save(tmp_path / name)
    read = np.asarray(read_image(tmp_path / name))
    np.testing.assert_allclose(read, np.repeat(RAMP[..., None], 3, 2), atol=1)
    np.testing.assert_allclose(read_tensor(tmp_path / name)[0], RAMP / 255, atol=1 / 255)


@pytest.mark.parametrize("name, picture, expected", [
    ("f255.tif", grey(RAMP, np.float32), "has float values from 0 to 255, expected 0 to 1: scale them"),
    ("nan.tif", grey(RAMP * np.nan, np.float32), "has float values from nan to nan"),
    ("i8.tif", grey(RAMP, np.int32), "has 32-bit values from 0 to 255, whose white is not known"),
    ("i32.tif", grey(RAMP * 65537, np.int32), "has 32-bit values from 0 to 16711935"),
])
def test_values_of_an_unknown_range_are_refused(name, picture, expected, tmp_path):
    picture.save(tmp_path / name)
    for read in (read_image, read_tensor):
        with pytest.raises(UserError) as caught:
            read(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name} {expected}")


@pytest.mark.parametrize("name, picture", [
    ("rgba.png", two(RED, CLEAR)), ("rgba.webp", two(RED, CLEAR)), ("rgba.tif", two(RED, CLEAR)),
    ("p.png", two(RED, CLEAR).quantize(2)), ("pa.tif", two(RED, CLEAR).quantize(2).convert("PA")),
    ("rgb.png", two(RED[:3], (1, 2, 3), "RGB")),
])
def test_transparency_is_white_and_refused_where_it_has_no_meaning(name, picture, tmp_path):
    given = {"transparency": (1, 2, 3)} if picture.mode == "RGB" else {}
    picture.save(tmp_path / name, **given | ({"lossless": True, "exact": True} if name.endswith("webp") else {}))
    read = np.asarray(read_image(tmp_path / name))
    assert read[0, 0].tolist() == [255, 0, 0] and read[7, 7].tolist() == [255, 255, 255]
    assert read_tensor(tmp_path / name)[:, 7, 7].tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="has transparency"):
        read_image(tmp_path / name, opaque=True)


@pytest.mark.parametrize("mode", ["LA", "CMYK", "LAB", "RGBX", "1", "P"])
def test_other_modes_keep_their_colours(mode, tmp_path):
    picture = two((255, 255, 255), (0, 0, 0), "RGB")
    picture = ImageCms.profileToProfile(picture, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"),
                                        outputMode="LAB") if mode == "LAB" else picture.convert(mode)
    picture.save(tmp_path / "a.tif")
    read = np.asarray(read_image(tmp_path / "a.tif"))
    assert read[0, 0].min() >= 253 and read[7, 7].max() <= 2


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_orientation_turns_once(ending, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side: the top is at the left
    stored = Image.new("RGB", (32, 16), "white")
    stored.paste((0, 0, 0), (0, 0, 16, 16))
    stored.save(tmp_path / f"a.{ending}", exif=exif)
    read = np.asarray(read_image(tmp_path / f"a.{ending}"))
    assert image_size(tmp_path / f"a.{ending}") == read.shape[:2] == (32, 16)
    assert read[:12].mean() < 5 and read[20:].mean() > 250
    assert read_tensor(tmp_path / f"a.{ending}").shape == (3, 32, 16)


def test_a_colour_profile_and_a_gamma_are_applied(tmp_path):
    lab = ImageCms.createProfile("LAB")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    Image.new("RGB", (8, 8), (128,) * 3).save(tmp_path / "bad.png", icc_profile=b"no profile")
    assert np.asarray(read_image(tmp_path / "bad.png"))[0, 0].tolist() == [128] * 3 and lab and profile
    from PIL import PngImagePlugin
    chunks = PngImagePlugin.PngInfo()
    chunks.add(b"gAMA", (100_000).to_bytes(4, "big"))  # linear
    Image.new("RGB", (8, 8), (55,) * 3).save(tmp_path / "linear.png", pnginfo=chunks)
    assert np.asarray(read_image(tmp_path / "linear.png"))[0, 0].tolist() == [127] * 3


@pytest.mark.parametrize("start, expected", [
    (b"", "it is empty"), (b"hello", "it is damaged, or no image"),
    (b"\0\0\0\x1cftypavif", "its format is AVIF, expected BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP: convert it"),
    (b"\0\0\0\x1cftypheic", "its format is HEIF"), (b"\xff\x0a", "its format is JPEG XL"),
])
def test_a_file_of_another_format_is_called_so(start, expected, tmp_path):
    (tmp_path / "a.png").write_bytes(start)
    with pytest.raises(UserError) as caught:
        read_image(tmp_path / "a.png")
    assert expected in str(caught.value)


FRAMES = [Image.new("RGB", (8, 8), (20 * number,) * 3) for number in range(12)]
SHADES = [20 * number for number in range(12)]


@pytest.mark.parametrize("name, form", [("a.gif", {}), ("a.webp", {"lossless": True}), ("a.png", {}), ("a.tif", {}),
                                        ("a.dat", {"format": "GIF"})])
def test_frames_of_a_file_are_in_order_and_no_single_image(name, form, tmp_path):
    FRAMES[0].save(tmp_path / name, save_all=True, append_images=FRAMES[1:], **form)
    assert frame_count(tmp_path / name) == 12
    read = [np.asarray(frame).mean() for frame in Clip.of(str(tmp_path / name), 12).frames]
    np.testing.assert_allclose(read, SHADES, atol=1)
    with pytest.raises(UserError, match=r"holds 12 images, expected one: .* `video`"):
        read_image(tmp_path / name)


def test_the_still_image_of_an_animated_png_is_no_frame(tmp_path):
    FRAMES[9].save(tmp_path / "a.png", save_all=True, append_images=FRAMES[:3], default_image=True)
    assert frame_count(tmp_path / "a.png") == 3
    assert [np.asarray(frame).mean() for frame in Clip.of(str(tmp_path / "a.png"), 3).frames] == SHADES[:3]


def test_frames_of_a_folder_go_by_their_numbers(tmp_path):
    for number, frame in enumerate(FRAMES):
        frame.save(tmp_path / f"frame{number}.png")
    (tmp_path / "._frame0.png").write_bytes(b"of a file system")
    assert [np.asarray(frame).mean() for frame in Clip.of(str(tmp_path), 12).frames] == SHADES
    np.testing.assert_allclose(read_output(tmp_path)[:, 0, 0, 0] * 255, SHADES, atol=1e-3)


def test_an_address_in_the_place_of_a_file_says_to_download_it():
    with pytest.raises(UserError, match="no file at https://a.b/c.png: it is an address, expected a file: download it"):
        read_output(Path("https://a.b/c.png"))
    with pytest.raises(UserError, match=r"cannot be read as an image \(it is an address, expected a file: download it"):
        read_image("https://a.b/c.png")


def test_a_folder_that_holds_more_than_one_clip_is_refused(tmp_path):
    FRAMES[0].save(tmp_path / "f0.png")
    FRAMES[0].resize((4, 4)).save(tmp_path / "f1.png")
    with pytest.raises(UserError, match="frame 2 has 4 x 4 pixels, and the first 8 x 8"):
        Clip.of(str(tmp_path), 2).frames
    FRAMES[0].save(tmp_path / "f0.bmp")
    with pytest.raises(UserError, match=r"holds f0\.bmp and f0\.png, expected one file for each frame"):
        frame_count(tmp_path)
    (tmp_path / "f2.avif").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds f2\.avif, expected frames of"):
        frame_count(tmp_path)
