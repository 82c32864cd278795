"""Process that runs a model's code: `python -I sandbox_child.py JOB REPORT`. Only the standard library.

JOB: the path of a JSON object {code, tests, namespace, cpu, memory, files, wall, word}. REPORT: the number of an open
file, to which it writes lines that begin with `word`: first "namespace" or "hook", then for each test "1" or "0".
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import types
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
REFUSED = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "os.kill",
           "pty.spawn", "ctypes.dl")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.lchown", "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "shutil.rmtree",
           "shutil.move", "shutil.chown")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def leave_the_network() -> bool:
    """Enter a new network namespace without any active device; False if the system grants none."""
    try:
        return ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK) == 0
    except (OSError, AttributeError):
        return False


def limit(cpu: int, memory: int, files: int, wall: int) -> None:
    """Limit for good: CPU seconds, bytes of memory and of a file, open files and processes, and wall-clock seconds."""
    limits = {"CPU": cpu, "AS": memory, "FSIZE": files, "NOFILE": 64, "NPROC": 0, "CORE": 0}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(kind, (value, value))
            except (OSError, ValueError):  # a system without this limit
                pass
    signal.alarm(wall)  # in case the parent process has died


def guard(folder: str) -> None:
    """Block, for good, the network, processes and threads, and changes to files outside the folder."""
    allowed = os.path.realpath(folder) + os.sep

    def outside(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        resolved = os.path.realpath(os.fsdecode(path))
        return resolved != os.devnull and not (resolved + os.sep).startswith(allowed)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(args[2], int) and args[2] & WRITES and outside(args[0]):
            raise PermissionError(f"{args[0]!r} cannot be written here")
        if event in CHANGES and any(map(outside, args[:2])):
            raise PermissionError(f"{event} outside the folder is not allowed here")

    sys.addaudithook(watch)


def main(job: dict[str, Any], report: int) -> None:
    """Run a job as the module describes, and write the outcome to the file `report`."""
    word = job["word"]
    apart = job["namespace"] and leave_the_network()
    os.write(report, f"{word} {'namespace' if apart else 'hook'}\n".encode())
    limit(job["cpu"], job["memory"], job["files"], job["wall"])
    guard(os.getcwd())
    module = types.ModuleType("__main__" if job["tests"] is None else "completion")
    sys.modules[module.__name__], sys.argv[:] = module, ["objectives/sequence_losses.py"]
    execute(job["code"], "objectives/sequence_losses.py", module)
    for number, test in enumerate(job["tests"] or (), 1):
        os.write(report, f"{word} {int(passes(test, number, module))}\n".encode())


def execute(code: str, name: str, module: types.ModuleType) -> None:
    """Run code in a module; name: shown in tracebacks."""
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)


def passes(test: str, number: int, module: types.ModuleType) -> bool:
    """True if a test runs without raising anything."""
    try:
        execute(test, f"test {number}", module)
        return True
    except BaseException:
        return False


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    os.remove(sys.argv[1])
    main(given, int(sys.argv[2]))
