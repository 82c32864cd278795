"""Escapes from the boundary around a model's code, each tried within every boundary of this machine."""

import contextlib
import errno
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from flowgrpo.text.rewards.sandbox import choose
from flowgrpo.text.rewards.sandbox import run as boundaries
from flowgrpo.text.rewards.sandbox.run import Checks, Limits, asserts, program, remove, run
from tests.helpers.refusals import message, refused

WORKING, REASONS = choose.available()
SLOW = Limits(seconds=60)


def inside(boundary: boundaries.Boundary, code: str, limits: Limits = SLOW) -> str:
    """What a program printed that ran to its end."""
    output = program(code, "", limits, boundary)
    assert output.status == 0, output
    return output.text.strip()


def refusal(boundary: boundaries.Boundary, code: str, limits: Limits = SLOW) -> str:
    """Name of the exception of a piece of code, and of its number of the system; "" without one."""
    body = "\n    ".join(code.splitlines())
    return inside(boundary, "import errno, os\ntry:\n    " + body + "\nexcept BaseException as error:\n"
                  "    print(type(error).__name__, errno.errorcode.get(getattr(error, 'errno', None), ''))", limits)


def none(monkeypatch, folder: Path) -> None:
    """Let nothing be installed but the programs in a folder."""
    choose._probe.cache_clear()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(boundaries, "PACKAGES", ("flowgrpo.absent",) * 2)


def test_what_this_machine_has_and_prefers():
    """Every kind either works or has its reason, so that the tests below tell of which boundaries they speak."""
    assert len(WORKING) + len(REASONS) == len(boundaries.KINDS) and WORKING.keys() <= boundaries.KINDS.keys()
    assert choose.describe_boundary() == (", ".join(WORKING) if WORKING else f"none ({'; '.join(REASONS)})")
    assert list(boundaries.KINDS) == ["bubblewrap", "nsjail", "wasmtime"]
    assert list(choose.available()[0]) == [kind for kind in boundaries.KINDS if kind in WORKING]


def test_without_a_boundary_the_reward_refuses(monkeypatch, tmp_path):
    none(monkeypatch, tmp_path)
    line = message(choose.choose, accept_risk=False)
    reasons = "bwrap is not installed; nsjail is not installed; wasmtime is not installed"
    assert f"no boundary for it ({reasons}): install bubblewrap" in line and "accept_risk: true" in line
    assert choose.choose(accept_risk=True).kind == "none" and choose.describe_boundary() == f"none ({reasons})"


def test_a_variable_that_the_boundary_sets_is_no_leak(monkeypatch):
    """The probe asks for a variable of the trainer that the boundary does not set by itself."""
    for name in os.environ.keys() - {"PATH"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    choose._probe.cache_clear()
    assert choose.available()[0].keys() == WORKING.keys()


@pytest.mark.parametrize("script, reason", [
    ("echo 'No permissions to create a new namespace' >&2; exit 1", "No permissions to create a new namespace"),
    ("exit 3", "it ended without a message"),
    ("while [ \"$1\" != -- ]; do shift; done; shift; exec \"$@\"", "does not start a process (Traceback")])
def test_a_boundary_that_does_not_hold_is_not_taken(script, reason, monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o700)
    none(monkeypatch, tmp_path)
    told = message(choose.choose, accept_risk=False)
    assert "no boundary for it" in told and reason in told


def test_a_wrapper_that_confines_nothing_is_found_out(monkeypatch, tmp_path):
    """One that only starts the process: everything that its own filter of calls does not stop is open."""
    monkeypatch.setitem(boundaries.KINDS, "bubblewrap", ("true", lambda program: boundaries.Boundary(
        "open", boundaries.nothing().wrap)))
    working, reasons = choose.available()
    assert "bubblewrap" not in working
    assert sys.platform != "linux" or "leaves open: a file outside" in reasons[0]


# --- what faults were found by ---------------------------------------------------------------------------------------
# Kinds that work here. Without any, the tests below show that the code does not run at all.
KINDS = [kind for kind in WORKING if kind != "wasmtime"] or [None]  # its own cases are at the end


def battery(test, kinds=KINDS):
    """Run a test within every boundary that works; where none does, test that the reward refuses instead."""
    @pytest.mark.parametrize("kind", kinds)
    @functools.wraps(test)
    def each(kind, *arguments, **options):
        if kind is not None:
            test(kind, *arguments, **options)
            return
        if not WORKING:
            assert "no boundary for it" in message(choose.choose, accept_risk=False)
    return each


everywhere = functools.partial(battery, kinds=[*WORKING] or [None])
ABSENT = ("SyntaxError", "NameError")


def test_the_battery_without_a_boundary_tests_the_refusal(monkeypatch, tmp_path):
    """A machine without one runs each test below in this form."""
    none(monkeypatch, tmp_path)
    monkeypatch.setitem(globals(), "WORKING", {})
    ran: list[object] = []
    battery(ran.append)(None)
    assert not ran


# Ways to write, delete or make something at FOLDER, a folder outside of the boundary with the file `kept` in it.
WRITES = {
    "open": "open(FOLDER + '/new', 'w')",
    "dir_fd": "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "dir_fd of the root": "d = os.open('/', os.O_RDONLY)\nos.remove(FOLDER[1:] + '/kept', dir_fd=d)",
    "sqlite3": "import sqlite3\nsqlite3.connect(FOLDER + '/new').execute('create table a(b)')",
    "dbm": "import dbm.dumb\ndbm.dumb.open(FOLDER + '/new', 'c')['a'] = 'b'",
    "mkfifo": "os.mkfifo(FOLDER + '/new')",
    "mknod": "os.mknod(FOLDER + '/new')",
    "symlink": "os.symlink('/etc', FOLDER + '/new')",
    "symlink that is followed": "os.symlink(FOLDER, '/tmp/in')\nopen('/tmp/in/new', 'w')",
    "link": "open('/tmp/a', 'w')\nos.link('/tmp/a', FOLDER + '/new')",
    "link out": "os.link(FOLDER + '/kept', '/tmp/kept')",
    "rename": "os.rename(FOLDER + '/kept', '/tmp/kept')",
    "remove": "os.remove(FOLDER + '/kept')",
    "ssl key log": "import ssl\nssl.create_default_context().keylog_filename = FOLDER + '/new'",
    "readline": "import readline\nreadline.write_history_file(FOLDER + '/new')",
    "faulthandler": "import faulthandler\nfaulthandler.dump_traceback(open(FOLDER + '/new', 'w'))",
    "Python's own files": "open(os.__file__, 'a')",
    "job folder": "open('/job/new', 'w')",
    "root": "open('/new', 'w')",
    "devices": "open('/dev/new', 'w')",
    "device node": "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))"}


@everywhere
@pytest.mark.parametrize("way", WRITES)
def test_nothing_outside_is_written(kind, way, tmp_path):
    (tmp_path / "kept").write_text("mine")
    raised = refusal(WORKING[kind], f"FOLDER = {str(tmp_path)!r}\n{WRITES[way]}")
    if kind == "wasmtime":
        own = way == "Python's own files"  # a copy in the memory of this one instance
        assert own or raised and not raised.startswith(ABSENT), raised
    else:
        assert raised and not raised.startswith((*ABSENT, "AttributeError")), raised
    assert [file.name for file in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "mine"


@battery
def test_there_is_no_hook_to_replace(kind, tmp_path):
    """Replaced constants of __main__ and of the entry's modules open nothing: the kernel holds the limits."""
    assert refusal(WORKING[kind], f"""
import __main__, sys
for module in (__main__, sys.modules.get('inside.confine')):
    for name in ('REFUSED', 'CHANGES', 'WRITES'):
        setattr(module, name, ())
os.mkdir({str(tmp_path / 'new')!r})""").startswith("FileNotFoundError")
    assert list(tmp_path.iterdir()) == []


PROCESSES = {
    "fork": "os.fork()",
    "system": "assert os.system('true') != 0\nraise PermissionError(1, '')",
    "subprocess": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])",
    "posix_spawn": "import sys\nos.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "_posixsubprocess": "import multiprocessing.util as util, sys\n"
                        "util.spawnv_passfds(os.fsencode(sys.executable), ['python', '-c', ''], [])",
    "multiprocessing": "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()",
    "clone by number": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
                       "if libc.syscall(CLONE, 17, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), '')",
    "new namespace": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
                     "if libc.unshare(0x10000000) < 0: raise OSError(ctypes.get_errno(), '')"}


@everywhere
@pytest.mark.parametrize("way", PROCESSES)
def test_no_process_is_started(kind, way):
    clone = "56" if kind == "wasmtime" else "220 if os.uname().machine == 'aarch64' else 56"
    raised = refusal(WORKING[kind], f"CLONE = {clone}\n{PROCESSES[way]}")
    if kind == "wasmtime":
        assert raised and not raised.startswith(ABSENT), raised
    else:
        assert raised in ("PermissionError EPERM", "BlockingIOError EAGAIN", "OSError EPERM")


@battery
def test_bombs_of_forks_and_threads(kind):
    assert inside(WORKING[kind], "import os\nn = 0\nfor _ in range(1000):\n    try:\n        os.fork()\n"
                                 "    except OSError:\n        n += 1\nprint(n)") == "1000"
    code = ("import threading, time\nn = 0\ntry:\n    while True:\n        threading.Thread(target=time.sleep, "
            "args=(600,), daemon=True).start()\n        n += 1\nexcept RuntimeError:\n    print(n, flush=True)\n"
            "    import os; os._exit(0)")
    assert int(inside(WORKING[kind], code)) < 256


@battery
def test_the_trainer_gets_no_signal(kind):
    """Neither by number, nor by a descriptor of a process, nor all at once."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        for code in (f"os.kill({os.getpid()}, signal.SIGUSR1)", f"os.pidfd_open({os.getpid()})",
                     "signal.pidfd_send_signal(0, signal.SIGUSR1)", f"os.killpg({os.getpgrp()}, signal.SIGUSR1)"):
            assert refusal(WORKING[kind], f"import signal\n{code}") in (
                "ProcessLookupError ESRCH", "PermissionError EPERM"), code
        program("import os\nos.kill(-1, 9)", "", SLOW, WORKING[kind])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == []


@battery
def test_the_trainers_limits_and_priority_stay(kind):
    import resource
    def state() -> tuple:
        return (resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE),
                sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0))
    before, pid = state(), os.getpid()
    for code in (f"import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (9, 9))",
                 f"os.sched_setaffinity({pid}, [0])", f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
                 f"os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))"):
        assert refusal(WORKING[kind], code) in ("ProcessLookupError ESRCH", "PermissionError EPERM"), code
    refusal(WORKING[kind], "os.setpriority(os.PRIO_USER, 0, 19)")
    assert state() == before


@battery
def test_the_trainers_memory_and_environment_are_not_read(kind, monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "word")
    for name in ("environ", "mem", "maps", "cmdline"):
        for pid in {os.getpid(), os.getppid()}:
            assert refusal(WORKING[kind], f"open('/proc/{pid}/{name}', 'rb').read()") == "FileNotFoundError ENOENT"
    environment = inside(WORKING[kind], "import os\nprint(os.environ)")
    assert "A_SECRET_TOKEN" not in environment and "/tmp" in environment


@battery
@pytest.mark.fast
def test_no_folder_of_the_trainer_is_seen(kind, tmp_path):
    """Only Python's installation, the system's libraries, four devices, and the code's own job and folder."""
    for path in (tmp_path, Path.cwd(), Path(sys.prefix) / "pyvenv.cfg", "/etc/passwd", "/sys", "/var", "/run",
                 Path(boundaries.__file__).parents[3]):
        assert refusal(WORKING[kind], f"os.stat({str(path)!r})") == "FileNotFoundError ENOENT", path
    assert inside(WORKING[kind], "import os\nprint(sorted(os.listdir('/tmp')), sorted(os.listdir('/job')), "
                                 "sorted(os.listdir('/dev')))") == (
        "[] ['in', 'job.json'] ['null', 'random', 'urandom', 'zero']")


@battery
def test_other_samples_are_not_seen(kind, tmp_path, monkeypatch):
    """Neither the folder of another run at the same time, nor what an earlier one left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "flowgrpo-job-other").mkdir()
    inside(WORKING[kind], "open('/tmp/left', 'w')")
    assert inside(WORKING[kind], "import glob\nprint(glob.glob('/tmp/*'))") == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["flowgrpo-job-other"]


@battery
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"])
def test_no_socket_is_opened(kind, family):
    assert refusal(WORKING[kind], f"import socket\nsocket.socket(socket.{family})") == "PermissionError EPERM"


@battery
def test_a_server_that_is_there_is_not_reached(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        call = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert refusal(WORKING[kind], call) == "PermissionError EPERM"
        with pytest.raises(BlockingIOError):
            server.accept()


@battery
def test_the_disk_is_not_filled(kind, tmp_path, monkeypatch):
    """The folder has a size, and no part of it is on the disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = ("import os\nfor n in range(50):\n    with open(f'/tmp/{n}', 'wb') as file:\n"
            "        file.write(bytes(2**20))")
    assert refusal(WORKING[kind], code, Limits(seconds=60, files=4)) == "OSError ENOSPC"
    assert refusal(WORKING[kind], "open('/tmp/a', 'wb').write(bytes(2**23))", Limits(seconds=60, files=4)) in (
        "OSError EFBIG", "OSError ENOSPC")
    assert list(tmp_path.iterdir()) == []


@battery
def test_deep_folders_are_cleaned_up(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert inside(WORKING[kind], "import os\nfor _ in range(5000):\n    os.mkdir('a'); os.chdir('a')\nprint(1)") == "1"
    assert list(tmp_path.iterdir()) == []


@battery
@pytest.mark.parametrize("code", ["x = bytearray(2**30)", "x = []\nwhile True: x.append(bytes(2**20))",
                                  "import mmap\nx = mmap.mmap(-1, 2**30)"])
def test_a_memory_bomb_ends(kind, code):
    assert refusal(WORKING[kind], code, Limits(seconds=60, memory=256)) in ("MemoryError", "OSError ENOMEM")


@battery
@pytest.mark.parametrize("call", ["os.memfd_create('a')", "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
                                  "if libc.shmget(0, 4096, 0o1600) < 0: raise OSError(ctypes.get_errno(), '')"])
def test_memory_that_no_limit_counts_is_refused(kind, call):
    assert refusal(WORKING[kind], call) == "PermissionError EPERM"


@everywhere
def test_a_flood_of_output_ends(kind):
    output = program("while True: print('a' * 1000)", "", Limits(seconds=60, files=1), WORKING[kind])
    assert output.status is None and len(output.text) == 2**20


@everywhere
@pytest.mark.parametrize("code", [
    "while True: pass", "import time; time.sleep(600)", "def f(): f()\nf()",
    "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError: pass\ntime.sleep(600)",
    "import os, time\nos.close(1)\ntime.sleep(600)"])
def test_time_is_limited(kind, code):
    assert program(code, "", Limits(seconds=1), WORKING[kind]).status != 0


def running(word: str) -> list[Path]:
    """The processes whose command has a word."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process] * (word in (process / "cmdline").read_text())
    return found


@battery
def test_nothing_outlives_the_run(kind):
    """A named process of the code is gone once the run is over, also one that had detached itself."""
    import threading
    word = f"flowgrpo-{os.getpid()}-{kind}"
    code = ("import os, sys, time\nos.setsid() if os.getpid() != os.getsid(0) else None\ntry: os.fork()\n"
            f"except OSError: pass\nif len(sys.argv) == 1: os.execv({os.path.realpath(sys.executable)!r}, "
            f"['python', '-S', '-c', 'import time; time.sleep(600)', {word!r}])")
    thread = threading.Thread(target=program, args=(code, "", Limits(seconds=2), WORKING[kind]))
    thread.start()
    seen = False
    while thread.is_alive():
        seen = seen or bool(running(word))
        time.sleep(0.02)
    end = time.monotonic() + 30  # the kernel ends the processes inside after the boundary's own
    while running(word) and time.monotonic() < end:
        time.sleep(0.02)
    assert seen and not running(word)


@battery
def test_the_kernels_switches_are_not_reached(kind):
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/fs/cgroup"):
        assert refusal(WORKING[kind], f"os.stat({path!r})") == "FileNotFoundError ENOENT"
    assert inside(WORKING[kind], "import os\nprint(os.getuid(), os.getgid())") == "65534 65534"


# --- a verdict that the code would write -----------------------------------------------------------------------------
FORGED = {
    "report": "import os\nfor n in range(20):\n    try: os.write(n, b'1' * 9 + b'\\n1\\n')\n    except OSError: pass",
    "exit": "import os\nos._exit(0)",
    "exit in the test": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "equal": "class A:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
             "    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0\n"
             "    def __lt__(self, other): return True\n    __gt__ = __le__ = __ge__ = __lt__\n"
             "def f(x): return A()",
    "number": "class A(int):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
              "    __hash__ = None\ndef f(x): return A(3)",
    "builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.abs = lambda x: 0\n"
                "builtins.__build_class__ = None\ndef f(x): return 3",
    "frames": "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
              "        frame.f_globals['abs'] = lambda x: 0\n        frame = frame.f_back\n"
              "    for thing in gc.get_objects():\n        if isinstance(thing, list): thing[:] = [1]\n    return 3",
    "messages": "import os\ndef f(x):\n    for n in range(20):\n"
                "        try: os.write(n, b'[\"done\", [\"function\", \"exit\"], []]\\n' * 5)\n"
                "        except OSError: pass\n    return 3",
    "garbage": "import os\ndef f(x):\n    while True:\n        for n in range(20):\n"
               "            try: os.write(n, b'[' * 99999)\n            except OSError: pass",
    "exception": "def f(x): raise SystemExit(0)",
    "names": "abs = len = AssertionError = lambda *x: 0\n__debug_ = 0\ndef f(x): return 3"}
KEPT = ("assert f(1) == 4", "assert abs(f(1) - 4) < 1e-6", "x = f(1)\nif x != 4: raise ValueError",
        "assert not f(1) != 4", "import math\nassert math.isclose(f(1), 4)")


@everywhere
@pytest.mark.parametrize("way", FORGED)
def test_no_verdict_is_forged(kind, way):
    passed = run(FORGED[way], Checks(asserts=KEPT), Limits(seconds=3), WORKING[kind]).passed
    assert passed == (False,) * 5


@battery
def test_functions_and_expected_outputs_stay_outside(kind):
    """The code may call a function that a test passes to it; its attributes, and all other objects, it cannot reach."""
    code = ("def f(g):\n    tried = []\n    for name in ('__globals__', '__code__', '__class__', '__self__'):\n"
            "        try: tried.append(getattr(g, name))\n        except TypeError: pass\n"
            "    try: g.x = 1\n    except TypeError: pass\n"
            "    try: tried.append(g._link.ask('name', None, 'secret'))\n    except TypeError: pass\n"
            "    return len(tried), g(2)")
    tests = ["secret = 4\nassert f(lambda x: x * secret) == (1, 8)"]  # the one is __class__, its own Remote
    assert [*asserts(code, tests, SLOW, WORKING[kind]).passed] == [True]
    checks = Checks(pairs=(("1\n", "a secret"),))
    code = "print(open('/job/job.json').read(), open('/job/in').read())"
    assert run(code, checks, SLOW, WORKING[kind]).passed == (False,)
    assert "a secret" not in program(code, "1\n", SLOW, WORKING[kind]).text


# --- without a boundary, where the user accepts it -------------------------------------------------------------------
def test_a_deep_folder_is_deleted_without_recursion(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    fd = os.open(top, os.O_RDONLY)
    for number in range(1100):  # beyond the longest path, and Python's recursion
        os.mkdir("a" * 10, dir_fd=fd)
        inner = os.open("a" * 10, os.O_RDONLY, dir_fd=fd)
        if number % 100 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)
        fd = inner
    os.close(fd)
    remove(str(top))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_accepted_risk_keeps_limits_and_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bare = boundaries.nothing()
    twice = asserts("def f(x): return 2 * x", ["assert f(2) == 4", "assert f(2) == 5"], SLOW, bare)
    assert twice.passed == (True, False)
    assert [*asserts(FORGED["equal"], KEPT, SLOW, bare).passed] == [False] * 5
    assert refusal(bare, "x = bytearray(2**30)", Limits(seconds=60, memory=512)) == "MemoryError"
    assert refusal(bare, "open('a', 'wb').write(bytes(2**22))", Limits(seconds=60, files=1)) == "OSError EFBIG"
    if sys.platform == "linux":
        assert refusal(bare, "import socket\nsocket.socket()") == f"PermissionError {errno.errorcode[errno.EPERM]}"
        for call in ("syncfs(0)", "syscall(SYNC)"):  # of every disk of the machine
            code = ("import ctypes\nSYNC = 81 if os.uname().machine == 'aarch64' else 162\n"
                    f"libc = ctypes.CDLL(None, use_errno=True)\nlibc.{call}\n"
                    "raise OSError(ctypes.get_errno(), '')")
            assert refusal(bare, code) == "PermissionError EPERM", call
    assert list(tmp_path.iterdir()) == []


BOX = WORKING.get("wasmtime")


def boxed(test):
    """Run a test within the boundary; where it is not installed, test that it is not offered."""
    @functools.wraps(test)
    def each(*arguments, **options):
        if BOX is not None:
            test(*arguments, **options)
        else:
            assert "wasmtime" not in WORKING and boundaries.wasm_path() is None
    return each


def test_a_file_that_is_another_is_refused(tmp_path):
    (tmp_path / boundaries.FILE).write_bytes(b"\0asm")
    refused("is not the known CPython for WebAssembly: its SHA-256 differs", boundaries.compile_module,
            tmp_path / boundaries.FILE)


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
def test_code_is_scored():
    tests = ["assert f([1, 2]) == [2, 4]", "assert f([1]) == [1]", "x = []\nassert f(x) is not x", "assert g(f)"]
    code = "import re, heapq\nprint('said')\ndef f(x): return [2 * y for y in x]\ndef g(h): return h([1]) == [2]"
    assert [*asserts(code, tests, SLOW, BOX).passed] == [True, False, True, True]
    output = program("print(sum(map(int, input().split())))", "3 4\n", SLOW, BOX)
    assert (output.status, output.text) == (0, "7\n")
    assert program("import sys\nsys.exit(3)", "", SLOW, BOX).status == 3


@boxed
@pytest.mark.parametrize("code", ["x = bytearray(2**30)", "x = []\nwhile True: x.append(bytes(2**20))"])
def test_memory_is_limited(code):
    assert refusal(BOX, code, Limits(seconds=60, memory=128)) == "MemoryError"


@boxed
def test_the_process_ends_with_the_run(tmp_path):
    before = running(str(boundaries.HOST))
    assert program("import time; time.sleep(600)", "", Limits(seconds=1), BOX).status is None
    assert running(str(boundaries.HOST)) == before
