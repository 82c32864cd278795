"""Write every image and video reward's number on three fixed images, with the released weights, as JSON.

    python scripts/measure/reward_numbers.py                             # all; needs the hub, or its cache
    python scripts/measure/reward_numbers.py pickscore ocr --output FILE  # those two
    python scripts/measure/reward_numbers.py --against FILE              # also prints what differs from an earlier file

Images are drawn by a seeded function; nothing but weights is downloaded. A video is eight shifted copies of an image.
The file says when, at which commit, on which device and by which libraries it was written. A reward that cannot score
has its reason there in one line: no weights, a package or a server that is missing, arguments that it needs.
"""

import argparse
import gc
import hashlib
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.evaluation.report.snapshots import commit
from flowgrpo.rewards import BUILT_IN, find, score
from flowgrpo.rewards.find import FACTS
from flowgrpo.rewards.preprocessing import eight_bit

SIZE, FRAMES, SEED = 512, 8, 46
PROMPTS = ("a red disc on a blue field", 'a sign that says "HELLO"', "soft clouds of many colours")
METADATA = ({"tag": "colors", "include": [{"class": "frisbee", "count": 1, "color": "red"}]},
            {"tag": "single_object", "include": [{"class": "stop sign", "count": 1}], "text": "HELLO"},
            {"tag": "single_object", "include": [{"class": "kite", "count": 1}]})
LETTERS = {"H": "10001 10001 10001 11111 10001 10001 10001", "E": "11111 10000 10000 11110 10000 10000 11111",
           "L": "10000 10000 10000 10000 10000 10000 11111", "O": "01110 10001 10001 10001 10001 10001 01110"}
# Modules of rewards that no image alone has a number of.
OTHERS = ("starter", "combine", "verdicts", "groups", "json_api")
LIBRARIES = ("flowgrpo", "torch", "torchvision", "transformers", "open_clip_torch", "timm", "rapidocr", "onnxruntime",
             "pillow", "numpy")
TOLERANCE = 1e-3  # of a number's size, or 1 if that is less: other devices and libraries round otherwise


def images() -> Tensor:
    """Return the three images [3, 3, SIZE, SIZE], multiples of 1/255: a disc, a sign, clouds of SEED."""
    y, x = torch.meshgrid(*[torch.arange(SIZE)] * 2, indexing="ij")
    disc = torch.stack([30 + x // 8, 60 + y // 8, 200 - x // 8])
    inside = (x - 300) ** 2 + (y - 220) ** 2 < 120 ** 2
    disc = torch.where(inside, torch.tensor([210, 30, 30])[:, None, None], disc)
    rows = [" ".join(LETTERS[letter].split()[row] for letter in "HELLO").replace(" ", "0") for row in range(7)]
    word = torch.tensor([[int(dot) for dot in row] for row in rows]).repeat_interleave(14, 0).repeat_interleave(14, 1)
    sign = torch.full((3, SIZE, SIZE), 235)
    top, left = (SIZE - word.shape[0]) // 2, (SIZE - word.shape[1]) // 2
    sign[:, top:top + word.shape[0], left:left + word.shape[1]] -= 215 * word
    coarse = torch.randint(0, 256, (3, 9, 9), generator=torch.Generator().manual_seed(SEED))
    step = SIZE // 8  # integers alone, so that every machine draws the same bytes
    i, j, u, v = y // step, x // step, y % step, x % step
    corners = [coarse[:, i + a, j + b] * (u if a else step - u) * (v if b else step - v)
               for a in (0, 1) for b in (0, 1)]
    return torch.stack([disc, sign, sum(corners) // step ** 2]).float() / 255


def clips() -> Tensor:
    """Return a video of each image [3, FRAMES, 3, SIZE, SIZE], which moves by four pixels a frame."""
    return torch.stack([images().roll(4 * frame, -1) for frame in range(FRAMES)], 1)


def scorers() -> list[str]:
    """Return the names of the rewards that judge images or videos by themselves."""
    return [name for name, place in BUILT_IN.items() if not set(OTHERS) & set(place.partition(":")[0].split("."))
            and {"image", "video"} & set((FACTS[name]["modality"] or "").split("/"))]


def scores(name: str) -> list[float | None]:
    """Return a reward's numbers on the three images, or their videos; None where it does not apply.
    Raises UserError if it cannot be loaded, needs arguments, fails, or applies to none of them."""
    facts = FACTS.get(name, {})
    outputs = images() if "image" in (facts.get("modality") or "image") else clips()
    column = score({name: find(name)}, outputs, list(PROMPTS), list(METADATA))[:, 0].tolist()
    if all(map(math.isnan, column)):
        raise UserError(f"reward {name!r} applies to none of the three images")
    return [None if math.isnan(value) else value for value in column]


def numbers(names: Iterable[str]) -> dict[str, Any]:
    """Return the content of the file: its circumstances, `scores` by reward, and `not_scored` with the reasons."""
    found: dict[str, list[float | None]] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            found[name] = scores(name)
        except UserError as error:
            reasons[name] = " ".join(str(error).split())
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{name}: {found.get(name, reasons.get(name))}", flush=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"written": datetime.now(timezone.utc).isoformat(timespec="seconds"), **commit(),
            "device": gpu or f"CPU, {platform.machine()}", "python": platform.python_version(),
            "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
            "images": [hashlib.sha256(image.tobytes()).hexdigest() for image in eight_bit(images())],
            "prompts": list(PROMPTS), "scores": found, "not_scored": reasons}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def different(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return a line for every reward of both files whose numbers differ by more than TOLERANCE."""
    def near(a: float | None, b: float | None) -> bool:
        return a == b if a is None or b is None else abs(a - b) <= TOLERANCE * max(1, abs(b))

    return [f"{name}: {now['scores'][name]}, expected {values} of {before['written']}"
            for name, values in before["scores"].items()
            if name in now["scores"] and not all(map(near, now["scores"][name], values))]


def main(arguments: list[str] | None = None) -> int:
    """Write the file; return 1 if a number differs from that of --against."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="REWARD", help="without: all that judge images or videos")
    parser.add_argument("--output", type=Path, default=Path("reward_numbers.json"))
    parser.add_argument("--against", type=Path, metavar="FILE", help="of an earlier run")
    given = parser.parse_args(arguments)
    before = json.loads(given.against.read_text(encoding="utf-8")) if given.against else None
    now = numbers(given.names or scorers())
    given.output.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    lines = different(now, before) if before else []
    print(f"{given.output}: {len(now['scores'])} rewards, {len(now['not_scored'])} without a number", *lines, sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
