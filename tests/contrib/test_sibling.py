"""A distilled sibling beside a run: projections by hand, its weights in place and back, measurements, and resume."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.contrib import sibling
from flowgrpo.contrib.sibling import match, project, span
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation import kept, siblings
from flowgrpo.evaluation.report import report
from flowgrpo.evaluation.samplers import draw_one
from flowgrpo.evaluation.siblings import Sibling, sibling_of
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from flowgrpo.samplers.rollout import generators
from flowgrpo.training import checks, memory
from tests.helpers import loop, tiny
from tests.helpers.refusals import message, only_line, refused
from tests.helpers.tiny_runs import assert_same_weights, lines, same

PROMPTS = [Prompt(f"{number} {text}") for number in range(6) for text in tiny.PROMPTS]
ONE = {"parts__plan": {"size": 1}}  # SDE step, as of two the last is not trained


@pytest.fixture(scope="module")
def turbo(tmp_path_factory):
    """A folder with the tiny pipeline under other weights."""
    pipe, generator = tiny.sd3(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in pipe.transformer.parameters():
            value += 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=generator)
    return tiny.save(pipe, tmp_path_factory.mktemp("turbo") / "tiny-turbo")


def settings(folder, turbo, **options):
    on = {"model": str(turbo), "steps": 2} | options.pop("on", {})
    return tiny.config(folder, **{"train__lr": 0.05, "eval__on": on, "eval__prompts": 12} | options)


def go(config, resume: bool = False):
    return run(config, resume, pipe=tiny.sd3(), functions={"red": tiny.red}, prompts=PROMPTS)


def trainer(turbo, **options):
    return tiny.trainer(**{"eval__on": {"model": str(turbo), "steps": 2}} | options)


def of(made):
    return loop.extension(made, "OnSibling")


# --- formulas --------------------------------------------------------------------------------------------------------
def test_a_projection_by_hand():
    u, v = span(torch.diag(torch.tensor([2.0, 5.0, 0.0])), 1)
    torch.testing.assert_close(u.abs(), torch.tensor([[0.0], [1.0], [0.0]]))
    torch.testing.assert_close(v.abs(), torch.tensor([[0.0], [1.0], [0.0]]))
    down, up = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0], [5.0], [6.0]])
    project(down, up, u, v)
    torch.testing.assert_close(up @ down, torch.tensor([[4.0, 0.0, 12.0], [0.0, 0.0, 0.0], [6.0, 0.0, 18.0]]))
    u, v = span(torch.zeros(4, 3), 2)  # an equal weight has no directions
    assert u.shape == (4, 0) and v.shape == (3, 0)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 4, 3, 3), (1100, 1050)])
def test_nothing_is_left_in_the_span(shape):
    torch.manual_seed(0)
    difference = (torch.randn(shape[0], 3) @ torch.randn(3, math.prod(shape[1:]))).view(shape)
    u, v = span(difference, 8)
    assert u.shape == (shape[0], 3) and v.shape == (math.prod(shape[1:]), 3)  # of rounding there is no direction
    torch.testing.assert_close(u @ (u.T @ difference.flatten(1)), difference.flatten(1), rtol=1e-3, atol=1e-3)
    down, up = torch.randn(2, *shape[1:]), torch.randn(shape[0], 2)
    before, size = down.clone(), (up @ down.flatten(1)).norm()
    project(down, up, u, v)
    product = up @ down.flatten(1)
    assert (u.T @ product).norm() < 1e-4 * size and (product @ v).norm() < 1e-4 * size and product.norm() > 0.05 * size
    once = down.clone()
    project(down, up, u, v)
    torch.testing.assert_close(down, once)
    assert not torch.equal(before, once)


def test_epochs_take_turns_by_their_share(turbo):
    for share, places in ((0.5, [1, 3, 5, 7]), (0.25, [3, 7]), (0.75, [1, 2, 3, 5, 6, 7])):
        made = of(trainer(turbo, train__sibling="replay", train__sibling_share=share, **ONE))
        assert [epoch for epoch in range(8) if made.replays(epoch)] == places


# --- weights ---------------------------------------------------------------------------------------------------------
def of_stock(turbo, lora=None) -> torch.Tensor:
    """The image of the stock pipeline, with a LoRA of a folder."""
    stock = load_pipeline(str(turbo))
    if lora:
        stock.load_lora_weights(lora)
    return stock("red", generator=torch.Generator().manual_seed(4), num_inference_steps=3, guidance_scale=1.0,
                 output_type="pt", **tiny.CALL).images.float()


def test_inside_the_policy_is_the_sibling_and_outside_itself_to_the_bit(turbo):
    made = trainer(turbo)
    policy, worn = made.policy, of(made).worn
    tiny.stir(policy)
    before, drawn = tiny.weights(policy), []
    conditioning = policy.encode(["red"])
    for inside in (False, True):
        with policy.reference(), worn.on() if inside else policy.reference():
            drawn.append(policy.generate(conditioning, generators([4]), 3, 1.0))
    torch.testing.assert_close(drawn[1], of_stock(turbo), rtol=1e-4, atol=1e-5)
    assert (drawn[0] - drawn[1]).abs().max() > 1e-2
    assert same(before, tiny.weights(policy))
    assert policy.pipe.scheduler is policy.stock is policy.driver.stock is not worn.scheduler


def test_with_the_lora_it_draws_as_the_stock_pipeline_with_the_file(turbo, tmp_path):
    made = trainer(turbo)
    policy = tiny.stir(made.policy)
    policy.weights.save(tmp_path)
    with of(made).worn.on():
        drawn = policy.generate(policy.encode(["red"]), generators([4]), 3, 1.0)
    torch.testing.assert_close(drawn, of_stock(turbo, tmp_path), rtol=1e-4, atol=1e-5)


def test_only_weights_that_differ_are_held_and_a_lacking_guidance_is_zero():
    module, other = (torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)}) for _ in range(2))
    other["a"].load_state_dict(module["a"].state_dict())
    assert match("part", module, other).keys() == {"b.weight", "b.bias"}
    module["guidance_embedder"] = torch.nn.Linear(1, 2)
    values = match("part", module, other)
    assert not values["guidance_embedder.weight"].any() and not values["guidance_embedder.bias"].any()
    refused("has a weight guidance_embedder.weight, which the trained model lacks", match, "part", other, module)
    other["b"] = torch.nn.Linear(3, 1)
    refused(r"has it in the shape \[1, 3\] as b.weight \[1, 2\]", match, "part", module, other)


def test_its_weights_count_in_every_phase_of_the_memory(turbo):
    made = trainer(turbo)
    policy = made.policy
    plain = tiny.trainer()
    assert "OnSibling" not in loop.names(plain)
    ours, theirs = (memory.memory(each.policy, each.config, each.policy.encode(["red"])) for each in (made, plain))
    frozen = sum(value.nbytes for value in policy.denoisers["transformer"].parameters() if not value.requires_grad)
    held = sum(value.nbytes for value in of(made).worn.values["transformer"].values())
    assert 0 < held <= frozen
    for phase, parts in ours.items():
        assert parts.pop("sibling's denoiser") == frozen
        assert parts == theirs[phase]


# --- runs ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(turbo, tmp_path_factory):
    """A run that is measured on its sibling on the way, and its weights chosen there."""
    config = settings(tmp_path_factory.mktemp("runs"), turbo, eval__every=1, eval__best="on", train__epochs=3,
                      train__save_every=1, train__keep=9, eval__samples=2)
    return config, go(config)


@pytest.mark.fast
def test_a_run_keeps_the_weights_that_are_best_on_its_sibling(finished):
    config, summary = finished
    gains = [line["on/gain"] for line in lines(config.folder)]
    assert len({*gains}) == 3 and all(line["on/edge_width"] > 0 for line in lines(config.folder))
    assert f"kept the weights of epoch {1 + gains.index(max(gains))}, the best by held-out on" in summary["kept"]


@pytest.mark.fast
def test_what_a_run_writes_is_what_the_command_measures(finished):
    config, summary = finished
    file = next((config.folder / kept.FOLDER).glob("*.json"))
    written = json.loads(file.read_text())
    [worn] = written["weights"]
    assert written["steps"] == 2 and written["samples"] == 2 and worn["weight"] == 1
    means = [worn["rewards"]["red"][arm]["mean"] for arm in ("before", "after", "change")]
    assert means[1] - means[0] == pytest.approx(means[2]) and worn["gain"]["mean"] == pytest.approx(means[2])
    assert written["own"]["gain"]["mean"] == pytest.approx(summary["after"]["red"] - summary["before"]["red"])
    assert worn["kept"]["mean"] == pytest.approx(means[2] / written["own"]["gain"]["mean"], rel=1e-6)
    assert file.with_suffix(".png").is_file() and kept.sentence(written).lower() in summary["kept"].lower()
    [shown] = report.data(config.folder)["siblings"]
    assert shown["said"] == kept.sentence(written) and shown["page"].startswith("data:image/png")


def test_a_run_that_is_killed_and_resumed_replays_the_same(turbo, tmp_path):
    options = dict(train__sibling="replay", train__epochs=4, train__save_every=1, train__keep=9, **ONE)
    whole = settings(tmp_path / "whole", turbo, **options)
    go(whole)
    assert [line["on/epoch"] for line in lines(whole.folder)] == [0, 1, 0, 1]
    half = settings(tmp_path / "half", turbo, **options)
    shutil.copytree(whole.folder, half.folder)
    shutil.rmtree(half.folder / kept.FOLDER)
    for epoch in (3, 4):  # as after a kill in epoch 3
        shutil.rmtree(half.folder / "checkpoints" / f"epoch-{epoch:05d}")
    go(half, resume=True)
    assert_same_weights(*(load_file(each.folder / LORA_FILE) for each in (whole, half)))


def test_an_epoch_on_the_sibling_samples_and_trains_its_few_steps(turbo):
    made = trainer(turbo, train__sibling="replay", train__updates=1, **ONE)
    policy, own = made.policy, made.rollouts
    tiny.stir(policy)
    made.epoch = 1
    with made.extensions.around_epoch():
        assert made.rollouts is not own and len(made.rollouts.grid) == 3
        drawn = loop.draw(made)
        parts = drawn.parts
        for part in parts:  # the replay repeats the rollout under the sibling's weights
            for k, rows, new in made.rollouts.replay(part, drawn.conditioning):
                old = part.transitions[k].old.rows(rows)
                torch.testing.assert_close(new.logp.cpu(), old.logp, rtol=1e-4, atol=1e-4)
    assert made.rollouts is own and len(own.grid) == 7
    part, (k, rows, new) = parts[0], next(own.replay(parts[0], drawn.conditioning))
    assert (new.logp.detach().cpu() - part.transitions[k].old.rows(rows).logp).abs().max() > 1e-2  # not of the base's


def test_what_a_run_trains_is_orthogonal_to_the_difference(turbo, tmp_path):
    config = settings(tmp_path, turbo, train__sibling="orthogonal", train__sibling_rank=3)
    go(config)
    base, other = tiny.sd3().transformer, load_pipeline(str(turbo)).transformer
    values = load_file(config.folder / LORA_FILE)
    layers = [key.removesuffix(".lora_A.weight") for key in values if key.endswith(".lora_A.weight")]
    moved = 0.0
    for layer in layers:
        name = layer.removeprefix("transformer.")
        u, v = span(other.get_submodule(name).weight - base.get_submodule(name).weight, 3)
        product = values[f"{layer}.lora_B.weight"] @ values[f"{layer}.lora_A.weight"]
        assert (u.T @ product).abs().max() < 1e-5 and (product @ v).abs().max() < 1e-5
        moved += float(product.norm())
    assert layers and moved > 1e-3


@pytest.mark.parametrize("options, said", [
    (dict(train__sibling="replay", eval__on=None), "eval.on is not set"),
    (dict(train__sibling_share=0.25), "train.sibling is None"),
    (dict(eval__prompts=0), "eval.prompts is 0"),
    (dict(eval__best="on", eval__on=None, eval__every=1), "eval.best names the reward 'on'"),
    (dict(adapter__rank=0), "trains all weights"),
    (dict(adapter__dora=True), "a DoRA"),
    (dict(memory__offload="block_level"), "memory.offload"),
    (dict(on={"model": None}), "expected a distilled one"),
    (dict(train__sibling="replay", train__staleness=1), "in turn of two models"),
    (dict(train__sibling="orthogonal", train__sibling_rank=99), "leaves transformer."),
    (dict(train__sibling="replay"), "replay at 2 steps: a strength of 1 leaves 2 of 2 steps: Sliding")])
def test_what_does_not_go_with_a_sibling_is_one_line(turbo, tmp_path, options, said):
    assert said in message(lambda: go(settings(tmp_path, turbo, **options)))


def test_a_text_run_reads_no_sibling():
    with pytest.raises(UserError, match="eval.on"):
        run(load(None, {"model": "starter_text", "method": "grpo", "eval.on": {"model": "starter_consistency"},
                        "prompts": "starter_text", "reward": "numeric_match"}))


# --- the command -----------------------------------------------------------------------------------------------------
def test_the_steps_of_a_sibling_are_its_cards_or_asked_for(turbo, tmp_path):
    config = load(None, {"model": "starter"})
    assert sibling_of(config, "starter_consistency") == Sibling("starter_consistency", 4, 1.0)
    assert sibling_of(config, str(turbo)).steps == 4  # by its name
    assert sibling_of(config, str(turbo), steps=3, guidance=2.0) == Sibling(str(turbo), 3, 2.0)
    lightning = sibling_of(config, "starter", "Lightning-8steps.safetensors")
    assert lightning.steps == 8 and lightning.name == "starter + Lightning-8steps.safetensors"
    assert [lora.path for lora in lightning.files(config).loras_with_scales] == ["Lightning-8steps.safetensors"]
    hyper = load(None, {"model": "starter", "eval.on": {"lora": "Hyper-FLUX-8steps.safetensors", "lora_scale": 0.125}})
    assert [(lora.path, lora.scale) for lora in sibling.setting(hyper).files(hyper).loras_with_scales] == [
        ("Hyper-FLUX-8steps.safetensors", 0.125)]
    for model, said in (("starter", "is the model that the run trained"),
                        ("other", r"other is not known .*: check the name, or give its steps \(--on-steps\)")):
        refused(said, sibling_of, config, model)
    with pytest.raises(UserError, match=r"eval.on: other is not known .* give its steps \(eval.on.steps\)"):
        sibling.setting(load(None, {"model": "starter", "eval.on": {"model": "other"}}))
    refused("eval.on.lora is 'Hyper-FLUX-8steps.safetensors', which has no LoRA", checks.check, hyper)


@pytest.fixture(scope="module")
def starter_run(tmp_path_factory):
    """An epoch of the starter, whose scores are then given a gain of 0.5 on average."""
    folder = tmp_path_factory.mktemp("starter")
    config = load("configs/starter.yaml", {
        "output": str(folder), "name": "run", "train.epochs": 1, "train.prompts": 1, "train.group": 4,
        "eval.prompts": 6, "eval.steps": 2, "train.steps": 5, "train.lr": 1e-3, "tracker": "none",
        "device": "cpu", "precision": "fp32"})
    run(config)
    for name, values in (("before", [0.0] * 6), ("after", [0.4, 0.5, 0.6] * 2)):
        file = config.folder / "report" / f"{name}.json"
        content = json.loads(file.read_text())
        content["scores"] = dict.fromkeys(content["scores"], values)
        file.write_text(json.dumps(content))
    return config


def test_the_command_measures_a_finished_run_on_a_packaged_sibling(starter_run, capsys):
    assert main(["eval", str(starter_run.folder), "--on", "starter_consistency", "--on-steps", "2", "--weights",
                 "0.5,1"]) == 0
    out = capsys.readouterr().out
    [(file, found)] = kept.read(starter_run.folder).items()
    assert found["steps"] == 2 and found["prompts"] == 6 and [each["weight"] for each in found["weights"]] == [0.5, 1]
    own = found["own"]["gain"]["mean"]
    assert own == pytest.approx(2 * 0.5)  # two rewards of weight 1
    for each in found["weights"]:
        assert each["kept"]["mean"] == pytest.approx(each["gain"]["mean"] / own)
    assert str(file) in out and "on starter_consistency at 2 steps" in " ".join(out.split())
    config = load(str(starter_run.folder / "config.yaml"))
    with siblings.worn_sibling(config, sibling_of(config, "starter_consistency"), starter_run.folder, "fp32") as (
            policy, worn):
        images = []
        for weight in (0.0, 1.0):
            with worn(weight):
                images.append(policy.generate(policy.encode(["a circle"]), generators([4]), 2, 1.0))
    stock = load_pipeline("starter_consistency")
    plain = draw_one(stock, Prompt("a circle"), 4, {"num_inference_steps": 2, "guidance": 1.0,
                                                    "max_sequence_length": 1})
    torch.testing.assert_close(images[0][0], plain, rtol=1e-3, atol=1e-3)
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("options, said", [
    (["--on", "starter"], "is the model that the run trained"),
    (["--on", "starter_video", "--on-steps", "2"], "does not fit starter_video"),
    (["--on", "starter_consistency", "--steps", "2"], "--steps: does not go with --on"),
    (["--suite", "starter", "--weights", "1"], "--weights: does not go with --suite"),
    (["--on", "starter_consistency", "--weights", "1,1"], "expected different numbers above 0"),
    (["--on", "starter_consistency", "--weights", "-1"], "expected numbers above 0"),
    (["--on", "starter", "--on-lora", "none-8steps.safetensors"], "--on-lora is 'none-8steps.safetensors', which has"),
    ([], "expected --suite")])
def test_what_cannot_be_measured_is_one_line(starter_run, options, said, capsys):
    assert said in only_line(capsys, "eval", starter_run.folder, *options)


def test_a_run_without_a_gain_or_a_lora_has_nothing_to_keep(finished, starter_run, tmp_path):
    config, _ = finished
    place = tmp_path / "run"
    shutil.copytree(starter_run.folder, place)
    shutil.copy(place / "report" / "before.json", place / "report" / "after.json")
    with pytest.raises(UserError, match="has no gain to keep: its trained rewards changed by 0.000"):
        siblings.evaluate(str(place), "starter_consistency")
    with pytest.raises(UserError, match="trained all weights"):
        siblings.own_scores(place, config.model_copy(update={"adapter": config.adapter.model_copy(update={"rank": 0})}))
    shown = json.loads((place / "before.json").read_text())
    shown["settings"]["shown"][0][0] = "another prompt"
    (place / "before.json").write_text(json.dumps(shown))
    refused("are not those that the run measured", siblings.prompts_of, place, load(str(place / "config.yaml")))


def test_totals_and_the_sentence_by_hand():
    scores = {"a": [1.0, 0.0, math.nan, math.nan], "b": [0.5, math.nan, 1.0, math.nan], "c": [9.0, 9.0, 9.0, 9.0]}
    found = kept.totals(scores, {"a": 1.0, "b": 2.0}, 1)
    assert found[:3].tolist() == [2.0, 0.0, 2.0] and math.isnan(found[3])
    assert kept.totals(scores, {"a": 1.0, "b": 2.0}, 2).tolist() == [1.0, 2.0]
    whole = {"mean": 0.5, "low": 0.4, "high": 0.6}
    worn = [{"weight": 1, "gain": {"mean": 0.1}, "kept": {"mean": 0.2, "low": 0.1, "high": 0.3}},
            {"weight": 0.5, "gain": {"mean": 0.4}, "kept": {"mean": 0.84, "low": 0.7, "high": 0.98}}]
    found = {"name": "X", "steps": 4, "own": {"gain": whole}, "weights": worn}
    said = "on X at 4 steps: kept 0.20 [0.10, 0.30] of the gain"
    assert kept.sentence(found) == f"{said}; 0.84 with the LoRA at 0.5"
    assert kept.sentence(found | {"weights": worn[:1]}) == said
    assert kept.sentence(found | {"weights": worn[1:]}) == (
        "on X at 4 steps: kept 0.84 [0.70, 0.98] of the gain with the LoRA at 0.5")
    assert kept.sentence(found | {"own": {"gain": whole | {"low": -0.1}}}) == "on X at 4 steps: no gain to keep"
