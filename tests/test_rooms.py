"""Rooms that are named in tables and loaded where they are used: `text` and `contrib`."""

import dataclasses
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from flowgrpo import rewards
from flowgrpo.config import features
from flowgrpo.methods import PRESETS, presets, registry

ROOT = Path(__file__).parents[1]
# Records of features, of which the configuration has keys, and of the domain.
LIGHT = ["flowgrpo.contrib", "flowgrpo.contrib.features", "flowgrpo.text"]
LOADED = "print(*(name for name in sys.modules if name.startswith(('flowgrpo.text', 'flowgrpo.contrib'))))"


def loaded(code: str) -> list[str]:
    """Modules of the two rooms that a process has loaded after some code."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\n{LOADED}"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_an_image_run_loads_no_module_of_language_models_and_records_of_contrib_alone(tmp_path):
    options = ["train", "configs/starter.yaml", "--train.epochs=1", "--train.prompts=2", "--train.group=4",
               "--train.updates=1", "--train.steps=4", "--train.lr=1e-3", "--eval.prompts=2", "--eval.steps=2",
               "--eval.every=0", "--device=cpu", f"--output={tmp_path / 'run'}"]
    assert loaded(f"from flowgrpo.cli import main\nassert main({options!r}) == 0") == LIGHT


def test_the_presets_of_images_load_no_more():
    of_images = [name for name in PRESETS if name not in presets.OF_TEXT and not PRESETS[name]().for_tokens]
    assert len(of_images) > 30
    code = f"""from flowgrpo.config import Config
from flowgrpo.methods import overlay, preset, reads
from flowgrpo.training.extensions import wanted
for name in {of_images!r}:
    method = preset(name).on("flow")
    reads.require_types(method)
    list(wanted(Config(method=name, reward="scene"), method))
    overlay.preset_and_parts(method)"""
    assert loaded(code) == LIGHT


def test_the_table_of_text_presets_is_that_of_their_modules():
    for module, names in presets.OF_DOMAINS.items():
        assert [*presets.of_module(import_module(f"flowgrpo.{module}"))] == names, module
    found = {file.stem for file in (ROOT / "flowgrpo" / "text" / "presets").glob("*.py")} - {"__init__"}
    assert {module.rpartition(".")[2] for module in presets.OF_DOMAINS} == found
    texts = {name for name in PRESETS if PRESETS[name]().for_tokens}
    assert texts == {*presets.OF_TEXT} | presets.TEXT_ALONE


def test_the_fields_of_language_models_are_names_of_parts():
    from flowgrpo.text import targets
    classes = [cls for cls in vars(targets).values() if dataclasses.is_dataclass(cls)
               and cls.__module__ == targets.__name__]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert {"decoding", "draws", "relaxation"} <= fields <= registry.NAMES


def test_features_and_the_table_of_rewards_name_what_is_there():
    for feature in features.all():
        for place in filter(None, (feature.extension, feature.memory, feature.dry_run)):
            assert callable(features.at(place)), place
    for place in rewards.BUILT_IN.values():
        module, name = place.split(":")
        assert callable(getattr(import_module(module), name))
