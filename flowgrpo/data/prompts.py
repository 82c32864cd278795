"""Prompts: load them from a file.

A prompt file is one of
- `.txt`: one prompt per line; blank lines are skipped;
- `.jsonl`: one object per line with `prompt` and optionally `negative_prompt`, `metadata` (an object passed to the
  rewards; those for text read `answer` there), `weight` (a positive number), and the files of inputs.py (paths
  relative to the prompt file; rewards find the full paths in the metadata). Other keys, such as `answer`, go into the
  metadata, unless they are one letter off one of these;
- `.csv`: the same names as columns; `metadata` cells hold JSON, empty cells count as absent;
- `.parquet` (of the hub's datasets; extra `parquet`): the same names as columns. Other columns go into the metadata;
  columns of bytes, such as images, are left out.

In place of `prompt` there may be `question` or `problem`, or `messages`: a user's message, and perhaps the assistant's
answer to it, which becomes metadata.answer. Of an answer with #### (GSM8K) the text behind it is taken, without
thousands separators.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any

from flowgrpo.data import inputs as files
from flowgrpo.data.inputs import Inputs
from flowgrpo.errors import UserError, excerpt, slip
from flowgrpo.files import json_lines, json_of, require_ending, text_of, unsafe
from flowgrpo.packages import import_optional

ANSWERS = ("solution", "answer")  # of a prompt's metadata: the first that it has
KEYS = ("prompt", "negative_prompt", "metadata", "weight", *files.KEYS)
QUESTIONS = ("question", "problem", "messages")  # keys in place of `prompt`
WORDS = {*KEYS, *QUESTIONS, "height"}  # that are no slip of a key
USER_PROMPT = "user_prompt"  # metadata key of the prompt that a rewritten prompt comes from
LARGEST = 2**28  # bytes of a file
LONGEST, LONGEST_TEXT = 20_000, 1_000_000  # characters of a prompt of a pipeline, and of a language model
ROWS = 2**20  # of a .parquet file
NOTHING = Inputs()  # what a prompt of text alone brings
STARTER = Path(__file__).parents[1] / "starter"


@dataclass(frozen=True)
class Guidance:
    """Input under which a prompt is sampled in place of its own.

    text: in place of the prompt's.
    scale: the guidance scale of a pipeline; None: `train.guidance`.
    learned: True if the loss scores samples under this input; False: under the prompt's own.
    level: the number of hints in the text, or their share of the solution; 0: none; below 0 the image is noised.
    noise: deviation of the noise on the image that a language model reads, of values from 0 to 1.
    answers: True if teachers' answers join the prompt's group.
    """

    text: str
    scale: float | None = None
    learned: bool = True
    level: float = 0.0
    answers: bool = False
    noise: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """One prompt; `image` is the path of its first reference image, `weight` its relative frequency in training.

    inputs: all files that it brings. The metadata holds their full paths under their keys, unless it has such a key
    already.
    guided: the input under which it is sampled; None: its own. Rewards and reports see `text` and the metadata.
    """

    text: str
    negative: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    image: str | None = None
    weight: float = 1.0
    inputs: Inputs = NOTHING
    guided: Guidance | None = None

    def __post_init__(self) -> None:
        if isinstance(self.image, str) and self.image not in self.inputs.images[:1]:
            object.__setattr__(self, "inputs", replace(self.inputs, images=(self.image,)))
        if self.inputs.images and self.image is None:
            object.__setattr__(self, "image", self.inputs.images[0])
        if facts := self.inputs.metadata():
            object.__setattr__(self, "metadata", facts | self.metadata)

    @property
    def key(self) -> str:
        """Identity of a prompt: the text, with its hints if it is sampled with any, and the files if there are any.
        Groups with teachers' answers, whose rewards are not the policy's alone, have an identity of their own."""
        text = self.guided.text if self.guided and self.guided.level else self.text
        answers = ["with answers"] if self.guided and self.guided.answers else []
        answers += [f"with noise {self.guided.noise:g}"] if self.guided and self.guided.noise else []
        files = [] if self.inputs == NOTHING else [*self.inputs.images, *filter(None, [self.inputs.key])]
        return "\n".join([text, *files, *answers])

    @property
    def shown(self) -> str:
        """Text that the policy is given."""
        return self.guided.text if self.guided else self.text

    @property
    def unguided(self) -> "Prompt":
        return replace(self, guided=None) if self.guided else self

    @property
    def learned(self) -> "Prompt":
        """Prompt under which the loss scores its samples."""
        return self if self.guided and self.guided.learned else self.unguided

    @property
    def brings(self) -> str | Inputs | None:
        """Input that a policy encodes beside the text: nothing, one reference image's path, or all inputs."""
        if self.inputs == NOTHING:
            return self.image  # None, or an image that was given as an object
        return self.image if self.inputs.as_dict().keys() <= {"image"} else self.inputs


def encodable(prompts: Sequence[Prompt], negative: str) -> tuple[list[str], list[str], list[Any]]:
    """Texts, negative prompts and inputs of prompts, which policies encode. negative: of prompts without their own."""
    return ([prompt.text for prompt in prompts],
            [negative if prompt.negative is None else prompt.negative for prompt in prompts],
            [prompt.brings for prompt in prompts])


def of_records(records: Sequence[str | dict[str, Any] | Prompt]) -> list[Prompt]:
    """Prompts of texts, of dictionaries with the keys of a .jsonl file's lines, or of prompts as they are. An image's
    path is relative to the working directory. Raises UserError with the number of a wrong record."""
    listed = Path("list")
    prompts = [record if isinstance(record, Prompt) else
               _prompt({"prompt": record} if isinstance(record, str) else _of_line(record, listed, number), listed,
                       number)
               for number, record in enumerate(records, 1)]
    for number, prompt in enumerate(prompts, 1):
        try:
            json.dumps(prompt.metadata)
        except (TypeError, ValueError) as error:
            raise _wrong(listed, number, f"expected metadata that JSON can hold ({error})") from error
    return prompts


def as_line(prompt: Prompt) -> dict[str, Any]:
    """Prompt as a line of a .jsonl file, with the full paths of its files."""
    line: dict[str, Any] = {"prompt": prompt.text}
    if prompt.metadata:
        line["metadata"] = prompt.metadata
    if prompt.negative is not None:
        line["negative_prompt"] = prompt.negative
    full = prompt.inputs.metadata()
    line |= {key: full[key] for key in prompt.inputs.as_dict()}
    return line if prompt.weight == 1 else line | {"weight": prompt.weight}


def to_jsonl(prompts: Iterable[Prompt]) -> str:
    return "".join(json.dumps(as_line(prompt), ensure_ascii=False) + "\n" for prompt in prompts)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a .txt, .jsonl, .csv or .parquet file. Raises UserError with the file and the line of a mistake."""
    path = Path(path)
    require_ending(path, (".txt", ".jsonl", ".csv", ".parquet"), "prompts")
    text = text_of(path, LARGEST, "prompts", binary=path.suffix == ".parquet")
    records: Iterable[tuple[int, Any]]
    if path.suffix == ".parquet":
        table = rows(path)
        _require_spelt(table[0] if table else (), path, 1)
        records = _of_columns(table, path)
    elif path.suffix == ".csv":
        records = _read_csv(text, path)
    elif path.suffix == ".jsonl":
        records = ((line, _of_line(record, path, line)) for line, record in json_lines(text, f"prompts {path}"))
    else:
        records = ((line, {"prompt": prompt}) for line, prompt in enumerate(text.split("\n"), 1) if prompt.strip())
    prompts = []
    for line, record in records:
        prompts.append(_prompt(record, path, line))
        require_length(prompts[-1:], LONGEST_TEXT, f"{path}, line {line}")
    if not prompts:
        raise UserError(f"prompts {path}: the file holds no prompt")
    return prompts


def require_length(prompts: Sequence[Prompt], most: int = LONGEST, where: str = "a prompt") -> None:
    """Raise UserError for a text of more than `most` characters: tokenizers read it to its end. where: its place."""
    for prompt in prompts:
        for text in (prompt.text, prompt.negative or ""):
            if len(text) > most:
                raise UserError(f"{where}: a prompt of {len(text):,} characters, expected {most:,} at most "
                                f"({text[:40]!r} ...)")


Records = Iterator[tuple[int, dict[str, Any]]]  # line number, counted from 1, and the record's keys


def _of_line(row: Any, path: Path, line: int) -> Any:
    if not isinstance(row, dict):
        return row
    _require_spelt(row, path, line)
    return _with_facts(row, path, line) if row.keys() - set(KEYS) or isinstance(row.get("prompt"), list) else row


def _require_spelt(names: Iterable[str], path: Path, line: int) -> None:
    """Raise UserError for a key or column that is one letter off one of ours; any other name is metadata."""
    for name in names:
        if name not in WORDS and (meant := slip(name, KEYS)):
            raise _wrong(path, line, f"unknown key {name!r}: did you mean {meant!r}? (as a fact it goes into "
                                     "`metadata`)")


def _with_prompt(row: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """Row with `prompt`, if it has a question or messages instead. Raises UserError for more than one question."""
    if "prompt" not in row and (name := next((key for key in QUESTIONS if key in row), None)):
        row = {"prompt": row[name]} | {key: value for key, value in row.items() if key != name}
    if isinstance(turns := row.get("prompt"), list):
        roles, said = [], []
        for turn in turns:
            role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, "")
            parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
            if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                       for part in parts):
                raise _wrong(path, line, f"expected messages of text, got {str(content)[:60]!r}: the path of an image "
                                         "goes under 'image'")
            roles.append(role)
            said.append("\n".join(part["text"] for part in parts))
        if "system" in roles:
            raise _wrong(path, line, "a message of the system: leave it out, and set text.system, which all prompts "
                                     "share")
        if roles not in (["user"], ["user", "assistant"]):
            raise _wrong(path, line, "expected messages of one user, and perhaps the assistant's answer, got the roles "
                                     f"{', '.join(map(str, roles)) or 'of none'}")
        row = row | {"prompt": said[0]} | {"answer": row.get("answer", text) for text in said[1:]}
    return row


def _read_csv(text: str, path: Path) -> Records:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        headings = reader.fieldnames or ()
        _require_spelt(headings, path, 1)
        if text.strip() and not {"prompt", *QUESTIONS[:2]} & {*headings}:
            raise _wrong(path, 1, f"expected the heading 'prompt' in the first line, got {reader.fieldnames!r}")
        if len(set(headings)) < len(headings):
            raise _wrong(path, 1, f"expected different headings, got {reader.fieldnames!r}")
        for record in reader:
            line = reader.line_num
            if None in record:
                raise _wrong(path, line, f"{len(headings) + len(record[None])} cells under "
                                         f"{len(headings)} headings: quote prompts that hold a comma")
            yield line, _with_facts({key: cell for key, cell in record.items() if cell}, path, line)
    except csv.Error as error:
        raise _wrong(path, reader.line_num, f"not valid CSV: {error}") from None


def rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .parquet file as JSON values, without columns of bytes. Dates and times become ISO 8601 texts, NaN
    null. Raises UserError if pyarrow is missing, for a damaged file, and for more than ROWS rows."""
    parquet = import_optional("pyarrow.parquet", "parquet", str(path))
    try:
        if (count := parquet.read_metadata(path).num_rows) > ROWS:  # a few bytes can stand for any number
            raise UserError(f"{path}: {count:,} rows, expected {ROWS:,} at most: split it")
        schema = parquet.read_schema(path)
        columns = [field.name for field in schema if "binary" not in str(field.type)]
        files.note_unread(str(path), tuple(name for name in schema.names if name not in columns))
        return [_json_value(row) for row in parquet.read_table(path, columns=columns).to_pylist()]
    except UserError:
        raise
    except Exception as error:  # a broken file can raise anything
        raise UserError(f"{path}: not a .parquet file that can be read ({' '.join(str(error).split())[:200]})"
                        ) from None


def _json_value(value: Any) -> Any:
    """A cell's value as JSON has it; a value without a JSON form, such as a duration, as its text."""
    if isinstance(value, dict):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value if isinstance(value, (str, int, float, NoneType)) else str(value)


def of_rows(table: Iterable[dict[str, Any]], path: Path) -> list[Prompt]:
    """Prompts of a table's rows, as of a .parquet file; path: the table's name in messages."""
    records = _of_columns((_json_value(row) for row in table), path)
    return [_prompt(record, path, line) for line, record in records]


def _of_columns(table: Iterable[dict[str, Any]], path: Path) -> Records:
    for line, row in enumerate(table, 1):
        if not {"prompt", *QUESTIONS} & row.keys():
            raise _wrong(path, line, f"expected the column 'prompt', got {', '.join(row)}")
        yield line, _with_facts(_drop_none(row), path, line)


def _with_facts(row: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """Convert a row to our keys; columns that are not ours become metadata."""
    row = {**_with_prompt(row, path, line)}
    metadata = row.pop("metadata", None)
    metadata = {} if metadata is None else metadata
    if isinstance(metadata, str):
        metadata = json_of(metadata, f"prompts {path}, line {line}")
    elif isinstance(metadata, dict):
        metadata = _drop_none(metadata)  # a structure has the keys of all rows
    facts = {key: row.pop(key) for key in [*row] if key not in KEYS}
    answer = facts.get("answer")
    if isinstance(answer, str) and "####" in answer:  # of GSM8K's solutions (2110.14168) the number behind it
        final = answer.rpartition("####")[2].strip()
        if not final:
            raise _wrong(path, line, f"expected an answer behind '####' under 'answer', got {answer[-60:]!r}")
        facts["answer"] = final.replace(",", "")
    return row | {"metadata": facts | metadata if isinstance(metadata, dict) else metadata}


def _drop_none(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def _prompt(record: Any, path: Path, line: int) -> Prompt:
    if not isinstance(record, dict):
        raise _wrong(path, line, f"expected an object with the key 'prompt', got {excerpt(record)}")
    text, negative, metadata = record.get("prompt"), record.get("negative_prompt"), record.get("metadata")
    if not isinstance(text, str) or not text.strip():
        raise _wrong(path, line, f"expected a text under 'prompt', got {excerpt(text)}")
    if not isinstance(negative, str | None):
        raise _wrong(path, line, f"expected a text under 'negative_prompt', got {excerpt(negative)}")
    if not isinstance(metadata, dict | None):
        raise _wrong(path, line, f"expected an object under 'metadata', got {excerpt(metadata)}")
    for key in ("prompt", "negative_prompt"):
        if why := unsafe(record.get(key) or ""):
            raise _wrong(path, line, f"the text under {key!r} holds {why}")
    weight = 1.0 if record.get("weight") is None else files.number(record["weight"])
    if not 0 < weight < math.inf:
        raise _wrong(path, line, f"expected a positive number under 'weight', got {excerpt(record['weight'])}")
    return Prompt(text.strip(), negative, metadata or {}, None, weight, files.read_inputs(record, path, line))


def _wrong(path: Path, line: int, what: str) -> UserError:
    return UserError(f"prompts {path}, line {line}: {what}")


def answer_of(prompt: Prompt) -> str | None:
    """Answer in a prompt's metadata; None without one."""
    return next((str(prompt.metadata[key]) for key in ANSWERS if prompt.metadata.get(key) is not None), None)
