"""Code that is run: what passes, what the limits end, and what it may not touch. The processes are real ones."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from flowgrpo.errors import UserError
from flowgrpo.rewards.text.code_tests import Checks, CodeRun, code_of, printed, read_tests
from flowgrpo.rewards.text.sandbox import Bounds, isolation, run

SLOW = Bounds(seconds=60)


def message(call, *arguments, **keywords) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal(code: str, bounds: Bounds = SLOW) -> str:
    """The name of what a line of code raises; "" where it raises nothing."""
    done = run(f"try:\n    {code}\nexcept BaseException as error:\n    print(type(error).__name__)", None, "", bounds)
    assert done.status == 0
    return done.out.strip()


# --- what is asked for -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, code", [
    ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("```py\na\n```\n```\nb\n```", "b\n"), ("x = 2", "x = 2"),
    ("<think>```python\na\n```</think>x = 3", "x = 3"), ("```python\nx = 4", "```python\nx = 4"),
])
def test_the_code_of_a_completion(text, code):
    assert code_of(text) == code


def test_tests_are_read():
    assert read_tests("assert 1") == read_tests(["assert 1"]) == Checks(asserts=("assert 1",))
    assert read_tests([{"input": "1", "output": "2"}]) == Checks(pairs=(("1", "2"),))
    for wrong in ([], {}, [3], [{"input": "1"}], ["assert 1", {"input": "", "output": ""}]):
        with pytest.raises(ValueError, match="expected a list of texts"):
            read_tests(wrong)
    with pytest.raises(ValueError, match="and 'assert f\\(' in it is not Python"):
        read_tests(["assert f("])
    assert printed("a \nb\n\n") == printed("a\nb") != printed("a b")


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
            for made in (CodeRun(seconds=60), CodeRun(seconds=60, strict=True))]


def test_the_share_of_tests_that_pass(scores):
    assert scores[0] == [0.5, 0, 0, 0.5, None, 0, 1, 1, 0]


def test_all_or_nothing(scores):
    assert scores[1] == [0, 0, 0, 0, None, 0, 1, 1, 0]


def test_a_report_is_not_taken_from_the_code():
    """What the code prints, and what it writes to any open file, does not pass for a test that was passed."""
    forged = "import os\nprint('1\\n' * 9)\nfor number in range(3, 20):\n    try: os.write(number, b'1\\n' * 9)\n" \
             "    except OSError: pass\n"
    assert run(forged, ["assert False"], "", SLOW).passed == [False]


# --- limits ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [
    "while True: pass", "import time; time.sleep(600)",
    "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(600)",
])
def test_time_is_limited(code):
    # The clock, SIGXCPU, or SIGKILL: the soft and the hard limit of processor time are the same second.
    assert run(code, None, "", Bounds(seconds=1)).status in (None, -24, -9)


def test_memory_output_and_files_are_limited():
    assert refusal("x = bytearray(2**30)", Bounds(seconds=60, memory=512)) == "MemoryError"
    assert refusal("open('a', 'wb').write(bytes(2**22))", Bounds(seconds=60, files=1)) == "OSError"
    done = run("while True: print('a' * 1000)", None, "", Bounds(seconds=60, files=1))
    assert done.status != 0 and len(done.out) == 2**20


def test_a_test_that_hangs_leaves_those_before_it():
    assert run("", ["assert 1", "while True: pass", "assert 1"], "", Bounds(seconds=3)).passed == [True]


@pytest.mark.parametrize("code", [
    "import os; os.fork()", "import subprocess; subprocess.run(['true'])", "import os; os.system('true')",
    "import os; os.execv('/bin/true', ['true'])", "import os; os.kill(os.getppid(), 0)",
    "import ctypes; ctypes.CDLL(None)", "import os; os.posix_spawn('/bin/true', ['true'], {})",
])
def test_processes_and_libraries_are_refused(code):
    assert refusal(code) == "PermissionError"


def test_files_outside_the_folder_are_safe(tmp_path):
    (tmp_path / "mine").write_text("kept")
    for code in (f"open({str(tmp_path / 'mine')!r}, 'w')", f"open({str(tmp_path / 'new')!r}, 'x')",
                 f"import os; os.remove({str(tmp_path / 'mine')!r})",
                 f"import shutil; shutil.rmtree({str(tmp_path)!r})",
                 f"import os; os.rename({str(tmp_path / 'mine')!r}, 'taken')", "open('../job.json', 'w')",
                 f"import os; os.symlink({str(tmp_path)!r}, 'in'); open('in/new', 'w')"):
        assert refusal(code) == "PermissionError", code
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "kept"
    assert refusal("open('a', 'w').write('b'); import os; os.remove('a'); open(os.devnull, 'w')") == ""


def test_the_environment_is_not_handed_over(monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "word")
    code = "import os; print(sorted(os.environ), os.path.realpath(os.environ['HOME']) == os.getcwd())"
    done = run(code, None, "", SLOW)
    assert "A_SECRET_TOKEN" not in done.out and done.out.strip().endswith("True")


# --- the network -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("namespace", [True, False])
def test_a_server_that_is_there_cannot_be_reached(namespace):
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert refusal(call, Bounds(seconds=60, namespace=namespace)) == "PermissionError"


def test_it_is_told_how_the_network_is_kept_away():
    assert run("", None, "", Bounds(seconds=60, namespace=False)).isolation == "hook"
    devices = [line.split(":")[0].strip() for line in
               run("print(open('/proc/net/dev').read())", None, "", SLOW).out.splitlines() if ":" in line]
    assert isolation() in ("namespace", "hook")
    assert sys.platform != "linux" or (isolation() == "namespace") == (os.path.exists("/proc/net/dev") and
                                                                       set(devices) <= {"lo"})


def test_code_runs_that_cannot_be():
    assert "seconds 0, memory 1024" in message(CodeRun, seconds=0)
    assert "isolation is 'jail', expected any or namespace" in message(CodeRun, isolation="jail")
    told = message(CodeRun(), ["x"], ["p"], [{"tests": [3]}])
    assert told.startswith("reward 'code_run': metadata.tests is [3], expected a list of texts")


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("open('a', 'w').write('b')", None, "", SLOW)
    assert list(Path(tmp_path).iterdir()) == []
