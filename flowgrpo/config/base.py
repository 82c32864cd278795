"""Base class of all configuration sections: frozen, unknown keys are errors, numbers are finite."""

from __future__ import annotations

import re

import yaml
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number: YAML 1.1 asks for 1.0e-4 and would leave the text "1e-4"."""


class Dumper(yaml.SafeDumper):
    """Quotes texts that `Loader` would read as numbers."""


for _yaml in (Loader, Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                                list("-+.0123456789"))
