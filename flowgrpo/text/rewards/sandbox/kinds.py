"""Boundaries that the kernel or WebAssembly keeps, each as a command line around a Python process."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.text.rewards.sandbox import wasm

INSIDE = Path(__file__).with_name("inside")
MIB = 2**20
NOBODY = "65534"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64")  # shared libraries


@dataclass(frozen=True)
class Boundary:
    """Boundary of a kind. wrap: (folder of the job, MiB of files) -> command line. writes: the code has a folder."""

    kind: str
    wrap: Callable[[Path, int], list[str]]
    writes: bool = True


def python(box: str, job: str) -> list[str]:
    """Return the command line of the process inside. box: folder that has `inside`. job: the job's folder."""
    code = f"import sys; sys.path.insert(0, {box!r}); from inside.main import main; main({job!r})"
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8", "-c", code]


def installation() -> list[str]:
    """Return the paths that this Python needs: its own, and the system's libraries."""
    program = os.path.realpath(sys.executable)
    base = os.path.realpath(sys.base_prefix)
    paths = [*SYSTEM, program, os.path.realpath(sysconfig.get_path("stdlib"))]
    if base not in ("/", "/usr"):
        paths += [os.path.join(base, "lib"), *_library(base)]
    return [path for path in dict.fromkeys(paths) if os.path.lexists(path)]


def _library(base: str) -> Iterable[str]:
    """Yield the folder of Python's own shared library, if it is outside `base`."""
    folder = sysconfig.get_config_var("LIBDIR")
    if folder and sysconfig.get_config_var("Py_ENABLE_SHARED") and not os.path.realpath(folder).startswith(base):
        yield os.path.realpath(folder)


def bubblewrap(program: str) -> Boundary:
    """Return the boundary of bubblewrap: new namespaces of every kind, no capabilities, a file system of its own."""
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
    """Return the boundary of nsjail: the same namespaces as bubblewrap's."""
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
    """Return the boundary of WebAssembly: a CPython without system calls of its own. program: its file."""
    file, python = str(wasm.compiled(Path(program))), os.path.realpath(sys.executable)
    return Boundary("wasmtime", lambda job, files: wasm.command(python, file, INSIDE, job), writes=False)


def nothing() -> Boundary:
    """Return no boundary: a process of the same user, in a folder of its own."""
    return Boundary("none", lambda job, files: python(str(INSIDE.parent), str(job)))


KINDS: dict[str, tuple[str, Callable[[str], Boundary]]] = {
    "bubblewrap": ("bwrap", bubblewrap), "nsjail": ("nsjail", nsjail), "wasmtime": ("wasmtime", wasmtime)}


def located(program: str) -> str | None:
    """Return the path of a kind's program; None if it is not installed."""
    return wasm.located() if program == "wasmtime" else shutil.which(program)
