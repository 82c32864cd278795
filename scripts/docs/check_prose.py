"""Check the prose of README.md, CONTRIBUTING.md and docs/: no word of the lists below, no sentence above 40 words.

PRIVATE lists words that only this project uses, with the field's. It also holds what a user reads of the package:
`--help`, errors, the report, and comments of recipes. `prose_not_yet.txt` lists the files that still have such
words, a file and its words a line. It may only become shorter: a file that lost a word has to leave its line.

    python scripts/docs/check_prose.py            # part of `make lint`, which runs proselint too
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Word or phrase, and what stands for it.
AVOIDED = {
    "a person": "you, the user", "nobody": "no user", "whoever": "the user who", "somebody": "a user",
    "is told": "is reported", "are told": "are reported", "was told": "was reported", "at once told": "reported",
    "hands back": "returns", "foretells": "predicts", "a stranger": "a third party", "kin": "variants",
    "gone on from": "resumed", "look through": "check", "hosts": "base methods", "slip of the pen": "typo",
    "whatsoever": "any", "thereof": "of it", "herein": "here",
}
# Pattern of a word, and the field's term.
PRIVATE = {"pictures?": "image", "deviations?": "std", "refused": "rejected, not supported", "watched": "eval-only",
           "alone": "only", "draws?|drawn|drew": "sample, generate", "texts": "completions, prompts"}
NOT_YET = {page: words.split() for page, words in (
    line.split(maxsplit=1) for line in (Path(__file__).parent / "prose_not_yet.txt").read_text().splitlines())}
LONGEST = 40  # words of a sentence


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs with the number of their first line, without code, tables, headings and links' targets."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if not line.strip() or line.startswith(("|", "#", ">", "<", "!")) or item:
            if lines:
                yield start, " ".join(lines)
            lines = []
        if line.strip() and not line.startswith(("|", "#", ">", "<", "!")):
            start = start if lines else number
            lines.append(re.sub(r"\]\([^)]*\)", "]", line.strip()))


def problems(page: Path) -> Iterator[str]:
    """Yield a line per problem of a page."""
    path, found = str(page.relative_to(ROOT)), set[str]()
    for number, paragraph in prose(page.read_text(encoding="utf-8")):
        place = f"{path}:{number}"
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        for words, better in AVOIDED.items():
            if re.search(rf"\b{words}\b", plain, re.I):
                yield f"{place}: got {words!r}, expected {better!r}"
        for words, better in PRIVATE.items():
            if match := re.search(rf"\b(?:{words})\b", plain, re.I):
                found.add(words)
                if words not in NOT_YET.get(path, ()):
                    yield f"{place}: got {match[0]!r}, expected {better!r}"
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\[(*])", plain):
            if (count := len(sentence.split())) > LONGEST:
                yield f"{place}: got a sentence of {count} words, expected at most {LONGEST}: {sentence[:60]}..."
    for words in NOT_YET.get(path, ()):
        if words not in found:
            yield f"{path}: has no {words!r} any more, take it out of scripts/docs/prose_not_yet.txt"


def said(path: str) -> Iterator[tuple[int, str]]:
    """Yield what a user reads of a file of the package or of a recipe, with its line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        yield from strings(ast.parse(text), path)
    elif path.endswith(".html"):
        for number, line in enumerate(text.splitlines(), 1):
            for pair in re.findall(r">([^<>{}]* [^<>{}]*)<|\"([^\"<>(=]* [^\"<>(=]*)\"", line):
                yield number, " ".join(pair)
    else:
        yield from ((number, line.partition("#")[2]) for number, line in enumerate(text.splitlines(), 1)
                    if re.search(r"(?:^|\s)#", line))


def strings(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors and the help of options; of commands their docstrings, of the report all strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = [*node.args, *(word.value for word in node.keywords if word.arg in (None, "help", "short_help"))]
            if name.endswith("Error") or name in ("Option", "Argument", "command"):
                yield from (place for each in given for place in constants(each))
            elif name == "Field":
                yield from (place for word in node.keywords if word.arg == "description" for place in constants(word))
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(of) for of in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""
    if "/report/" in path:
        docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)}
        yield from ((line, text) for line, text in constants(tree) if " " in text.strip() and text not in docs)


def constants(node: ast.AST) -> Iterator[tuple[int, str]]:
    return ((each.lineno, each.value) for each in ast.walk(node)
            if isinstance(each, ast.Constant) and isinstance(each.value, str))


def package() -> list[str]:
    """Return the files of the package and of configs/ whose words are held."""
    files = [*(ROOT / "flowgrpo").rglob("*.py"), *(ROOT / "flowgrpo").rglob("report.html"),
             *(ROOT / "configs").rglob("*.yaml")]
    return sorted(str(file.relative_to(ROOT)) for file in files if "recipes" not in file.parts)


def private(path: str) -> Iterator[str]:
    """Yield a line per private word that a user reads of a file; keys such as `image.height` are none."""
    found = set[str]()
    for number, text in said(path):
        plain = re.sub(r"`[^`]*`", "CODE", text)
        for words, better in PRIVATE.items():
            if match := re.search(rf"(?<![.\w])(?:{words})(?![\w]|[.:=]\S|: ?\{{)", plain, re.I):
                found.add(words)
                if words not in NOT_YET.get(path, ()):
                    yield f"{path}:{number}: got {match[0]!r}, expected {better!r}"
    for words in NOT_YET.get(path, ()):
        if words not in found:
            yield f"{path}: has no {words!r} any more, take it out of scripts/docs/prose_not_yet.txt"


def main() -> int:
    files = package()
    found = [line for page in PAGES for line in problems(page)] + [line for file in files for line in private(file)]
    known = {*files, *(str(page.relative_to(ROOT)) for page in PAGES)}
    found += [f"{path}: is not there, take it out of scripts/docs/prose_not_yet.txt" for path in {*NOT_YET} - known]
    print("\n".join(found) or f"{len(PAGES)} pages, and what {len(files)} files say: no problem")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
