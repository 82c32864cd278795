"""Files beside a prompt's text, their images and frames, in every mode that Pillow returns."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageCms

from flowgrpo.data.images import Clip, frame_count, image_size, read_image
from flowgrpo.data.inputs import Inputs
from flowgrpo.data.pairs import load_demonstrations, load_pairs
from flowgrpo.data.prompts import Prompt, as_line, load_prompts, of_records
from flowgrpo.rewards.preprocessing import read_output, read_tensor
from tests.helpers.refusals import message, refused

SHADES = (0, 80, 160, 240)


@pytest.fixture
def folder(tmp_path):
    """a.png to c.png; clip/, clip.gif, clip.webp and clip.mp4 of four grey frames of 32 x 16."""
    for name in "abc":
        Image.new("RGB", (16, 16), "red").save(tmp_path / f"{name}.png")
    frames = [Image.new("RGB", (32, 16), (shade,) * 3) for shade in SHADES]
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "clip" / f"{number:02}.png")
    for ending in ("gif", "webp"):
        frames[0].save(tmp_path / f"clip.{ending}", save_all=True, append_images=frames[1:], duration=100)
    writer = cv2.VideoWriter(str(tmp_path / "clip.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 8, (32, 16))
    for frame in frames:
        writer.write(np.asarray(frame)[..., ::-1].copy())
    writer.release()
    return tmp_path


def read(folder, *lines, name="p.jsonl"):
    (folder / name).write_text("\n".join(lines if name.endswith(".csv") else map(json.dumps, lines)))
    return load_prompts(folder / name)


def test_keys_of_a_line_become_inputs_and_metadata(folder):
    line = {"prompt": "edit", "images": ["a.png", "b.png"], "video": "clip.gif", "control_image": "c.png",
            "ip_adapter_image": "a.png", "controlnet_conditioning_scale": 0.5, "metadata": {"video": "mine"}}
    [prompt] = read(folder, line)
    full = {name: str(folder / f"{name}.png") for name in "abc"}
    assert prompt.inputs == Inputs((full["a"], full["b"]), str(folder / "clip.gif"), full["c"], full["a"], 0.5)
    assert prompt.image == full["a"] and prompt.brings is prompt.inputs
    assert prompt.metadata == {"image": full["a"], "images": [full["a"], full["b"]], "video": "mine",
                               "control_image": full["c"], "ip_adapter_image": full["a"],
                               "controlnet_conditioning_scale": 0.5}
    [again] = read(folder, as_line(prompt), name="again.jsonl")
    assert again == prompt and again.key == prompt.key


def test_one_image_by_either_key_and_in_a_table(folder):
    one, listed, plain = read(folder, {"prompt": "x", "image": "a.png"}, {"prompt": "x", "images": ["a.png"]},
                              {"prompt": "x"})
    assert one == listed and one.brings == one.image == str(folder / "a.png")
    assert plain.brings is None and plain.metadata == {} and plain.key == "x"
    assert Prompt("x", image="a.png").inputs.images == ("a.png",)
    first, second = read(folder, "prompt,images,controlnet_conditioning_scale", "x,a.png; b.png,0.5",
                         'y,"[""b.png"", ""c.png""]",', name="p.csv")
    assert first.inputs.images == (str(folder / "a.png"), str(folder / "b.png"))
    assert first.inputs.controlnet_conditioning_scale == 0.5
    assert second.inputs.images == (str(folder / "b.png"), str(folder / "c.png"))


def test_files_below_the_home_folder(folder, monkeypatch):
    """Of prompts, of pairs and of demonstrations."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "lists").mkdir()
    line = {"prompt": "x", "images": ["~/a.png", "~/b.png"], "video": "~/clip.gif"}
    [prompt] = read(folder, line, name="lists/p.jsonl")
    assert prompt.inputs == Inputs((str(folder / "a.png"), str(folder / "b.png")), str(folder / "clip.gif"))
    (folder / "lists" / "two.jsonl").write_text('{"prompt": "x", "chosen": "~/a.png", "rejected": "~/b.png"}')
    [pair] = load_pairs(folder / "lists" / "two.jsonl")
    assert (pair.chosen, pair.rejected) == (folder / "a.png", folder / "b.png")
    (folder / "lists" / "one.jsonl").write_text('{"prompt": "x", "image": "~/a.png"}')
    assert load_demonstrations(folder / "lists" / "one.jsonl")[0].image == folder / "a.png"


@pytest.mark.parametrize("load, line, place", [
    (load_prompts, {"prompt": "x", "image": "~nobody-of-this-name/a.png"}, "prompts .*, line 1, 'image'"),
    (load_pairs, {"prompt": "x", "chosen": "~nobody-of-this-name/a.png", "rejected": "b.png"}, "pairs .*, line 1"),
    (load_demonstrations, {"prompt": "x", "image": "~nobody-of-this-name/a.png"}, "demonstrations .*, line 1")])
def test_a_file_of_a_user_who_does_not_exist_is_one_line(folder, load, line, place):
    (folder / "p.jsonl").write_text(json.dumps(line))
    refused(f"^{place}: ~nobody-of-this-name/a.png: there is no user 'nobody", load, folder / "p.jsonl")


def test_prompts_differ_by_their_files_and_paths(folder):
    lines = [{"prompt": "x"}, {"prompt": "x", "image": "a.png"}, {"prompt": "x", "images": ["a.png", "b.png"]},
             {"prompt": "x", "control_image": "a.png"}, {"prompt": "x", "video": "clip"},
             {"prompt": "x", "control_image": "a.png", "controlnet_conditioning_scale": 0.5}]
    assert len({prompt.key for prompt in read(folder, *lines)}) == len(lines)
    one, several = of_records([{"prompt": "x", "image": folder / "a.png", "mask_image": folder / "b.png"},
                               {"prompt": "x", "images": [folder / "a.png", folder / "b.png"]}])
    assert one.inputs.as_dict() == {"image": str(folder / "a.png"), "mask_image": str(folder / "b.png")}
    assert several.inputs.images == (str(folder / "a.png"), str(folder / "b.png"))


@pytest.mark.parametrize("line, expected", [
    ({"image": "aa.png"}, "'image': no image at {folder}/aa.png: did you mean 'a.png'?"),
    ({"images": ["a.png", "q.png"]}, "'images': no image at {folder}/q.png: did you mean"),
    ({"images": "a.png"}, "'images': expected a list of paths, got 'a.png': a single path goes under `image`"),
    ({"images": []}, "'images': expected a list of paths, got []"),
    ({"image": ["a.png"]}, "'image': expected a path, got ['a.png']: several images go under `images`"),
    ({"image": "a.png", "images": ["b.png"]}, "'images': got `image` and `images`: put all images into `images`"),
    ({"video": "clip.mp5"}, "'video': no video at {folder}/clip.mp5: did you mean 'clip.mp4'?"),
    ({"control_image": "clip"}, "'control_image': no image at {folder}/clip"),
    ({"image": "https://a.b/c.png"}, "'image': got the address https://a.b/c.png, expected a path: download it first"),
    ({"mask_image": "data:image/png;base64,iVBO", "image": "a.png"}, "'mask_image': got the address data:image/png;"),
    ({"image": "data:image/png;base64," + "A" * 9000}, "'image': got the address data:image/png;base64,AAA"),
    ({"control_image": "no/a.png"}, "'control_image': no image at {folder}/no/a.png; there is no folder {folder}/no"),
    ({"controlnet_conditioning_scale": -1}, "'controlnet_conditioning_scale': expected a number of 0 or more"),
    ({"control_imag": "a.png"}, "unknown key 'control_imag': did you mean 'control_image'?")])
def test_a_wrong_key_is_one_line_with_file_line_and_key(folder, line, expected):
    caught = message(lambda: read(folder, {"prompt": "fine"}, {"prompt": "x"} | line))
    assert caught.startswith(f"prompts {folder}/p.jsonl, line 2")
    assert expected.format(folder=folder) in caught


@pytest.mark.parametrize("record", [
    {"prompt": "x", "image": {"bytes": bytes(9000), "path": "a.png"}}, {"prompt": "x", "image": ["a.png"] * 3000},
    {"prompt": "x", "images": {"bytes": bytes(9000)}}, {"prompt": "x", "images": "[" + "x" * 9000},
    {"prompt": "x", "controlnet_conditioning_scale": "x" * 9000}, {"prompt": bytes(9000)}, bytes(9000),
    {"prompt": "x", "weight": "x" * 9000}, {"prompt": "x", "negative_prompt": bytes(9000)},
    {"prompt": "x", "metadata": bytes(9000)}])
def test_a_long_value_is_told_by_its_ends(record):
    told = message(of_records, [record])
    assert told.startswith("prompts list, line 1") and " [...] " in told and len(told) < 320


@pytest.mark.parametrize("name, off", [("clip", 0), ("clip.gif", 4), ("clip.webp", 6), ("clip.mp4", 12)])
def test_a_clip_is_read_and_scored_from_its_first_frame_on(folder, name, off):
    path = str(folder / name)
    assert frame_count(path) == 4
    frames = Clip.open(path, 3).frames
    assert [frame.size for frame in frames] == [(32, 16)] * 3
    np.testing.assert_allclose([np.asarray(frame).mean() for frame in frames], SHADES[:3], atol=off)
    assert [frame.size for frame in Clip.open(path, 2, (8, 8)).frames] == [(8, 8)] * 2
    assert "has 4 frames, expected 5" in message(lambda: Clip.open(path, 5).frames)
    scored = read_output(folder / name)  # what a reward scores
    assert scored.shape == (4, 3, 16, 32)
    np.testing.assert_allclose(scored.mean((1, 2, 3)) * 255, SHADES, atol=off or 1e-3)


def test_a_image_fills_the_size_and_is_cut_at_its_sides(folder):
    picture = Image.new("RGB", (32, 16), "red")
    picture.paste((0, 0, 255), (8, 0, 24, 16))
    picture.save(folder / "wide.png")
    assert image_size(folder / "wide.png") == (16, 32)
    assert set(read_image(folder / "wide.png", (16, 16)).getdata()) == {(0, 0, 255)}


def test_a_file_that_is_no_image_or_video_is_one_line(folder):
    (folder / "no.png").write_text("no image")
    for call in (read_image, image_size, frame_count):
        refused(r"no\.png cannot be read as an? (image|video)", call, folder / "no.png")
    (folder / "no.mp4").write_text("no video")
    assert "no.mp4 cannot be read as a video: expected one that OpenCV reads" in message(frame_count, folder / "no.mp4")
    (folder / "empty").mkdir()
    assert "holds no frame" in message(lambda: frame_count(folder / "empty"))


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
    ("f.tif", grey(RAMP / 255, np.float32)), ("f.pfm", grey(RAMP / 255, np.float32))])
def test_a_grey_ramp_goes_from_black_to_white(name, picture, tmp_path):
    picture.save(tmp_path / name)
    read = np.asarray(read_image(tmp_path / name))
    np.testing.assert_allclose(read, np.repeat(RAMP[..., None], 3, 2), atol=1)
    np.testing.assert_allclose(read_tensor(tmp_path / name)[0], RAMP / 255, atol=1 / 255)


@pytest.mark.parametrize("name, picture, expected", [
    ("f255.tif", grey(RAMP, np.float32), "has float values from 0 to 255, expected 0 to 1: scale them"),
    ("nan.tif", grey(RAMP * np.nan, np.float32), "has float values from nan to nan"),
    ("i8.tif", grey(RAMP, np.int32), "has 32-bit values from 0 to 255, whose white is not known"),
    ("i32.tif", grey(RAMP * 65537, np.int32), "has 32-bit values from 0 to 16711935")])
def test_values_of_an_unknown_range_are_refused(name, picture, expected, tmp_path):
    picture.save(tmp_path / name)
    for read in (read_image, read_tensor):
        assert message(lambda: read(tmp_path / name)).startswith(f"{tmp_path / name} {expected}")


@pytest.mark.parametrize("name, picture", [
    ("rgba.png", two(RED, CLEAR)), ("rgba.webp", two(RED, CLEAR)), ("rgba.tif", two(RED, CLEAR)),
    ("p.png", two(RED, CLEAR).quantize(2)), ("pa.tif", two(RED, CLEAR).quantize(2).convert("PA")),
    ("rgb.png", two(RED[:3], (1, 2, 3), "RGB"))])
def test_transparency_is_white_and_refused_where_it_has_no_meaning(name, picture, tmp_path):
    given = {"transparency": (1, 2, 3)} if picture.mode == "RGB" else {}
    picture.save(tmp_path / name, **given | ({"lossless": True, "exact": True} if name.endswith("webp") else {}))
    read = np.asarray(read_image(tmp_path / name))
    assert read[0, 0].tolist() == [255, 0, 0] and read[7, 7].tolist() == [255, 255, 255]
    assert read_tensor(tmp_path / name)[:, 7, 7].tolist() == [1, 1, 1]
    assert "has transparency" in message(lambda: read_image(tmp_path / name, opaque=True))


@pytest.mark.parametrize("mode", ["LA", "CMYK", "LAB", "RGBX", "1", "P"])
def test_other_modes_keep_their_colours(mode, tmp_path):
    picture, profiles = two((255, 255, 255), (0, 0, 0), "RGB"), map(ImageCms.createProfile, ("sRGB", "LAB"))
    picture = ImageCms.profileToProfile(picture, *profiles, outputMode=mode) if mode == "LAB" else picture.convert(mode)
    picture.save(tmp_path / "a.tif")
    read = np.asarray(read_image(tmp_path / "a.tif"))
    assert read[0, 0].min() >= 253 and read[7, 7].max() <= 2


def test_a_colour_profile_and_a_gamma_are_applied(tmp_path):
    Image.new("RGB", (8, 8), (128,) * 3).save(tmp_path / "bad.png", icc_profile=b"no profile")
    assert np.asarray(read_image(tmp_path / "bad.png"))[0, 0].tolist() == [128] * 3
    from PIL import PngImagePlugin
    chunks = PngImagePlugin.PngInfo()
    chunks.add(b"gAMA", (100_000).to_bytes(4, "big"))  # linear
    Image.new("RGB", (8, 8), (55,) * 3).save(tmp_path / "linear.png", pnginfo=chunks)
    assert np.asarray(read_image(tmp_path / "linear.png"))[0, 0].tolist() == [127] * 3


@pytest.mark.parametrize("start, expected", [
    (b"", "it is empty"), (b"hello", "it is damaged, or no image"),
    (b"\0\0\0\x1cftypavif", "its format is AVIF, expected BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP: convert it"),
    (b"\0\0\0\x1cftypheic", "its format is HEIF"), (b"\xff\x0a", "its format is JPEG XL")])
def test_a_file_of_another_format_is_called_so(start, expected, tmp_path):
    (tmp_path / "a.png").write_bytes(start)
    assert expected in message(lambda: read_image(tmp_path / "a.png"))


FRAMES = [Image.new("RGB", (8, 8), (20 * number,) * 3) for number in range(12)]
GREYS = [20 * number for number in range(12)]


@pytest.mark.parametrize("name, form", [("a.gif", {}), ("a.webp", {"lossless": True}), ("a.png", {}), ("a.tif", {}),
                                        ("a.dat", {"format": "GIF"})])
def test_frames_of_a_file_are_in_order_and_no_single_image(name, form, tmp_path):
    FRAMES[0].save(tmp_path / name, save_all=True, append_images=FRAMES[1:], **form)
    assert frame_count(tmp_path / name) == 12
    np.testing.assert_allclose(greys(tmp_path / name, 12), GREYS, atol=1)
    refused(r"holds 12 images, expected one: .* `video`", read_image, tmp_path / name)


def greys(path: Path, count: int) -> list[float]:
    return [np.asarray(frame).mean() for frame in Clip.open(str(path), count).frames]


def test_frames_of_a_folder_go_by_their_numbers_and_a_still_image_is_none(tmp_path):
    for number, frame in enumerate(FRAMES):
        frame.save(tmp_path / f"frame{number}.png")
    (tmp_path / "._frame0.png").write_bytes(b"of a file system")
    assert greys(tmp_path, 12) == GREYS
    np.testing.assert_allclose(read_output(tmp_path)[:, 0, 0, 0] * 255, GREYS, atol=1e-3)
    animated = tmp_path / "frame0.png"
    FRAMES[9].save(animated, save_all=True, append_images=FRAMES[:3], default_image=True)
    assert frame_count(animated) == 3 and greys(animated, 3) == GREYS[:3]


def test_addresses_and_folders_of_several_clips_are_refused(tmp_path):
    for read, told in ((read_output, "no file at https://a.b/c.png: "), (read_image, "cannot be read as an image (")):
        assert told + "it is an address, expected a file: download it" in message(read, Path("https://a.b/c.png"))
    FRAMES[0].save(tmp_path / "f0.png")
    FRAMES[0].resize((4, 4)).save(tmp_path / "f1.png")
    assert "frame 2 has 4 x 4 pixels, and the first 8 x 8" in message(lambda: Clip.open(str(tmp_path), 2).frames)
    FRAMES[0].save(tmp_path / "f0.bmp")
    assert "holds f0.bmp and f0.png, expected one file for each frame" in message(frame_count, tmp_path)
    (tmp_path / "f2.avif").write_bytes(b"")
    assert "holds f2.avif, expected frames of" in message(frame_count, tmp_path)
