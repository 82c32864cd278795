"""Targets of the battery: by name the strategy of its cases, and the readers that each case passes through."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flowgrpo.errors import UserError
from tests.fuzz import CORPUS, cases
from tests.fuzz.cases import lines, structures
from tests.fuzz.contents import bombs, mutated, nested

PROMPT_KEYS = [
    "prompt", "negative_prompt", "metadata", "weight", "image", "images", "video", "control_image",
    "controlnet_conditioning_scale", "question", "answer", "tag", "include"]

ANSWER_KEYS = ["choices", "message", "delta", "content", "tool_calls", "function", "arguments", "logprobs", "data",
               "id", "error", "detail", "loc", "msg", "type", "text", "finish_reason", "index"]


def streamed(content: bytes) -> bytes:
    """Return bytes as the event of a stream."""
    return b'data: {"choices": [' + content + b"]}\n\ndata: [DONE]\n"


@dataclass(frozen=True)
class Target:
    """One kind of input. strategy: of its cases. read: takes a case and a folder that it may write to.

    refuses: error that a refusal is.
    """

    strategy: st.SearchStrategy[Any]
    read: Callable[[Any, Path], None]
    refuses: type[ValueError] = UserError


class Broken(AssertionError):
    """Error: a property does not hold."""


def refused(target: Target, case: Any, folder: Path) -> bool:
    """Read a case; return True if it was refused. Raises Broken for a refusal that is not one printable line."""
    try:
        target.read(case, folder)
    except target.refuses as error:
        if (
            re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", str(error))
            or len(str(error)) > 5000):
            raise Broken(f"no printable line: {str(error)[:200]!r}") from error
        return True
    return False


def prepare(folder: Path) -> None:
    """Write into a folder the images, the FIFO and the sub-folder that cases name."""
    shutil.copy(CORPUS / "pictures" / "rgb.png", folder / "a.png")
    shutil.copy(CORPUS / "pictures" / "turned.jpg", folder / "b.png")
    (folder / "clip").mkdir()
    os.mkfifo(folder / "pipe")


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


# --- readers ---------------------------------------------------------------------------------------------------------
def recipe(content: bytes, folder: Path) -> None:
    from flowgrpo import config
    settings = config.load(written(folder, "recipe.yaml", content))
    settings.yaml().encode()
    _ = settings.rewards, settings.extra_rewards, settings.call, settings.folder


def override(case: tuple[str, str], folder: Path) -> None:
    from flowgrpo import config
    config.load(None, dict([case])).yaml().encode()


def templates(content: bytes, folder: Path) -> None:
    from flowgrpo.data.prompt_writer import load_templates
    for prompt in load_templates(written(folder, "templates.yaml", content)).write(5, 0):
        prompt.text.encode()


def prompts(case: tuple[str, bytes], folder: Path) -> None:
    from flowgrpo.data.prompts import as_line, load_prompts
    name, content = case
    for prompt in load_prompts(written(folder, name, content)):
        json.dumps(as_line(prompt), ensure_ascii=False).encode()
        _ = prompt.key, hash(prompt)


def pairs(content: bytes, folder: Path) -> None:
    from flowgrpo.data.pairs import aspects, load_pairs, split
    from flowgrpo.tools.vote.ballot import Ballot, Comparison
    file = written(folder, "pairs.jsonl", content)
    with contextlib.suppress(UserError):
        Ballot([Comparison("a star", folder / "a.png", folder / "b.png")], ("a", "b"), file).state()
    pairs = load_pairs(file)
    aspects(*split(pairs, 0.5))


def picture(case: tuple[str, bytes], folder: Path) -> None:
    from flowgrpo.data.images import Clip, frame_count, image_size, read_image
    file = written(folder, f"picture.{case[0]}", case[1])
    errors = []
    for read in (
        image_size,
        read_image,
        lambda path: read_image(path, (8, 8)),
        lambda path: Clip.open(str(path), min(3, frame_count(path)), (8, 8)).frames):
        try:
            read(file)
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def video(case: tuple[str, bytes], folder: Path) -> None:
    from flowgrpo.data.images import Clip, frame_count
    file = written(folder, f"clip.{case[0]}", case[1])
    _ = Clip.open(str(file), min(3, frame_count(file)), (8, 8)).frames


def scored(case: tuple[str, bytes], folder: Path) -> None:
    from flowgrpo.rewards.preprocessing import read_output
    read_output(written(folder, f"picture.{case[0]}", case[1]))


def run(changes: dict[str, bytes | None], folder: Path) -> None:
    from flowgrpo.cli.runs import runs as list_runs
    from flowgrpo.evaluation.report import report
    place = folder / "runs" / "mine"
    shutil.copytree(CORPUS / "run", place)
    for name, content in changes.items():
        (place / name).unlink(missing_ok=True)
        if content is not None:
            other = place / os.fsdecode(content[1:]) if content[:1] == b"=" else None
            (place / name).write_bytes(other.read_bytes() if other and other.is_file() else content)
    with contextlib.suppress(UserError), contextlib.redirect_stdout(io.StringIO()):
        list_runs(folder / "runs")
        list_runs(folder / "runs", as_json=True)
    with contextlib.suppress(UserError):
        from flowgrpo.export.export import load_finished
        load_finished(place)
    report.write(place)


def page(content: bytes, folder: Path) -> None:
    from PIL import Image, PngImagePlugin

    from flowgrpo.tools.vote.sources import pairs as listed
    info = PngImagePlugin.PngInfo()
    info.add_itxt("flowgrpo", content.decode("utf-8", "replace"))
    Image.new("RGB", (2, 2)).save(folder / "page.png", pnginfo=info)
    for name in ("0", "1"):
        (folder / name).mkdir()
        shutil.copy(CORPUS / "pictures" / "rgb.png", folder / name / "000.png")
    listed([folder / "page.png"])


def folders(case: tuple[str, bytes, bytes], folder: Path) -> None:
    from flowgrpo.tools.vote.sources import pairs as listed
    for name in ("0", "1"):
        (folder / name).mkdir()
        written(folder / name, case[0], case[1])
    written(folder / "1", "prompts.jsonl", case[2])
    listed([folder / "0", folder / "1"])


def tensors(content: bytes, folder: Path) -> None:
    from flowgrpo.export import run_lora
    from flowgrpo.export.comfy_names import Place
    from flowgrpo.export.export import _rename_tensors
    from flowgrpo.policies.pipelines.load import _shapes
    from flowgrpo.policies.weights.lora_files import LORA_FILE
    file = written(folder, LORA_FILE, content)
    with contextlib.suppress(UserError):
        _shapes(str(file))
    for tensors, adapter in run_lora.read(folder).values():
        _rename_tensors(Place, tensors, adapter)


def edited(case: tuple[dict[str, Any], dict[str, list[int]]], folder: Path) -> None:
    """The newest whole checkpoint of a whole one and an edited one, which is loaded."""
    import torch

    from flowgrpo.storage import checkpoint
    from flowgrpo.storage.checkpoint import newest_whole
    from flowgrpo.training.state import REQUIRED
    whole = {"epoch": 1, "update": 1, "memory": {}, "reward_failures": {}, "evaluations": 0, "rescore": False,
             "rollout_evaluations": 0, "saved_evaluations": 0}
    tensors = {"weights/a": torch.ones(2), "optimizer/0.exp_avg": torch.ones(2)}
    checkpoint.save(folder / "c", 1, tensors, whole, 2)
    more = {key: torch.zeros(shape, dtype=torch.int64) for key, shape in case[1].items()}
    checkpoint.save(folder / "c", 2, tensors | more, whole | {"epoch": 2} | case[0], 2)
    found = newest_whole(folder / "c", lambda _: None, REQUIRED)
    if found is None or checkpoint.load(found)[1]["epoch"] not in (1, 2):
        raise Broken(f"{found} is no whole checkpoint")


def lora(case: tuple[str, float], folder: Path) -> None:
    """A LoRA of a dtype and a value; one that is read holds weights."""
    import torch
    from safetensors.torch import save_file

    from flowgrpo.policies.weights import adapters, lora_files
    values = torch.full((2, 2), case[1], dtype=torch.float64).to(getattr(torch, case[0]))
    save_file({f"transformer.a.lora_{side}.weight": values.clone() for side in "AB"}, folder / "lora.safetensors")
    lora_files.read(folder / "lora.safetensors")
    if not values.is_floating_point() or not values.float().abs().max() <= adapters.LARGEST:
        raise Broken(f"{values.dtype} of {case[1]} was read")


def number(text: str, folder: Path) -> None:
    """A number of a recipe as YAML has it: what is taken is the number that the text says."""
    from flowgrpo import config
    taken = config.load(None, {"train.epochs": text}).train.epochs
    if taken != float(text.strip(" '\"\n\t").replace("_", "") if "x" not in text and "b" not in text else int(text, 0)):
        raise Broken(f"{text!r} was taken for {taken}")


def request(content: bytes, folder: Path) -> None:
    import safetensors.torch  # noqa: F401  # before the limit of memory, whatever the first case is

    from flowgrpo.serving import wire
    _ = wire.refusal(content)
    errors = []
    for read in (
        lambda: wire.unpack(content, wire.Limits()),
        lambda: wire.scores(content, 2),
        lambda: wire.Info.read(content)):
        try:
            read()
        except ValueError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def answer(content: bytes, folder: Path) -> None:
    from flowgrpo.contrib.engine.client import unpack
    from flowgrpo.rewards.vlm_judge import client
    _ = client._error(content)
    errors = []
    for read in (lambda: client.answer(content), lambda: client._models(content), lambda: unpack(content)):
        try:
            read()
        except ValueError as error:
            errors.append(ValueError(repr(str(error))[:300]))
    if errors:
        raise errors[0]


# --- all -------------------------------------------------------------------------------------------------------------
def _keys() -> st.SearchStrategy[str]:
    from flowgrpo.config.schema import keys, sections
    return st.one_of(st.sampled_from([*keys(), *sections()]), st.text(max_size=8))


YAML = st.one_of(mutated("recipes/*"), nested())
RECORDS = st.one_of(mutated("prompts/*.jsonl"), nested(), lines(structures(PROMPT_KEYS)))
SUFFIX = st.sampled_from(["png", "gif", "webp", "jpg", "tiff"])
IMAGES = st.tuples(SUFFIX, st.one_of(mutated("pictures/*"), bombs()))
TARGETS = {
    "recipes": Target(YAML, recipe),
    "recipe values": Target(cases.recipes(), recipe),
    "overrides": Target(
        st.tuples(_keys(), st.one_of(st.text(max_size=12), cases.VALUES.map(json.dumps), nested().map(bytes.decode))),
        override),
    "templates": Target(
        st.one_of(mutated("templates/*"), nested(), structures(["templates", "slots", "metadata"])), templates
    ),
    "prompts txt": Target(
        st.tuples(st.just("p.txt"), st.one_of(mutated("prompts/*.txt"), st.binary(max_size=60))), prompts
    ),
    "prompts jsonl": Target(st.tuples(st.just("p.jsonl"), RECORDS), prompts),
    "prompts csv": Target(st.tuples(st.just("p.csv"), mutated("prompts/*.csv")), prompts),
    "prompts parquet": Target(st.tuples(st.just("p.parquet"), mutated("prompts/*.parquet", most=3)), prompts),
    "pairs": Target(
        st.one_of(mutated("pairs/*"), nested(), lines(structures(["prompt", "chosen", "rejected", "aspects"]))), pairs
    ),
    "pictures": Target(IMAGES, picture),
    "videos": Target(st.tuples(st.sampled_from(["mp4", "avi"]), mutated("videos/*", most=3)), video),
    "pictures to score": Target(IMAGES, scored),
    "run folders": Target(cases.run_files(), run),
    "pages to vote on": Target(
        st.one_of(nested(), structures(["folders", "columns", "prompts", "tasks"]), cases.facts()), page
    ),
    "folders to vote on": Target(
        st.tuples(st.sampled_from(["a.png", "a.jpg", "a.webp", "a.txt"]), mutated("pictures/*"), RECORDS), folders
    ),
    "safetensors": Target(st.one_of(cases.tensor_files(), mutated("tensors/*")), tensors),
    "checkpoints": Target(cases.checkpoints(), edited),
    "LoRAs": Target(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "float16", "bool", "int64", "uint8", "complex64", "float8_e4m3fn"]),
            st.one_of(st.floats(-2, 2), st.sampled_from([1e30, -1e7, float("inf"), float("nan")]))),
        lora),
    "numbers": Target(
        st.one_of(
            st.from_regex(r"[-+]?[0-9][0-9_:.]{0,5}", fullmatch=True),
            st.sampled_from(["yes", "true", "on", "010", "0x1F", "0b11", "0o10", "1:30", "1e2", "1_0", "08", "٣"])),
        number),
    "server requests": Target(cases.requests(), request, ValueError),
    "servers' answers": Target(
        st.one_of(st.binary(max_size=200), nested(), structures(ANSWER_KEYS), structures(ANSWER_KEYS).map(streamed)),
        answer,
        ValueError)}
