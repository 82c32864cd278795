"""Stored counts of dry runs: those of packaged recipes, and of a user's own in the cache."""

import json
import re
from datetime import date

import dry_run_profiles
import pytest
import recipe_table

from flowgrpo.config import load
from flowgrpo.gpus import GPUS
from flowgrpo.tools.dry_run import fit, profiles
from flowgrpo.tools.dry_run.estimate import dry_run

RENEW = "python scripts/docs/dry_run_profiles.py"
STORED = profiles.packaged()


def test_stored_counts_are_of_recipes_as_they_stand():
    wanted = {digest: name for name in recipe_table.names() for digest in dry_run_profiles.runs(name)}
    changed = {wanted.get(digest) or STORED[digest]["recipe"] for digest in wanted.keys() ^ STORED.keys()}
    assert not changed, f"these recipes, models or GPUs changed: {RENEW} {' '.join(sorted(changed))}"


@pytest.mark.parametrize("turn", [0, 1])
def test_stored_counts_are_those_of_a_dry_run(turn):
    """Two a day, in turn. Lines of sources may move, and versions of diffusers."""
    digest, stored = list(STORED.items())[(2 * date.today().toordinal() + turn) % len(STORED)]
    run = dry_run_profiles.runs(stored["recipe"])[digest]
    found = json.loads(json.dumps(dry_run_profiles.profile(stored["recipe"], *run)))
    stored = dict(stored)
    for profile in (found, stored):
        profile.pop("commit")
    told = [re.sub(r"\.py:\d+", ".py", json.dumps(profile, sort_keys=True)) for profile in (found, stored)]
    assert told[0] == told[1], f"counts of {stored['recipe']} changed: {RENEW} {stored['recipe']}"


def test_one_dry_run_serves_all_gpus(tmp_path, monkeypatch):
    """The counts from the cache are, to the last bit, those of a dry run on each GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load("starter")
    first = fit.epoch(config, GPUS["4090"])
    [file] = (tmp_path / "flowgrpo").iterdir()
    written = file.stat().st_mtime_ns
    for name in ("A10", "4090", "B200"):
        read, alone = fit.epoch(config, GPUS[name]), dry_run(config, GPUS[name])
        assert read.phases == alone.phases and read.first == alone.first and read.seconds == alone.seconds
    assert file.stat().st_mtime_ns == written and first.stored == ""
    fit.epoch(config, GPUS["4090"], processes=2)
    assert len(list((tmp_path / "flowgrpo").iterdir())) == 2


def test_a_stored_profile_is_read_with_its_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    digest, stored = next(iter(STORED.items()))
    config, processes = dry_run_profiles.runs(stored["recipe"])[digest]
    read = fit.epoch(config, GPUS["A100"], processes)
    assert read.stored == stored["commit"] and not (tmp_path / "flowgrpo").exists()
    place = list(GPUS).index("A100")
    assert {name: phase.seconds for name, phase in read.phases.items()} == {
        name: phase["seconds"][place % len(phase["seconds"])] for name, phase in stored["phases"].items()}
