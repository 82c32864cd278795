"""The decorator of a part: ranges of its fields, its messages, its place, and the list of names."""

import ast
import dataclasses
import math
import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import pytest

from flowgrpo.errors import UserError
from flowgrpo.methods import preset, registry
from flowgrpo.methods.overlay import with_parts
from flowgrpo.parts import Above, AtLeast, OneOf, Range, part, ranges
from tests.helpers import golden_files
from tests.helpers.refusals import message

PACKAGE = Path(__file__).parents[1] / "flowgrpo"
SHAPES = {"round": 0, "square": 4}


@part("advantage", target="noise", reads_groups=True, jointly={"low high": "0 to 1, and 1 or more"})
class Whole:
    count: Annotated[int, AtLeast(1)] = 1
    rate: Annotated[float | None, Above(0, to=1, words="a share")] = None
    way: Literal["up", "down"] = "up"
    shape: Annotated[str, OneOf(SHAPES)] = "round"
    low: Annotated[float, AtLeast(0, to=1)] = 0.0
    high: Annotated[float, AtLeast(1)] = 1.0
    bare: Annotated[float, AtLeast(0, below=1, named=False)] = 0.0
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.count >= 1, "ranges come first"
        if self.low == 0.5:
            raise ValueError("Whole: low is a half")


@part("advantage")
class Longer(Whole):
    more: Annotated[float, Above(0, below=1)] = 0.5


def test_a_part_is_a_frozen_dataclass_with_its_capabilities():
    made = Longer(steps=[1, 2])
    assert made == Longer(1, None, "up", "round", 0.0, 1.0, 0.0, (1, 2), 0.5) and made.steps == (1, 2)
    assert (Whole.reads_target, Whole.reads_groups, Longer.reads_groups) == ("noise", True, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.count = 2
    assert Whole(rate=1, low=1, high=math.inf, bare=0.99).rate == 1


@pytest.mark.parametrize(("settings", "message"), [
    ({"count": 0}, "Longer: count is 0, expected 1 or more"), ({"count": math.nan}, "Longer: count is nan, expected 1"),
    ({"rate": 0}, "Longer: rate is 0, expected a share"), ({"rate": 1.5}, "Longer: rate is 1.5, expected a share"),
    ({"way": "left"}, "Longer: way is 'left', expected up or down"),
    ({"shape": ["round"]}, "Longer: shape is ['round'], expected one of round, square"),
    ({"low": 2}, "Longer: low is 2 and high 1.0, expected 0 to 1, and 1 or more"),
    ({"high": 0}, "Longer: low is 0.0 and high 0, expected 0 to 1, and 1 or more"),
    ({"bare": 1}, "bare is 1, expected 0 to below 1"), ({"more": 1}, "Longer: more is 1, expected between 0 and 1"),
    ({"low": 0.5}, "Whole: low is a half")])
def test_a_wrong_value_is_named_with_what_is_expected(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Longer(**settings)


def test_ranges_of_plain_dataclasses_and_bases():
    @dataclasses.dataclass(frozen=True)
    class Mine(Whole):
        own: int = 0

    assert "Mine: count is 0, expected 1 or more" in message(Mine, count=0, error=ValueError)
    assert {name: str(known) for name, known in ranges(Longer).items()} == {
        "count": "1 or more", "rate": "above 0 to 1", "way": "one of up, down", "shape": "one of round, square",
        "low": "0 to 1", "high": "1 or more", "bare": "0 to below 1", "more": "between 0 and 1"}


def beyond(known: Range | OneOf) -> list[float | str]:
    """Values next to a range, or a name that a table lacks."""
    if isinstance(known, OneOf):
        return ["no such name"]
    below = known.bound if isinstance(known, Above) else math.nextafter(known.bound, -math.inf)
    ends = [below, known.below, None if known.to is None else math.nextafter(known.to, math.inf)]
    return [math.nan, *(value for value in ends if value is not None and not known.takes(value))]


def required(cls: type) -> dict[str, object]:
    """A value for each field without a default: the nearest in its range, or 1."""
    fields = [field for field in dataclasses.fields(cls)
              if field.default is field.default_factory is dataclasses.MISSING]
    return {field.name: next(value for value in (1, 0.5, 2) if field.name not in ranges(cls)
                             or ranges(cls)[field.name].takes(value)) for field in fields}


@pytest.mark.parametrize("name", sorted(registry.TYPES))
def test_every_part_takes_its_defaults_and_no_value_beside_a_range(name):
    cls = registry.TYPES[name]
    assert cls is getattr(import_module(cls.__module__), name)
    for field in dataclasses.fields(cls):
        if (known := ranges(cls).get(field.name)) is None:
            continue
        assert field.default is dataclasses.MISSING or known.takes(field.default), field.name
        for value in beyond(known):
            line = message(cls, **required(cls) | {field.name: value}, error=ValueError)
            assert re.search(rf"\b{field.name} (is )?{re.escape(repr(value))}", line) and ", expected " in line


def test_ranges_are_what_they_were():
    assert golden_files.parts().splitlines() == golden_files.kept("parts").splitlines()


def test_a_part_of_a_users_file_states_its_ranges(tmp_path):
    path = tmp_path / "gate.py"
    path.write_text("""from __future__ import annotations
from typing import Annotated
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.parts import Above, part
@part()
class Gate(Surrogate):
    share: Annotated[float, Above(0, to=1)] = 0.5
    def __call__(self, log_ratio, advantage, old):
        return -advantage * log_ratio
""")
    made = with_parts(preset("flow_grpo"), {"surrogate": {"type": f"{path}:Gate", "share": 1}})
    assert made.loss.surrogate.share == 1
    with pytest.raises(UserError, match="parts.surrogate: Gate: share is 2, expected above 0 to 1"):
        with_parts(preset("flow_grpo"), {"surrogate": {"type": f"{path}:Gate", "share": 2}})


def test_every_capability_of_a_part_is_read_somewhere():
    """One with a typing error would be without effect."""
    texts = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    calls = [call for text in texts if "@part(" in text for node in ast.parse(text).body
             for call in getattr(node, "decorator_list", ()) if ast.unparse(call).startswith("part(")]
    stated = {keyword.arg for call in calls for keyword in call.keywords} - {"target", "jointly"}
    assert len(calls) > 150 and {"reads_groups", "single", "needs"} <= stated
    assert [name for name in sorted(stated) if not any(re.search(rf"\.{name}\b|\"{name}\"", text) for text in texts)] \
        == []
