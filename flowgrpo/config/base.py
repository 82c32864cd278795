"""What every section of the configuration is: frozen, without keys that it does not know, its numbers finite."""

from __future__ import annotations

import re

import yaml
from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number: YAML 1.1 asks for 1.0e-4 and would leave the text "1e-4"."""


class Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


for _yaml in (Loader, Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                                list("-+.0123456789"))
