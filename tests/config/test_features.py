"""Features: their seam. The core names none, one file is enough for a new one, and a record says all of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.config import Config, features, keys
from flowgrpo.config.base import FeatureKeys, key
from flowgrpo.config.schema import fields
from flowgrpo.contrib import features as ours
from flowgrpo.training import extensions

ROOT = Path(__file__).parents[2]
RECORDS = [each for each in vars(ours).values() if isinstance(each, features.Feature)]
KEYS = {f"{cls.section}.{name}".lstrip(".") for each in RECORDS for cls in each.keys for name in cls.model_fields}
# Features that a part of the method switches on: the table of parts has their modules, and `Method` their names.
BY_PARTS = {"variants", "rehearsal", "distillation", "consistency", "group_replay", "held_out_answers"}
TABLE = "flowgrpo/training/extensions/__init__.py"  # the one table of their names
ABOVE = ("contrib/", "serving/", "tools/bench/", "tools/vote/")  # rooms above the core


def found(pattern: str) -> list[str]:
    """Lines of the core that match, as file:line."""
    return [f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
            for file in sorted((ROOT / "flowgrpo").rglob("*.py"))
            if not str(file.relative_to(ROOT / "flowgrpo")).startswith((*ABOVE, "config/options.py"))
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if re.search(pattern, line)]


# --- the core --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_core_names_no_key_module_or_class_of_a_feature():
    assert len(KEYS) == 28
    dotted = [re.escape(each) for each in KEYS if "." in each] + [r"config\.phases"]
    assert found(rf"\b({'|'.join(dotted)})\b") == []
    modules = {each.extension.removeprefix("flowgrpo.").split(":")[0] for each in RECORDS if each.name not in BY_PARTS}
    classes = {each.extension.split(":")[1] for each in RECORDS} - {"Guard", "Phases", "EngineRollouts"}  # other things
    assert len(RECORDS) == 16 and len(modules) == 10
    assert found(rf"\b({'|'.join([*map(re.escape, modules), *classes])})\b") == []
    words = {"phases", "engine", "frontier", "guard", "sibling"}  # of everyday: those of a GPU, a rate, an answer
    names = {each.name for each in RECORDS} - BY_PARTS - words
    assert names == {"feature_cache", "staleness", "one_pass", "step_size", "extrapolation"}
    assert {line.split(":")[0] for line in found(rf"\b({'|'.join(names)})\b")} == {TABLE}
    assert {each.name for each in RECORDS} < {*extensions.ORDER} == {each.name for each in features.all()}


def test_records_load_nothing_of_what_they_name():
    code = "import sys, flowgrpo.config\nprint(*(n for n in sys.modules if n.startswith(('torch', 'flowgrpo.con'))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [each for each in done.stdout.split() if not each.startswith("flowgrpo.config")] == [
        "flowgrpo.contrib", "flowgrpo.contrib.features"]


# --- records ---------------------------------------------------------------------------------------------------------
def test_keys_of_features_are_keys_of_the_configuration_where_their_fields_say():
    assert KEYS < {*keys()}
    for cls in (cls for each in RECORDS for cls in each.keys):
        for each, field in cls.model_fields.items():
            assert getattr(cls.read(Config()), each) == field.default
            assert fields()[f"{cls.section}.{each}".lstrip(".")].default == field.default
    order = keys()
    for before, after in (("train.inner_epochs", "train.one_pass"), ("train.ema", "train.staleness"),
                          ("train.rollout_ranks", "train.extrapolate"), ("text.penalty", "text.over_provision"),
                          ("guard.window", "guard.false_alarms"), ("guard.unscored", "guard.best"),
                          ("rollout.release", "rollout.cache")):
        assert order.index(after) == order.index(before) + 1
    assert next(each for each in order if each.startswith("guard.")) == "guard.window"


def test_a_feature_reads_its_values_from_their_section():
    config = Config.model_validate({"train": {"lr": 1e-3, "one_pass": "auto"}, "guard": {"window": 3},
                                    "phases": [{"at": 0.5, "set": {"train.group": 4}}]})
    assert ours.OnePassKeys.read(config).one_pass == "auto" and not ours.OnePassKeys.read(Config()).one_pass
    assert ours.GuardKeys.read(config).window == 3 and ours.guard.wanted(config, None)
    assert [phase.set for phase in ours.PhaseKeys.read(config).phases] == [{"train.group": 4}]


@pytest.mark.parametrize("feature", RECORDS, ids=lambda feature: feature.name)
def test_a_features_page_has_its_keys(feature):
    page = (ROOT / feature.page).read_text(encoding="utf-8")
    assert not [name for cls in feature.keys for name in cls.model_fields if name not in page]


def test_a_key_that_there_is_cannot_be_added():
    class Again(FeatureKeys):
        section = "train"
        lr: float = key(1.0)

    before = keys()
    with pytest.raises(ValueError, match="^a feature's key 'train.lr' is there already: use another name"):
        features.add(features.Feature(name="again", wanted=lambda config, method: True, keys=(Again,)))
    assert keys() == before and "again" not in features.KNOWN


# --- a feature of another package, in one file -----------------------------------------------------------------------
ECHO = '''
from flowgrpo.config.base import DENOISERS, FeatureKeys, When, key
from flowgrpo.config.features import DryRun, Feature, add
from flowgrpo.training.extension import Extension


class TrainKeys(FeatureKeys):
    section = "train"
    echo: int = key(0, of=DENOISERS, after="epochs", ge=0, description="times")
    echo_gain: float = key(1.0, When(lambda c, m: c.train.echo > 0, "train.echo is 0", "set train.echo"))


class OwnKeys(FeatureKeys):
    section = "own"
    name: str = key("own")


class Echo(Extension):
    def on_trained(self, epoch):
        return {"echo": TrainKeys.read(self.trainer.config).echo}


def memory(phases, measured):
    phases["update"]["echoes"] = TrainKeys.read(measured.config).echo * 1000


class Dry(DryRun):
    options = (("train.echo", 3, 0),)
    reported = ("train.echo",)

    def count(self, phases, calls, times):
        phases["update"].allocated += 1000


add(Feature(name="echo", wanted=lambda config, method: TrainKeys.read(config).echo, keys=(TrainKeys, OwnKeys),
            extension=Echo, memory=memory, dry_run=Dry, charts={"echo": ("Echo", "heard")}))
'''

RUN = '''
import json, sys
from flowgrpo.config import Config, keys, load
from flowgrpo.cli.dry_run import _feature_keys
from flowgrpo.training import memory
from flowgrpo.tools.dry_run.estimate import dry_run
from flowgrpo.tools.dry_run.fit import _options
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report.report import ALONE
from flowgrpo.methods import keys_read
from tests.helpers import loop, tiny, tiny_text


def refusal(call):
    try:
        call()
    except UserError as error:
        return str(error)


config, policy = tiny.config(train__echo=3), tiny.policy()
trainer, pipe = tiny.trainer(train__echo=3), tiny.sd3()
plain, more = (dry_run(tiny.config(train__echo=count), pipe=pipe).phases["update"].allocated
               for count in (0, 3))
print(json.dumps({
    "keys": [key for key in keys() if "echo" in key or key.startswith("own.")], "default": Config().train.echo,
    "own": load(None, {"own.name": "x"}).own.name, "extensions": loop.names(trainer),
    "metric": trainer.run_epoch()["echo"], "off": loop.names(tiny.trainer()),
    "memory": memory.memory(policy, config, policy.encode(["red"]))["update"]["echoes"],
    "dry run": more - plain, "option": next(_options(config, ["update"])), "reported": _feature_keys(),
    "chart": ALONE["echo"],
    "range": refusal(lambda: load(None, {"train.echo": -1})), "typo": refusal(lambda: load(None, {"train.ecko": 1})),
    "kind": refusal(lambda: keys_read.check(loop.setup(tiny_text.config(train__echo=1), "causal_lm"))),
    "idle": refusal(lambda: keys_read.check(loop.setup(tiny.config(train__echo_gain=2.0))))}))
'''


def package(folder: Path, source: str) -> dict[str, str]:
    """The environment of a process in which a package of one file has declared a feature."""
    (folder / "echoes.py").write_text(source)
    info = folder / "echoes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowgrpo.features]\necho = echoes\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


@pytest.mark.parametrize("first", ["", "import echoes\n"])
def test_a_new_feature_is_one_file(first, tmp_path):
    done = subprocess.run([sys.executable, "-c", first + RUN], cwd=ROOT, env=package(tmp_path, ECHO),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["keys"] == ["train.echo", "train.echo_gain", "own.name"]
    assert (seen["default"], seen["own"]) == (0, "x")
    assert seen["extensions"] == ["RewardHints", "Echo"] and seen["metric"] == 3 and seen["off"] == ["RewardHints"]
    assert seen["memory"] == 3000 and seen["dry run"] == 1000
    assert seen["option"] == ["train.echo", 0] and seen["reported"] == ["train.one_pass", "train.echo"]
    assert seen["chart"] == ["Echo", "heard"]
    assert seen["range"] == "the options: train.echo: got -1, expected a number greater than or equal to 0"
    assert seen["typo"] == "the options: unknown key 'train.ecko': did you mean 'train.echo'?"
    assert seen["kind"].startswith("train.echo is set, which is about denoisers: leave it out for a language model")
    assert seen["idle"].startswith("train.echo_gain is 2.0, but train.echo is 0, so that the run does not read it: set")


def test_a_feature_that_does_not_import_is_told_in_a_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "flowgrpo", "train", "starter"], cwd=ROOT, capture_output=True,
                          text=True, env=package(tmp_path, "import no_such_module\n"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["flowgrpo: error: feature 'echo' of another package does not import: "
                                        "ModuleNotFoundError: No module named 'no_such_module' (echoes.py, line 1)"]
