"""Rewards for text without a model: what completions score, by tables, and what is told of a wrong answer key."""

import copy as copying
import json
import pickle
import subprocess
import sys
import threading
import warnings
from fractions import Fraction

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.text.rewards.answer_keys import abstains, final_answer, last_box, strip_thoughts
from flowgrpo.text.rewards.code_tests import JsonSchema
from flowgrpo.text.rewards.judge import Rubric
from flowgrpo.text.rewards.numeric import MathAnswer, NumericMatch, Worker, answer_key, expression, last_number
from flowgrpo.text.rewards.rules import (
    CompletionLength,
    Distinct,
    ExactMatch,
    FormatTags,
    Length,
    LengthCurve,
    MultiChoice,
    Overlong,
    Repetition,
    StepMatch,
    distinct,
    normalise,
    tag_share,
)
from flowgrpo.types import Completion, opening_tag
from tests.helpers.refusals import message


def one(reward, completion: str, **metadata) -> float | None:
    """The score of one completion, as a run takes it."""
    found = rewards.score({"r": reward}, [completion], ["p"], [metadata])[0, 0].item()
    return None if found != found else found


@pytest.fixture(scope="module")
def mathematics():
    return MathAnswer(timeout=20)


# --- the answer of a completion --------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, answer", [
    ("It is <answer> 5 </answer>.", "5"), ("<answer>4</answer> no, <answer>5</answer>", "5"),
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{1} and \boxed{2", "1"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), ("text\n#### 1,234\n", "1,234"), ("The answer is 5. Check: 7.", "5"),
    ("Final answer: x = 3", "x = 3"), ("**Answer:** cat", "cat"), ("answer = 9", "9"), ("the answers vary", None),
    ("", None), ("five", None), ("<think>answer: 3</think>It is 4", None), ("<think>answer: 3", None),
    ("3 \\boxed{3}</think>\n\\boxed{4}", "4"), (r"<answer>\boxed{5}</answer>", "5"), ("#### \n", None),
])
def test_the_answer_that_is_stated(text, answer):
    assert final_answer(text) == answer


def test_marks_tags_and_thoughts():
    assert [*map(strip_thoughts, ("<think>a</think> b <think>c", "a</think>b", "a"))] == [" b ", "b", "a"]
    assert last_box("\\boxed{" * 40_000) is None and last_box("}" * 40_000 + r"\boxed{a}") == "a"
    assert one(FormatTags(begun=True), "a</think><answer>b</answer>") == 1
    assert one(FormatTags(begun=True), "<think>a</think><answer>b</answer>") < 1
    assert one(FormatTags(tags=["plan"]), "<plan>x</plan>") == 1
    for tags in ([], ["a", "a"], "think", ["a b"], [3]):
        assert "expected different names" in message(FormatTags, tags=tags)


def test_a_thought_that_the_prompt_opens_and_that_never_closes_is_no_answer(mathematics):
    """A chat template that ends in <think>: what is written is a thought up to its </think> (TRL#6966)."""
    def scores(text, opened, prompt="p", **facts):
        found = rewards.score({type(each).__name__: each for each in (NumericMatch(), ExactMatch(), MultiChoice(),
                                                                      mathematics)},
                              [text if opened is None else Completion(text, 1, opened=opened)], [prompt],
                              [{"answer": "18"} | facts])
        return found[0].tolist()
    for text in ("18", "\\boxed{18}", "The answer is 18.", "#### 18", "<answer>18</answer>"):
        assert scores(text, "<think>") == [0] * 4 and 1 in scores(text, "")
    assert scores("17, or is it?</think>18", "<think>") == [1] * 4
    assert scores("18", None, "2 * 9 = ?\n<think>\n") == [0] * 4  # a text of a file, whose prompt is all there is
    assert scores("18", None, completion_opened="<think>") == [0] * 4  # as a reward server is sent it
    assert scores("18", "", "Think between <think> and </think>, begin with <think>") == [1] * 4  # in a chat template
    assert abstains(Completion("I don't know", 1, opened="<think>")) is False


def test_the_tag_that_the_prompt_ends_with_belongs_to_the_format():
    opened = Completion("a</think><answer>b</answer>", 9, opened="<think>")
    assert one(FormatTags(), opened) == 1 and one(FormatTags(), str(opened)) < 1
    assert one(FormatTags(), Completion("<think>a</think><answer>b</answer>", 9, opened="<think>")) < 1
    assert one(FormatTags(tags=["plan", "answer"]), opened) < 1
    assert [*map(opening_tag, ("a\n<think>\n", "<think>", "a <think> b", "a <", "<|assistant|>", ""))] == [
        "<think>", "<think>", "", "", "", ""]
    for copy in (pickle.loads(pickle.dumps(opened)), copying.deepcopy(opened)):
        assert copy == opened and (copy.tokens, copy.opened) == (9, "<think>")


# --- exact -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("completion, key, score", [
    ("Paris", "paris", 1), ("  The   answer is: **Paris**.", "Paris", 1), ("Paris, I think", "Paris", 0),
    ("<answer>Los\nAngeles</answer>", "los angeles", 1), ("\uff11\uff12", 12, 1), ("12.0", 12, 0), ("B", ["A", "b"], 1),
    ("", "Paris", 0), ("\u201cyes\u201d", "Yes", 1), ("?", "?", 1), ("STRASSE", "stra\u00dfe", 1)])
def test_exact_match(completion, key, score):
    assert one(ExactMatch(), completion, answer=key) == score


def test_exact_and_numeric_matches_as_they_are_set():
    assert one(ExactMatch(case=True), "paris", answer="Paris") == 0
    assert one(ExactMatch(extract=False), "The answer is Paris", answer="Paris") == 0
    assert one(ExactMatch(key="city"), "Paris", answer="Rome", city="Paris") == 1
    assert one(ExactMatch(), "Paris") is None and one(ExactMatch(), "Paris", answer=None) is None
    assert normalise("...") == "..." and normalise(" A \t B. ") == "a b"
    assert one(StepMatch(key="proof", separator="\n"), "a\nb", proof="a\nc") == 0.5 and one(StepMatch(), "1") is None
    assert "separator is empty" in message(StepMatch, separator="")
    near = NumericMatch(tolerance=0.01)
    assert [one(near, text, answer=200) for text in ("202", "198", "202.1", "0")] == [1, 1, 0, 0]
    assert [one(near, text, answer=0) for text in ("0.01", "0.02")] == [1, 0]
    solver = NumericMatch(expressions=True)
    assert one(solver, "<answer>3*(4+5)</answer>", answer=27) == 1 and one(solver, "it is 27", answer=27) == 1
    assert one(NumericMatch(), "3") is None
    assert "tolerance is 1, expected from 0 to below 1" in message(NumericMatch, tolerance=1)
    assert [number.percent for number in answer_key(["5%", "5"])] == [True, False]


@pytest.mark.parametrize("completion, score", [
    ("46;102;180", 1), (" 46; 102 ;180", 1), ("46;102;181", 2 / 3), ("46;103;180", 1 / 3), ("45;102;180", 0),
    ("46;102", 2 / 3), ("46;102;180;7", 3 / 4), ("180", 0), ("", 0)])
def test_steps_count_up_to_the_first_wrong_one(completion, score):
    for solution in ("46;102;180", [46, 102, 180]):
        assert one(StepMatch(), completion, solution=solution) == pytest.approx(score)


@pytest.mark.parametrize("key", [True, {}, [], " ", [1, None]])
def test_an_exact_key_that_is_none_is_told(key):
    told = message(one, ExactMatch(), "x", answer=key)
    assert told.startswith("reward 'exact_match': metadata.answer is ") and told.endswith(
        "expected a text, a number, or a list of these (prompt: 'p')")


# --- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, value", [
    ("18", "18"), ("$1,234.50", "1234.5"), ("10-3", "3"), ("10 - 3", "3"), ("x = -7", "-7"), ("-$5", "-5"),
    ("$-5", "-5"), ("3/4", "3/4"), ("3 / 4", "3/4"), ("2 1/2", "5/2"), ("2 1/25.", "51/25"), ("50%", "1/2"),
    ("50 percent", "1/2"), (r"50\%", "1/2"), ("1e3", "1000"), ("2.5E-1", "1/4"), ("18km", "18"), ("1234,567", "567"),
    (".5", "1/2"), ("5.", "5"), ("\u22124", "-4"), (r"\frac{3}{4}", "3/4"), (r"1{,}000", "1000"),
    ("1,000,000", "1000000"),
    ("3 cats, 4 dogs", "4"), ("0.1", "1/10"), ("+6", "6"), ("(7)", "7"), ("= 8", "8"),
    ("H2O", None), ("none", None), ("", None), ("1/0", None), ("9" * 400, None), ("1e9999", None)])
def test_the_last_number(text, value):
    found = last_number(text)
    assert (found and found.value) == (value and Fraction(value))


@pytest.mark.parametrize("text, value", [
    ("3*(4+5)", "27"), ("2^10", "1024"), ("2**-2", "1/4"), ("(-2)**3", "-8"), ("1,234+1", "1235"), ("10%", "1/10"),
    ("0.1+0.2", "3/10"), (r"3 \times 4", "12"), ("7\u00f72", "7/2"), (r"\frac{1+1}{4}", "1/2"), ("- 5", "-5"),
    ("9**9**9", None), ("1/0", None), ("__import__('os').system('x')", None), ("a", None), ("1 if 1 else 2", None),
    ("2**0.5", None), ("1e400", None), ("(" * 1000, None), ("-" * 1000 + "1", None), ("1+" * 300 + "1", None),
    ("1or 2", None), ("1e", None),
    ("True", None), ("'1'", None), ("1,2", None), ("0x10", None), ("", None), ("\0", None), ("1_000", None)])
def test_arithmetic_is_worked_out_without_running_it(text, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = expression(text)
    assert (found and found.value) == (value and Fraction(value))


@pytest.mark.parametrize("completion, key, score", [
    ("16 - 3 - 4 = 9, and 9 * 2 = 18", "18", 1), ("The answer is 18 dollars.", 18, 1), ("#### 18", "18.0", 1),
    ("19", "18", 0), ("eighteen", "18", 0), ("<think>18</think>", "18", 0), ("<think>18", "18", 0),
    ("1,000", "1000", 1),
    ("0.5", "1/2", 1), ("0.3333333333", "1/3", 1), ("0.333", "1/3", 0), ("27", "3*(4+5)", 1), ("3*(4+5)", 27, 0),
    ("50%", "50%", 1), ("50", "50%", 1), ("0.5", "50%", 1), ("50%", 50, 1), ("50%", 0.5, 1), ("5%", "50%", 0),
    ("-3", "3", 0), ("4", [3, 4], 1), (r"\boxed{2\frac12}", "2.5", 1), (r"\boxed{2 \frac{1}{2}}", "2.5", 1)])
def test_numeric_match(completion, key, score):
    assert one(NumericMatch(), completion, answer=key) == score


@pytest.mark.parametrize("key", ["eighteen", "18 dollars", "1/0", [3, "x"], True, "import os", "9**9**9"])
def test_a_numeric_key_that_is_none_is_told(key):
    told = message(one, NumericMatch(), "3", answer=key)
    assert told.startswith("reward 'numeric_match': metadata.answer is ") and "expected a" in told


# --- mathematics -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("completion, key, score", [
    (r"So it is \boxed{\frac{1}{2}}.", "1/2", 1), (r"\boxed{0.5}", r"\frac{1}{2}", 1), (r"\boxed{2}", "1/2", 0),
    (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1), (r"<answer>(0, 1]</answer>", r"(0, 1]", 1), ("#### 18", 18, 1),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1), (r"first \boxed{3}, then \boxed{4}", "3", 0), ("I do not know", "3", 0),
    (r"<think>\boxed{3}</think>", "3", 0), (r"\boxed{", "3", 0), (r"\boxed{4}", ["3", "4"], 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1), ("The final answer is $7$.", "7", 1)])
def test_math_answers(mathematics, completion, key, score):
    assert one(mathematics, completion, answer=key) == score


def test_math_answers_are_found_in_a_thread(mathematics):
    found = []
    thread = threading.Thread(target=lambda: found.append(one(mathematics, r"\boxed{3}", answer="3")))
    thread.start()
    thread.join()
    assert found == [1]
    assert one(mathematics, r"\boxed{3}") is None


def test_a_math_key_that_cannot_be_read_is_told(mathematics):
    assert "expected mathematics that math-verify reads" in message(one, mathematics, "3", answer=r"\frac{")
    assert "expected a text, a number" in message(one, mathematics, "3", answer=[])
    assert "timeout is 0 and memory 2048, expected both above 0" in message(MathAnswer, timeout=0)


def test_a_question_without_end_does_not_hold_the_next():
    """A worker that sleeps when it is told to, and dies when it is told to."""
    code = ("import json, sys, time\nprint('\"ready\"', flush=True)\nfor line in sys.stdin:\n"
            "    told = json.loads(line)\n    time.sleep(600) if told == 'sleep' else None\n"
            "    sys.exit() if told == 'die' else None\n    print(json.dumps(told), flush=True)\n")
    worker = Worker(sys.executable, "-c", code)
    assert worker.ask("a", 60) == "a"
    first = worker._process
    assert worker.ask("sleep", 0.2) is None and first.returncode is not None
    assert worker.ask("b", 60) == "b" and worker.ask("die", 60) is None and worker.ask("c", 60) == "c"
    worker._end()


@pytest.mark.parametrize("code, told", [("print('\"no sympy\"')", "(no sympy)"), ("raise SystemExit", "(None)")])
def test_a_worker_that_does_not_start_is_told(code, told):
    assert "does not start " + told in message(Worker(sys.executable, "-c", code).ask, "a", 60)


# --- form, length, repetition ----------------------------------------------------------------------------------------
FORM = ("think", "answer")


@pytest.mark.parametrize("text, of_six", [
    ("<think>a</think><answer>b</answer>", 6), (" <think>a</think>\n<answer>\nb\n</answer>\n", 6),
    ("<think>a</think>so<answer>b</answer>", 5), ("<think> </think><answer>b</answer>", 5),
    ("<think>a</think><answer></answer>", 5), ("<answer>b</answer><think>a</think>", 4),
    ("<think>a</think><answer>b", 3), ("<think>a</think><answer>b</answer><answer>c</answer>", 2),
    ("<think>a<answer>b</think></answer>", 4), ("a", 0), ("", 0), ("<think><think>", 0), ("<think>a", 1)])
def test_tags(text, of_six):
    assert tag_share(text, FORM) == pytest.approx(of_six / 6, abs=1e-12)
    assert one(FormatTags(graded=False), text) == (of_six == 6)


@pytest.mark.parametrize("size, share", [
    (4, 0), (6, 0), (8, 0.5), (9, 0.75), (10, 1), (15, 1), (20, 1), (23, 0.25), (24, 0)])
def test_a_window_of_lengths(size, share):
    assert one(Length(10, 20, 4), "word " * size) == share and one(Length(10, 20, 4, "characters"), "c" * size) == share
    assert one(Length(10, 20, 4, "tokens"), "", completion_tokens=size) == share
    assert one(Length(10, 20), "word " * size) == (10 <= size <= 20)


@pytest.mark.parametrize("size, score", [
    (0, 0), (16384, 0), (17408, -0.25), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)])
def test_the_soft_overlong_punishment_of_dapo(size, score):
    assert one(Overlong(20480, 4096), "", completion_tokens=size) == score
    assert one(Overlong(20480, 0), "", completion_tokens=size) == (-1 if size > 20480 else 0)


def test_lengths_and_repetition_by_hand_or_refused():
    assert "expected 0 <= low <= high" in message(Length, 5, 4)
    assert "expected 0 <= buffer <= longest" in message(Overlong, 5, 6)
    assert "unit is 'pages', expected words, characters, tokens" in message(Overlong, 5, 1, "pages")
    told = message(one, Overlong(5, 1), "a")
    assert "metadata.completion_tokens is None, expected how many tokens the completion has" in told
    assert "n is 0 and unit 'words', expected 1 or more" in message(Repetition, 0)
    assert "expected 1 or more, and words or characters" in message(Distinct, 2, "tokens")
    whole = [one(LengthCurve(4), "", completion_tokens=size) for size in (0, 1, 2, 3, 4, 8)]
    assert whole == [0, 0.75, 1, 0.5, -1, -1]
    turned = [one(LengthCurve(1, turn=0.2), "", completion_tokens=size) for size in (0.2, 0.2 + 1e-9)]
    assert turned[0] == pytest.approx(turned[1])
    curve = LengthCurve(longest=4, unit="words")
    assert [one(curve, text) for text in ("a", "a b", "a b c", "a b c d e")] == [0.75, 1, 0.5, -1]
    gate = rewards.find("gated", {"rewards": [FormatTags(tags=["answer"]), curve], "thresholds": [1]})
    assert one(gate, "<answer>a b</answer>") == 1 and one(gate, "<answer> a b") == 0
    assert "a turn between 0 and 1, got 4, 1" in message(LengthCurve, 4, 1)
    assert one(CompletionLength("words"), "a b c") == 3
    assert one(CompletionLength(), "a b c", completion_tokens=7) == 7
    assert "unit is 'bytes'" in message(CompletionLength, "bytes")


@pytest.mark.parametrize("text, n, unit, share", [
    ("a b c d", 2, "words", 1), ("a b a b", 2, "words", 2 / 3), ("A b a B a", 2, "words", 0.5),
    ("a a a a a", 3, "words", 1 / 3), ("a", 2, "words", None), ("", 1, "words", None),
    ("abab", 2, "characters", 2 / 3), ("a b", 2, "characters", 1)])
def test_repetition(text, n, unit, share):
    assert distinct(text, n, unit) == share
    assert one(Repetition(n, unit), text) == pytest.approx(0 if share is None else share - 1)
    assert one(Distinct(n, unit), text) == pytest.approx(share or 0)


# --- JSON ------------------------------------------------------------------------------------------------------------
SCHEMA = {"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
          "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/count"},
                         "tags": {"type": "array", "items": {"type": "string"}}},
          "$defs": {"count": {"type": "integer", "minimum": 0}}}
GOOD = {"name": "Ann", "age": 3, "tags": []}


@pytest.mark.parametrize("completion, score", [
    (json.dumps(GOOD), 1), (f"Here:\n```json\n{json.dumps(GOOD)}\n```\nDone.", 1), (f"```\n{json.dumps(GOOD)}```", 1),
    (f"```json\n{{}}\n```\n```json\n{json.dumps(GOOD)}\n```\n```py\nx\n```", 1),
    (f"<think>hm</think>{json.dumps(GOOD)}", 1),
    (f"<think>hm</think>\n<answer>{json.dumps(GOOD)}</answer>", 1), (json.dumps(GOOD | {"more": 1}), 0.75),
    (json.dumps(GOOD | {"age": -1}), 0.5), ('{"name": "Ann"}', 0.25), ("{}", 0), ("[]", 0), ('{"name": "Ann"', 0),
    ("", 0), ("not JSON", 0), ('{"age": NaN}', 0), ("[" * 100_000, 0), ("1" * 10_000, 0)])
def test_json_by_a_schema(completion, score):
    assert one(JsonSchema(SCHEMA), completion) == score == one(JsonSchema(), completion, schema=SCHEMA)
    assert one(JsonSchema(SCHEMA, graded=False), completion) == (score == 1)


def test_schemas(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"type": "integer"}))
    assert [one(JsonSchema(str(tmp_path / "s.json")), text) for text in ("3", '"3"')] == [1, 0]
    assert one(JsonSchema(), "3") is None
    assert "expected a JSON schema, an object" in message(one, JsonSchema(), "3", schema=["a"])
    assert "no JSON schema: 'odd' is not valid" in message(one, JsonSchema(), "3", schema={"type": "odd"})
    assert message(JsonSchema, {"type": 3}).startswith("reward 'json_schema': schema is {'type': 3}, which is no JSON")
    assert "No such file" in message(JsonSchema, "none.json")
    outside = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert "expected references within it" in message(one, JsonSchema(outside), "3")


# --- a rubric --------------------------------------------------------------------------------------------------------
ITEMS = [{"contains": "light", "weight": 2}, {"contains": ["Sun", "lamp"]}, {"matches": r"CO.?2"},
         {"words": [3, 6], "weight": 4}, {"contains": "!", "weight": -2}]


@pytest.mark.parametrize("text, of_eight", [
    ("Light of the sun, CO2", 8), ("Light of the sun, CO2!", 6), ("light", 2), ("<think>sun CO2</think>light", 2),
    ("!", 0), ("", 0), ("a lamp is on", 5), ("a b c d e f g", 0)])
def test_a_rubric(text, of_eight):
    assert one(Rubric(), text, rubric=ITEMS) == of_eight / 8


def test_needed_items_and_rubrics_that_are_none():
    rubric = [{"contains": "a"}, {"excludes": "not sure", "needed": True}]
    assert [one(Rubric(), text, rubric=rubric) for text in ("a", "b", "a, NOT sure")] == [1, 0.5, 0]
    assert one(Rubric(), "a") is None
    for wrong, told in (([], "expected a list of items"), ("a", "expected a list"), ([{"has": "a"}], "expected one of"),
                        ([{"matches": "("}], "`matches` is not what it can be"),
                        ([{"words": [2, 1]}], "`words` is not"),
                        ([{"contains": ""}], "`contains` is not"), ([{"contains": 3}], "`contains` is not"),
                        ([{"contains": "a", "weight": 0}], "a weight other than 0"),
                        ([{"contains": "a", "weight": -1}], "an item with a weight above 0"),
                        ([{"contains": "a", "wieght": 2}], "expected one of")):
        assert told in message(one, Rubric(), "a", rubric=wrong)


# --- lists of texts, as a run has them -------------------------------------------------------------------------------
def test_texts_are_routed_skipped_and_kept_as_images_are(tmp_path):
    """A route, an answer per sample, a failure that is skipped, and kept scores, on lists of texts."""
    rule = RewardRule(use="exact_match", cache=True, when={"task": "word"})
    composed = rewards.compose({"r": rule}, str(tmp_path))
    texts, prompts = ["a", "b", "a"], ["p", "p", "q"]
    facts = [{"task": "word", "answer": "a"}, {"task": "word", "answer": "a"}, {"answer": "a"}]
    expected = torch.tensor([[1.0], [0.0], [torch.nan]])
    for _ in range(2):
        assert torch.equal(rewards.score(composed, texts, prompts, facts).nan_to_num(9), expected.nan_to_num(9))
    kept_scores = composed["r"].kept
    assert len(kept_scores.read([kept_scores.key(text, "p", facts[0]) for text in ("a", "b")])) == 2
    assert len({kept_scores.key(text, "p", {}) for text in ("a", "b", "\u00e4", "a ")}) == 4
    asked = []
    def failing(completions, prompts):
        asked.append(completions)
        if "b" in completions:
            raise ArithmeticError
        return [len(text) for text in completions]
    tally = rewards.Tally()
    skipping = {"f": rewards.Composed(failing, RewardRule(on_error="skip"))}
    found = rewards.score(skipping, texts, prompts, facts, tally=tally)
    assert found[:, 0].nan_to_num(9).tolist() == [1, 9, 1] and tally.failed == {"f": 1}
    assert asked == [texts, ["a"], ["b"], ["a"]]


def test_a_reward_for_text_refuses_images():
    assert "reward 'r' judges text" in message(rewards.score, {"r": ExactMatch()}, torch.zeros(1, 3, 4, 4), ["p"], [{}])


def test_whatever_a_model_repeats_is_read():
    """Every reader is about linear in the length of a completion; a quadratic one would take minutes here."""
    for text in ("\\boxed{" * 20_000, "<answer>" * 20_000, "answer is " * 20_000, "1,234" * 20_000, "#### " * 20_000,
                 "1 1/" * 20_000, "```json\n" * 20_000, "<think>" * 20_000, "-" * 100_000, " \n" * 50_000,
                 "1." * 50_000, "answer:\n" * 20_000, "\\fbox 1" * 20_000, "$a" * 20_000 + " 3", "\\(" * 20_000 + " 3",
                 "(A) x, " * 20_000, "\\frac{" * 20_000, "\\boxed{a" * 20_000 + "}" * 20_000,
                 "\\boxed{" + "\\boxed{1} " * 20_000 + "}", "\\boxed{3 a" + " " * 100_000 + "<}",
                 "\\boxed{3 a " + "for 2. " * 150 + "<}", "\\boxed{" + "a-'" * 300 + "< 3}",
                 "\\boxed{" + "1=" * 500 + "}"):
        for reward in (ExactMatch(), NumericMatch(), MultiChoice(), FormatTags(), Repetition(), JsonSchema(SCHEMA)):
            assert one(reward, text, answer=3) <= 1


def test_nothing_heavy_is_imported_to_know_the_rewards():
    code = ("import sys; from flowgrpo.rewards import locate\n"
            "for name in ('exact_match', 'numeric_match', 'math_answer', 'format_tags', 'text_length', 'overlong', "
            "'repetition', 'distinct', 'json_schema', 'code_run', 'rubric', 'text_judge'): locate(name)\n"
            "sys.exit(bool({'sympy', 'math_verify', 'jsonschema', 'transformers'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- abstentions, and lengths over a run -----------------------------------------------------------------------------
@pytest.mark.parametrize("text, says", [
    ("I don't know.", True), ("I do not know", True), ("I\u2019m not sure, maybe 5", True), ("Answer: unknown", True),
    ("It cannot be determined.", True), ("There is not enough information", True), ("Unknown", True),
    ("<think>I don't know</think>5", False), ("I am not sure at first. The answer is 5", False), ("5", False),
    ("I know: 5", False), ("<answer>I cannot tell</answer>", True), ("an unknown city", False)])
def test_a_completion_that_abstains(text, says):
    assert abstains(text) == says


@pytest.mark.parametrize("reward, wrong", [(ExactMatch, "4"), (NumericMatch, "4"), (MathAnswer, "4")])
def test_an_abstention_scores_none_where_it_is_asked_for_and_0_of_a_ternary(reward, wrong):
    assert one(reward(), "I don't know", answer="5") == 0
    assert one(reward(abstain=True), "I don't know", answer="5") is None
    found = rewards.score({"t": rewards.find("ternary", {"rewards": [reward(abstain=True)]})},
                          ["5", "I don't know", wrong], ["p"] * 3, [{"answer": "5"}] * 3)
    assert found[:, 0].tolist() == [1, 0, -1]
