"""A thousand names of files whose code no recipe from elsewhere gets executed, by the product's own way."""

import base64
import builtins
import random
import string
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import yaml

from flowgrpo import rewards, trust
from flowgrpo.config import parse
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.user_code import from_file

COUNT, SEED = 1000, 20240607
CODE = """import builtins
builtins.flowgrpo_ran.append(__file__)
def f(*given, **named):
    return given[0]
class P:
    pass
"""
# Letters that end a line, are left out, or are read in two ways somewhere.
SIGNS = [*"\n\r\t\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029\xa0\u3000\u200b\u202e\ufeff\0\x7f\udcff\ud800\uff1a\uff0e\u2024",
         *" :+,~'\"#?*\\\xe9\u212b\u4e2d\U0001f600\u0130\xdf", "e\u0301", "\r\n", "\x1b[2K", "%3A", "%2e%70%79", "%0a",
         "C:\\", "..", ".py", ".py:", ".PY:", "$HOME", "{}", "mix_grpo+", "http:", "file://", "hub:", "a/"]
ATTRIBUTES = ["f"] * 8 + ["P", "f ", " f", "f\n", "\nf", "", "f:f", "f.py", "\uff46", "f+grpo_guard"]
TAGS = {"!!binary": lambda text: base64.b64encode(text.encode()).decode(), "!!str": lambda text: f'"{text}"'}


def name_of_file(chance: random.Random) -> str:
    letters = [chance.choice(string.ascii_letters) for _ in range(chance.randint(1, 5))]
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        letters.insert(chance.randint(0, len(letters)), chance.choice(SIGNS) if chance.random() < .8 else
                       chr(chance.choice([chance.randint(1, 0x2fff), chance.randint(0x1f300, 0x1faff)])))
    text = "".join(letters)
    form = chance.choice(["NFC", "NFD", None, None])
    return (unicodedata.normalize(form, text) if form else text) + chance.choice([".py"] * 9 + [".PY", ".py ", ".pyc"])


def spelled(chance: random.Random, there: Path, file: str) -> str:
    """The path of a file below `there`, which lies beside the working folder."""
    return chance.choice([f"{there}/{file}", f"../there/{file}", f"./..//there/./{file}", f"link/{file}",
                          f"link/../there/{file}", f"~/there/{file}", f"{there}//../there/{file}", f" ../there/{file}",
                          f"../there/{file}"])


def placed(chance: random.Random, name: str) -> dict[str, object]:
    """A recipe that has a name where a reward, a method or a part is named."""
    nested = {"use": "gated", "args": {"rewards": [name, {"use": name}], "thresholds": [0]}}
    return chance.choice([
        {"reward": name}, {"reward": {name: 1.0}}, {"reward": {"e": {"use": name}}}, {"eval": {"rewards": [name]}},
        {"eval": {"rewards": {name: {}}}}, {"eval": {"rewards": {"e": {"use": name}}}}, {"reward": {"e": nested}},
        {"reward": {"d": {"use": "diversity", "args": {"features": name}}}}, {"method": name},
        {"method": f"mix_grpo+{name}"}, {"method": f"{name}+grpo_guard"}, {"parts": {"kernel": {"type": name}}},
        {"reward": {"t": {"use": "tiered", "args": {"tiers": [{"rewards": {name: 1.0}}]}}}},
        {"reward": {"v": {"use": "vbench", "args": {"python": name.rpartition(":")[0]}}}}])


def write(place: Path, content: str) -> bool:
    """True if the system takes a file of that name."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    except (OSError, ValueError):
        return False
    return True


def attempt(recipe: Path, trusted: bool) -> str:
    """Load a recipe and make what it names, as a run does; what came of it."""
    with trust.command():
        try:
            config = parse.load(recipe, trusted=trusted)
        except UserError as error:
            return "asked" if "so it may not" in str(error) else "no recipe"
        for make in (lambda: overlay.with_parts(overlay.preset(config.method), config.parts),
                     lambda: rewards.compose(config.trained | config.extra_rewards)):
            try:
                make()
            except UserError as error:
                if "is not yours" in str(error):
                    return "stopped"
    return "loaded"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A working folder beside the folder of the recipes, which it has a link to."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(builtins, "flowgrpo_ran", [], raising=False)
    return tmp_path / "there"


def test_a_thousand_names_get_past_no_question(world):
    chance, came, ran = random.Random(SEED), Counter[str](), builtins.flowgrpo_ran
    for number in range(COUNT):
        file = f"{number}{name_of_file(chance)}"
        for path in dict.fromkeys([file, file.strip(), unicodedata.normalize("NFC", file)]):
            write(world / path, CODE)
        name = f"{spelled(chance, world, file)}:{chance.choice(ATTRIBUTES)}"
        text = yaml.safe_dump({"model": "starter"} | placed(chance, name), allow_unicode=chance.random() < .5)
        if chance.random() < .05 and name.isprintable():
            tag = chance.choice([*TAGS])
            text = f"model: starter\nreward: {tag} {TAGS[tag](name)}\n"
        recipe = world / chance.choice([f"{number}.yaml", f"{name_of_file(chance)}{number}.yaml"])
        if not write(recipe, text):
            write(recipe := world / f"{number}.yaml", text)
        own = world.parent / "here" / f"{number}.yaml"
        given = own if chance.random() < .1 and write(own, yaml.safe_dump({"extends": str(recipe)})) else recipe
        came[attempt(given, trusted=False)] += 1
        assert ran == [], (name, text)
        attempt(given, trusted=True)
        came["ran"] += len(ran) > 0
        ran.clear()
    assert came.total() - came["ran"] == COUNT
    assert came["ran"] > 250 and came["asked"] > 500, came  # the names are those of files that are executed


def test_the_loader_and_the_question_read_a_name_alike_and_know_the_files_of_joined_methods(world):
    chance = random.Random(SEED)
    for number in range(COUNT):
        name = f"{spelled(chance, world, f'{number}{name_of_file(chance)}')}:{chance.choice(ATTRIBUTES)}"
        file = trust.code_file(name)
        with pytest.raises(UserError) as caught:  # no file is there
            from_file(name, "reward")
        assert ("expected path/to/file.py:name" in str(caught.value)) == (file is None), name
        assert file is None or file in trust.code_files(name)
    known = trust.code_files("mix_grpo+link/a.py:f+b+c.py:g")
    assert {world / "a.py", Path("c.py").resolve()} <= {*known}
