"""Base class of all configuration sections: frozen, unknown keys are errors, numbers are finite."""

from __future__ import annotations

import re
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, where YAML 1.1 asks for 1.0e-4 and would leave the text "1e-4", and in which a
    key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"the key {key.value!r} stands twice",
                                                        problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes texts that `Loader` would read as numbers."""


for _yaml in (Loader, Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                                list("-+.0123456789"))
