"""What a person can get wrong: exit code 2, one line that says what to do, no traceback, nothing lost."""

import contextlib
import json
import shutil

import pytest
import torch
from PIL import Image

import flowgrpo
from flowgrpo.cli import main
from flowgrpo.errors import UserError
from flowgrpo.storage import checkpoint
from tests.helpers import tiny
from tests.helpers.refusals import error_line

GOOD_REWARD = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"


@pytest.fixture
def recipe(model, tmp_path):
    """A recipe that works, in a folder with its prompts and its reward."""
    (tmp_path / "reward.py").write_text(GOOD_REWARD)
    (tmp_path / "prompts.txt").write_text("\n".join(tiny.PROMPTS))
    settings = tiny.config(tmp_path / "runs", model=str(model), reward=f"{tmp_path}/reward.py:red",
                           prompts=str(tmp_path / "prompts.txt"), train__steps=4, parts__plan__size=2, train__epochs=3)
    path = tmp_path / "recipe.yaml"
    path.write_text(settings.yaml())
    return path


def told(capsys, *arguments: object) -> str:
    return error_line(capsys, "train", "--trust", *arguments)


ABSENT = next(kind for kind, here in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
              if not here)


@pytest.mark.parametrize("options, line", [
    (["--seed=5000000000"], "seed: got 5000000000, expected a number less than 4294967296"),
    (["--method=mixgrpo"], "unknown method 'mixgrpo': did you mean 'mix_grpo'?"),
    (["--parts.plan.sizes=3"], "unknown key parts.plan.sizes: did you mean 'size'?"),
    (["--parts.plan.size=4"], "a window of 4 from step 0 does not fit below step 3 of 4 steps"),
    (["--parts.kernel=0.7"], "parts.kernel: got 0.7, expected keys with values, such as {type: FlowSDE}"),
    (["--parts.selection={type: BestWorst, n: 6}"], "n is 6, expected at most the 4 samples of a group"),
    (["--reward=scen"], "unknown reward 'scen': did you mean 'scene'?"),
    ([f"--device={ABSENT}"], f"device is '{ABSENT}', but torch"),
    (["--train.updates=3"], "2 groups of 4 in micro-batches of 4 make 2 parts: use at most 2 updates"),
    (["--held_out=1.5"], "held_out: got 1.5, expected a share between 0 and 1"),
    (["--eval.weights=ema"], "eval.weights is 'ema', but train.ema is 0"),
    (["--resume"], "--resume: no checkpoint in "),
    (["--train.group=1000000000"], "2,000,000,000 samples of an epoch (train.prompts x train.group) need 9,418 GiB"),
    (["--phases=[{at: 1, set: {train.group: 1000000000}}]"], "samples of an epoch of a phase need 9,418 GiB"),
    (["--eval.samples=1000000000"], "samples of an evaluation need "),
    (["--train.steps=10000000"], "train.steps: got 10000000, expected a number less than or equal to 10000"),
    (["--eval.steps=10000000"], "eval.steps: got 10000000, expected a number less than or equal to 10000"),
    (["--image.height=100000"], "image.height: got 100000, expected a number less than or equal to 65536"),
    (["--image.height=65536", "--image.width=65536"], "268,435,456 pixels at most, got 4,294,967,296"),
    (["--image.sizes=[[64, 64], [60000, 60000]]"], "268,435,456 pixels at most, got 3,600,000,000"),
    (["--name=\x1b[31mx"], "name: got '\\x1b[31mx', expected a text that is not blank, without control characters"),
    (["--name=a\nb"], "name: got 'a\\nb', expected a text"), (["--name=a\u202eb"], "name: got 'a\\u202eb', expected"),
    (["--name= "], "name: got ' ', expected a text that is not blank"),
    (["--output=\x1b[31mx"], "output: got '\\x1b[31mx', expected a text")])
def test_mistakes_are_told_before_anything_is_loaded_or_written(recipe, options, line, capsys):
    assert line in told(capsys, recipe, *options, "--model=nowhere/to/be/found")
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize("options, line", [
    (["--adapter.targets=[to_qq]"], "adapter.targets ['to_qq'] match no module of the transformer: its linear layers"),
    (["--adapter.rank=1000000000"], "adapter.rank is 1000000000, with which the LoRA and its optimizer take "),
    (["--method=dpo"], "got a method of language models (it samples by Decoding), which this model is not: `flowgrpo"),
    (["--image.height=17"], "StableDiffusion3Pipeline refuses its arguments: `height` and `width`"),
    (["--image.frames=8"], "`image`: StableDiffusion3Pipeline takes no 'num_frames'"),
    (["--image.call={max_sequence_len: 9}"], "takes no 'max_sequence_len': did you mean 'max_sequence_length'?")])
def test_mistakes_that_the_model_shows_are_told_before_anything_is_written(recipe, options, line, capsys):
    assert line in told(capsys, recipe, *options)
    assert not (recipe.parent / "runs").exists()


def test_prompt_files_and_prompts_that_are_too_long(recipe, capsys):
    prompts = recipe.with_name("prompts.txt")
    short = "\n".join(tiny.PROMPTS)
    prompts.write_text(f"{short}\n{'a' * 20_001}\n")
    assert "a prompt of 20,001 characters, expected 20,000 at most ('aaaa" in told(capsys, recipe)
    prompts.write_text(f"{short}\n{'a' * 1_000_002}\n")
    assert f"{prompts}, line {len(tiny.PROMPTS) + 1}: a prompt of 1,000,002 characters" in told(capsys, recipe)
    prompts.write_text("\n\n")
    assert f"prompts {prompts}: the file holds no prompt" in told(capsys, recipe)
    prompts.write_text("only one\n")
    assert "1 different prompts cannot be parted" in told(capsys, recipe)
    prompts.unlink()
    assert f"prompts {prompts}: no such file" in told(capsys, recipe)


def test_memory_that_runs_out_on_a_cpu(recipe, capsys):
    """In the reward's module a line of the user's; in the run itself the allocator's."""
    recipe.with_name("reward.py").write_text(GOOD_REWARD.replace("return", "import torch; torch.empty(2**50); return"))
    assert "reward.py, line 2" in told(capsys, recipe)
    recipe.with_name("method.py").write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom flowgrpo.advantages.group import Advantage\n\n"
        "@dataclass(frozen=True)\nclass Large(Advantage):\n    def __call__(self, *given, **more):\n"
        "        return torch.empty(2**50)\n\ndef large(method):\n    return method.having(advantage=Large())\n")
    recipe.with_name("good.py").write_text(GOOD_REWARD)
    assert "out of memory (" in told(capsys, recipe, f"--method=mix_grpo+{recipe.with_name('method.py')}:large",
                                     f"--reward={recipe.with_name('good.py')}:red")


def test_models_that_do_not_load(recipe, model, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"cannot load the model '{empty}'" in told(capsys, recipe, f"--model={empty}")
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"not a file of weights")
    assert f"cannot load the model '{broken}'" in told(capsys, recipe, f"--model={broken}")
    (broken / "model_index.json").write_text("{")
    assert f"cannot load the model '{broken}'" in told(capsys, recipe, f"--model={broken}")
    assert not (tmp_path / "runs").exists()


def test_a_pipeline_without_one_of_its_parts_and_a_flow_with_another_scheduler(recipe, model, tmp_path, capsys):
    lacking = shutil.copytree(model, tmp_path / "lacking")
    shutil.rmtree(lacking / "vae")
    line = told(capsys, recipe, f"--model={lacking}")
    assert f"cannot load the model '{lacking}' (its model_index.json names vae, of which there is no folder)" in line
    other = shutil.copytree(model, tmp_path / "other")
    index = other / "model_index.json"
    index.write_text(index.read_text().replace("FlowMatchEulerDiscreteScheduler", "DDIMScheduler"))
    (other / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    line = told(capsys, recipe, f"--model={other}")
    assert "StableDiffusion3Pipeline is of a flow and expects a FlowMatchEulerDiscreteScheduler, but its" in line
    assert "scheduler is a DDIMScheduler" in line and not (tmp_path / "runs").exists()


def test_a_scheduler_without_a_grid_of_its_own(recipe, model, tmp_path, capsys):
    second = shutil.copytree(model, tmp_path / "second_order")
    for file in (second / "model_index.json", second / "scheduler" / "scheduler_config.json"):
        file.write_text(file.read_text().replace("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"))
    line = told(capsys, recipe, f"--model={second}", "--train.grid=stock")
    assert "train.grid 'stock': FlowMatchHeunDiscreteScheduler sets 8 sigmas" in line and "train.grid: shifted" in line
    assert not (tmp_path / "runs").exists()


FAILING = """calls = 0

def red(images, prompts):
    global calls
    calls += 1
    if calls == 5:
        {}
    return images[:, 0].mean((1, 2))
"""


@pytest.mark.parametrize("statement, options, line", [
    ("return 1 / 0", [], "raised on 4 samples (first prompt of the batch: '"),
    ("return [0.5, 0.5, float('nan'), 0.5]", [], "returned nan, expected a finite number"),
    ("return ['a', 'b', 'c', 'd']", [], "returned 'a', expected a finite number"),
    pytest.param("raise OSError('judge unreachable')", ["--eval.every=1"],
                 "OSError: judge unreachable (reward.py, line 7)", marks=pytest.mark.fast)])
def test_a_reward_that_fails_in_training_loses_no_whole_epoch(recipe, statement, options, line, capsys):
    """The first call is the trial, the second measures the base; two calls later the second epoch begins, or with
    `eval.every` the held-out prompts are measured after the first."""
    file = recipe.with_name("reward.py")
    file.write_text(FAILING.format(statement))
    found = told(capsys, recipe, *options)
    assert line in found and f"reward '{file}:red'" in found
    run = recipe.parent / "runs" / "run"
    assert checkpoint.latest(run / "checkpoints").name == "epoch-00001"
    assert main(["train", "--trust", str(recipe), "--resume"]) == 0
    epochs = [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3] and (run / "summary.json").exists()


@pytest.mark.parametrize("begins, line", [
    ("def red(images)", "takes (images): expected (images, prompts, metadata) or (images, prompts)"),
    ("def red()", "takes (): expected (images, prompts, metadata) or (images, prompts)"),
    ("async def red(images, prompts)", "is an `async def`: expected a function that returns a number per sample"),
    ("def red(first, second)", "takes (first, second): expected (first, second, prompts, metadata) or")])
def test_a_function_that_is_no_reward_is_told_before_the_model_is_loaded(begins, line, recipe, capsys):
    recipe.with_name("reward.py").write_text(f"{begins}:\n    return [0.0]\n")
    assert line in told(capsys, recipe, "--model=nowhere/to/be/found")


def test_a_misspelt_folder_is_told_without_asking_the_hub(tmp_path, capsys):
    (tmp_path / "runs" / "starter").mkdir(parents=True)
    runs, told = tmp_path / "runs", "has no folder of that name: did you mean"
    for arguments in (["eval", runs / "startr", "--suite=starter", f"--output={tmp_path / 'out'}"],
                      ["sample", runs / "startr", "--prompt=x"], ["train", f"--model={runs / 'startr'}"]):
        line = error_line(capsys, *arguments)
        assert f"no model or run '{runs / 'startr'}': {runs} {told} '{runs / 'starter'}'?" in line
    assert error_line(capsys, "sample", runs / "nothing_like_it", "--prompt=x").endswith("has no folder of that name")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_there_is_no_name_of_the_hub(here, capsys):
    for folder in (here, here / "runs"):
        folder.mkdir(exist_ok=True)
        told = "no model or run 'runs/sdxl': runs has no folder of that name"
        assert error_line(capsys, "sample", "runs/sdxl", "--prompt=x").endswith(told)


@pytest.mark.parametrize("path", ["/nowhere/x", "./x", "../b/c"])
def test_a_path_is_no_name_of_the_hub(here, capsys, path):
    line = error_line(capsys, "sample", path, "--prompt=x")
    assert line.endswith(f"no model or run '{path}': there is no such folder")
    assert main(["check", path]) == 2
    assert f"no model or run '{path}'" in capsys.readouterr().out


def test_a_run_in_the_place_of_a_model_is_told(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(tiny.config(model="owner/name").yaml())
    told = f"{tmp_path} is a run, not a model: give the model that it trained"
    line = error_line(capsys, "train", f"--model={tmp_path}")
    assert told in line and f"`flowgrpo sample owner/name --lora {tmp_path}`" in line


def test_an_interrupted_evaluation_says_how_it_goes_on(tmp_path, capsys):
    file, out = tmp_path / "interrupting.py", tmp_path / "out"
    file.write_text("raise KeyboardInterrupt\n")
    assert main(["eval", "starter", "--suite=starter", f"--rewards={file}:f", f"--output={out}"]) == 130
    assert f"flowgrpo: interrupted; the same command continues with what is in {out}" in capsys.readouterr().err


def test_a_message_has_no_addresses_in_memory():
    assert str(UserError(f"got {object()!r}, expected {(lambda: 0)!r} at 5")) == (
        "got <object object>, expected <function test_a_message_has_no_addresses_in_memory.<locals>.<lambda>> at 5")


# --- a rejected command leaves nothing -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def world(model, tmp_path_factory):
    """A folder with a model, one whose weights are damaged, a finished run, its recipe, prompts, reward and pairs."""
    place = tmp_path_factory.mktemp("world")
    shutil.copytree(model, place / "model")
    shutil.copytree(model, place / "broken")
    for file in (place / "broken").rglob("*.safetensors"):
        file.write_bytes(b"x" * 100)
    (place / "reward.py").write_text(GOOD_REWARD)
    (place / "prompts.txt").write_text("\n".join(tiny.PROMPTS[:2]))
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (16, 16), colour).save(place / f"{name}.png")
    (place / "pairs.jsonl").write_text(json.dumps({"prompt": "red", "chosen": "a.png", "rejected": "b.png"}) + "\n")
    settings = tiny.config("runs", model="model", reward="reward.py:red", prompts="prompts.txt", train__steps=4,
                           parts__plan__size=2, train__epochs=1, train__prompts=1)
    (place / "recipe.yaml").write_text(settings.yaml())
    with contextlib.chdir(place):
        assert main(["train", "recipe.yaml"]) == 0
    return place


def tree(place):
    return {file: file.stat().st_mtime_ns for file in place.rglob("*") if file.is_file() and file.suffix != ".pyc"} | {
        folder: 0 for folder in place.rglob("*") if folder.is_dir() and folder.name != "__pycache__"}


@pytest.mark.parametrize("line, error", [
    ("train recipe.yaml --output=new --adapter.targets=[to_qq]", "match no module of the transformer"),
    ("train recipe.yaml --output=new --model=broken", "cannot load the model 'broken'"),
    ("train recipe.yaml --output=new --reward=reward.py:none", "has no 'none'; there are: red"),
    ("train recipe.yaml --output=new/deep --train.updates=3", "use at most"),
    ("eval broken --rewards reward.py:red --suite prompts.txt --output new/out", "cannot load the model 'broken'"),
    ("eval model --lora nowhere --rewards reward.py:red --suite prompts.txt --output new", "no weights at nowhere"),
    ("eval model --rewards reward.py:red --suite none.jsonl --output new", "no suite 'none.jsonl'"),
    ("eval runs/run --rewards reward.py:none --suite prompts.txt --output new", "has no 'none'"),
    ("sample broken --prompts prompts.txt --output new/out", "cannot load the model 'broken'"),
    ("sample model --prompts prompts.txt --lora nowhere --output new", "no weights at nowhere"),
    ("sample model --prompt red --image none.png --output new", "none.png cannot be read"),
    ("sample runs/run --epoch 9 --prompt red --output new", "has no such checkpoint"),
    ("export runs/run --epoch 9 --output new/lora", "has no such checkpoint"),
    ("export broken --form merged --output new", "is not a run"),
    ("report runs/run nowhere --output new/page.html", "no run at nowhere"),
    ("reward train none.jsonl --output new", "pairs none.jsonl: no such file"),
    ("reward train pairs.jsonl --held-out none.jsonl --output new", "pairs none.jsonl: no such file"),
    ("reward train-text none.jsonl --output new", "none.jsonl: no such file"),
    ("reward label broken --prompts prompts.txt --rewards reward.py:red --output new/pairs.jsonl", "'broken'"),
    ("reward label model --prompts prompts.txt --rewards reward.py:none --output new/pairs.jsonl", "has no 'none'"),
    ("reward label nowhere --rewards reward.py:red --output new/pairs.jsonl", "no folder at nowhere"),
    ("prompts write recipe.yaml --output new/p.jsonl", "expected a list under 'templates'"),
    ("prompts proxy caption_error prompts.txt --output new/p.jsonl", "has a caption in which"),
    ("prompts mix none.txt --output new/p.jsonl", "prompts none.txt: no such file"),
    ("prompts mix prompts.txt --measure broken --reward reward.py:red --output new/p.jsonl", "'broken'"),
    ("prompts mix prompts.txt --measure model --reward reward.py:none --output new/p.jsonl", "has no 'none'"),
    ("prompts encode recipe.yaml --model=broken --cache new", "cannot load the model 'broken'"),
    ("compare grid nowhere --output new/grid.png", "no run at nowhere"),
    ("compare grid runs/run --prompts none.txt --output new/grid.png", "prompts none.txt: no such file"),
    ("compare grid runs/run --columns steps --values x --output new/grid.png", "expected whole numbers"),
    ("compare vote broken --prompts prompts.txt --output new/pairs.jsonl", "cannot load the model 'broken'"),
    ("compare vote model --prompts prompts.txt --lora none --output new/pairs.jsonl", "no weights at none"),
    ("compare vote nowhere --output new/pairs.jsonl", "nowhere: expected a finished run"),
    ("compare methods --methods mix_grpo,nope --output new", "unknown method 'nope'"),
    ("compare methods --methods mix_grpo --evaluations 10 --output new/bench", "got 10, but the first epoch"),
    ("compare methods --methods rpo --output new/bench", "rpo: method rpo pulls to the first image of recorded pairs"),
    ("compare methods --methods hypo --model starter_text --output new", "hypo: parts.data is PreferencePairs"),
    ("compare methods --methods grpo --model starter_text --evaluations 9000 --output new", "alone may take 12,288"),
    ("new method class --output new", "got the name 'class'"),
    ("taste broken --prompts prompts.txt --train.steps=4 --output new --port 0", "cannot load the model 'broken'"),
    ("taste model --prompts none.txt --output new --port 0", "prompts none.txt: no such file"),
    ("prepare none.yaml", "no recipe at none.yaml"),
    ("contrib evolve recipe.yaml --output new", "adapter.init is not set")])
def test_a_rejected_command_leaves_nothing(world, line, error, monkeypatch, capsys):
    monkeypatch.chdir(world)
    before = tree(world)
    assert error in error_line(capsys, *line.split()) and tree(world) == before


def test_a_rejected_align_leaves_nothing(world, monkeypatch):
    monkeypatch.chdir(world)
    before = tree(world)
    for options in ({"model": "broken"}, {"model": "model", "adapter": {"targets": ["to_qq"]}}):
        with pytest.raises(UserError):
            flowgrpo.align(rewards="reward.py:red", prompts="prompts.txt", output="new", tracker="none", **options)
    assert tree(world) == before


@pytest.mark.parametrize("line, written", [
    ("sample {} --prompts prompts.txt --steps 2 --output out", "out/prompts.jsonl"),
    ("eval {} --rewards reward.py:red --suite prompts.txt --steps 2 --output out", "out/results.json"),
    ("prompts mix prompts.txt --measure {} --reward reward.py:red --low 0 --high 1 --samples 1 --output out/p.jsonl",
     "out/p.jsonl")])
def test_the_right_command_follows_a_wrong_one_in_a_folder_that_was_there(world, line, written, monkeypatch, capsys):
    monkeypatch.chdir(world)
    shutil.rmtree("out", ignore_errors=True)
    (world / "out" / "p.rates" / "samples").mkdir(parents=True)
    assert "'broken'" in error_line(capsys, *line.format("broken").split())
    assert main(line.format("model").split()) == 0, capsys.readouterr().err
    assert (world / written).is_file()


def test_a_budget_that_is_measured_to_be_too_small_leaves_nothing(tmp_path, capsys):
    line = "compare methods --model starter_text --methods dpo --reference dpo --evaluations 12288 --jobs 1 --prompts 2"
    said = error_line(capsys, *line.split(), "--output", tmp_path / "bench")
    assert "got 12,288, but the first epoch of dpo takes " in said and not [*tmp_path.iterdir()]
