"""Process around a CPython for WebAssembly: `python wasm_host.py PACKAGES MODULE INSIDE JOB`.

PACKAGES: folder that has wasmtime. MODULE: the compiled CPython. INSIDE, JOB: folders that the code may read, and
nothing else: WebAssembly has no system calls but those that are given to it, here WASI's of files, streams and time.
"""

import json
import os
import sys
from typing import Any

CODE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("inside", "/box/__init__.py", submodule_search_locations=["/box"])
sys.modules["inside"] = module_from_spec(spec)
from inside.main import main
main("/job")
"""


def main(packages: str, module: str, inside: str, job: str) -> int:
    """Run a job; return its exit status."""
    sys.path[:0] = [packages, os.path.dirname(inside)]
    import wasmtime  # type: ignore[import-not-found, unused-ignore]
    from inside.confine import filter_calls, limit  # type: ignore[import-not-found, unused-ignore]

    with open(os.path.join(job, "job.json"), encoding="utf-8") as file:
        given: dict[str, Any] = json.load(file)
    engine = wasmtime.Engine()
    code = wasmtime.Module.deserialize_file(engine, module)
    # The code sees two folders, and of the system its standard streams.
    wasi = wasmtime.WasiConfig()
    wasi.argv = ("python", "-I", "-S", "-B", "-X", "utf8", "-c", CODE)
    wasi.preopen_dir(inside, "/box", fs_mutable=False)
    wasi.preopen_dir(job, "/job", fs_mutable=False)
    if given["mode"] == "program":
        wasi.stdin_file = os.path.join(job, "in")
    else:
        wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    # Limits of memory and time come before the first instruction of the code.
    store = wasmtime.Store(engine)
    store.set_wasi(wasi)
    store.set_limits(memory_size=given["memory"], instances=1, memories=1, tables=4)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    limit(CPU=given["cpu"], FSIZE=given["files"], NOFILE=256, CORE=0)  # wasmtime limits the code's memory
    filter_calls()  # of this process too, where the system has such a filter: it ends with its parent
    try:
        start = linker.instantiate(store, code).exports(store)["_start"]
        start(store)
    except wasmtime.ExitTrap as ended:
        return int(ended.code)
    except Exception:  # a trap: the memory or the stack is full
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
