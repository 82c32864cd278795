"""Suites of prompts with categories: published ones in their own formats, and built-in ones.

A suite is a file, a folder of files, a hub dataset's id or one of its files (`org/name/file.csv`, `org/name:file.csv`),
or the name of a built-in one. Its format is detected from the content: the keys of its records, or the words of plain
lines; failing these, from its name.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.data import hub, prompts, sets, sources
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.files import json_lines, text_of

SHIPPED = {name: named.suite for name, named in sets.SETS.items() if named.suite}
ENDINGS = (".jsonl", ".csv", ".tsv", ".txt", ".parquet")
ABOUT = re.compile(r"(licen[cs]es?|copying|notice|readme|citation)([-.]\w+)*", re.IGNORECASE)  # not prompts
TRAINING = re.compile(r"(^|[-_])train(-\d+-of-\d+)?$")
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:[:/]([^:]+))?")
COMPBENCH = re.compile(r"(?:^|_)(3d_spatial|non_spatial|spatial|color|shape|texture|complex|numeracy)(_train|_val)?$")
QUOTED = re.compile(r'"[^"]+"')
KINDS = ("category", "subject", "type", "level")  # keys of a question's category
WRITTEN = ("prompt", "tag", "Prompt", "Prompts", "Category", "Challenge", "item_id", "text",
           "question_natural_language", "question")  # keys of a text in published formats
UNIGEN_TEXT, UNIGEN_FACTS = ("prompt_en", "prompt_zh", "prompt"), ("sub_dims_en", "sub_dims_zh", "sub_dims")


@dataclass(frozen=True)
class Case:
    """Prompt and its categories: one, several, or none."""

    prompt: Prompt
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Suite of prompts. name: of the file or folder. form: the detected format. cases: in the file's order."""

    name: str
    form: str
    cases: tuple[Case, ...]

    @property
    def prompts(self) -> list[Prompt]:
        return [case.prompt for case in self.cases]

    @property
    def categories(self) -> dict[str, list[int]]:
        """Indices of the prompts of each category, categories in the order of their first prompt."""
        indices: dict[str, list[int]] = {}
        for number, case in enumerate(self.cases):
            for category in case.categories:
                indices.setdefault(category, []).append(number)
        return indices


def load_suite(name: str) -> Suite:
    """Load a suite by name, path or hub id; its prompts' files are decoded. Raises UserError if none can be read."""
    name = name.lower() if name.lower() in sets.SETS else name
    path = SHIPPED.get(name) or Path(name)
    fetched = sets.SETS[name].held_out or sets.SETS[name].train if name in sets.SETS else name
    if name not in SHIPPED and hub.is_dataset(fetched):
        return Suite(name, "hub", tuple(Case(prompt, _own_category(prompt)) for prompt in sets.load(fetched)))
    if not path.exists():
        match = HUB.fullmatch(name)
        if not match or (path.suffix in ENDINGS) != bool(match[2]):
            raise UserError(f"no suite {name!r}: expected one that `flowgrpo list prompts` lists, a file "
                            f"({', '.join(ENDINGS)}), a folder of such files, or a hub "
                            "dataset's id, with or without one of its files behind it")
        path = _download(name, match[1], match[2])
    form, cases = _folder(path) if path.is_dir() else _file(path)
    if not cases:
        raise UserError(f"suite {path}: it holds no prompt")
    sources.require([case.prompt for case in cases])
    return Suite(name if name in SHIPPED else Path(name.replace(":", "/")).stem, form, tuple(cases))


def _download(name: str, dataset: str, file: str | None) -> Path:
    """Download the files of a hub dataset that may hold prompts, or the named one."""
    from huggingface_hub import snapshot_download

    patterns = [file] if file else [f"*{end}" for end in ENDINGS]
    try:
        folder = Path(snapshot_download(dataset, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:
        raise UserError(f"no suite {name!r}: it is no path, and as a hub dataset it does not load "
                        f"({' '.join(str(error).split())[:200]})") from None
    if file and not (folder / file).is_file():
        raise UserError(f"no suite {name!r}: the hub dataset {dataset} has no file {file}")
    return folder / (file or "")


Found = tuple[str, list[Case]]  # the format and the cases


def _folder(path: Path) -> Found:
    """Read all files of a folder except licences and the like. Of files named *_train and *_val only the latter are
    read, of splits those not for training, .parquet only without other files. One-line texts are one prompt each."""
    files = sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and not ABOUT.fullmatch(file.stem))
    for accepts in (lambda file: file.suffix != ".parquet", lambda file: file.stem.endswith("_val"),
                    lambda file: not TRAINING.search(file.stem)):
        files = list(filter(accepts, files)) or files
    if not files:
        raise UserError(f"suite {path}: the folder holds no file that ends in {', '.join(ENDINGS)}")
    texts = [_lines(text_of(file, what="suite")) if file.suffix == ".txt" else [] for file in files]
    if len(files) > 1 and all(len(lines) == 1 for lines in texts):
        return _dpg([{"id": file.stem, "prompt": lines[0]} for file, lines in zip(files, texts)])
    read = [_file(file) for file in files]
    forms = list(dict.fromkeys(form for form, _ in read))
    if len(forms) > 1:
        raise UserError(f"suite {path}: its files are of several formats ({', '.join(forms)}): give one of them")
    return forms[0], [case for _, cases in read for case in cases]


def _file(path: Path) -> Found:
    if path.suffix not in ENDINGS:
        raise UserError(f"suite {path}: expected a file that ends in {', '.join(ENDINGS)}")
    if path.suffix == ".txt":
        return _plain(path.stem, _lines(text_of(path, what="suite")))
    records = _records(path)
    if not records:
        return "empty", []
    keys = set(records[0])
    read = next((read for holds, read in FORMATS if holds(keys)), None)
    if read is None:
        return "flowgrpo", [Case(prompt, _own_category(prompt)) for prompt in prompts.load_prompts(path)]
    for number, record in enumerate(records, 1):
        for key in WRITTEN:
            if not isinstance(record.get(key, ""), str):
                raise UserError(f"suite {path}, record {number}: expected a text under {key!r}, got {record[key]!r}")
    try:
        return read(records)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"suite {path}: a record is not like the first one, which has {sorted(keys)} "
                        f"({type(error).__name__}: {error})") from None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return prompts.rows(path)
    text = text_of(path, what="suite")
    if path.suffix == ".jsonl":
        records = [*json_lines(text, f"suite {path}")]
        for number, record in records:
            if not isinstance(record, dict):
                raise UserError(f"suite {path}, line {number}: expected an object, got {str(record)[:60]}")
        return [record for _, record in records]
    # PartiPrompts has unpaired quotes in its prompts and no quoted fields
    if path.suffix == ".tsv":
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    return list(csv.DictReader(io.StringIO(text, newline="")))


# --- one reader per format -------------------------------------------------------------------------------------------

def _unigen(records: list[dict[str, Any]]) -> Found:
    """Columns prompt_en and sub_dims_en, JSON with `Testpoints` such as "Attribute - Color". A prompt counts in the
    dimension of each test point, the word before the dash. The rest is kept as metadata."""
    text, facts = (next(key for key in keys if key in records[0]) for keys in (UNIGEN_TEXT, UNIGEN_FACTS))
    cases = []
    for record in records:
        dimensions = json.loads(record[facts])
        points = tuple(dict.fromkeys(point.split(" - ")[0] for point in dimensions["Testpoints"]))
        cases.append(Case(Prompt(record[text].strip(), metadata=dimensions), points))
    return "unigenbench", cases


def _dpg(records: list[dict[str, Any]]) -> Found:
    """{"id": "partiprompts13", "prompt": ...}, or one-line files of that name: the category is the source named in the
    id, or `dpg` for a number."""
    return "dpg", [Case(Prompt(record["prompt"].strip(), metadata={"id": str(record["id"])}), (_source(record["id"]),))
                   for record in records]


def _dpg_questions(records: list[dict[str, Any]]) -> Found:
    """Columns item_id, text, question_natural_language, ..., a line per question with the answer yes: a prompt with its
    `questions`, the form of `question_answers`. Each keeps its number and those it depends on, if given."""
    cases: dict[str, Case] = {}
    for record in records:
        name = record["item_id"]
        if name not in cases:
            cases[name] = Case(Prompt(record["text"].strip(), metadata={"id": name, "questions": []}), (_source(name),))
        kept = {key: record[key] for key in ("proposition_id", "dependency") if record.get(key)}
        cases[name].prompt.metadata["questions"].append(
            {"question": record["question_natural_language"].strip(), "answer": "yes"} | kept)
    return "dpg", list(cases.values())


def _plain(stem: str, lines: Sequence[str]) -> Found:
    """One prompt per line: T2I-CompBench's files, named by category; OCR, if nearly all lines hold a text in double
    quotes; else prompts without categories, such as DrawBench's."""
    if named := COMPBENCH.search(stem):
        return "t2i_compbench", [Case(Prompt(line), (named[1],)) for line in lines]
    quoted = [QUOTED.search(line) for line in lines]
    if lines and sum(map(bool, quoted)) >= 0.9 * len(lines):
        return "ocr", [Case(Prompt(line, metadata={"text": match[0].strip('"')} if match else {}))
                       for line, match in zip(lines, quoted)]
    return "prompts", [Case(Prompt(line)) for line in lines]


def _questions(records: list[dict[str, Any]]) -> Found:
    """Columns or keys question and answer, and maybe others: the question is the prompt. If a solution ends with ####
    and a number, as in GSM8K (2110.14168), that number without thousands separators is the answer. The category is the
    value of category, subject, type or level."""
    cases = []
    for record in records:
        _, mark, last = str(record["answer"]).rpartition("####")
        facts = _without(record, "question") | {"answer": last.strip().replace(",", "") if mark else record["answer"]}
        kinds = [str(facts[key]) for key in KINDS if facts.get(key)]
        cases.append(Case(Prompt(record["question"].strip(), metadata=facts), tuple(kinds[:1])))
    return "questions", cases


FORMATS: tuple[tuple[Callable[[set[str]], bool], Callable[[list[dict[str, Any]]], Found]], ...] = (
    # {"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": ...}: the category is the tag.
    (lambda keys: {"prompt", "tag", "include"} <= keys, lambda records: (
        "geneval", [Case(Prompt(each["prompt"], metadata=_without(each, "prompt")), (each["tag"],))
                    for each in records])),
    (lambda keys: {"Prompt", "Category", "Challenge"} <= keys, lambda records: (
        "partiprompts", [Case(Prompt(each["Prompt"].strip(), metadata={"challenge": each["Challenge"]}),
                              (each["Category"],)) for each in records])),
    (lambda keys: {"Prompts", "Category"} <= keys, lambda records: (
        "drawbench", [Case(Prompt(each["Prompts"].strip()), (each["Category"],)) for each in records])),
    (lambda keys: bool(keys & set(UNIGEN_TEXT) and keys & set(UNIGEN_FACTS)), _unigen),
    (lambda keys: {"item_id", "text", "question_natural_language"} <= keys, _dpg_questions),
    (lambda keys: {"id", "prompt"} == keys, _dpg),
    (lambda keys: {"question", "answer"} <= keys and not keys & {"prompt", "image"}, _questions),
)


def _without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def _source(name: Any) -> str:
    return re.split("[^A-Za-z]", str(name), maxsplit=1)[0] or "dpg"


def _own_category(prompt: Prompt) -> tuple[str, ...]:
    known = [prompt.metadata[key] for key in ("category", "task", "tag") if key in prompt.metadata]
    if known and isinstance(known[0], list):  # one prompt in several categories
        return tuple(map(str, known[0]))
    return (str(known[0]),) if known else ()
