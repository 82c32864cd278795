"""Methods, prompts, budgets and runs of a bench, and the requests that it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.cli import main
from flowgrpo.config import load, validate
from flowgrpo.config.recipes import flat
from flowgrpo.config.schema import sections
from flowgrpo.config.sections import Adapter
from flowgrpo.cores import count as cores
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import PRESETS, preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards import differentiable
from flowgrpo.run import run
from flowgrpo.starter import CALLS, EVAL
from flowgrpo.tools.bench import models, plan
from flowgrpo.tools.bench.bench import Workers, duration, remaining, seconds
from flowgrpo.tools.bench.models import Entry, clip_of, entries
from flowgrpo.tools.bench.plan import Plan, Request, epoch_cost, epochs_for, epochs_of
from tests.data.test_recorded_pairs import pairs_file
from tests.helpers import tiny
from tests.helpers.forked import Forked
from tests.helpers.refusals import message

RECIPES = Path(__file__).parents[3] / "configs"
TRIAL = {"first": 200.0, "following": 100.0, "seconds": 2.0, "measuring": 0.5}


@pytest.fixture
def request_of(tmp_path):
    def made(*methods, model="starter", **changes):
        usual = Request(list(methods), model, models.MODELS[model].reference, 40_000, 3, 4, None, [],
                        tmp_path / "bench")
        return replace(usual, **changes)
    return made


@pytest.mark.parametrize("name", models.MODELS)
def test_three_sides_share_no_text_and_hold_all_tasks(name):
    sides = models.split(name)
    keys = [{prompt.key for prompt in sides[side]} for side in models.SIDES]
    assert all(keys) and not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])
    tasks = [{prompt.metadata["task"] for prompt in sides[side]} for side in ("validation", "held_out")]
    assert tasks[0] == tasks[1]
    assert len(keys[1]) == pytest.approx(len(keys[0] | keys[1]) / models.VALIDATION, abs=len(tasks[0]))


@pytest.mark.parametrize("name", models.MODELS)
def test_every_setting_of_the_recipe_is_taken_or_listed_with_a_reason(request_of, name):
    made = Plan(request_of(models.MODELS[name].reference, model=name, evaluations=10**6))
    for entry in made.unforeseen:
        made.learn(entry, 10**4, 10**4)
    recipe, own = (flat(config.model_dump(), sections()) for config in (load(name), made.published_runs()[0].config))
    recipe["reward"] = load(name).reward if isinstance(load(name).reward, dict) else {load(name).reward: 1.0}
    differing = {key for key in recipe.keys() | own.keys() if recipe.get(key) != own.get(key)}
    apart = models.MODELS[name].differs
    assert differing - models.OF_BENCH.keys() == apart.keys()
    assert models.OF_BENCH.keys() <= own.keys()
    assert [(key, value, why) for key, _, value, why in models.differences(name)] == [
        (key, *of) for key, of in apart.items()] and all(own[key] == value for key, (value, _) in apart.items())
    if card := EVAL.get(name):
        assert (own["eval.steps"], own["eval.guidance"]) == (card["num_inference_steps"], card["guidance"])


def test_the_page_lists_every_difference_and_its_reason():
    text = (RECIPES.parent / "docs" / "bench.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (`.*`) \| (.*) \|$", text, re.M))
    listed = {key: why for names, why in rows.items() for key in re.findall(r"`([^`]+)`", names)}
    expected = models.OF_BENCH | {f"{key} of {name}": why for name, of in models.MODELS.items()
                                  for key, (_, why) in of.differs.items()}
    assert listed == expected


@pytest.mark.parametrize("name", ["starter", "starter_consistency", "starter_video"])
def test_a_models_process_is_that_of_its_policy(name):
    policy = PipelinePolicy(load_pipeline(name), Adapter(rank=1), call=CALLS.get(name, {}))
    assert models.MODELS[name].process == policy.process


@pytest.mark.parametrize("name", models.MODELS)
def test_every_preset_of_a_model_can_be_run_or_says_why_not(request_of, name):
    of, refused = models.MODELS[name], []
    for given in PRESETS:
        try:
            made = Plan(request_of(given, model=name, evaluations=10**6))
        except UserError as error:
            refused.append((given, str(error)))
            continue
        assert made.trial(made.entries[0]).method == given
    assert of.reference not in dict(refused) and all(error for _, error in refused)
    assert len(refused) < len(PRESETS)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_default_budget_holds_the_recipes_method_and_each_run_stays_within(request_of, name):
    of = models.MODELS[name]
    costly = {"starter": ["granular_grpo", "crd"], "starter_consistency": ["sol_rl"], "starter_video": ["sol_rl"],
              "starter_text": ["sdpo"]}[name]
    made = Plan(request_of(*costly, model=name, evaluations=of.evaluations))
    for entry in made.unforeseen if name == "starter_text" else []:
        made.learn(entry, 85_792, 73_728)  # of sdpo, the costliest
    runs = made.published_runs()
    assert all(run.foretold is None or 0.8 * of.evaluations < run.foretold <= of.evaluations for run in runs)
    assert all(run.config.train.epochs >= 5 for run in runs)


def test_methods_are_presets_files_and_recipes(request_of, tmp_path):
    file, recipe = tmp_path / "my.py", tmp_path / "wide.yaml"
    file.write_text("from flowgrpo.methods import preset\n\n\ndef mine(method):\n    return preset('mix_grpo')\n")
    recipe.write_text(yaml.dump({"method": "mix_grpo", "parts": {"plan": {"size": 3}}, "train": {"lr": 1e-4},
                                 "eval": {"steps": 3}, "seed": 7}))
    made = Plan(request_of("mix_grpo+grpo_guard", f"{file}:mine", str(recipe), "refl"))
    assert [entry.label for entry in made.entries] == ["mix_grpo+grpo_guard", "mine", "wide", "refl", "flow_grpo"]
    runs = made.published_runs()
    assert [run.label for run in runs[:6]] == [f"{entry.label} seed 0" for entry in made.entries] + [
        "mix_grpo+grpo_guard seed 1"]
    mine, wide, refl = (run.config for run in runs[1:4])
    assert wide.parts == {"plan": {"size": 3}} and wide.train.lr == 1e-4 and wide.seed == 0
    assert wide.eval.steps == mine.eval.steps == EVAL["starter"]["num_inference_steps"]
    assert made.entries[2].adjusted == {"method": "mix_grpo", "parts": {"plan": {"size": 3}}, "train.lr": 1e-4}
    assert mine.method.endswith("my.py:mine") and refl.reward == {"scene_soft": 1.0}
    assert all(37_000 < run.foretold <= 40_000 for run in runs)


@pytest.mark.fast
def test_recipes_rewards_and_folders_of_runs(request_of, tmp_path):
    recipe = tmp_path / "whole.yaml"
    for reward in ("scene_soft", {"soft": {"use": "scene_soft"}}):
        recipe.write_text(yaml.dump({"method": "draft", "reward": reward, "parts": {"plan": {"count": 3}}}))
        assert Plan(request_of(str(recipe))).entries[0].settings["reward"] == reward
    recipe.write_text(yaml.dump({"method": "draft", "reward": "scene"}))
    assert "reward 'scene' is not differentiable" in message(lambda: Plan(request_of(str(recipe))))
    file = tmp_path / "my.py"
    file.write_text("def mine(method):\n    return method\n")
    def name(**changes):
        return Plan(request_of(f"{file}:mine", **changes)).published_runs()[0].folder.name
    before = name()
    assert name(seeds=5) == name(output=tmp_path / "elsewhere") == before != name(points=2)
    file.write_text("def mine(method):\n    return method.having()\n")
    assert name() != before


def test_a_sweep_scales_rate_and_clip_on_validation_prompts(request_of, tmp_path):
    recipe = tmp_path / "ddpo_twice.yaml"  # its second update has ratios that a clip can cut
    recipe.write_text(yaml.dump({"method": "ddpo", "train": {"updates": 2, "micro_batch": 48}}))
    made = Plan(request_of(str(recipe), "ddpo", "refl", "awm", reference="ddpo", sweep=[str(recipe), "ddpo", "refl"]))
    runs = made.sweep()
    assert [sum(run.entry.label == entry.label for run in runs) for entry in made.entries] == [9, 3, 3, 0]
    assert {run.seed for run in runs} == {3} and all("validation" in str(run.config.held_out) for run in runs)
    usual = made.run(made.entries[0], 0, plan.PUBLISHED)
    scaled = made.run(made.entries[0], 0, plan.TUNED, 3.0, 1 / 3)
    clip = clip_of(made.entries[0], 1.0)
    assert scaled.config.train.lr == pytest.approx(3 * usual.config.train.lr)
    assert scaled.config.parts["surrogate"] == pytest.approx({key: value / 3 for key, value in clip.items()})
    assert [run.folder for run in made.tuned_runs({"ddpo_twice": (1.0, 1.0)})] == [
        made.run(made.entries[0], seed, plan.PUBLISHED).folder for seed in range(3)]
    assert clip_of(made.entries[2], 1.0) == {}
    confirming = made.confirming({"ddpo": (3.0, 1.0), "refl": (1.0, 1.0)})
    assert [(run.entry.label, run.seed, run.lr, run.column) for run in confirming] == [
        ("ddpo", seed, 3.0, plan.SWEEP) for seed in (4, 5)]


def test_a_sweep_is_of_all_methods_or_of_named_ones(request_of):
    given = ("ddpo", "refl", "flow_grpo")
    assert {run.entry.label for run in Plan(request_of(*given, sweep=plan.ALL)).sweep()} == {*given}
    assert not Plan(request_of(*given)).sweep()
    with pytest.raises(UserError, match="--sweep: got 'dppo', expected methods of --methods, or all.*ddpo"):
        Plan(request_of(*given, sweep=["dppo"]))


def test_groups_that_are_drawn_again_and_selections_by_scores_are_measured_before_runs_are_listed(request_of):
    given = ("mix_grpo+dynamic_sampling", "ghpo", "scaf_grpo", "mix_grpo", "flow_grpo")
    assert [entry.label for entry in Plan(request_of(*given)).unforeseen] == [*given[:3]]
    made = Plan(request_of("b2_diffurl", "diffusion_dpo", "flow_grpo"))  # best and worst: two, whatever the scores
    assert [entry.label for entry in made.unforeseen] == ["b2_diffurl"]
    config = made.run(made.entries[1], 0, plan.PUBLISHED).config.model_copy(update={"method": "b2_diffurl"})
    costs = [epoch_cost(config, epoch) for epoch in range(200)]  # they grow with the trained interval
    made.learn(made.entries[0], costs[0], costs[1] // 2)
    runs = made.published_runs()[:3]
    assert runs[0].foretold is None and costs[1] < costs[150]
    assert sum(costs[:runs[0].config.train.epochs]) / 2 == pytest.approx(40_000, abs=costs[150])
    assert all(38_000 < run.foretold <= 40_000 for run in runs[1:])


@pytest.mark.parametrize("name, factor, low, high", [("cispo", 3.0, 1.0, 12.0), ("cispo", 1 / 3, 1.0, 4 / 3),
                                                     ("ppo", 3.0, 0.6, 0.6), ("gspo", 1 / 3, 1e-4, 4e-4 / 3)])
def test_a_bound_of_one_below_bounds_nothing_and_stays(name, factor, low, high):
    [entry] = entries([name], "starter_text", models.MODELS["starter_text"])
    assert clip_of(entry, factor) == {"low": pytest.approx(low), "high": pytest.approx(high)}


@pytest.mark.parametrize("factor", plan.FACTORS)
def test_every_loss_takes_its_scaled_clip(factor):
    for name in (name for name in PRESETS if not isinstance(preset(name).target, LatentEdits)):
        fields = clip_of(Entry(name, name, {"method": name}, {}), factor)
        taken = with_parts(preset(name), {"surrogate": fields}).loss.surrogate
        inner = fields.pop("surrogate", {})
        assert fields == {key: getattr(taken, key) for key in fields}, name
        assert inner == {key: getattr(taken.surrogate, key) for key in inner}, name


def test_a_clip_that_a_loss_refuses_is_reported_before_the_first_run(request_of, tmp_path):
    file = tmp_path / "narrow.py"
    file.write_text("""
from dataclasses import dataclass
from flowgrpo.objectives.surrogates import Clip

@dataclass(frozen=True)
class Narrow(Clip):
    def __post_init__(self):
        if self.high > 2e-4:
            raise ValueError(f"Narrow: high is {self.high}, expected 2e-4 at most")

def mine(method):
    return method.having(surrogate=Narrow())
""")
    recipe = tmp_path / "narrow.yaml"
    recipe.write_text(yaml.dump({"method": f"flow_grpo+{file}:mine", "train": {"updates": 2, "micro_batch": 48}}))
    with pytest.raises(UserError, match="Narrow: high is 0.0003.*, expected 2e-4 at most"):
        Plan(replace(request_of(str(recipe), "flow_grpo", sweep=[str(recipe)]), trusted=True)).sweep()


def test_wrapped_clips_and_most_epochs():
    [entry] = entries(["grpo+entropy_bonus"], "starter_text", models.MODELS["starter_text"])
    assert clip_of(entry, 3.0) == {"surrogate": {"low": pytest.approx(0.6), "high": pytest.approx(0.6)}}
    # 100 for the first epoch, 30 for each further one
    assert [epochs_of(100, 30, budget) for budget in (1, 100, 129, 130, 160)] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("arguments, error", [
    (["--methods", "mixgrpo"], "unknown method 'mixgrpo': did you mean 'mix_grpo'?"),
    (["--methods", "mix_grpo,mix_grpo"], "--methods: mix_grpo is given twice"),
    (["--methods", ","], "--methods: got none, expected names"),
    (["--methods", "mix_grpo", "--evaluations", "50"], "--evaluations: got 50, but the first epoch of mix_grpo takes"),
    (["--methods", "mix_grpo", "--model", "starter_text"], "got a method of denoisers"),
    (["--methods", "refl", "--model", "starter_video"], "reward 'motion' is not differentiable"),
    (["--methods", "mix_grpo", "--reference", "flow_gpo"], "unknown method 'flow_gpo'"),
    (["--methods", "none.yaml"], "no recipe at none.yaml")])
def test_what_cannot_be_run_is_one_line(arguments, error, tmp_path, capsys):
    assert main(["compare", "methods", *arguments, "--output", str(tmp_path / "bench")]) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "bench").exists()


def test_a_folder_holds_one_bench(request_of, tmp_path, capsys):
    request = request_of("mix_grpo")
    plan.begin(request)
    Plan(request_of("mix_grpo", evaluations=50_000))  # nothing has been trained
    done = request.output / "runs" / "a" / plan.RESULT
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    files = {side: len((request.output / "prompts" / f"{side}.jsonl").read_text().splitlines())
             for side in models.SIDES}
    assert files == {side: len(prompts) for side, prompts in models.split("starter").items()}
    Plan(request_of("ddpo", seeds=5))  # methods and seeds may be added
    with pytest.raises(UserError, match="holds a bench with evaluations 40000, got 50000: name another folder"):
        Plan(request_of("mix_grpo", evaluations=50_000))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    assert "notes holds other files and no bench" in message(Plan, request_of("mix_grpo", output=tmp_path / "notes"))


def test_expected_seconds_by_hand(request_of):
    runs = Plan(request_of("mix_grpo", seeds=1)).published_runs()
    # 40,000 of 100 evaluations in 2 s each; the prompts before, at every point and after, and 10 samples, 0.5 s each
    each = [400 * 2.0 + 0.5 * (10 + run.config.eval.prompts * (2 + run.config.train.epochs // run.config.eval.every))
            for run in runs]
    assert seconds(runs, TRIAL, 40_000, 10, 2) == pytest.approx(sum(each) / 2)
    runs[0].folder.mkdir(parents=True)
    runs[0].result.write_text(json.dumps({}))
    assert remaining([*runs, *runs]) == runs[1:]
    assert [duration(value) for value in (40, 720, 12_600)] == ["about 40 s", "about 12 min", "about 3.5 h"]


@pytest.mark.parametrize("asked, jobs, expected", [
    (None, 1, cores()), (None, 10_000, 1), ("1", 1, 1), ("100000", 1, cores()), ("0", 1, 1), ("4,2", 1, cores())])
def test_jobs_share_the_cores_within_the_threads_that_are_asked_for(asked, jobs, expected, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert Workers(jobs, tmp_path).threads == expected


def config(folder, method: str, micro_batch: int, guidance: float = 1.0, **parts):
    return validate({
        "method": method, "parts": parts, "reward": "bright", "output": str(folder), "tracker": "none", "device": "cpu",
        "precision": "fp32", "image": {"call": tiny.CALL}, "adapter": {"rank": 2},
        "eval": {"steps": 1, "prompts": 1, "grid": 1},
        "train": {"epochs": 3, "prompts": 2, "group": 3, "micro_batch": micro_batch, "guidance": guidance}})


def shortened(settings, **train):
    """Two epochs, of which the first alone checks its ratio, on a grid of 6 steps."""
    return settings.having({f"train.{key}": value for key, value in ({"epochs": 2, "steps": 6} | train).items()})


@differentiable
def bright(images, prompts):
    return images.flatten(1).mean(1)


def spent(settings) -> int:
    """Denoiser evaluations of the epochs of a run, without those that measure it."""
    prompts = [Prompt(text) for text in "abcde"]
    trainer = tiny.trainer_of(settings, {"bright": bright}, prompts)
    for trainer.epoch in range(settings.train.epochs):
        trainer.run_epoch()
    return trainer.policy.evaluations


# Parts of groups, or one group, as 4 rows do not hold two; every kind of replay, with guidance and without.
@pytest.mark.parametrize("method, guidance, micro_batch, parts", [
    ("flow_grpo", 1.0, 2, {}), ("flow_grpo", 1.0, 4, {}), ("flow_grpo_fast", 1.0, 2, {}), ("dance_grpo", 1.0, 2, {}),
    ("mix_grpo", 3.0, 2, {}), ("mix_grpo", 1.0, 4, {"plan": {"every": 1}}),
    ("mix_grpo_flash", 1.0, 2, {"plan": {"every": 1}}), ("mix_grpo+grpo_guard", 1.0, 4, {}),
    ("diffusion_nft", 1.0, 2, {}), ("diffusion_nft", 1.0, 4, {}), ("awm", 3.0, 2, {}), ("dgpo", 1.0, 2, {}),
    ("dgpo", 1.0, 4, {}), ("diffusion_dpo", 1.0, 4, {}), ("refl", 1.0, 2, {}),
    ("draft", 3.0, 4, {"plan": {"count": 2}}), ("alignprop", 1.0, 2, {})])
def test_a_run_costs_what_was_foretold(tmp_path, method, guidance, micro_batch, parts):
    settings = shortened(config(tmp_path, method, micro_batch, guidance, **parts))
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in range(2))


@pytest.mark.parametrize("method, staleness, guidance", [("flow_grpo", 1, 3.0), ("mix_grpo", 2, 1.0)])
def test_epochs_that_are_drawn_ahead_cost_a_replay_more(tmp_path, method, staleness, guidance):
    settings = shortened(config(tmp_path, method, 2, guidance), staleness=staleness, epochs=3)
    costs = [epoch_cost(settings, epoch) for epoch in range(3)]
    plain = [epoch_cost(shortened(settings, staleness=0), epoch) for epoch in range(3)]
    assert spent(settings) == sum(costs) and costs[0] == plain[0] and costs[1] > plain[1]


def test_the_most_epochs_within_a_budget(tmp_path):
    # 2 prompts of 3 rows: the step at which they part costs 2, another one 6. Rollout 2 + 9 * 6, replay of the window
    # 2 + 3 * 6, and in the first epoch once more for the first ratio.
    settings = config(tmp_path, "mix_grpo", 2)
    assert [epoch_cost(settings, epoch) for epoch in (0, 1, 24)] == [56 + 2 * 20, 56 + 20, 56 + 20]
    assert epoch_cost(settings, 25) == 56 - 4 + 20  # the window has moved: one more step per prompt
    assert epochs_for(settings, 96) == epochs_for(settings, 171) == epochs_for(settings, 1) == (1, 96)
    assert epochs_for(settings, 172) == (2, 172)


def test_previews_are_foretold_and_a_whole_run_reports_what_was(tmp_path):
    settings = config(tmp_path, "mix_grpo+sol_rl", 2, preview={"pool": 5, "steps": 2}).having(
        {"train.group": 4, "train.epochs": 2})
    # 2 prompts of 4 rows, each a noise of its own: previews 2 * 5 * 2, rollout 10 * 8, replay of the window 4 * 8, and
    # in the first epoch once more.
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [20 + 80 + 2 * 32, 20 + 80 + 32]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == 2 * (20 + 80) + 3 * 32
    assert summary["rollout_evaluations_per_sample"] == pytest.approx((20 + 80) / 8)
    assert summary["rollout_evaluations_saved_by_sharing"] == 0
    settings = config(tmp_path, "mix_grpo", 4)
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in "abcde"])
    assert summary["denoiser_evaluations"] == sum(epoch_cost(settings, epoch) for epoch in range(3))


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("method, parts", [("diffusion_dpo", {}), ("rpo", {"times": {"count": 2}})])
def test_a_run_on_recorded_pairs_costs_what_was_foretold(tmp_path, method, parts, micro_batch):
    texts = "abcde"
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in texts))
    settings = config(tmp_path, method, micro_batch, **parts).having({
        "preferences": file, "labels": "rewards" if method == "rpo" else "file", "train.group": 2, "train.epochs": 2})
    # 2 pairs, so 4 rows at each time: the old score, the reference's, the policy's own, and this once more for the
    # first ratio; no rollout.
    rows = 4 * parts.get("times", {}).get("count", 4)
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [4 * rows, 3 * rows]
    summary = run(settings, pipe=tiny.sd3(), functions={"bright": bright}, prompts=[Prompt(text) for text in texts])
    assert summary["denoiser_evaluations"] == 7 * rows


@pytest.mark.parametrize("guidance, edit, bases", [(1.0, {}, 4), (3.0, {"candidates": 2}, 8),
                                                   (1.0, {"acting": "pairs"}, 2)])
def test_a_run_of_edits_costs_its_bases(tmp_path, guidance, edit, bases):
    settings = config(tmp_path, "expo", 4, guidance, edit={"width": 8, "depth": 1} | edit,
                      value={"steps": 2, "batch": 4}).having({"train.group": 4, "train.epochs": 2})
    # 2 prompts, with a grid of 10 steps
    assert [epoch_cost(settings, epoch) for epoch in (0, 1)] == [2 * bases * 10 * (2 if guidance > 1 else 1)] * 2
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in (0, 1))


@pytest.mark.parametrize("method", ["flow_grpo", "dgpo"])
def test_a_second_pass_costs_what_was_foretold(tmp_path, method):
    settings = shortened(config(tmp_path, method, 2), inner_epochs=2)
    assert spent(settings) == sum(epoch_cost(settings, epoch) for epoch in range(2))


ARGUMENTS = ["--model", "starter_text", "--methods", "grpo,rloo", "--evaluations", "60000", "--seeds", "1",
             "--points", "1", "--prompts", "8", "--jobs", "1"]


def compared(output: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    return main(["compare", "methods", *ARGUMENTS, "--output", str(output)])


def wait_for(condition: Callable[[], Any]) -> Any:
    """The first value that is true, within ten minutes."""
    for _ in range(12_000):
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not become true")


def test_an_interrupted_bench_goes_on_and_writes_its_results(tmp_path, capsys):
    output = tmp_path / "bench"
    first = Forked(compared, output)
    wait_for(lambda: [*output.glob("runs/*/result.json")])
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130 and "interrupted: runs are saved; the same command goes on" in first.streams()[0]
    finished = {file: file.stat().st_mtime_ns for file in output.glob("runs/*/result.json")}
    assert main(["compare", "methods", *ARGUMENTS, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert len(finished) == 1 and "1 more finished), 1 at a time" in said
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    results = json.loads((output / "results.json").read_text())
    assert [method["label"] for method in results["methods"]] == ["grpo", "rloo"] and results["unit"] == "tokens"
    for method in results["methods"]:
        assert [run["seed"] for run in method["runs"]] == [0]
        assert all(run["evaluations"] > 37_000 and len(run["scores"]) == 8 for run in method["runs"])
        assert method["kl"] > 0 and method["diversity"] > 0 and method["accuracy"] == sum(
            sum(run["scores"]) for run in method["runs"]) / 8
    assert results["methods"][0]["seconds_ratio"] == 1
    first, second = results["methods"]
    assert first["difference"] is None and second["difference"]["p"] is None  # of one seed
    assert second["difference"]["mean"] == pytest.approx(second["accuracy"] - first["accuracy"])
    assert second["software"].keys() >= {"flowgrpo", "torch", "diffusers", "transformers", "peft"}
    assert "| grpo |" in (output / "results.md").read_text() and "grpo & 1 &" in (output / "results.tex").read_text()
    assert (output / "results.csv").read_text().count("\n") == 3
    assert (output / "curves.pdf").read_bytes().startswith(b"%PDF")
    page = (output / "index.html").read_text()
    assert {*re.findall(r"""\b(?:src|href)=["']?([^\s"'>]*)""", page)} <= {"data:,"}  # it loads nothing
    assert re.search('<svg [^>]*aria-label="rloo: accuracy from', page)


def is_running(process: int) -> bool:
    """A process that has ended, and waits for its parent to learn it, has no command line."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_bench_ends_its_workers(number, tmp_path):
    bench = Forked(compared, tmp_path / "bench")
    try:
        wait_for(lambda: [*tmp_path.glob("bench/logs/*.log")])
        workers = [int(process) for task in Path(f"/proc/{bench.process.pid}/task").iterdir()
                   for process in (task / "children").read_text().split()]
        assert any(map(is_running, workers))
        os.kill(bench.process.pid, number)
        assert bench.wait(120) == {signal.SIGTERM: -number, signal.SIGINT: 130}[number]
        wait_for(lambda: not any(map(is_running, workers)))
    finally:
        bench.kill()


def test_a_worker_begins_no_task_of_a_bench_that_has_ended(tmp_path):
    command = [sys.executable, "-m", "flowgrpo.tools.bench.worker", "trial", f"{tmp_path}/none.yaml", f"{tmp_path}/r"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGTERM and not ended.stdout and not [*tmp_path.iterdir()]
