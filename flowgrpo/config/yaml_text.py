"""YAML of recipes and templates: limits of size, depth and aliases; a key that stands twice is an error."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from flowgrpo.errors import UserError
from flowgrpo.files import DEEPEST, DIGITS, require_size, unfit, unsafe

LARGEST = 2**20  # bytes of a file
MOST = 50_000  # values of a text, those of aliases counted at each


class Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: 1e-4 is a number, not a text; 1:30 and 2024-01-01 are texts, not 90 and a date;
    of truth values there are true and false, and yes, no, on and off are texts.

    Its values are those of JSON: other tags, such as !!binary and !!set, are errors.

    Raises ConstructorError for a key that stands twice, nesting deeper than DEEPEST, more values than MOST, an alias
    within its own anchor, a number of more than DIGITS digits or with a leading 0, and a text with a NUL or half of a
    surrogate pair.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}  # by node, values below it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        if self._depth > DEEPEST:
            raise ConstructorError(problem=f"nested deeper than {DEEPEST} levels", problem_mark=mark)
        before, self._depth = self._count, self._depth + 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise ConstructorError(problem="an alias stands within its own anchor", problem_mark=mark)
        self._count += self._sizes[id(node)] if alias else 1
        self._sizes.setdefault(id(node), self._count - before)
        if self._count > MOST:
            raise ConstructorError(problem=f"more than {MOST:,} values", problem_mark=mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            kind = node.tag.rpartition(":")[2][:60]
            raise ConstructorError(problem=f"not a valid {kind}", problem_mark=node.start_mark) from None

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if why := unsafe(node.value) if isinstance(node, yaml.ScalarNode) else None:
            raise ConstructorError(problem=f"a text with {why}", problem_mark=node.start_mark)
        return super().construct_scalar(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > DIGITS:
            raise ConstructorError(problem=f"a number of {len(node.value)} digits", problem_mark=node.start_mark)
        digits = node.value.replace("_", "")
        if OCTAL.match(digits) and (of := (int(digits, 8), int(digits)))[0] != of[1]:
            raise ConstructorError(problem=f"got {node.value}, which is {of[0]} in YAML 1.1 and {of[1]} in YAML 1.2: "
                                   "write one of them, or quote a text", problem_mark=node.start_mark)
        return super().construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            value = key.value if key.tag.endswith(":merge") else self.construct_object(key)
            if value in seen:
                raise ConstructorError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(value)
        return super().construct_mapping(node, deep)


Loader.yaml_constructors = {tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items()
                            if str(tag).rpartition(":")[2] not in ("binary", "omap", "pairs", "set", "timestamp")}
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


class Dumper(yaml.SafeDumper):
    """Quotes texts that `Loader` would read as numbers."""


TAG = "tag:yaml.org,2002:"
OCTAL = re.compile(r"[-+]?0[0-7_]+$")
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known
            if tag.removeprefix(TAG) not in ("bool", "int", "float", "timestamp", "value")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()}
for _tag, _pattern, _first in (
        ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
        ("int", r"[-+]?(?:0b[01_]+|0[0-7_]*|[1-9][\d_]*|0x[\da-fA-F_]+)$", "-+0123456789"),
        ("float", r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))$|"
                  r"\.(?:nan|NaN|NAN)$", "-+.0123456789")):
    Loader.add_implicit_resolver(TAG + _tag, re.compile(_pattern), list(_first))
for _yaml in (Loader, Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
                                list("-+.0123456789"))


def parse(text: str) -> Any:
    """Value of a YAML text. Raises yaml.YAMLError for a broken text, and as `Loader` does."""
    try:
        return yaml.load(text, Loader)
    except (ValueError, OverflowError, RecursionError) as error:  # a number in a directive or an escape
        raise yaml.YAMLError(str(error)) from None


def read(path: Path) -> Any:
    """Value of a YAML file. Raises UserError for one that is not regular, larger than LARGEST, or not YAML."""
    if why := unfit(path):
        raise UserError(f"{path} {why}")
    require_size(path, LARGEST, str(path))
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {describe_error(error)}") from None


def describe_error(error: Exception) -> str:
    """Message of an error of the YAML parser in one line, with the place where it knows one."""
    mark = getattr(error, "problem_mark", None)
    if mark:
        return f"{getattr(error, 'problem')} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())
