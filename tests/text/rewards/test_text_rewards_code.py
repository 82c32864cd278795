"""Code that is run: what passes. The processes are real ones; what the boundary holds is in test_sandbox.py."""

import pytest

from flowgrpo.rewards import find
from flowgrpo.text.rewards.code_tests import CodeRun, code_of, pace_score, read_tests
from flowgrpo.text.rewards.sandbox.choose import choose
from flowgrpo.text.rewards.sandbox.run import Boundary, Checks, Limits, asserts, output_lines
from tests.helpers.refusals import message

SLOW = Limits(seconds=60)


# --- what is asked for -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, code", [
    ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("```py\na\n```\n```\nb\n```", "b\n"), ("x = 2", "x = 2"),
    ("<think>```python\na\n```</think>x = 3", "x = 3"), ("```python\nx = 4", "x = 4"),
    ("~~~python\nx = 5\n~~~", "x = 5\n"), ("~~~~\nx = '~~~'\n~~~~", "x = '~~~'\n"), ("````py\n```\n````", "```\n"),
    ("```Python3.11\nx = 6\n```", "x = 6\n"), ("```python title=a\nx = 7\n```", "x = 7\n"),
    ("```bash\nls\n```\nthen\n```python\nx = 8\n```", "x = 8\n"), ("```js\na\n```", "```js\na\n```"),
    ("```python\nx = 9\n```\nso it is ```x```\n", "x = 9\n")])
def test_the_code_of_a_completion(text, code):
    assert code_of(text) == code


def test_tests_and_modules_are_read():
    assert read_tests("assert 1") == read_tests(["assert 1"]) == Checks(asserts=("assert 1",))
    assert read_tests([{"input": "1", "output": "2"}]) == Checks(pairs=(("1", "2"),))
    for wrong in ([], {}, [3], [{"input": "1"}], ["assert 1", {"input": "", "output": ""}]):
        assert "expected a list of strings" in message(read_tests, wrong, error=ValueError)
    assert "and 'assert f(' in it is not Python" in message(read_tests, ["assert f("], error=ValueError)
    assert output_lines("a \nb\n\n") == output_lines("a\nb") != output_lines("a b")
    code = "import math\ndef area(r):\n    return math.pi * r * r\n"
    test = "assert math.isclose(area(1), 3.14159, rel_tol=1e-4)"
    assert [*asserts(code, [test], SLOW, choose(accept_risk=True)).passed] == [True]


# --- what comes of it ------------------------------------------------------------------------------------------------
DOUBLE = "```python\ndef f(x):\n    return 2 * x\n\nif __name__ == '__main__':\n    print(input())\n```"
PROGRAM = "print(2 * int(input()))"
RECORD = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int"


@pytest.fixture(scope="module")
def scores():
    """Nine completions with their tests, in one call."""
    tests = ["assert f(2) == 4", "assert f(0) == 0", "assert f(2) == 5", "raise SystemExit(0)"]
    pairs = [{"input": "4\n", "output": "8"}, {"input": "x", "output": "8"}]
    rows = [(DOUBLE, tests), ("def f(:", tests), ("import os\nos._exit(0)", tests), (PROGRAM, pairs), (DOUBLE, None),
            ("print(8)\nraise SystemExit(3)", pairs), ("print(8)", pairs), (RECORD, "assert A(3).x == 3"), ("", tests)]
    metadata = [{} if tests is None else {"tests": tests} for _, tests in rows]
    return [made([code for code, _ in rows], ["p"] * len(rows), metadata)
            for made in (CodeRun(seconds=60, accept_risk=True), CodeRun(seconds=60, strict=True, accept_risk=True))]


def test_tests_that_pass_one_by_one_or_all(scores):
    assert scores[0] == [0.5, 0, 0, 0.5, None, 0, 1, 1, 0]
    assert scores[1] == [0, 0, 0, 0, None, 0, 1, 1, 0]


# --- tests see definitions through a link -------------------------------------------------------------------------
DEFINED = """
count = 0
class Point:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __len__(self): return 2
    def __repr__(self): return f"Point({self.x})"
    def __enter__(self): return self
    def __exit__(self, *args): return True
class Wrong(ValueError): pass
def wrong(): raise Wrong("text")
def steps(n): yield from range(n)
def apply(function, values): return [function(value) for value in values]
def arrange(values): values.sort()
def grow(): global count; count += 1
def many(): return [(1, 2.5), {"a": {1}}, b"x", None, 3j, range(2), float("inf"), 10**5000]
"""


@pytest.mark.parametrize("test", [
    "assert Point(1).x == 1 and Point(1, y=2).y == 2", "assert Point(1) + Point(2) == Point(3)",
    "p = Point(1)\np.x = 5\nassert p == Point(5) and p != Point(1) and p == p", "assert len(Point(1)) == 2",
    "assert repr(Point(4)) == 'Point(4)' and isinstance(Point(1), Point) and not isinstance(4, Point)",
    "with Point(1) as p:\n    assert p.x == 1",
    "try:\n    wrong()\n    done = True\nexcept Wrong as error:\n    done = str(error)\nassert done == 'text'",
    "try:\n    wrong()\n    assert False\nexcept ValueError:\n    pass",
    "assert list(steps(3)) == [0, 1, 2] and next(steps(1)) == 0 and 2 in steps(3)",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]", "assert apply(len, ['a']) == [1] and apply(int, ['3']) == [3]",
    "a = [3, 1]\narrange(a)\nassert a == [1, 3]", "grow()\nassert count == 1\ngrow()\nassert count == 2",
    "def check(candidate):\n    assert all(list(candidate(n)) == list(range(n)) for n in range(3))\ncheck(steps)",
    "assert many() == [(1, 2.5), {'a': {1}}, b'x', None, 3j, range(2), float('inf'), 10**5000]",
    "import math\nassert math.sqrt(Point(4).x) == 2", "assert hasattr(Point(1), 'x') and not hasattr(Point(1), 'z')"])
def test_what_tests_may_do_with_definitions(test):
    assert [*asserts(DEFINED, [test], SLOW, choose(accept_risk=True)).passed] == [True]


FORGED = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    one = 3\ndef copy(x):\n    return x\n"


@pytest.mark.parametrize("test, passes", [
    ("assert math.isclose(1.0, 2.0)", False), ("assert math.isclose(1.0, 1.0)", True), ("assert math.one", False),
    ("assert copy(3) == 3", True),  # a definition of the name of a module
    ("assert copy(3) == 3 and copy.copy(3) == 3", False)])
def test_standard_modules_are_the_tests_own(test, passes):
    assert [*asserts(FORGED, [test], SLOW, choose(accept_risk=True)).passed] == [passes]


@pytest.mark.parametrize("test", ["assert Point(1) == 1", "assert Point(1) + 1", "assert Point(1) < 2",
                                  "assert nothing", "assert apply(print, 3)"])
def test_what_they_may_not(test):
    assert [*asserts(DEFINED, [test], SLOW, choose(accept_risk=True)).passed] == [False]


def test_a_test_that_hangs_leaves_those_before_it():
    tests = ["assert 1", "while True: pass", "assert 1"]
    assert [*asserts("", tests, Limits(seconds=1), choose(accept_risk=True)).passed] == [True, False, False]


def test_fast_code_scores_more_where_it_is_right():
    """At the pace itself 3/4, instantly 1, ever slower 1/2; half the tests never more than that."""
    assert [pace_score(1, seconds, 2) for seconds in (0, 2, 6)] == [1, 0.75, 0.625]
    assert pace_score(1, 1e6, 2) > pace_score(0.99, 0, 2) and pace_score(0.5, 0, 2) == pace_score(0.5, 9, 2) == 0.25
    made = CodeRun(seconds=60, pace=1e6, accept_risk=True)
    right, wrong = made(["def f(): return 1"] * 2, ["p"] * 2, [{"tests": ["assert f() == 1"]},
                                                              {"tests": ["assert f() == 1", "assert f() == 2"]}])
    assert right == pytest.approx(1, abs=1e-4) and right < 1 and wrong == 0.25
    assert "pace is 0" in message(CodeRun, pace=0)


def test_code_runs_that_cannot_be():
    assert "seconds 0, memory 1024" in message(CodeRun, seconds=0)
    told = message(CodeRun(accept_risk=True), ["x"], ["p"], [{"tests": [3]}])
    assert told.startswith("reward 'code_run': metadata.tests is [3], expected a list of strings")


def test_the_risk_has_to_be_accepted_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no boundary for it" in message(find, "code_run") and "{accept_risk: true}" in message(find, "code_run")
    accepted = find("code_run", {"accept_risk": True})
    assert accepted.boundary.kind == "none"
    assert accepted([DOUBLE], ["p"], [{"tests": "assert f(2) == 4"}]) == [1]


@pytest.mark.fast
def test_records_and_outcomes_of_runs():
    from flowgrpo.evaluation.report.snapshots import machine
    kind = CodeRun(accept_risk=True).boundary.kind
    assert kind in machine("cpu", 1, "fp32")["code boundary"].split(", ")
    reward = CodeRun(accept_risk=True)
    object.__setattr__(reward, "boundary", Boundary("bubblewrap", lambda job, files: ["false"]))
    assert message(reward, [DOUBLE], ["p"], [{"tests": "assert f(2) == 4"}]) == (
        "the boundary bubblewrap does not start a process (it ended without a message): check its installation")
    made = CodeRun(seconds=60, outcomes=True, accept_risk=True, workers=1)
    codes = ["def f(x): return x", "def f(x): return -x", "def f(x): return x\n1 / 0", "def f(x: return x"]
    assert made(codes, ["p"] * 4, [{"tests": ["assert f(2) == 2"]}] * 4) == [1, -0.3, -0.6, -1]
    pair = [{"tests": [{"input": "3", "output": "4"}]}] * 2
    assert made(["print(4)", "print(5)"], ["p"] * 2, pair) == [1, -0.3]
    assert "outcomes is true, beside strict or pace" in message(CodeRun, outcomes=True, strict=True)
