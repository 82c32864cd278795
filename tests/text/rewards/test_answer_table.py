"""Forms of answers and what four rewards give them, worked by hand (`answers.tsv`), beside three released rules."""

import csv
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from flowgrpo.text.rewards.numeric import MathAnswer, NumericMatch, answer_key
from flowgrpo.text.rewards.rules import ExactMatch, MultiChoice

LINES = Path(__file__).with_name("answers.tsv").read_text(encoding="utf-8").splitlines()
REASONS = set(re.findall(r"(\w+): ", " ".join(line for line in LINES if line.startswith("# "))))
ROWS = [{key: value.replace("\u23ce", "\n") for key, value in row.items()} for row in csv.DictReader(
    [line for line in LINES if not line.startswith("# ")], delimiter="\t", quoting=csv.QUOTE_NONE)]
STYLES = {"GSM8K", "MATH", "AIME", "MMLU", "Chinese", "Markdown", "label", "tags", "none"}


def is_number(key: str) -> bool:
    try:
        return bool(answer_key(key))
    except ValueError:
        return False


def test_the_table_has_all_styles_and_keys_that_are_wrong():
    assert len(ROWS) >= 150 and {row["style"] for row in ROWS} == STYLES
    assert len({(row["completion"], row["key"]) for row in ROWS}) == len(ROWS)
    assert not [row for row in ROWS if row["key"] == row["wrong"]]
    assert min(Counter(row["style"] for row in ROWS).values()) >= 6


@pytest.mark.parametrize("column, reward", [("numeric", NumericMatch()), ("exact", ExactMatch()),
                                            ("choice", MultiChoice()), ("math", MathAnswer(timeout=60))])
def test_what_each_form_is_worth_and_that_a_wrong_key_is_worth_nothing(column, reward):
    rows = [row for row in ROWS if row[column] != "-"]
    assert len(rows) > 200 and all(is_number(row["key"]) == (row["numeric"] != "-") for row in ROWS)
    texts, nothing = [row["completion"] for row in rows], [""] * len(rows)
    found = reward(texts, nothing, [{"answer": row["key"]} for row in rows])
    of_wrong = reward(texts, nothing, [{"answer": row["wrong"]} for row in rows])
    assert [(row["completion"], row["key"], value) for row, value in zip(rows, found)
            if value != pytest.approx(float(Fraction(row[column])))] == []
    assert [(row["completion"], row["wrong"]) for row, value in zip(rows, of_wrong) if value] == []


# --- released rules, written after their descriptions ----------------------------------------------------------------
def gsm8k(completion: str) -> str | None:
    """The first number behind "#### ", without its commas (Cobbe et al. 2021, 2110.14168); compared as a text."""
    found = re.search(r"#### (\-?[0-9\.\,]+)", completion)
    return found and found[1].strip().replace(",", "")


def boxed(text: str) -> str | None:
    """The content of the last \\boxed, or if there is none of the last \\fbox (Hendrycks et al. 2021, 2103.03874)."""
    start = max(text.rfind("\\boxed"), -1) if "\\boxed" in text else text.rfind("\\fbox")
    if start < 0:
        return None
    if text.startswith("\\boxed ", start):
        return text[start + 7:].split("$")[0]
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and not depth:
            return text[text.index("{", start) + 1:place]
    return None


def stripped(text: str) -> str:
    """MATH's normalisation: spaces, sizes, degrees, dollars, percents and units behind \\text are left out, \\frac12
    and 1/2 are \\frac{1}{2}, .5 and 0.5 are 0.5 and a half, and x = 5 is 5."""
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""),
                     ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")):
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text[:1] == "." else text
    if text.count("=") == 1 and len(text.split("=")[0]) <= 2:
        text = text.split("=")[1]
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text))
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"(-?\d+)/(-?\d+)", r"\\frac{\1}{\2}", text) if re.fullmatch(r"-?\d+/-?\d+", text) else text


def compared(rule: str, row: dict[str, str]) -> tuple[bool, bool]:
    """Whether a released rule finds an answer in a row's completion, and whether it is the key."""
    if rule == "gsm8k":
        return gsm8k(row["completion"]) is not None, gsm8k(row["completion"]) == row["key"]
    if rule == "MATH":
        found = boxed(row["completion"])
        return found is not None, found is not None and stripped(found) == stripped(row["key"])
    from math_verify import parse, verify
    parsed = parse(row["completion"], parsing_timeout=None)
    return bool(parsed), verify(parse(f"\\boxed{{{row['key']}}}", parsing_timeout=None), parsed, timeout_seconds=None)


AGREE = {"gsm8k": (237, 83), "MATH": (290, 130), "math-verify": (290, 211)}  # rows, and those that agree


@pytest.mark.parametrize("rule, column", [("gsm8k", "numeric"), ("MATH", "math"), ("math-verify", "math")])
def test_every_difference_from_a_released_rule_has_its_reason(rule, column):
    rows = [row for row in ROWS if row["numeric"] != "-"] if rule == "gsm8k" else ROWS
    unexplained, differ = [], 0
    for row in rows:
        finds, right = compared(rule, row)
        reason, same = row[rule], right == (float(Fraction(row[column])) == 1)
        differ += not same
        if same != (not reason) or (reason and (reason == "none") != (not finds)) or not {reason} - {""} <= REASONS:
            unexplained.append((row["completion"], row["key"], reason))
    assert unexplained == [] and (len(rows), len(rows) - differ) == AGREE[rule]
