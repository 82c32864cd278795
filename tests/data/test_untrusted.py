"""Files that others made: what is refused in one line, and what of an image is followed."""

import json
import os
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowgrpo import config
from flowgrpo.config.parse import parse_value, read_yaml
from flowgrpo.data.images import Clip, frame_count, image_size, read_image
from flowgrpo.data.open_image import PIXELS
from flowgrpo.data.pairs import load_pairs
from flowgrpo.data.prompt_writer import load_templates
from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import LONGEST, UserError, nearest
from flowgrpo.files import parse_json, tensors_of
from flowgrpo.rewards.preprocessing import read_tensor, read_tensors
from tests.data.test_data import write
from tests.helpers.refusals import message


def refusal(call, *arguments) -> str:
    """Return the one line of a UserError."""
    line = message(call, *arguments)
    assert line.isprintable() and len(line) < 2 * LONGEST
    return line


LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9))


@pytest.mark.parametrize("text, told", [
    ("train: " + "[" * 20_000, "nested deeper than 64 levels (line 1, column 7"),
    ("- " * 20_000, "nested deeper than 64 levels"),
    ("{a: " * 20_000, "nested deeper than 64 levels"),
    (LAUGHS, "more than 50,000 values (line"),
    ("parts: &a {plan: *a}", "an alias stands within its own anchor (line 1"),
    ("seed: " + "9" * 10_000, "a number of 10000 digits (line 1, column 7)"),
    ("seed: 0x" + "f" * 10_000, "a number of 10002 digits"),
    ('name: "a\\0b"', "a text with a NUL character (line 1, column 7)"),
    ('name: "\\ud800"', "a text with half of a surrogate pair"),
    ('name: "\\U00110000"', "not valid YAML"),
    ("seed: 2020-13-45", "seed: got '2020-13-45', expected a valid integer"),
    ("seed: !!bool maybe", "not a valid bool"),
    ("held_out: !!float ", "not a valid float (line 1, column"),
    ("true: 1\nTrue: 2", "the key 'True' stands twice (line 2, column 1)"),
    ("seed: 1\n'seed': 2", "the key 'seed' stands twice (line 2, column 1)"),
    ("train: {lr: 1, lr: 2}", "the key 'lr' stands twice"),
    ("a: 1\n" + "# long\n" * 200_000, "1.3 MiB, expected 1 MiB at most"),
    ("<b>: 1", "unknown key '<b>'"),
    ("train: {<b>: 1}", "unknown key 'train.<b>'"),
    ("<: 1\nbool: 2", "unknown key '<'")])
def test_recipes_that_harm_are_refused(tmp_path, text, told):
    assert told in refusal(config.load, write(tmp_path, "recipe.yaml", text))


def test_options_that_harm_are_refused_and_many_wrong_entries_at_once():
    assert "nested deeper" in refusal(parse_value, "train.lr", "[" * 20_000)
    assert "name: got 'a\\x00b', expected a text without a NUL" in refusal(config.load, None, {"name": "a\0b"})
    assert "stands twice" in refusal(parse_value, "train", "{lr: 1, lr: 2}")
    assert refusal(config.validate, {"image": {"sizes": [["x", 1]] * 20_000}}).startswith("the options: image.sizes")


@pytest.mark.parametrize("name, text, told", [
    ("p.jsonl", '{"prompt": "a", "metadata": ' + "[" * 100_000, "nested too deeply"),
    ("p.jsonl", '{"prompt": "a", "metadata": {"x": ' + "[" * 500 + "]" * 500 + "}}", "nested too deeply"),
    ("p.jsonl", '{"prompt": "a", "weight": ' + "9" * 10_000 + "}", "a number of 10000 digits"),
    ("p.jsonl", '{"prompt": "a", "controlnet_conditioning_scale": "1e999"}', "expected a number of 0 or more"),
    ("p.jsonl", '{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
    ("p.jsonl", '{"prompt": "a\\ud800"}', "half of a surrogate pair"),
    ("p.jsonl", '{"prompt": "a\\u0000"}', "the text under 'prompt' holds a NUL character"),
    ("p.jsonl", '{"prompt": "a", "image": "a\\u0000.png"}', "'image': expected a path, got 'a\\x00.png', which holds"),
    ("p.jsonl", '{"prompt": "a", "image": "' + "x" * 300 + '.png"}', "File name too long"),
    ("p.jsonl", '{"prompt": "a", "image": "pipe"}', "'image': no image at"),
    ("p.jsonl", '{"prompt": "a", "images": "[[[' + "[" * 5000 + '"}', "not a JSON list"),
    ("p.csv", "prompt,prompt\na,b\n", "expected different headings"),
    ("p.csv", "prompt,weight\na," + "9" * 400 + "\n", "expected a positive number under 'weight'"),
    ("p.txt", "a\0b\n", "the text under 'prompt' holds a NUL character")])
def test_prompt_files_that_harm_are_refused(tmp_path, name, text, told):
    os.mkfifo(tmp_path / "pipe")
    assert told in refusal(load_prompts, write(tmp_path, name, text))


@pytest.mark.parametrize("read, name", [
    (read_yaml, "x.yaml"), (load_prompts, "x.jsonl"), (load_pairs, "x.jsonl"), (load_templates, "x.yaml"),
    (read_image, "x.png"), (image_size, "x.png"), (frame_count, "x.gif"), (frame_count, "x.mp4"),
    (tensors_of, "x.safetensors")])
def test_a_fifo_a_socket_and_a_device_are_refused_without_waiting(tmp_path, monkeypatch, read, name):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo(name)
    assert "is a FIFO, expected a regular file" in refusal(read, Path(name))
    os.remove(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        assert "is a socket, expected a regular file" in refusal(read, Path(name))
    os.remove(name)
    os.symlink("/dev/zero", name)
    assert "is a device, expected a regular file" in refusal(read, Path(name))


def test_fifos_starting_formats_and_lines_of_errors(tmp_path):
    os.mkfifo(tmp_path / "0.png")
    assert "is a FIFO" in message(lambda: Clip(str(tmp_path), 1).frames)
    file = write(tmp_path, "a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "cannot be read as an image" in refusal(read_image, file)
    error = UserError("a\nb\x1b[2J\u202e\ud800" + "x" * 10_000 + "end")
    assert str(error).startswith("a b\\x1b[2J\\u202e\\ud800x") and str(error).endswith("xend")
    assert len(str(error)) < LONGEST
    assert nearest("learning" * 10_000, ["train.lr"]) == "; there are: train.lr"


# --- images --------------------------------------------------------------------------------------------------------
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}


@pytest.mark.parametrize("orientation, ending", [*((each, "png") for each in range(1, 9)), (6, "jpg"), (6, "webp"),
                                                 (6, "tif")])
def test_exif_orientation_is_followed(tmp_path, orientation, ending):
    from PIL import ImageOps
    file, stored = tmp_path / f"a.{ending}", np.zeros((8, 16, 3), np.uint8)
    for place, name in enumerate("rgbw"):
        stored[4 * (place // 2) : 4 * (place // 2) + 4, 8 * (place % 2) : 8 * (place % 2) + 8] = COLOURS[name]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(file, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    assert image_size(file) == expected.shape[:2] == ((16, 8) if orientation >= 5 else (8, 16))
    np.testing.assert_array_equal(np.asarray(read_image(file)), expected)
    assert read_tensor(file).shape == read_tensors(file)[0].shape == (3, *expected.shape[:2])


def test_a_damaged_exif_turns_nothing(tmp_path):
    Image.new("RGB", (16, 8), "red").save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert image_size(tmp_path / "a.jpg") == (8, 16)


def test_sixteen_bits_are_scaled_whatever_the_name(tmp_path):
    # The content names the format, not the file's ending, for what is drawn and for what is scored.
    with (tmp_path / "a.jpg").open("wb") as file:
        Image.fromarray(np.full((4, 4), 32_896, np.uint16)).save(file, "PNG")
    assert np.unique(np.asarray(read_image(tmp_path / "a.jpg"))).tolist() == [128]
    assert read_tensor(tmp_path / "a.jpg").unique().tolist() == pytest.approx([32_896 / 65_535])


def png(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has no pixel."""
    parts = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)


@pytest.mark.parametrize("side", [PIXELS // 8192 + 1, 2**14 + 1, 2**20])
def test_a_image_of_too_many_pixels_is_refused_by_its_header(tmp_path, side):
    file = write(tmp_path, "a.png", png(side, 8192))
    for read in (read_image, image_size, frame_count):
        assert "pixels" in refusal(read, file)


def test_a_clip_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(0, 250, 50)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    monkeypatch.setattr("flowgrpo.data.images.PIXELS", 130)
    assert "has more than 130 pixels in its first 3 frames" in message(lambda: Clip(str(tmp_path / "a.gif"), 5).frames)


def test_a_video_of_too_large_frames_is_refused(tmp_path):
    frame = b",\0\0\0\0" + struct.pack("<HH", 8191, 8191) + b"\0\x02\x02D\x01\0"
    head = b"GIF89a" + struct.pack("<HH", 8191, 8191) + b"\x80\0\0" + bytes(6)
    file = write(tmp_path, "a.mp4", head + 9 * frame + b";")
    assert "has 8191 x 8191 pixels" in refusal(frame_count, file)


# --- the rest --------------------------------------------------------------------------------------------------------
def test_templates_safetensors_and_json_at_their_limits(tmp_path):
    for text, told in (
            ("templates: ['{a:>999999999}']\nslots: {a: [x]}", "a slot has a format"),
            ("templates: ['{a}']\nslots: [a]", "slots: got ['a'], expected names with values"),
            ("templates: ['a']\nmetadata: 3", "metadata: got 3, expected names with values")):
        assert told in refusal(load_templates, write(tmp_path, "t.yaml", text))
    slots = {f"s{i}": list("abcdefghij") for i in range(25)}
    text = json.dumps({"templates": [" ".join(f"{{{name}}}" for name in slots)], "slots": slots})
    assert len({prompt.text for prompt in load_templates(write(tmp_path, "t.yaml", text)).write(4, 0)}) == 4
    beyond = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    for header in (b"not JSON", b"[" * 5000, beyond):
        file = write(tmp_path, "a.safetensors", struct.pack("<Q", len(header)) + header + b"1234")
        assert "cannot be read" in refusal(tensors_of, file)
    long = struct.pack("<Q", 2**24 + 1) + b" " * (2**24 + 2)
    assert "a header of 16 MiB, expected 16 MiB at most" in refusal(tensors_of, write(tmp_path, "a.safetensors", long))
    assert parse_json('{"a": [1, -2.5e3, "\\ud83d\\ude00", null]}') == {"a": [1, -2500.0, "\U0001f600", None]}
