"""`flowgrpo new`, `reproduce` and `taste`: what they write, print and refuse; and a run that trains nothing."""

import inspect
import json
import re
import runpy
import threading
import urllib.request
from pathlib import Path

import pytest

from flowgrpo import loopback
from flowgrpo.cli import main, reproduce
from flowgrpo.cli.evaluate import folder_of
from flowgrpo.cli.train import UNTRAINED
from flowgrpo.config import load
from flowgrpo.config.geometry import geometry
from flowgrpo.methods.validate import resolve
from flowgrpo.storage.places import CONFIG
from tests.helpers import tiny
from tests.helpers.refusals import error_line, only_line, printed


@pytest.mark.parametrize("kind, name", [("method", "my_loss"), ("method", "Loss"), ("reward", "my_reward")])
def test_the_written_test_passes(kind, name, tmp_path, capsys):
    assert main(["new", kind, name, "--output", str(tmp_path / "mine")]) == 0
    files = [tmp_path / "mine" / f"{name}.py", tmp_path / "mine" / f"test_{name}.py"]
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    tests = [thing for key, thing in runpy.run_path(str(files[1])).items()
             if key.startswith("test_") and inspect.isfunction(thing)]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_written_method_trains_and_the_written_recipe_loads(tmp_path):
    assert main(["new", "method", "one_sided", "--output", str(tmp_path)]) == 0
    trainer = tiny.trainer(method=f"flow_grpo+{tmp_path / 'one_sided.py'}:one_sided",
                           parts={"surrogate": {"high": 0.1}}, train__steps=4, train__group=4)
    assert trainer.method.loss.surrogate.high == 0.1 and trainer.run_epoch()["grad_norm"] > 0
    assert main(["new", "recipe", "mine", "--output", str(tmp_path)]) == 0
    config = load(tmp_path / "mine.yaml")
    assert (config.name, config.train.epochs, list(config.extra_rewards)) == ("mine", 60, ["sharpness"])
    assert resolve(config).rollout and geometry(config.train, 1).group == 12


@pytest.mark.parametrize("kind, existing", [("method", "a.py"), ("reward", "test_a.py"), ("recipe", "a.yaml")])
def test_no_file_is_overwritten(kind, existing, tmp_path, capsys):
    (tmp_path / existing).write_text("mine\n")
    line = only_line(capsys, "new", kind, "a", "--output", tmp_path)
    assert f"no file is overwritten, and there is {tmp_path / existing}: give another name" in line
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(existing, "mine\n")]


@pytest.mark.parametrize("kind, name, line", [
    ("method", "my-loss", "got the name 'my-loss', expected letters, digits and underscores, such as my_loss"),
    ("reward", "class", "got the name 'class', expected letters"),
    ("reward", "_1", "got the name '_1', expected letters"),
    ("method", "random", "got the name 'random', which Python or flowgrpo has already: expected another one, such as "
                         "my_random"),
    ("method", "surrogate", "got the name 'surrogate', which Python or flowgrpo has already"),
    ("reward", "rewards", "got the name 'rewards', which Python or flowgrpo has already"),
    ("loss", "mine", "'loss' is not one of 'method', 'reward', 'recipe'")])
def test_names_that_cannot_be_used_are_refused(kind, name, line, tmp_path, capsys):
    assert line in only_line(capsys, "new", kind, name, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


COSTS = json.loads((Path(__file__).parents[2] / "scripts" / "docs" / "paper_costs.json").read_text(encoding="utf-8"))


def test_results_have_costs_and_unknown_ones_name_the_others(capsys):
    assert {name.replace("/", "_") for name in reproduce.RESULTS} == COSTS.keys()
    for name, result in reproduce.RESULTS.items():
        found = COSTS[name.replace("/", "_")]
        assert (result.epochs, result.seconds, result.peak) == (found["epochs"], found["seconds"], found["peak"])
        assert (found["gpu"], found["processes"]) == (reproduce.GPU, reproduce.PROCESSES)
    assert main(["reproduce", "flow_grpo/genevil"]) == 2
    assert "no published result 'flow_grpo/genevil': did you mean 'flow_grpo/geneval'?" in capsys.readouterr().err


def test_a_dry_run_prints_the_commands_and_the_cost(capsys):
    assert printed(capsys, "reproduce", "flow_grpo/geneval", "--dry-run", "--train.epochs=2").splitlines() == [
        "flowgrpo prepare --yes papers/flow_grpo_geneval --train.epochs=2",
        "accelerate launch --multi_gpu --num_processes 8 -m flowgrpo train papers/flow_grpo_geneval --resume=auto "
        "--train.epochs=2",
        "flowgrpo eval runs/flow_grpo_geneval --suite geneval --rewards geneval --base",
        "training, computed: 62.7 GiB on each of 8 A100, 247 s an epoch, 69 h for 1,000 epochs, 548 GPU-hours"]


def test_the_papers_number_stands_beside_ours(capsys):
    def arm(mean):
        return {"geneval": {"all prompts": {"mean": 0, "low": 0, "high": 0}}}, {"geneval": {
            "mean": mean, "low": mean - 0.02, "high": mean + 0.02}}
    (base, base_tasks), (tuned, tuned_tasks) = arm(0.61), arm(0.93)
    reproduce.show("flow_grpo/geneval", reproduce.RESULTS["flow_grpo/geneval"], {
        "arms": {"base": base, "tuned": tuned}, "category_means": {"base": base_tasks, "tuned": tuned_tasks},
        "suite": {"prompts": 553}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["base", "0.63", "0.61", "0.59", "to", "0.63"] in lines
    assert ["tuned", "0.95", "0.93", "0.91", "to", "0.95"] in lines
    assert "flow_grpo/geneval: 2505.05470, table 2, with KL; 553 prompts".split() in lines


@pytest.mark.parametrize("name, base, tuned", [
    ("flow_grpo/pickscore", 22.34, 23.53), ("mix_grpo/flux", 0.313, 0.367), ("diffusion_nft/geneval", 0.24, 0.98),
    ("diffusion_nft/ocr", 0.12, 0.97), ("diffusion_nft/pickscore", 20.51, 24.03)])
def test_published_numbers_are_those_of_the_papers_tables(name, base, tuned):
    result = reproduce.RESULTS[name]
    assert (result.base, result.tuned) == (base, tuned) and "table" in result.source


def test_a_stand_in_is_trained_evaluated_and_shown_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd):
    """All three commands as a user's, on the toy model: its number is a "paper's" here."""
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps({"prompt": f"a red {shape}", "metadata": {}}) + "\n"
                                                  for shape in ("circle", "square", "triangle")))
    (tmp_path / "toy.yaml").write_text(
        "extends: starter\nreward: sharpness\nprecision: fp32\neval: {every: 0, prompts: 1, grid: 1, steps: 2, "
        "rewards: []}\ntrain: {epochs: 1, prompts: 1, group: 4, micro_batch: 4, steps: 4, updates: 1}\n"
        f"output: {tmp_path / 'runs'}\nname: toy\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    toy = reproduce.Result(str(tmp_path / "suite.jsonl"), "sharpness", "table 1 of a stand-in", 1, 1.0, 1.0, 0.5, 0.75,
                           str(tmp_path / "toy.yaml"))
    monkeypatch.setitem(reproduce.RESULTS, "toy/sharpness", toy)
    assert main(["reproduce", "toy/sharpness", "--gpus=1"]) == 0
    found = json.loads((tmp_path / "runs" / "toy" / "eval" / "suite" / "results.json").read_text())
    said = capfd.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    for arm, published in (("base", "0.5"), ("tuned", "0.75")):
        ours = found["arms"][arm]["sharpness"]["all prompts"]
        assert [arm, published, f"{ours['mean']:.4g}", f"{ours['low']:.4g}", "to", f"{ours['high']:.4g}"] in rows
    assert "toy/sharpness: table 1 of a stand-in; 3 prompts" in said and said.count("$ flowgrpo ") == 3
    assert main(["reproduce", "toy/sharpness", "--gpus=1"]) == 0
    again = capfd.readouterr().out
    assert again.count("$ flowgrpo ") == 1 and "table 1 of a stand-in" in again  # the run is there


@pytest.mark.parametrize("source, suite, folder", [
    ("runs/mine", "geneval", "runs/mine/eval/geneval"), ("owner/model", "geneval", "runs/eval/owner_model/geneval"),
    ("runs/mine", "hub:owner/set?split=test", "runs/mine/eval/hub_owner_set_split_test")])
def test_an_evaluation_has_a_folder_without_output(here, source, suite, folder):
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "config.yaml").write_text("model: starter\n")
    assert folder_of(source, suite) == Path(folder)


@pytest.mark.parametrize("arguments, line", [
    ([], "expected a model"),
    (["starter_consistency", "--prompts", "none.txt"], "none.txt"),
    (["starter_consistency", "--lora", "none"], "no weights at none"),
    (["starter_consistency", "--output", "used"], "--output used holds a session already: --resume goes on with it"),
    (["starter_consistency", "--output", "full"], "--output full exists and is no session"),
    (["starter_consistency", "--resume"], "--resume: no session in taste: leave --resume out"),
    (["starter_text"], "starter_text writes completions: expected a model of images"),
    (["starter_consistency", "--train.stepz=3"], "unknown option --train.stepz"),
    (["starter_consistency", "--method=diffusion_nft", "--parts={}"],
     "the samples are voted on, which does not go with"),
    (["starter_consistency", "--port", "{busy}"], "port {busy} cannot be used")])
def test_refusals(here, capsys, arguments, line):
    (here / "used").mkdir()
    (here / "used" / CONFIG).write_text("model: starter_consistency\n")
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("mine")
    with loopback.listen(loopback.Handler, 0) as busy:
        given = [argument.replace("{busy}", str(busy.server_port)) for argument in arguments]
        said = error_line(capsys, "taste", *given, *([] if "--port" in given else ["--port", "0"]))
        assert line.replace("{busy}", str(busy.server_port)) in said
    assert not (here / "taste" / CONFIG).exists()


def test_a_model_of_many_steps_is_told(here, capsys):
    told = "starter is not known as a few-step model, and has 4 steps here: --train.steps gives others"
    with loopback.listen(loopback.Handler, 0) as busy:
        for arguments, line in ((["starter"], told), (["starter", "--train.steps=20"], ""),
                                (["starter_consistency"], "")):
            assert main(["taste", *arguments, "--port", str(busy.server_port)]) == 2
            said = capsys.readouterr().err
            assert line in said and bool(line) == ("few-step" in said)


def test_a_session_by_the_command(tmp_path, monkeypatch, capfd):
    """A person in a thread reads the address that the command prints, votes over HTTP and finishes."""
    model = tiny.save(tiny.sd3(), tmp_path / "pipe")
    (tmp_path / "p.txt").write_text("\n".join([*tiny.PROMPTS, "a star", "a ring"]) + "\n")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    ended = threading.Event()
    def person() -> None:
        while not (found := re.findall(r"http://\S+/(?= )", "".join(said))) and not ended.wait(0.05):
            said.append(capfd.readouterr().out)
        [address] = found
        def ask(path: str, content: object = None) -> dict:
            body = None if content is None else json.dumps(content).encode()
            request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
            return json.loads(urllib.request.urlopen(request, timeout=60).read())
        state = ask("state")
        while state["clicks"] < 5:
            if (question := state["question"]) is None:
                ended.wait(0.05)
                state = ask("state")
                continue
            state = ask("vote", {"question": question["name"], "shown": [*range(question["count"])], "choice": 0})
        ask("finish", {})
    thread = threading.Thread(target=person)
    thread.start()
    small = {"image.call": json.dumps(tiny.CALL), "train.prompts": 2, "train.updates": 1, "train.micro_batch": 4,
             "train.inner_epochs": 1, "train.steps": 3, "adapter.rank": 2, "precision": "fp32", "eval.steps": 3}
    code = main(["taste", str(model), "--prompts", "p.txt", "--port", "0", "--output", "mine", "--minutes", "5",
                 *(f"--{key}={value}" for key, value in small.items())])
    ended.set()
    thread.join()
    out, err = capfd.readouterr()
    assert code == UNTRAINED, err  # five votes are no evidence
    assert f"5 clicks, 5 of them for an image: votes in {Path('mine') / 'pairs.jsonl'}" in out
    assert "nothing is trained, and no LoRA is written, since the clicks could be chance: their evidence of a" in out
    assert (tmp_path / "mine" / "pairs.jsonl").is_file() and not (tmp_path / "mine" / "taste").exists()
    assert not (tmp_path / "mine" / "pytorch_lora_weights.safetensors").exists()
    assert re.search(r"epoch 8 \(00:\d\d, 0[45]:\d\d left\): taste=", err) and " of 2000" not in err


@pytest.mark.parametrize("body, cause", [
    ("return [0.5] * len(prompts)", "mine gave every sample 0.5"),
    ("raise OSError('away')", r"mine gave no score \(its last error: reward 'mine' raised on 1 sample \(first prompt "
                              r"of the batch: '[^']+'\): OSError: away \(same.py, line 2\)\)")])
def test_a_run_that_trained_nothing_has_an_exit_code_of_its_own(body, cause, here, capsys):
    (here / "same.py").write_text(f"def same(images, prompts):\n    {body}\n")
    small = ["--train.epochs=1", "--train.prompts=1", "--train.group=2", "--train.steps=4", "--eval.steps=1",
             "--eval.prompts=1", "--eval.rewards=[]", "--tracker=none", "--output=runs", "--method=mix_grpo",
             "--parts={plan: {size: 1}}", "--train.updates=1", "--train.lr=1e-3"]
    reward = '{"mine": {"use": "same.py:same", "on_error": "skip"}}'
    assert main(["train", "starter", f"--reward={reward}", *small]) == 3
    out = capsys.readouterr()
    said = out.err.splitlines()[-1].removeprefix("flowgrpo: ")
    assert re.fullmatch(f"Nothing was trained in 1 epoch: {cause}. These are the weights that the run began with.",
                        said)
    assert "ComfyUI" not in out.out and not (here / "runs" / "starter" / "comfyui").exists()
    assert said in " ".join(out.out.split()) and "was trained on" not in out.out
    run = here / "runs" / "starter"
    assert json.loads((run / "summary.json").read_text())["trained"] == {"epochs": 0, "nothing": True, "said": [said]}
    assert printed(capsys, "push", "runs/starter", "me/lora", "--dry-run").splitlines()[0] == said
    said = said if "(" not in said else said.partition(" (")[0]
    card = (run / "README.md").read_text()
    assert card.index("Nothing was trained in 1 epoch") < card.index("was to be trained") < card.index("## Usage")
    assert said in (run / "report.html").read_text()
