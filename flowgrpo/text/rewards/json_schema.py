"""Reward of JSON in a completion that fits a JSON schema, by the package jsonschema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import fenced, keys, spoken, tagged


def held(text: str) -> Any:
    """Return the JSON of a completion: its last block of code that holds some, or else all text in its
    <answer> tags or, without these, after its thoughts.
    Raises ValueError if that is not JSON; NaN and infinities are not."""
    text = spoken(text)
    inside = tagged(text)
    text = text if inside is None else inside
    for block in reversed(fenced(text, "", "json")):
        try:
            return _loaded(block)
        except ValueError:
            continue
    return _loaded(text)


def _loaded(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def validator(schema: object) -> Any:
    """Return a schema's validator; references lead nowhere outside it.
    Raises ValueError for an invalid schema."""
    from jsonschema import SchemaError, validators
    from referencing import Registry

    if not isinstance(schema, (dict, bool)):
        raise ValueError("expected a JSON schema, an object")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"which is no JSON schema: {error.message[:120]}") from None
    return kind(schema, registry=Registry())


def graded(value: object, check: Any) -> float:
    """Return 1 if a value fits; else k / (n + 1) if k of the n keys that the schema requires at its top are present and
    fit separately."""
    if check.is_valid(value):
        return 1.0
    schema = check.schema if isinstance(check.schema, dict) else {}
    required, parts = schema.get("required", []), schema.get("properties", {})
    if not isinstance(value, dict):
        return 0.0
    right = [key in value and all(False for _ in check.descend(value[key], parts.get(key, True))) for key in required]
    return sum(right) / (len(right) + 1)


@dataclass(frozen=True)
class JsonSchema:
    """1 if a completion's JSON fits a JSON schema; otherwise less, by the required keys that fit.

    The JSON is in a block of code, of which the last counts, or is the whole answer (see `held`).
    schema: one for every prompt, as an object or the path of a .json file. Without it, each prompt's metadata holds a
    schema under `key`; the score is None for a prompt without one.
    graded: false scores 0 for any misfit. `format` in a schema is not checked.
    Raises UserError for an invalid schema, and for a reference that leads out of it.
    """

    schema: Any = None
    key: str = "schema"
    graded: bool = True
    checked: Any = field(init=False, repr=False)
    about = About(modality="text", range=(0, 1), needs="text", licence="Apache-2.0, MIT packages")

    def __post_init__(self) -> None:
        needed("jsonschema", "text", "reward 'json_schema'")
        try:
            object.__setattr__(self, "checked", None if self.schema is None else validator(_read(self.schema)))
        except (OSError, ValueError) as error:
            shown = one_line(repr(self.schema)[:120])
            raise UserError(f"reward 'json_schema': schema is {shown}, {one_line(error)}") from None

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        checks = ([self.checked] * len(prompts) if self.checked is not None else
                  keys("json_schema", metadata, self.key, prompts, validator))
        return [None if check is None else self._one(text, check) for text, check in zip(completions, checks)]

    def _one(self, completion: str, check: Any) -> float:
        from referencing.exceptions import Unresolvable

        try:
            score = graded(held(completion), check)
        except Unresolvable as error:
            raise UserError(f"reward 'json_schema': the schema refers to {one_line(error)}, expected references "
                            "within it") from None
        except (ValueError, RecursionError):
            return 0.0
        return score if self.graded else float(score == 1)


def _read(schema: Any) -> Any:
    return json.loads(Path(schema).read_text(encoding="utf-8")) if isinstance(schema, str) else schema
