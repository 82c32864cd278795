"""Rewards that run or parse a completion: tests of Python code within a boundary (sandbox/), JSON by a schema
(jsonschema), and SVG code, rendered by resvg and compared with a reference image (RRVF, RLRF).
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.data.open_image import require_open
from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.remote.exchange import side_by_side
from flowgrpo.text.rewards.answer_keys import LICENCE, Metadata, Texts, answer_tag, code_blocks, keys, strip_thoughts
from flowgrpo.text.rewards.sandbox.choose import choose
from flowgrpo.text.rewards.sandbox.run import Boundary, Checks, Limits, run

if TYPE_CHECKING:
    from torch import Tensor


def code_of(text: str) -> str:
    text = strip_thoughts(text)
    blocks = code_blocks(text, "", "python", "py")
    return blocks[-1] if blocks else text


def read_tests(value: object) -> Checks:
    """Parse the tests in metadata: a list of texts, Python that raises on an error, or of {input, output}.
    Raises ValueError for anything else, and for invalid Python."""
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list) and value:
        if all(isinstance(test, str) for test in value):
            for test in value:
                try:
                    compile(test, "test", "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    raise ValueError(f"and {test[:60]!r} in it is not Python ({error})") from None
            return Checks(asserts=tuple(value))
        if all(isinstance(test, dict) and test.keys() == {"input", "output"} and
               all(isinstance(text, str) for text in test.values()) for test in value):
            return Checks(pairs=tuple((test["input"], test["output"]) for test in value))
    raise ValueError("expected a list of strings, such as [\"assert f(2) == 4\"], or of {input: text, output: text}")


@built_in("code_run", "programming unit test sandbox")
class CodeRun:
    """Share of its prompt's tests that a completion's Python code passes, run within a boundary (docs/security.md).

    key: of the metadata, a list of asserts, which see the code's definitions, or of {input, output}, for a program that
    reads standard input and prints; None for a prompt without it.
    strict: 1 if all tests pass, else 0.
    pace: seconds of all tests at which speed counts a half; None: time does not count. With it, code that passes all
    tests scores 1/2 + 1/2 pace / (pace + seconds), other code half its share (ACECode).
    outcomes: 1 if all tests pass, -0.3 if one fails, -0.6 if the code raises by itself, -1 if it does not compile
        (CodeRL). Programs that read standard input are not told to raise.
    seconds: wall-clock time for all asserts of a completion together, or for each pair.
    memory: MiB of a process. files: MiB of its folder and of the printed output.
    workers: completions that run at the same time.
    accept_risk: run without a boundary, as this user, where the machine has none.
    Code that does not compile, raises, or exceeds a limit fails the remaining tests.
    Raises UserError without a boundary, unless `accept_risk`, and for invalid tests.
    """

    key: str = "tests"
    strict: bool = False
    pace: float | None = None
    outcomes: bool = False
    seconds: float = 10.0
    memory: int = 1024
    files: int = 8
    workers: int = 4
    accept_risk: bool = False
    boundary: Boundary = field(init=False)
    about = About(modality="text", range=(-1, 1), needs="", licence=LICENCE)
    keyed = True  # nothing is scored without the key
    privileged = True  # runs code of completions and metadata

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.memory >= 64 and self.files >= 1 and self.workers >= 1):
            raise UserError(f"reward 'code_run': got seconds {self.seconds}, memory {self.memory}, files {self.files}, "
                            f"workers {self.workers}, expected above 0, from 64, from 1 and from 1")
        if self.pace is not None and not self.pace > 0:
            raise UserError(f"reward 'code_run': pace is {self.pace}, expected above 0 seconds")
        if self.outcomes and (self.strict or self.pace is not None):
            raise UserError("reward 'code_run': outcomes is true, beside strict or pace: expected one of them")
        if importlib.util.find_spec("resource") is None:
            raise UserError("reward 'code_run' needs the limits of a Unix system: run it there, behind "
                            "`flowgrpo reward serve code_run`")
        object.__setattr__(self, "boundary", choose(self.accept_risk))

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        tests = keys("code_run", metadata, self.key, prompts, read_tests)
        jobs = [(row, checks) for row, checks in enumerate(tests) if checks is not None]

        def score(job: tuple[int, Checks]) -> float:
            row, checks = job
            code = code_of(completions[row])
            verdict = run(code, checks, Limits(self.seconds, self.memory, self.files), self.boundary)
            share = sum(verdict.passed) / len(verdict.passed)
            if self.outcomes:
                return 1.0 if share == 1 else self._score_failure(code, checks)
            share = float(share == 1) if self.strict else share
            return share if self.pace is None else pace_score(share, verdict.seconds, self.pace)

        scores = {row: value for (row, _), value in zip(jobs, side_by_side(score, jobs, self.workers))}
        return [scores.get(row) for row in range(len(prompts))]

    def _score_failure(self, code: str, tests: Checks) -> float:
        """The outcome of code that fails a test, from further runs of it."""
        def passes(source: str) -> bool:
            limits = Limits(self.seconds, self.memory, self.files)
            return all(run(source, Checks(asserts=("pass",)), limits, self.boundary).passed)

        if not passes(f"compile({code!r}, 'code', 'exec')"):
            return -1.0
        return -0.3 if tests.pairs or passes(code) else -0.6


def pace_score(share: float, seconds: float, pace: float) -> float:
    """Half the share of passed tests, and for code that passes all of them 1/2 + 1/2 pace / (pace + seconds). Slow
    right code scores more than fast wrong code."""
    return share / 2 if share < 1 else 0.5 + 0.5 * pace / (pace + seconds)


def find_json(text: str) -> Any:
    """The JSON of a completion: its last block of code that holds some, or else all text in its <answer> tags or,
    without these, after its thoughts.
    Raises ValueError, or RecursionError, if that is not JSON; NaN and infinities are not."""
    text = strip_thoughts(text)
    text = text if (inside := answer_tag(text)) is None else inside
    for block in reversed(code_blocks(text, "", "json")):
        try:
            return json.loads(block, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def validator(schema: object) -> Any:
    """A schema's validator; references lead nowhere outside it. Raises ValueError for an invalid schema."""
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


def grade(value: object, check: Any) -> float:
    """1 if a value fits; else k / (n + 1) if k of the n keys that the schema requires at its top are present and fit
    separately."""
    if check.is_valid(value):
        return 1.0
    schema = check.schema if isinstance(check.schema, dict) else {}
    required, parts = schema.get("required", []), schema.get("properties", {})
    if not isinstance(value, dict):
        return 0.0
    right = [key in value and all(False for _ in check.descend(value[key], parts.get(key, True))) for key in required]
    return sum(right) / (len(right) + 1)


@built_in("json_schema", "structured output format")
class JsonSchema:
    """1 if a completion's JSON fits a JSON schema; otherwise less, by the required keys that fit.

    The JSON is in a block of code, of which the last counts, or is the whole answer (see `find_json`).
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
        import_optional("jsonschema", "text", "reward 'json_schema'")
        try:
            schema = json.loads(Path(self.schema).read_text("utf-8")) if isinstance(self.schema, str) else self.schema
            object.__setattr__(self, "checked", None if self.schema is None else validator(schema))
        except (OSError, ValueError) as error:
            shown = one_line(repr(self.schema)[:120])
            raise UserError(f"reward 'json_schema': schema is {shown}, {one_line(error)}") from None

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        checks = ([self.checked] * len(prompts) if self.checked is not None else
                  keys("json_schema", metadata, self.key, prompts, validator))
        return [None if check is None else self._one(text, check) for text, check in zip(completions, checks)]

    def _one(self, completion: str, check: Any) -> float:
        from referencing.exceptions import Unresolvable

        try:
            score = grade(find_json(completion), check)
        except Unresolvable as error:
            raise UserError(f"reward 'json_schema': the schema refers to {one_line(error)}, expected references "
                            "within it") from None
        except (ValueError, RecursionError):
            return 0.0
        return score if self.graded else float(score == 1)


_SVG = re.compile(r"<svg\b.*?</svg\s*>", re.S | re.I)
# An href other than to an element of the file or to embedded data, an entity, a document type, CSS that loads.
_OUTSIDE = re.compile(r"href\s*=\s*[\"']?\s*(?!#|data:)[^\s\"'>]|<!ENTITY|<!DOCTYPE|@import"
                      r"|data:\s*image/svg|url\(\s*[\"']?\s*(?!#)[^\s\"')]", re.I)
USES = 64  # <use> elements, each of which may repeat others


def svg_of(text: str) -> str | None:
    elements = _SVG.findall(strip_thoughts(text))
    return elements[-1] if elements else None


def sound(code: str, longest: int) -> bool:
    """True for code that names nothing outside itself, is not longer than `longest` characters and repeats little."""
    return len(code) <= longest and not _OUTSIDE.search(code) and code.lower().count("<use") <= USES


def similarity(image: Tensor, reference: Tensor, edges: float) -> float:
    """The likeness of two images [3, H, W] in [0, 1]: 1 for equal ones.
    It is 1 less the root of the mean squared difference, and with the weight `edges` the share that the steps between
    neighbouring pixels have in common: 1 less their mean absolute difference over the sum of their means."""
    apart = (image - reference).square().mean().sqrt().item()
    different, total = 0.0, 0.0
    for dim in (-1, -2):
        one, other = image.diff(dim=dim), reference.diff(dim=dim)
        different += (one - other).abs().mean().item()
        total += (one.abs().mean() + other.abs().mean()).item()
    return (1 - edges) * (1 - apart) + edges * (1 - different / total if total else 1.0)


def alike(features: Tensor, others: Tensor) -> float:
    """1 less half the distance of two features [1, D], scaled to unit length: 1 for equal ones, 0 for opposite ones."""
    one, other = (each / each.norm().clamp(min=1e-12) for each in (features, others))
    return 1 - (one - other).norm().item() / 2


def render(code: str, height: int, width: int) -> Tensor | None:
    """SVG code as an image [3, height, width] on white; None if it cannot be rendered. No font is loaded."""
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    resvg = import_optional("resvg_py", "svg", "reward 'svg_render'")
    try:
        data = resvg.svg_to_bytes(svg_string=code, width=width, height=height, background="#ffffff",
                                  skip_system_fonts=True)
        with Image.open(io.BytesIO(bytes(data))) as opened:
            image = opened.convert("RGB").resize((width, height))
    except BaseException as error:  # the renderer's own panics derive from it
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
            raise
        return None
    return pil_to_tensor(image).float() / 255


@built_in("svg_render", "vector drawing image")
class SvgRender:
    """Likeness of the image that a completion's SVG code makes to a reference image; 0 for code that makes none.

    key: metadata key of the reference's path; None for a prompt without it. Where a prompt brings an `image`, that is
    the one. size: pixels of either side of both images. edges: weight of edges beside colours, see `similarity`.
    semantic: weight of the likeness of `features` beside both, see `alike`; features as in `diversity`, such as "clip".
    longest: characters; longer code scores 0. brevity: weight of the code's length over `longest`, subtracted.
    Code that names files or addresses, or repeats too much, scores 0 and is not rendered. No font is loaded, so texts
    are not drawn.
    """

    key: str = "image"
    size: int = 128
    edges: float = 0.5
    semantic: float = 0.0
    features: Any = "clip"
    longest: int = 20_000
    brevity: float = 0.0
    about = About(modality="text", range=(0, 1), needs="svg", licence="Apache-2.0, MPL-2.0 package")
    keyed = True  # nothing is scored without the key
    privileged = True  # reads files that metadata name

    def __post_init__(self) -> None:
        if not (2 <= self.size <= 1024 and 0 <= self.edges <= 1 and 0 <= self.semantic <= 1 and self.longest >= 1
                and 0 <= self.brevity < 1):
            raise UserError(f"reward 'svg_render': got size {self.size}, edges {self.edges}, semantic {self.semantic}, "
                            f"longest {self.longest}, brevity {self.brevity}, expected 2 to 1024, 0 to 1, 0 to 1, from "
                            "1, and 0 to below 1")
        import_optional("resvg_py", "svg", "reward 'svg_render'")
        if self.semantic:
            from flowgrpo.rewards.guards import extractor

            object.__setattr__(self, "features", extractor(self.features))

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        return [None if self.key not in entry else self._one(text, entry[self.key])
                for text, entry in zip(completions, metadata)]

    def _one(self, text: str, path: str) -> float:
        from torchvision.transforms.functional import resize

        from flowgrpo.rewards.preprocessing import read_tensor

        code = svg_of(text)
        if code is None or not sound(code, self.longest):
            return 0.0
        image = render(code, self.size, self.size)
        if image is None:
            return 0.0
        require_open()
        try:
            reference = resize(read_tensor(path), [self.size, self.size], antialias=True)
        except UserError as error:
            raise UserError(f"reward 'svg_render': the reference {error}") from None
        value = similarity(image, reference, self.edges)
        if self.semantic:
            value += self.semantic * (alike(self.features(image[None]), self.features(reference[None])) - value)
        return max(0.0, value - self.brevity * len(code) / self.longest)
