"""The command line: its first screen, what answers at once, and mistakes in one line with exit code 2."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer import rich_utils

from flowgrpo.cli import about, app, main, root
from flowgrpo.cli.options import recipe_and_options
from flowgrpo.cli.root import RENAMED, TRAIN
from flowgrpo.cli.train import ALLOCATOR
from flowgrpo.config import Config, recipes
from flowgrpo.data.sets import SETS
from flowgrpo.log import NOISY
from flowgrpo.nouns import quantity
from flowgrpo.training import announcement
from tests.helpers.commands import commands
from tests.helpers.refusals import error_line, only_line, printed


@pytest.mark.parametrize("arguments", [
    ["--help"], ["--version"], ["train", "--help"], ["sample", "--help"], ["compare", "grid", "--help"],
    ["check", "--help"], ["list", "methods", "--help"], ["eval", "--help"], ["list", "rewards", "--help"],
    ["reward", "score", "--help"], ["new", "--help"], ["list", "runs", "--help"], ["reward", "--help"]])
def test_help_answers_without_torch(arguments):
    code = f"import sys, flowgrpo.cli as c; r = c.main({arguments!r}); sys.exit(r or ('torch' in sys.modules) * 7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flowgrpo" in done.stdout


@pytest.mark.parametrize("arguments, told", [
    (["train", "--reward=mine.py:none", "--model=no/where"], "reward 'mine.py:none' takes (): expected (images, "),
    (["check", "starter", "--gpu=H10"], "--gpu is 'H10', whose numbers are not known: ")])
def test_these_mistakes_are_told_without_torch(arguments, told, tmp_path):
    (tmp_path / "mine.py").write_text("def none():\n    return []\n")
    code = f"import sys, flowgrpo.cli as c; r = c.main({arguments!r}); sys.exit(r + ('torch' in sys.modules) * 7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 2 and done.stderr.startswith(f"flowgrpo: error: {told}"), done.stderr


def test_the_command_ends_its_process_group(tmp_path):
    """A process that exits while the group's threads run may abort."""
    code = ("import sys; from torch import distributed as d; from flowgrpo.cli import main; "
            f"d.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1); "
            "main(['--version']); sys.exit(d.is_initialized())")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_imports_without_torch():
    code = ("import sys, flowgrpo; assert flowgrpo.__version__ and flowgrpo.UserError and flowgrpo.reward; "
            "assert set(flowgrpo.__all__) == set(dir(flowgrpo)); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_mistakes_are_told_without_torch_by_the_module(tmp_path):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "flowgrpo", "train", "--train.lrr=1"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and " torch" not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("unknown option --train.lrr: did you mean '--train.lr'?")


@pytest.mark.parametrize("arguments, expected", [
    ([], (None, {})),
    (["r.yaml"], ("r.yaml", {})),
    (["--train.lr=1e-4", "r.yaml", "--parts.plan.size", "2"], ("r.yaml", {"train.lr": "1e-4", "parts.plan.size": "2"})),
    (["--negative_prompt", "", "--name=a=b"], (None, {"negative_prompt": "", "name": "a=b"})),
    (["--train.lr", "-1"], (None, {"train.lr": "-1"}))])
def test_options_are_parted_from_the_recipe(arguments, expected):
    assert recipe_and_options(arguments) == expected


@pytest.mark.parametrize("arguments, line", [
    (["--lr=1"], "unknown option --lr: did you mean '--train.lr'?"),
    (["--lr", "1"], "unknown option --lr: did you mean '--train.lr'?"),
    (["--trian.lr=1"], "unknown option --trian.lr: did you mean '--train.lr'?"),
    (["--resum"], "unknown option --resum: did you mean '--resume'?"),
    (["--selct-best=scene"], "unknown option --selct-best: did you mean '--select-best'?"),
    (["--promts=a.txt"], "unknown option --promts: did you mean '--prompts'?"),
    (["--train=1"], "unknown option --train; there are: train.lr"),
    (["-q"], "unknown option -q; there are: name, model"),
    (["--train.lr"], "option --train.lr needs a value: --train.lr=VALUE"),
    (["--train.lr", "--resume"], "option --train.lr needs a value: --train.lr=VALUE"),
    (["--model"], "--model"),
    (["--train.lr=-1"], "train.lr: got -1, expected a number greater than 0"),
    (["--seed", "many"], "seed: got 'many', expected a valid integer"),
    (["--train.group", "0"], "train.group: got 0, expected a number greater than or equal to 1"),
    (["a.yaml", "b.yaml"], "expected one recipe, got a.yaml and b.yaml"),
    (["no.yaml"], "no recipe at no.yaml"),
    (["--prompts", "no.txt"], "prompts no.txt: no such file"),
    (["--held_out", "no.txt"], "prompts no.txt: no such file"),
    (["--held-out", "no.txt"], "prompts no.txt: no such file"),
    (["--train.learning_rate=1"], "unknown option --train.learning_rate: did you mean '--train.lr'?"),
    (["--reward", "nope"], "unknown reward 'nope' (`flowgrpo list rewards` lists all; or path/to/file.py:function;"),
    (["--reward", "hps"], "unknown reward 'hps': did you mean 'hpsv3' or 'hpsv2.1' or 'hpsv2.0'?"),
    (["--prompts=starter_text", "--held_out=0.3"], "held_out: got 0.3, but prompts: starter_text brings held-out"),
    (["--reward", "scene_grade"], "unknown reward 'scene_grade': did you mean 'scene_graded'?"),
    (["--reward", "no.py:f"], "reward 'no.py:f': no file at no.py"),
    (["--eval.rewards", "[scenne]"], "unknown reward 'scenne': did you mean 'scene'?")])
def test_mistakes_in_training_are_told(arguments, line, capsys):
    assert line in only_line(capsys, "train", *arguments)


# Commands that take keys of the configuration, with what they need besides.
TAKING_KEYS = {"train": [], "prompts encode": [], "check": [], "contrib evolve": ["--output=out"],
               "contrib lessons": ["--output=out"]}


@pytest.mark.parametrize("command", TAKING_KEYS)
def test_a_command_suggests_its_options_and_none_of_another_command(command, capsys):
    """Leave out one letter of every option of the command; `--resume` is an option of `train` alone."""
    declared = commands()[command].params
    options = [name for parameter in declared if parameter.param_type_name == "option" and not parameter.hidden
               for name in parameter.opts]
    for option in options:
        typo = option[:3] + option[4:] if len(option) > 5 else option + "s"
        assert f"did you mean '{option}'?" in only_line(capsys, *command.split(), *TAKING_KEYS[command], f"{typo}=1")
    suggested = "did you mean '--resume'?" in only_line(capsys, *command.split(), *TAKING_KEYS[command], "--resum")
    assert suggested == ("--resume" in options)


def test_recipes_prompts_and_reward_files_that_are_wrong(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train: {lrr: 1e-4}\n")
    assert f"{recipe}: unknown key 'train.lrr': did you mean 'train.lr'?" in only_line(capsys, "train", recipe)
    recipe.write_text("train: [\n")
    assert f"{recipe} is not valid YAML" in only_line(capsys, "train", recipe)
    (tmp_path / "p.txt").write_text("\n\n")
    assert f"prompts {tmp_path}/p.txt: the file holds no prompt" in only_line(
        capsys, "train", "--prompts", tmp_path / "p.txt")
    file = tmp_path / "mine_for_cli.py"
    file.write_text("import nothing_of_that_name\n")
    line = only_line(capsys, "train", "--reward", f"{file}:f")
    assert f"reward file {file} does not import: ModuleNotFoundError" in line and "(mine_for_cli.py, line 1)" in line


TEXT = "--model=starter_text", "--method=grpo", "--prompts=starter_text", "--reward=numeric_match"


@pytest.mark.parametrize("arguments, given, expected", [
    ([], {}, {ALLOCATOR[0]: "expandable_segments:True"}),
    ([], {ALLOCATOR[0]: "max_split_size_mb:64"}, {ALLOCATOR[0]: "max_split_size_mb:64"}),
    ([], {ALLOCATOR[1]: ""}, {ALLOCATOR[1]: ""}),
    ([*TEXT, "--text.engine=vllm"], {}, {})])
def test_training_lets_segments_grow_unless_you_set_the_allocator(arguments, given, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "to restore")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert "device" in error_line(capsys, "train", *arguments, "--train.group=2", "--device=mps")
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected


def test_an_interruption_exits_with_130_and_no_command_shows_the_help(tmp_path, capsys):
    file = tmp_path / "interrupting.py"
    file.write_text("raise KeyboardInterrupt\n")
    assert main(["train", "--reward", f"{file}:f"]) == 130
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "train" in captured.out + captured.err and "error" not in captured.err


@pytest.mark.parametrize("arguments, line", [
    (["trian"], "'trian'"),
    (["sample"], "MODEL"),
    (["sample", "starter"], "--prompt"),
    (["sample", "starter", "--promt", "x"], "--prompt"),
    (["sample", "starter", "--prompt", " "], "--prompt: expected a text, got an empty one"),
    (["sample", "starter", "--prompt", "x", "--count", "0"], "--count"),
    (["sample", "starter", "--prompt", "x", "--steps", "few"], "--steps"),
    (["sample", "starter", "--prompt", "x", "--rlg", "1.5"], "--rlg: weights the change that a LoRA makes: give"),
    (["sample", "starter", "--prompt", "x", "--lora", "y", "--rlg", "1,2"], "--rlg: got '1,2', expected one number"),
    (["eval", "x", "--suite", "starter", "--output", "y", "--rlg", "-1"], "--rlg: got '-1', expected numbers from 0"),
    (["eval", "x", "--suite", "starter", "--output", "y", "--rlg", "1,nan"], "--rlg: got '1,nan', expected numbers"),
    (["eval", "x", "--suite", "starter", "--output", "y", "--base", "--rlg", "0,1"], "--base: several weights"),
    (["reward", "train", "no.jsonl", "--output", "y", "--held_out", "0.2"], "no.jsonl"),
    (["reward", "train", "no.jsonl", "--output", "y", "--held-out", "0.2"], "no.jsonl"),
    (["eval", "starter", "--suite", "starter", "--output", "y", "--rlg", "2"], "--rlg guides a result away from its"),
    (["compare", "grid"], "RUN"),
    (["compare", "grid", "no/run"], "no run at no/run"),
    (["check"], "MODEL"),
    (["sample", "startr", "--prompt", "x"], "no model 'startr', and no folder of that name: did you mean 'starter'?"),
    (["train", "--model=starter_vidoe"], "did you mean 'starter_video'?"),
    (["train", "--model=startr_text", "--method=grpo", "--prompts=starter_text", "--reward=numeric_match"],
     "did you mean 'starter_text'?")])
def test_mistakes_in_other_commands_are_told(arguments, line, capsys):
    assert line in only_line(capsys, *arguments)


def test_methods_are_listed_with_their_pages_found_by_a_word_and_stand_in_one_group_each(capsys):
    from flowgrpo.methods.presets import PRESETS
    out = printed(capsys, "list", "methods")
    assert [name for name in PRESETS if f"{name} " not in out] == []
    assert "2508.04324" in out and "docs/methods/index.md" in out
    assert [title for title in about.GROUPS if title.split(":")[0] not in out] == []
    listed = [row[0] for modules in about.GROUPS.values() for module in modules for row in about._presets(module)]
    assert sorted(listed) == sorted(PRESETS)
    out = printed(capsys, "list", "methods", "Dapo")
    assert "dynamic_sampling " in out and "high_entropy " in out and "mix_grpo " not in out
    assert main(["list", "methods", "nothing_like_it"]) == 2
    assert "no method has 'nothing_like_it': `flowgrpo list methods` lists all" in capsys.readouterr().err


def test_parts_are_listed_with_what_their_fields_take(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = printed(capsys, "list", "parts", "conditional")
    assert "parts.advantage" in shown and "mu=0.5 (0 to 1), metric=\"logp\" (logp|length|entropy)" in shown
    assert main(["list", "parts", "nothing_like_it"]) == 2
    assert "no part has 'nothing_like_it': `flowgrpo list parts` lists all" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["methods", "rewards", "recipes"])
def test_lists_load_nothing_heavy(command):
    heavy = {"torch", "transformers", "diffusers", "torchvision", "open_clip", "onnxruntime", "cv2"}
    code = (f"import sys; from flowgrpo.cli import main; main(['list', {command!r}]); "
            f"sys.exit(bool({heavy} & {{*sys.modules}}))")
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_rewards_are_found_by_a_word_and_stand_in_groups(capsys):
    out = printed(capsys, "list", "rewards")
    places = [out.index(text) for text in ("rewards of images and videos", "\n scene ", "rewards of texts",
                                           "\n math_answer ", "rewards of both", "\n checklist ")]
    assert places == sorted(places) and "scene_graded" in out and "what it does" in out
    out = printed(capsys, "list", "rewards", "warped BACK")
    assert " temporal_consistency " in out and " scene " not in out and "rewards of texts" not in out
    assert main(["list", "rewards", "nothing_like_it"]) == 2
    assert "no reward has 'nothing_like_it': `flowgrpo list rewards` lists all" in capsys.readouterr().err


def test_a_run_speaks_before_torch_is_loaded():
    code = """import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            print("torch is loaded", flush=True)
sys.meta_path.insert(0, Watch())
from flowgrpo.config import Config
from flowgrpo.training.announcement import announce
announce(Config(reward={"scene": 2.0}, eval={"rewards": ["sharpness"]}, parts={"plan": {"size": 2}}))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("flowgrpo ") and "--live" in first
    assert rest == [
        "torch is loaded", "model: starter (packaged)", "method: mix_grpo, parts: {'plan': {'size': 2}}",
        "rewards: scene (weight 2); eval-only: sharpness",
        "prompts: starter; 100 epochs of 8 prompts with 12 samples each"]


def test_one_of_a_thing_is_told_in_the_singular(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    [*_, said] = announcement.lines(Config(train={"prompts": 1, "group": 12, "epochs": 1}))
    assert said == "prompts: starter; 1 epoch of 1 prompt with 12 samples"
    assert [quantity(count, "picture") for count in (0, 1, 2)] == ["0 pictures", "1 picture", "2 pictures"]


def test_the_command_line_silences_what_libraries_say_in_every_run(caplog):
    from transformers import AutoTokenizer

    from flowgrpo.starter import FOLDERS
    assert main(["--version"]) == 0
    text = AutoTokenizer.from_pretrained(FOLDERS["starter"] / "tokenizer")
    assert len(text("a red star " * 40).input_ids) > text.model_max_length
    for name in NOISY:
        logging.getLogger(name).warning("a note")
    assert caplog.records == []


def test_a_home_folder_behind_an_equals_sign_is_the_users(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/of/me")
    assert [root._at_home(word) for word in ("--output=~/x", "--output=~", "~/x.yaml", "--prompt=~/x", "a~/b", "~ a")] \
        == ["--output=/of/me/x", "--output=/of/me/", "/of/me/x.yaml", "--prompt=~/x", "a~/b", "~ a"]
    assert main(["sample", "starter", "--prompt", "a", "--output=~nobody-of-this-name/x"]) == 2
    assert "there is no user 'nobody-of-this-name'" in capsys.readouterr().err


@pytest.mark.parametrize("options, end", [(["--seed", "1.5"], "got '1.5'"), (["--guidance=x"], "got 'x'")])
def test_a_wrong_value_is_in_the_line(options, end, capsys):
    assert error_line(capsys, "sample", "starter", "--prompt", "a", *options).endswith(end)


@pytest.mark.parametrize("name", ["star.jpg", "x.EXE", "x.webm"])
def test_a_folder_with_the_name_of_a_file_is_refused(name, tmp_path, capsys):
    assert main(["sample", "starter", "--prompt", "a", "--output", str(tmp_path / name)]) == 2
    assert "expected that of a folder or of one sample's .png, .webp, .mp4 file" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


NARROW = 80  # characters of a terminal
PANELS = ["Train", "Look", "Share", "Extend"]


def shown(monkeypatch, capsys, *arguments: str) -> list[str]:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", NARROW)
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", False)
    return printed(capsys, *arguments, "--help").splitlines()


def test_the_first_screen_has_four_panels_of_commands_in_a_line_each(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys)
    panels: dict[str, list[str]] = {}
    for line in lines:
        if found := re.match(r"╭─ (\w+) ─", line):
            panels[found[1]] = []
        elif line.startswith("│ "):
            panels[list(panels)[-1]].append(line)
    panels.pop("Options")
    assert list(panels) == PANELS and max(map(len, lines)) <= NARROW
    named = [re.match(r"│ ([a-z]+) +\w.*\. +│$", line)[1] for panel in panels.values() for line in panel]
    assert named == ["demo", "train", "taste", "check", "prepare", "list", "sample", "eval", "report", "export", "push",
                     "new", "reward", "prompts"]
    [last] = [line for line in lines if line.startswith(" Also:")]
    assert "flowgrpo compare" in last and "verify" in last and last.rstrip().endswith("docs and constraints.")


@pytest.mark.parametrize("group", ["list", "reward", "prompts", "compare", "contrib"])
def test_a_group_has_a_line_for_each_command(group, monkeypatch, capsys):
    lines = [line for line in shown(monkeypatch, capsys, group) if line.startswith("│ ") and "--help" not in line]
    inner = [name.partition(" ")[2] for name in commands() if name.startswith(f"{group} ")]
    assert [line.split()[1] for line in lines] == inner and all(line.rstrip("│ ").endswith(".") for line in lines)


def test_every_command_is_on_the_first_screen_or_in_a_group():
    top = typer.main.get_command(app).commands
    assert {name for name, command in top.items() if command.hidden} == {
        "compare", "constraints", "contrib", "docs", "reproduce", "verify"}
    assert {new for new in RENAMED.values()} <= set(commands()) and not set(RENAMED) & set(top)
    assert TRAIN == top["train"].rich_help_panel


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_name_works_and_prints_a_line_with_the_new_one(old, capsys):
    assert main([old, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (f"flowgrpo: `flowgrpo {old}` is now `flowgrpo {RENAMED[old]}`; the earlier name ends with "
                            "0.3\n")
    assert main([*RENAMED[old].split(), "--help"]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out and f"flowgrpo {RENAMED[old]}" in again.out and again.err == ""


@pytest.mark.parametrize("arguments", [["prompts", "--json"], ["prompts", "geneval", "--count", "1", "--json"]])
def test_the_earlier_list_of_prompts_is_another_command_than_their_group(arguments, capsys):
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) and captured.err.startswith("flowgrpo: `flowgrpo prompts` is now `flowgrpo list "
                                                                "prompts`")
    assert main(["list", *arguments]) == 0
    assert capsys.readouterr() == (captured.out, "")


def test_mistakes_in_a_group_are_one_line(capsys):
    for arguments, told in ((["reward", "trian"], "No such command 'trian'"), (["lsit"], "No such command 'lsit'"),
                            (["reward", "train", "no.jsonl"], "Missing option '--output'"),
                            (["train-reward", "no.jsonl", "--output", "y"], "no.jsonl")):
        assert main(arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert told in said[-1] and said[-1].startswith("flowgrpo: error: ")
        assert len(said) == 1 + (arguments[0] in RENAMED)


def test_recipes_are_listed_with_what_they_take(capsys):
    rows = {row["recipe"]: row for row in json.loads(printed(capsys, "list", "recipes", "--json"))}
    assert list(rows) == recipes.names()
    assert rows["sdxl_24gb"] == {"recipe": "sdxl_24gb", "model": "stable-diffusion-xl-base-1.0", "method": "mix_grpo",
                                 "reward": "hpsv2.1", "GPUs": "One 4090 (24 GB)", "hours": "42", "peak GiB": "16.8"}
    assert rows["starter"]["GPUs"] == "any, or a CPU"
    assert main(["list", "recipes", "SDXL", "mix", "4090", "hps"]) == 0
    assert [word for word in capsys.readouterr().out.split() if word in rows] == ["sdxl_24gb"]
    assert main(["list", "recipes", "2_klein_24"]) == 0
    assert [word for word in capsys.readouterr().out.split() if word in rows] == ["flux2_klein_24gb"]
    rows = {row["recipe"]: row for row in json.loads(printed(capsys, "list", "recipes", "papers", "--json"))}
    assert list(rows) == recipes.papers() and [
        rows["papers/mix_grpo_flux"][key] for key in ("GPUs", "hours", "peak GiB")] == ["8 A100 (80 GB)", "39", "43.0"]
    told = "no recipe has 'sdxl' and 'wan': `flowgrpo list recipes` lists all"
    assert told in error_line(capsys, "list", "recipes", "sdxl", "wan")


def test_sets_are_listed_with_their_role(capsys):
    roles = {row["name"]: row["role"] for row in json.loads(printed(capsys, "list", "prompts", "--json"))}
    assert [*roles.items()] == [(name, one.role) for name, one in SETS.items()]
    assert {name for name, role in roles.items() if role == "test"} == {
        "geneval_coco", "partiprompts", "dpg", "unigenbench", "vbench", "drawbench"}
