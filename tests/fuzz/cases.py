"""Hypothesis strategies of structures: recipes, records and folders with hostile values."""

import json
import struct
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import CORPUS
from tests.fuzz.contents import mutated, nested

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.floats(),
    st.sampled_from(
        [
            10**400,
            -(10**29),
            2**63,
            1e308,
            "",
            "a\0b",
            "\ud800",
            "\x1b[2J",
            "x" * 5000,
            "pipe",
            "a.png",
            "/dev/zero",
            ".",
            "auto",
            "starter",
            "1e-4",
            "9" * 5000,
            "\u202e",
            "{a:>99999999}",
            "{animal}",
            "~/x",
            "~nobody-of-this-name/x",
            "1:30",
            "010",
            "yes",
            "http://127.0.0.1:9/x"]),
    st.text(max_size=8))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                st.text(max_size=6),
                st.sampled_from(["weight", "type", "clip", "use", "args", "size", "scene", "a\0", "\ud800"])),
            inner,
            max_size=4)),
    max_leaves=8)


def structures(keys: list[str]) -> st.SearchStrategy[bytes]:
    """JSON, which is YAML too, of objects with some of the keys and hostile values."""
    objects = st.dictionaries(st.one_of(st.sampled_from(keys), st.text(max_size=6)), VALUES, max_size=5)
    return objects.map(lambda value: json.dumps(value).encode())


@st.composite
def recipes(draw: Any) -> bytes:
    """A recipe with hostile values under known keys, section by section."""
    from flowgrpo.config.schema import keys
    tree: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(keys()), max_size=5)):
        *sections, last = path.split(".")
        inner = tree
        for section in sections:
            below = inner.setdefault(section, {})
            inner = below if isinstance(below, dict) else inner
        inner[last] = draw(VALUES)
    return json.dumps(tree).encode()


def lines(of: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(of, min_size=1, max_size=3).map(b"\n".join)


@st.composite
def tensor_files(draw: Any) -> bytes:
    """Safetensors whose header says anything."""
    numbers = st.sampled_from([0, 1, 2, 4, 8, 24, 2**31, 2**62, 2**63 - 1, -1, 10**30, 0.5, "4", None])
    entries = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "X", 3]), "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, max_size=3)})
    names = st.sampled_from(
        ["transformer.to_q.lora_A.weight", "transformer.to_q.lora_B.weight", "a", "", "\0", "unet.x.alpha"])
    header: dict[str, Any] = draw(st.dictionaries(names, st.one_of(entries, VALUES), max_size=3))
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            st.one_of(
                VALUES,
                st.dictionaries(
                    st.sampled_from(["lora_adapter_metadata", "format"]),
                    st.sampled_from(
                        [
                            "{}",
                            "[]",
                            "[" * 5000,
                            '{"transformer.lora_alpha": "x"}',
                            '{"transformer.lora_alpha": 2}',
                            "pt"]))))
    text = json.dumps(header).encode()
    size = draw(st.sampled_from([len(text), len(text) + 1, 0, 2**30, 2**63, 2**64 - 1]))
    return struct.pack("<Q", size) + text + bytes(draw(st.sampled_from([0, 4, 24, 400])))


def facts() -> st.SearchStrategy[bytes]:
    """Facts of a page as `grid` writes them, with another value or two."""
    names = st.lists(st.one_of(st.sampled_from(["0", "1", "..", "/etc", "pipe", "a\0"]), PLAIN), max_size=3)
    usual = {
        "folders": st.just(["0", "1"]), "columns": st.just(["x", "y"]), "prompts": st.just(["a"]),
        "tasks": st.just(["t"])}
    return st.fixed_dictionaries({key: st.one_of(value, value, names) for key, value in usual.items()}).map(
        lambda value: json.dumps(value).encode())


def checkpoints() -> st.SearchStrategy[tuple[dict[str, Any], dict[str, list[int]]]]:
    """Values of a checkpoint under its usual keys, and shapes of further tensors."""
    from flowgrpo.training.state import REQUIRED
    names = st.sampled_from(["weights/a", "ema/a", "optimizer/0.exp_avg", "optimizer/1.step", "optimizer/x.", "a"])
    return st.tuples(
        st.dictionaries(st.sampled_from([*REQUIRED]), VALUES, max_size=4),
        st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3), max_size=3))


def run_files() -> st.SearchStrategy[dict[str, bytes | None]]:
    """Changes of a run's files: other content by name, None for a file that is gone, and `=NAME` for another's."""
    names = sorted(str(file.relative_to(CORPUS / "run")) for file in (CORPUS / "run").rglob("*") if file.is_file())
    keys = [
        "scores", "before", "after", "epochs", "epoch", "name", "cards", "best", "worst", "first_ratio", "kept", "unit",
        "compared", "seconds", "evaluations", "scene", "sample", "train", "reward"]
    cards = st.fixed_dictionaries(
        {
            "name": PLAIN, "epoch": PLAIN, "scores": VALUES, "cards": st.lists(VALUES, max_size=3),
            "evaluations": PLAIN, "seconds": PLAIN, "before": VALUES, "after": VALUES})
    content = st.one_of(
        st.none(),
        mutated("run/*"),
        mutated("run/report/*"),
        structures(keys),
        nested(),
        cards.map(lambda value: json.dumps(value).encode() + b"\n"),
        st.sampled_from(names).map(lambda name: f"={name}".encode()),
        st.binary(max_size=40))
    return st.dictionaries(
        st.sampled_from([*names, "report/more.json", "checkpoints"]), content, min_size=1, max_size=3
    )


@st.composite
def requests(draw: Any) -> bytes:
    """Bodies to the reward server: mutated, and structures with hostile samples."""
    sample = st.one_of(
        VALUES,
        st.fixed_dictionaries(
            {"prompt": PLAIN, "metadata": VALUES},
            optional={
                "text": VALUES, "png": st.one_of(VALUES, st.sampled_from(["AAAA", "iVBORw0KGgo="])),
                "safetensors": VALUES}))
    record = st.fixed_dictionaries(
        {"format": st.sampled_from([1, 1, 1, 2, None]), "samples": st.lists(sample, max_size=3)},
        optional={
            "group": PLAIN, "scores": st.lists(PLAIN, max_size=3), "failed": VALUES, "error": PLAIN, "limits": VALUES,
            "about": VALUES, "name": PLAIN})
    return draw(
        st.one_of(
            mutated("requests/*"),
            nested(),
            record.map(lambda value: json.dumps(value).encode()),
            st.binary(max_size=60)))
