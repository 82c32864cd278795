"""The escapes of test_sandbox.py within WebAssembly, where wasmtime and its CPython are installed.

Elsewhere each of them tests that the kind is not offered.
"""

import functools
import sys
from pathlib import Path

import pytest

from flowgrpo.errors import UserError
from flowgrpo.text.rewards.sandbox import choose
from flowgrpo.text.rewards.sandbox import run as boundaries
from flowgrpo.text.rewards.sandbox import run as runs
from flowgrpo.text.rewards.sandbox.run import Checks, Limits, asserts, program, run
from tests.text.rewards.test_sandbox import FORGED, KEPT, PROCESSES, SLOW, WORKING, WRITES, inside, refusal

BOX = WORKING.get("wasmtime")
ABSENT = ("SyntaxError", "NameError")


def boxed(test):
    """Run a test within the boundary; where it is not installed, test that it is not offered."""
    @functools.wraps(test)
    def each(*arguments, **options):
        if BOX is not None:
            test(*arguments, **options)
        else:
            assert "wasmtime" not in WORKING and runs.located_wasm() is None
    return each


def test_a_file_that_is_another_is_refused(tmp_path):
    (tmp_path / runs.FILE).write_bytes(b"\0asm")
    with pytest.raises(UserError, match="is not the known CPython for WebAssembly: its SHA-256 differs"):
        runs.compiled(tmp_path / runs.FILE)


@boxed
@pytest.mark.parametrize("way", WRITES)
def test_nothing_is_written(way, tmp_path):
    (tmp_path / "kept").write_text("mine")
    raised = refusal(BOX, f"FOLDER = {str(tmp_path)!r}\n{WRITES[way]}")
    own = way == "Python's own files"  # a copy in the memory of this one instance
    assert own or raised and not raised.startswith(ABSENT), raised
    assert [file.name for file in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "mine"


@boxed
@pytest.mark.parametrize("way", PROCESSES)
def test_no_process_is_started(way):
    raised = refusal(BOX, PROCESSES[way].replace("CLONE", "56"))
    assert raised and not raised.startswith(ABSENT), raised


@boxed
@pytest.mark.parametrize("code", [
    "import threading\nthreading.Thread(target=print).start()", "import ctypes", "import resource",
    "import socket\nsocket.socket()", "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "os.kill(1, 9)", "os.stat('/etc/passwd')", "os.stat('/proc/self/environ')", "os.listdir('/')", "os.mkdir('/tmp/a')",
    "os.open('/job/../../etc/passwd', os.O_RDONLY)", "os.open('/box/inside/../run.py', os.O_RDONLY)",
    "os.symlink('/etc/passwd', '/job/in2')", "os.chdir('/..')\nos.stat('etc')", "os.environ['PATH']",
    f"os.stat({str(Path.cwd())!r})", f"os.stat({sys.prefix!r})"])
def test_nothing_else_is_reached(code):
    raised = refusal(BOX, code)
    assert raised and not raised.startswith(ABSENT), raised


@boxed
def test_the_code_sees_its_job_and_its_library():
    assert inside(BOX, "import os\nprint(sorted(os.listdir('/job')), os.listdir('/usr'), dict(os.environ))") == (
        "['in', 'job.json'] ['local'] {}")


@boxed
@pytest.mark.parametrize("way", FORGED)
def test_no_verdict_is_forged(way):
    assert run(FORGED[way], Checks(asserts=KEPT), Limits(seconds=3), BOX).passed == (False,) * 5


@boxed
def test_code_is_scored():
    tests = ["assert f([1, 2]) == [2, 4]", "assert f([1]) == [1]", "x = []\nassert f(x) is not x", "assert g(f)"]
    code = "import re, heapq\nprint('said')\ndef f(x): return [2 * y for y in x]\ndef g(h): return h([1]) == [2]"
    assert asserts(code, tests, SLOW, BOX) == [True, False, True, True]
    output = program("print(sum(map(int, input().split())))", "3 4\n", SLOW, BOX)
    assert (output.status, output.text) == (0, "7\n")
    assert program("import sys\nsys.exit(3)", "", SLOW, BOX).status == 3


@boxed
@pytest.mark.parametrize("code", ["x = bytearray(2**30)", "x = []\nwhile True: x.append(bytes(2**20))"])
def test_memory_is_limited(code):
    assert refusal(BOX, code, Limits(seconds=60, memory=128)) == "MemoryError"


@boxed
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)",
                                  "import os, time\nos.close(1)\ntime.sleep(600)", "def f(): f()\nf()"])
def test_time_and_the_stack_are_limited(code):
    assert program(code, "", Limits(seconds=1), BOX).status != 0


@boxed
def test_a_flood_of_output_ends():
    output = program("while True: print('a' * 1000)", "", Limits(seconds=60, files=1), BOX)
    assert output.status is None and len(output.text) == 2**20


@boxed
def test_the_process_ends_with_the_run(tmp_path):
    running = lambda: [path for path in Path("/proc").glob("[0-9]*") if _is_host(path)]  # noqa: E731
    before = running()
    assert program("import time; time.sleep(600)", "", Limits(seconds=1), BOX).status is None
    assert running() == before


def _is_host(process: Path) -> bool:
    try:
        return str(runs.HOST) in (process / "cmdline").read_text()
    except OSError:
        return False


def test_the_preferred_kind_is_of_the_kernel():
    assert list(boundaries.KINDS) == ["bubblewrap", "nsjail", "wasmtime"]
    assert list(choose.available()[0]) == [kind for kind in boundaries.KINDS if kind in WORKING]
