"""Processes that share their imports: a fork server loads torch and its libraries once, then each starts at once."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "accelerate", "peft", "transformers", "diffusers",
                                "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
                                "diffusers.loaders.peft", "flowgrpo.run", "tests.helpers.tiny"])


class Forked:
    """A running process, and what it wrote to both of its streams."""

    def __init__(self, function: Callable[..., int | None], *arguments: Any, **environment: str) -> None:
        """Run `function(*arguments)`, whose result is the exit code. environment: variables added to those of
        here; without OMP_NUM_THREADS it computes with as many threads."""
        self.folder = tempfile.TemporaryDirectory()
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = CONTEXT.Process(target=_run, args=(function, arguments, os.environ | threads | environment,
                                                          Path(self.folder.name)))
        self.process.start()

    def wait(self, timeout: float = 500) -> int:
        """The exit code; negative for the signal that ended it. Raises TimeoutError after so many seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"still running after {timeout} s: {self.streams()}")
        return self.process.exitcode

    def streams(self) -> tuple[str, str]:
        """All of standard output, and of standard error."""
        return tuple(Path(self.folder.name, name).read_text() for name in ("out", "err"))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _run(function: Callable[..., int | None], arguments: tuple, environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.exit(function(*arguments) or 0)
