"""Protocol between a reward's client and its server: JSON, with PNG or safetensors inside; never pickle.

    request   {"format": 1, "group": G, "samples": [{"prompt": "...", "metadata": {}, "png": "..."}, ...]}
    answer    {"format": 1, "scores": [0.5, null]}    a number per sample, null where the reward does not apply;
              {"failed": {"1": "one line"}, ...}      also the reason, by the index of a sample without an answer
    refusal   {"error": "one line"}, with another status than 200

A sample holds one of: `png`, base64 of an 8-bit RGB image, or a list of them, the frames of a video; `safetensors`,
base64 of a file with one tensor of F16, BF16, F32 or F64, "output", [3, H, W] or [F, 3, H, W] in [0, 1]; `text`.
Incoming data is untrusted. Readers raise ValueError, in one line, for any other form, and `TooLarge`, before unpacking,
beyond the limits.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.escaped import base64_of, one_line
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed, numbers
from flowgrpo.rewards.reward import Batch

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
SIGNATURE = b"\x89PNG\r\n\x1a\n"
FLOATS = ("float16", "bfloat16", "float32", "float64")  # dtypes of a tensor
SLACK = 2**-7  # beyond [0, 1]: bf16's rounding of an image
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
CONTAINERS = 2**20  # lists and objects of one message: empty ones take 30 times their bytes in memory


class TooLarge(ValueError):
    """Error: more than a server takes at once."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server for one request: bytes, samples, pixels of one image or frame, and pixels of all together,
    which take 12 bytes each as floats."""

    size: int = 64 * 2**20
    samples: int = 64
    pixels: int = 2**22
    all_pixels: int = 2**26


@dataclass(frozen=True)
class Info:
    """Statement of a server about its reward; group: it needs whole groups."""

    name: str
    about: About
    group: bool
    limits: Limits

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, body: bytes) -> Info:
        """Parse the JSON form. Raises ValueError for anything else."""
        record = _object(body)
        try:
            limits, facts = Limits(**record["limits"]), dict(record["about"])
            about = About(**facts | {"range": facts["range"] and tuple(facts["range"])})
            if not all(type(limit) is int and limit > 0 for limit in vars(limits).values()):
                raise ValueError(f"its limits are {record['limits']}")
            return cls(str(record["name"]), about, record["group"] is True, limits)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it does not say what it serves ({one_line(error)})") from None


# --- client ----------------------------------------------------------------------------------------------------------

def pack(output: Tensor | str, prompt: str, metadata: dict[str, Any], exact: bool = False) -> bytes:
    """Pack one sample of a request: an image [3, H, W] or a video [F, 3, H, W] in [0, 1], rounded to 8 bits unless
    `exact`; or a text.
    Raises UserError for metadata that is not JSON, Failed for an image that holds NaN or an infinity."""
    if not isinstance(output, str) and not output.isfinite().all():
        raise Failed(f"an image holds NaN or an infinity (prompt: {prompt!r})")
    try:
        return json.dumps({"prompt": prompt, "metadata": metadata, **_content(output, exact)}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"metadata that go to a reward server have to be JSON ({one_line(error)}; prompt: {prompt!r})"
                        ) from None


def request(samples: Sequence[bytes], group: int = 1) -> bytes:
    return b'{"format": %d, "group": %d, "samples": [%s]}' % (FORMAT, group, b", ".join(samples))


def split_requests(sizes: Sequence[int], pixels: int, limits: Limits, unit: int = 1, ways: int = 1) -> list[range]:
    """Split the rows of samples with these sizes in bytes into consecutive requests within the limits, with whole units
    (groups) in each, and at least `ways` requests if there are as many units. pixels: of each sample.
    Raises TooLarge if a single unit is beyond the limits."""
    most = min(limits.samples, limits.all_pixels // max(pixels, 1))
    share = min(most, unit * math.ceil(len(sizes) / unit / ways))
    parts: list[range] = []
    for start in range(0, len(sizes), unit):
        alone = range(start, start + unit)
        joined = range(parts[-1].start, alone.stop) if parts else alone
        if parts and len(joined) <= share and _size(sizes, joined) <= limits.size:
            parts[-1] = joined
        elif unit <= most and _size(sizes, alone) <= limits.size:
            parts.append(alone)
        else:
            raise TooLarge(f"{unit} {'sample' if unit == 1 else 'samples'} of {_size(sizes, alone) / 2**20:.1f} MiB "
                           f"and {unit * pixels} pixels have to be sent at once, and the server takes {limits.samples} "
                           f"samples, {limits.size / 2**20:.1f} MiB and {limits.all_pixels} pixels")
    return parts


def _size(sizes: Sequence[int], part: range) -> int:
    return 64 + sum(sizes[row] + 2 for row in part)


def answer(values: Sequence[float | Failed]) -> dict[str, Any]:
    """Answer with these scores, NaN where the reward does not apply."""
    failed = {str(place): one_line(value) for place, value in enumerate(values) if isinstance(value, Failed)}
    entries = [None if math.isnan(value) else value for value in numbers(values)]
    return {"format": FORMAT, "scores": entries} | ({"failed": failed} if failed else {})


def scores(body: bytes, count: int) -> list[float | None | Failed]:
    """Parse an answer. Raises ValueError for other than `count` scores, and for one that is not a finite number."""
    record = _object(body)
    values, failed = record.get("scores"), record.get("failed", {})
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} scores" if isinstance(values, list) else "no list of scores"
        raise ValueError(f"it sent {got}, expected {count}")
    for score in values:
        if score is not None and not (type(score) in (int, float) and abs(score) <= 3.4e38):
            raise ValueError(f"it sent the score {one_line(repr(score))}, expected a finite number or null")
    if not isinstance(failed, dict) or not all(isinstance(line, str) for line in failed.values()):
        raise ValueError(f"it sent {one_line(repr(failed))} for what failed, expected a line by the place of a sample")
    return [Failed(one_line(failed[str(place)])) if str(place) in failed else score
            for place, score in enumerate(values)]


def refusal(body: bytes) -> str | None:
    """The `error` of a JSON body, in one line; None for any other body."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return one_line(record["error"]) if isinstance(record, dict) and isinstance(record.get("error"), str) else None


def _content(output: Tensor | str, exact: bool) -> dict[str, Any]:
    if isinstance(output, str):
        return {"text": output}
    if exact:
        from safetensors.torch import save

        content = save({"output": output.detach().cpu().contiguous()})
        return {"safetensors": base64.b64encode(content).decode()}
    from PIL import Image

    from flowgrpo.rewards.preprocessing import eight_bit

    images = [base64_of(Image.fromarray(image), compress_level=1)
              for image in eight_bit(output if output.ndim == 4 else output[None])]
    return {"png": images if output.ndim == 4 else images[0]}


# --- server ----------------------------------------------------------------------------------------------------------

def unpack(body: bytes | bytearray, limits: Limits) -> Batch:
    """Parse a request. Raises ValueError, and TooLarge beyond the limits."""
    record = _object(body)
    samples, group = record.get("samples"), record.get("group", 1)
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("expected `samples`, a list of objects")
    if len(samples) > limits.samples:
        raise TooLarge(f"{quantity(len(samples), 'sample')}, expected {limits.samples} at most")
    if type(group) is not int or group < 1 or len(samples) % group:
        raise ValueError(f"group is {one_line(repr(group))}, expected a divisor of the "
                         f"{quantity(len(samples), 'sample')}")
    prompts, metadata = [sample.get("prompt") for sample in samples], [sample.get("metadata") for sample in samples]
    if not all(isinstance(prompt, str) for prompt in prompts) or not all(isinstance(entry, dict) for entry in metadata):
        raise ValueError("expected a text under `prompt` and an object under `metadata` in every sample")
    return Batch(_outputs(samples, limits), prompts, metadata, group)


class _Budget:
    """Pixels that a request may still unpack."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.left = limits, limits.all_pixels

    def spend(self, frames: int, height: int, width: int) -> None:
        if height * width > self.limits.pixels:
            raise TooLarge(f"an image of {width} x {height}, expected {self.limits.pixels} pixels at most")
        self.left -= frames * height * width
        if self.left < 0:
            raise TooLarge(f"more than {self.limits.all_pixels} pixels in one request")


def _outputs(samples: list[dict[str, Any]], limits: Limits) -> Tensor | list[str]:
    kinds = {kind for sample in samples for kind in ("text", "png", "safetensors") if kind in sample}
    if len(kinds) != 1 or not all(kinds <= sample.keys() for sample in samples):
        raise ValueError("expected one of `png`, `safetensors` and `text`, the same in every sample")
    [kind] = kinds
    if kind == "text":
        if not all(isinstance(sample["text"], str) for sample in samples):
            raise ValueError("expected a text under `text`")
        return [sample["text"] for sample in samples]
    import torch

    budget, read = _Budget(limits), _images if kind == "png" else _tensor
    contents = [read(sample[kind], budget) for sample in samples]
    if len({output.shape for output in contents}) > 1:
        raise ValueError("expected images or videos of one size")
    outputs = torch.stack(contents)
    return outputs.float() / 255 if kind == "png" else outputs.float()


def _images(content: object, budget: _Budget) -> Tensor:
    """Image, bytes [3, H, W], or the frames of a video [F, 3, H, W]."""
    import torch

    if not isinstance(content, list):
        return _image(content, budget)
    frames = [_image(frame, budget) for frame in content]
    if len({frame.shape for frame in frames}) != 1:
        raise ValueError("expected the frames of a video to be of one size, and at least one")
    return torch.stack(frames)


def _image(content: object, budget: _Budget) -> Tensor:
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError

    file = io.BytesIO(_bytes(content))
    try:
        image = Image.open(file, formats=["PNG"])  # reads only its header
        mode, (width, height) = image.mode, image.size
    except Image.DecompressionBombError as error:
        raise TooLarge(one_line(error)) from None
    except UnidentifiedImageError:  # its text has an address of this process
        begin = file.getvalue()[:8]
        raise ValueError("a PNG that is cut in its header" if begin == SIGNATURE else
                         f"not a PNG: it begins with the bytes {begin.hex(' ') or '(none)'}") from None
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"not a PNG ({one_line(error)})") from None
    budget.spend(1, height, width)
    if mode != "RGB":
        raise ValueError(f"a PNG of the mode {mode}, expected RGB")
    try:
        return torch.from_numpy(np.array(image)).movedim(-1, 0)
    except Exception as error:
        raise ValueError(f"not a whole PNG ({one_line(error)})") from None


def _tensor(content: object, budget: _Budget) -> Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        [(name, output)] = load(_bytes(content)).items()
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"not a safetensors file with one tensor ({one_line(error)})") from None
    kind = str(output.dtype).removeprefix("torch.")
    if name != "output" or output.ndim not in (3, 4) or output.shape[-3] != 3 or kind not in FLOATS:
        raise ValueError(f"the tensor {name!r} is {kind} {list(output.shape)}, expected floats 'output' [3, H, W] or "
                         f"[F, 3, H, W] of {', '.join(FLOATS[:-1])} or {FLOATS[-1]}")
    if not output.numel():
        raise ValueError(f"the tensor 'output' is {list(output.shape)}, expected one frame and one pixel at least")
    budget.spend(output[..., 0, 0, 0].numel(), *output.shape[-2:])
    if not output.isfinite().all():
        raise ValueError("the tensor 'output' holds NaN or an infinity")
    low, high = output.min().item(), output.max().item()
    if low < -SLACK or high > 1 + SLACK:
        raise ValueError(f"the tensor 'output' has values from {low:g} to {high:g}, expected 0 to 1")
    return output


def _bytes(content: object) -> bytes:
    if not isinstance(content, str):
        raise ValueError("expected base64")
    return base64.b64decode(content, validate=True)


def _object(body: bytes | bytearray) -> dict[str, Any]:
    if body.count(b"[") + body.count(b"{") > CONTAINERS:
        raise ValueError(f"not JSON of {CONTAINERS} lists and objects at most")
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({one_line(error)})") from None
    if not isinstance(record, dict) or type(record.get("format")) is not int or record["format"] != FORMAT:
        got = one_line(repr(record.get("format"))) if isinstance(record, dict) else "no object"
        raise ValueError(f"format: got {got}, expected {FORMAT}; both sides have to be of versions that agree")
    if _SURROGATE.search(body):
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half of a surrogate pair, which is no character") from None
    return record
