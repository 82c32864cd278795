"""Files that a run writes before its first epoch, in its folder, which is then its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flowgrpo.config.schema import Config
from flowgrpo.data import provenance
from flowgrpo.evaluation.report import snapshots
from flowgrpo.methods.setup import Setup
from flowgrpo.nouns import SAMPLE
from flowgrpo.policies.policy import Policy
from flowgrpo.storage import atomic, lock
from flowgrpo.storage.places import CRASH
from flowgrpo.training import inputs, run_folder


@contextlib.contextmanager
def held(config: Config, epoch: int, resumed: bool, changes: list[str]) -> Iterator[None]:
    """Context manager: archive an earlier run of the folder, or resume this one after `epoch`, and keep it locked
    against other runs."""
    folder = config.folder
    run_folder.require_free(folder)
    if not resumed and (moved := run_folder.set_aside(folder)):
        print(f"{folder} held an earlier run, which is now {moved}")
    for change in changes:
        print(f"resumed with {change}")
    with lock.held(folder):
        (folder / CRASH).unlink(missing_ok=True)
        with run_folder.crash_kept(folder):
            atomic.write_text(folder / "config.yaml", config.yaml())
            run_folder.keep_lines(folder / "metrics.jsonl", epoch)
            yield


def write(setup: Setup, epoch: int, policy: Policy, precision: str, listed: str | None) -> None:
    """Write the prompts, the hashes of all inputs, and the machine of a run.

    epoch: the epochs that are done. precision: in words. listed: content of the run's own prompt file; None: it has
    none.
    """
    config, folder = setup.config, setup.config.folder
    if listed is not None:
        atomic.write_text(folder / provenance.PROMPTS, listed)
    inputs.write(folder, inputs.of_run(config, setup.split))
    snapshots.begin(folder, epoch, setup.device, setup.processes, precision, SAMPLE[policy.modality], policy.unit)
