"""Signals to `sample`, `grid` and `encode`: what is finished stays whole, and the same command goes on with it."""

import os
import signal

import pytest
import yaml

from flowgrpo.cli import main
from tests.export.test_export import make_run
from tests.helpers import tiny
from tests.helpers.forked import Forked

CODES = {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}


def signalled(command: list[str], call: str, ending: str, number: int) -> int:
    """The command, whose process signals itself when it has called `os.replace` or calls `os.fsync` for the second
    file of this ending."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    original, names = getattr(os, call), []
    def counted(*arguments):
        if call == "fsync":
            names.append(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        else:
            original(*arguments)
            names.append(str(arguments[1]))
        at = 2 if call == "replace" else 1
        if names[-1].endswith(ending) and sum(name.endswith(ending) for name in names) == at:
            os.kill(os.getpid(), number)
        if call == "fsync":
            original(*arguments)
    setattr(os, call, counted)
    return main(command)


def stopped(command: list[str], *when) -> None:
    process = Forked(signalled, command, *when)
    assert process.wait(120) == CODES[when[-1]], process.streams()


def content(folder, pattern) -> dict:
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns)
            for file in folder.rglob(pattern)}


@pytest.mark.parametrize("number", CODES)
def test_sample_goes_on_with_the_finished_images(number, model, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(tiny.PROMPTS[:3]))
    command = ["sample", str(model), f"--prompts={tmp_path}/p.txt", "--steps=1", f"--output={tmp_path}/out"]
    stopped(command, "replace", ".png", number)
    kept = content(tmp_path / "out", "[0-9]*.png")
    assert len(kept) == 2 and not (tmp_path / "out" / "prompts.jsonl").exists()
    assert main(command) == 0
    done = content(tmp_path / "out", "[0-9]*.png")
    assert len(done) == 3 and kept.items() <= done.items()
    assert len((tmp_path / "out" / "prompts.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("number", CODES)
def test_encode_goes_on_with_the_finished_prompts(number, model, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(tiny.PROMPTS))
    config = tiny.config(tmp_path, model=str(model), prompts=str(tmp_path / "p.txt"), cache=str(tmp_path / "cache"))
    (tmp_path / "r.yaml").write_text(config.yaml())
    command = ["prompts", "encode", "--trust", str(tmp_path / "r.yaml")]
    stopped(command, "replace", ".safetensors", number)
    kept = content(tmp_path / "cache", "[!.]*.safetensors")
    assert len(kept) == 2
    assert main(command) == 0
    done = content(tmp_path / "cache", "[!.]*.safetensors")
    assert len(done) > 2 and kept.items() <= done.items()


@pytest.mark.parametrize("number", CODES)
def test_grid_leaves_the_page_before(number, tmp_path):
    run = make_run(tmp_path / "run", tiny.sd3(), tiny.CALL)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(settings | {"reward": f"{run}/absent.py:red"}))  # left out
    (tmp_path / "p.txt").write_text("a red star")
    command = ["compare", "grid", str(run), f"--output={tmp_path}/grid.png", f"--prompts={tmp_path}/p.txt", "--count=1"]
    (tmp_path / "grid.png").write_bytes(b"earlier")
    stopped(command, "fsync", "grid.png.tmp", number)
    assert (tmp_path / "grid.png").read_bytes() == b"earlier"
    assert main(command) == 0 and (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
