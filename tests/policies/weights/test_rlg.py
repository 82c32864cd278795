"""RLG: base + weight * (tuned - base), in closed form on Gaussians, and on tiny pipelines through every command."""

import contextlib
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image

from flowgrpo.cli import main
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import columns, findings, samplers
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.evaluation.pages import figures
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline
from flowgrpo.policies.pipelines.rlg import Branches, extrapolate, rl_guidance
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.policies.weights.trainable import lora_layers
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment
from flowgrpo.storage.json_files import finite
from tests.evaluation.test_columns import alone, drawn
from tests.evaluation.test_images import make_run, pixels
from tests.helpers import tiny
from tests.helpers.refusals import message

STEPS = 64  # sigmas that fp32 holds exactly, times 1000 too
WEIGHTS = (0.0, 0.5, 1.0, 1.5, 3.0)
MEAN = 3.0
ASKED = {"num_inference_steps": 2, "guidance_scale": 3.0, **tiny.CALL}


@pytest.fixture(scope="module", params=[2, 0], ids=["lora", "all weights"])
def run(tmp_path_factory, model, request):
    return make_run(tmp_path_factory.mktemp("runs") / "run", model, 0.3 if request.param else 0.1, rank=request.param)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, model):
    return make_run(tmp_path_factory.mktemp("runs") / "run", model, 0.3)


class Field(torch.nn.Module):
    """The velocity E[eps - x0 | x] of data N(mean, 1): with V = (1-s)^2 + s^2, (2s-1)/V (x - (1-s) mean) - mean."""

    def __init__(self, mean: float):
        super().__init__()
        self.mean = mean

    def forward(self, x, timestep):
        s = timestep.double() / 1000
        return ((2 * s - 1) / ((1 - s) ** 2 + s**2) * (x - (1 - s) * self.mean) - self.mean,)


def shrink() -> float:
    """By what the Euler steps multiply the deviation, whatever the mean: the product of 1 - D (2s-1)/V."""
    sigmas = [(STEPS - k) / STEPS for k in range(STEPS)]
    return math.prod(1 - (2 * s - 1) / ((1 - s) ** 2 + s**2) / STEPS for s in sigmas)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_gaussians_move_by_the_weight_and_keep_their_deviation(weight):
    """Base N(0, 1), tuned N(3, 1): the guided flow is that of N(3 w, 1), by our Euler steps in float64 and by the stock
    scheduler in its float32. Noise and its negative are drawn, so that the mean is that of the flow."""
    half = torch.randn(50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise, tuned = torch.cat([half, -half]), Field(MEAN)
    ours, stock = PolicyScheduler.over(FlowMatchEulerDiscreteScheduler()), FlowMatchEulerDiscreteScheduler()
    ours.follow(Segment(torch.linspace(1, 0, STEPS + 1, dtype=torch.float64), range(STEPS)))
    ours.set_timesteps(STEPS)
    stock.set_timesteps(sigmas=[(STEPS - k) / STEPS for k in range(STEPS)])
    for scheduler, tolerance in ((ours, 1e-10), (stock, 1e-4)):
        x = noise
        with rl_guidance({tuned: Field(0.0)}, weight):
            for t in scheduler.timesteps:
                x = scheduler.step(tuned(x, t)[0], t, x, return_dict=False)[0]
        assert (x - (weight * MEAN + shrink() * noise)).abs().max() < tolerance
        assert abs(x.mean() - weight * MEAN) < tolerance
    assert abs(shrink() - 1) < 2 / STEPS  # towards 1 with finer steps


def test_a_blend_by_hand():
    base, tuned = torch.tensor([1.0, -2.0]), torch.tensor([2.0, 2.0])
    assert extrapolate(base, tuned, 3.0).tolist() == [4.0, 10.0]
    assert extrapolate(base, tuned, 0.25).tolist() == [1.25, -1.0]
    nested = extrapolate(({"a": base}, [base], None, 1), ({"a": tuned}, [tuned], None, 2), 2.0)
    assert nested[0]["a"].tolist() == nested[1][0].tolist() == [3.0, 6.0] and nested[2:] == (None, 2)
    assert extrapolate(torch.tensor([1]), torch.tensor([4]), 2.0).tolist() == [4]  # no floats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_blend_rounds_once_and_ends_at_either_side(dtype):
    base, tuned = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    assert torch.equal(extrapolate(base, tuned, 0.0), base) and torch.equal(extrapolate(base, tuned, 1.0), tuned)
    exact = base.double() + 2.5 * (tuned.double() - base.double())
    ulp = torch.finfo(dtype).eps * exact.abs() + 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert extrapolate(base, tuned, 2.5).dtype == dtype
    assert ((extrapolate(base, tuned, 2.5).double() - exact).abs() <= ulp).all()


def test_modules_are_left_as_they_were():
    tuned, x, t = Field(MEAN), torch.ones(1, 1), torch.tensor(500.0)
    with pytest.raises(ZeroDivisionError), rl_guidance({tuned: Field(0.0)}, 2.0):
        assert tuned(x, t)[0].item() == -2 * MEAN
        1 / 0
    assert "forward" not in vars(tuned) and tuned(x, t)[0].item() == -MEAN
    tuned.forward = lambda *_: (7.0,)  # such as hooks put in place
    with rl_guidance({tuned: lambda *_: (1.0,)}, 0.0):
        assert tuned() == (1.0,)
    assert tuned() == (7.0,)


# --- pipelines -------------------------------------------------------------------------------------------------------
def picture(pipe, at=None, **asked) -> torch.Tensor:
    with at or contextlib.nullcontext():
        return samplers.draw_one(pipe, Prompt("a cat"), 5, ASKED | asked)


def latents(pipe, steps: int, **asked) -> torch.Tensor:
    with torch.no_grad():
        return pipe("a cat", generator=torch.Generator().manual_seed(5), num_inference_steps=steps, guidance_scale=4.0,
                    output_type="latent", return_dict=False, **asked)[0].double()


def test_at_0_it_is_the_base_and_at_1_the_tuned_model_bit_for_bit(model, run):
    pipe, touched = load_pipeline(str(model)), load_pipeline(str(model))
    base = picture(pipe)
    loading.load_tuned(pipe, run)
    tuned, branches = picture(pipe), loading.load_branches(touched, run)
    assert torch.equal(picture(touched, branches.at(0)), base)
    assert torch.equal(picture(touched, branches.at(1)), tuned)
    between, beyond = picture(touched, branches.at(0.5)), picture(touched, branches.at(1.5))
    assert all((one - two).abs().max() > 1e-3 for one, two in [(base, tuned), (between, base), (between, tuned),
                                                               (beyond, tuned)])
    assert torch.equal(picture(touched), tuned)  # what was blended has left nothing behind


def test_the_blend_itself_ends_at_base_and_tuned_bit_for_bit(model, run):
    """Without the shortcuts: a weight that only compares unequal to 0 and 1 runs both."""
    class Number(float):
        def __eq__(self, other):
            return False

        def __ne__(self, other):
            return True
    pipe = load_pipeline(str(model))
    base, branches = picture(pipe), loading.load_branches(pipe, run)
    tuned, calls = picture(pipe), []
    [module] = denoisers(pipe).values()
    module.register_forward_hook(lambda *_: calls.append(1))
    first = next(iter(branches._bases().values()))
    for weight, expected in ((0, base), (1, tuned)):
        counted = {module: lambda *args, **kwargs: (calls.append(1), first(*args, **kwargs))[1]}
        assert torch.equal(picture(pipe, rl_guidance(counted, Number(weight))), expected)
        assert len(calls) == 4  # two steps, each once by the base and once by the tuned
        calls.clear()


@pytest.mark.parametrize("make", [tiny.sd3, tiny.sd15], ids=["flow", "noise"])
def test_guided_latents_are_linear_in_the_weight_after_one_step(make):
    """With classifier-free guidance, so that blending before it is blending the guided outputs."""
    pipe, asked = make(), {"height": 16, "width": 16} if make is tiny.sd15 else tiny.CALL
    base = latents(pipe, 1, **asked)
    [module] = denoisers(pipe).values()
    first = denoisers(pipe)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), module)
    branches, tuned = Branches(pipe, first), latents(pipe, 1, **asked)
    assert (tuned - base).abs().max() > 1e-3
    for weight in WEIGHTS:
        with branches.at(weight):
            found = latents(pipe, 1, **asked)
        torch.testing.assert_close(found, base + weight * (tuned - base), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_policys_own_sampler_is_guided_as_the_stock_pipeline_is(rank):
    policy = tiny.stir(tiny.policy(rank=rank, guidance=3.0))
    conditioning = policy.encode(["red", "a cat"])
    grid = policy.stock_grid(conditioning, 3)
    def ran() -> tuple[torch.Tensor, int]:
        before = policy.evaluations
        with torch.no_grad():
            last, _ = policy.run(Segment(grid, range(3)), conditioning, generators=policy.generators([1, 2]))
        return last, policy.evaluations - before
    tuned, cost = ran()
    with policy.reference():
        base, _ = ran()
    found = {}
    for weight in (0.0, 1.0, 1.5):
        with policy.rl_guidance(weight):
            found[weight] = ran()[0]
    assert torch.equal(found[0.0], base) and torch.equal(found[1.0], tuned)
    before = policy.evaluations
    with policy.rl_guidance(1.5):
        stock = policy.generate(conditioning, policy.generators([1, 2]), 3, 3.0, output_type="latent")
    assert policy.evaluations - before == 2 * cost
    torch.testing.assert_close(found[1.5], stock, rtol=0, atol=1e-5)
    assert (found[1.5] - tuned).abs().max() > 1e-3 and torch.equal(ran()[0], tuned)


def test_a_tuned_text_encoder_is_refused_between_and_switched_off_at_0(model):
    pipe = load_pipeline(str(model))
    base, first = picture(pipe), denoisers(pipe)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    inject_adapter_in_model(config, pipe.text_encoder)
    branches = Branches(pipe, first)
    assert lora_layers(pipe.text_encoder) and not torch.equal(picture(pipe, branches.at(1)), base)
    assert torch.equal(picture(pipe, branches.at(0)), base)
    assert "RLG with weight 1.5: the text_encoder was tuned too" in message(branches.at, 1.5)


# --- commands --------------------------------------------------------------------------------------------------------
def test_sample_draws_with_the_weight(tmp_path, model, lora_run):
    def one(name, *options):
        assert main(["sample", str(model), "--prompt", "a cat", "--steps", "2", "--guidance", "1.5", "--output",
                     str(tmp_path / name), *options]) == 0
        [file] = (tmp_path / name).iterdir()
        return pixels(file)
    asked = ["--lora", str(lora_run / LORA_FILE)]
    base, tuned = one("base"), one("tuned", *asked)
    assert (one("0", *asked, "--rlg", "0") == base).all() and (one("1", *asked, "--rlg", "1") == tuned).all()
    beyond = one("2", *asked, "--rlg", "2")
    assert np.abs(beyond - tuned).max() > 1
    # Further from the base in the tuned model's direction.
    assert ((beyond - base) * (tuned - base)).sum() > ((tuned - base) ** 2).sum()


def test_columns_of_weights_go_from_the_base_to_the_result_and_beyond(tmp_path, lora_run):
    page, heads = drawn(lora_run, "rlg", ["2", "0", "1"], tmp_path)
    assert heads[:3] == ["rlg 2", "rlg 0", "rlg 1"]
    assert (page.images[1] == alone(lora_run, 0, lora=False)).all()
    assert (page.images[2] == alone(lora_run, 0)).all()
    assert np.abs(page.images[0] - page.images[2]).max() > 1
    _, heads = drawn(lora_run, "rlg", [], tmp_path, count=1)
    assert heads[:5] == ["rlg 0", "rlg 0.5", "rlg 1", "rlg 1.5", "rlg 2"]


def test_a_grid_shows_the_base_beside_the_weight(tmp_path, lora_run, capsys):
    asked = ["compare", "grid", str(lora_run), "--count", "2", "--trust-run", "--output"]
    for name, weight in (("0", "0"), ("1", "1"), ("2", "2")):
        assert main([*asked, str(tmp_path / f"{name}.png"), "--rlg", weight]) == 0
    columns.grid(lora_run, None, 2, 0, tmp_path / "plain.png")
    pages = {name: pixels(tmp_path / f"{name}.png") for name in ("0", "1", "2", "plain")}
    headed = slice(60, -150)  # between the columns' names, which tell the weight, and the means below them
    assert (pages["1"][headed] == pages["plain"][headed]).all() and (pages["2"] != pages["1"]).any()
    assert (pages["0"][headed] != pages["1"][headed]).any()
    assert main([*asked, "a.png", "--rlg", "1", "--columns", "seeds"]) == 2
    assert "--rlg: does not go with --columns: for a column per weight" in capsys.readouterr().err


@pytest.fixture(scope="module")
def swept(tmp_path_factory, lora_run):
    """A suite, and an evaluation of two weights to which a third is added."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "suite.txt").write_text("".join(f"picture {i}\n" for i in range(3)))
    draw = functools.partial(evaluate, str(lora_run), str(folder / "suite.txt"), [], folder / "out", samples=2)
    draw(rlg=(1.0, 0.0))
    known = {file: file.stat().st_mtime_ns for file in (folder / "out" / "pictures").rglob("*.png")}
    results = draw(rlg=(0.0, 1.0, 2.0))
    assert len(known) == 12 and {file: file.stat().st_mtime_ns for file in known} == known
    return folder, results


def test_a_sweep_tells_each_weight_and_plots_the_rewards(swept, lora_run):
    folder, results = swept
    plain = evaluate(str(lora_run), str(folder / "suite.txt"), [], folder / "plain", base=True, samples=2)
    [reward] = plain["arms"]["base"]
    assert list(results["arms"]) == ["rlg-0", "rlg-1", "rlg-2"] and results["compared"] == {}
    assert results["arms"]["rlg-0"] == plain["arms"]["base"] and results["arms"]["rlg-1"] == plain["arms"]["tuned"]
    assert results["arms"]["rlg-2"][reward] != results["arms"]["rlg-1"][reward]
    [line] = [line for line in (folder / "out" / "table.md").read_text().splitlines() if line.startswith("| all pro")]
    told = [float(number) for number in re.findall(r"\| (0\.\d+) \[", line)]
    wanted = [results["arms"][arm][reward]["all prompts"]["mean"] for arm in results["arms"]]
    assert told == pytest.approx(wanted, abs=6e-4)
    assert json.loads((folder / "out" / "results.json").read_text())["rlg"] == "sweep"
    with Image.open(folder / "out" / "rlg.png") as shown:
        assert len(shown.convert("RGB").getcolors(10**6)) > 10
    assert not (folder / "plain" / "rlg.png").exists()


def entry(mean):
    return {findings.ALL: {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}


def test_the_curves_are_those_of_the_results_and_their_ticks_the_weights():
    arms = {"a": 0.0, "b": 1.5}
    results = {"a": {"folder/f.py:x": entry(0.5), "y": entry(3)}, "b": {"folder/f.py:x": entry(0.75), "y": entry(1)}}
    with figures.figure_style() as pyplot:
        figure, (x, y) = pyplot.subplots(1, 2)
        figures.draw(x, "folder/f.py:x", arms, results)
        figures.draw(y, "y", arms, results)
        assert x.lines[-1].get_xydata().tolist() == [[0.0, 0.5], [1.5, 0.75]]
        [band] = x.collections
        assert {*map(tuple, band.get_paths()[0].vertices)} == {(0.0, 0.4), (1.5, 0.65), (0.0, 0.6), (1.5, 0.85)}
        assert y.lines[-1].get_ydata().tolist() == [3, 1]
        assert list(x.get_xticks()) == [0.0, 1.5]
        assert [label.get_text() for label in x.get_xticklabels()] == ["0", "1.5"]
        assert x.get_title(loc="left") == "f.py:x" and x.lines[-1].get_color() == figures.COLOURS[0]
        pyplot.close(figure)


def test_one_weight_is_compared_with_the_base(swept, lora_run, capsys, tmp_path):
    folder, results = swept
    assert main(["eval", str(lora_run), "--suite", str(folder / "suite.txt"), "--output", str(tmp_path / "one"),
                 "--samples", "2", "--base", "--rlg", "2", "--trust-run"]) == 0
    told = json.loads((tmp_path / "one" / "results.json").read_text())
    assert told["arms"]["tuned"] == finite(results["arms"]["rlg-2"]) and told["rlg"] == 2
    assert told["arms"]["base"] == finite(results["arms"]["rlg-0"]) and told["compared"]
    capsys.readouterr()
    for options, line in [(["--base", "--rlg", "0,1"], "--base: several weights of --rlg are compared side by side"),
                          (["--rlg", "1,1"], "--rlg: got a weight twice in 1, 1"),
                          (["--samples", "2", "--base", "--rlg", "3"], "holds an evaluation with another rlg (2.0, ")]:
        assert main(["eval", str(lora_run), "--suite", str(folder / "suite.txt"), "--output", str(tmp_path / "one"),
                     "--trust-run", *options]) == 2
        assert line in capsys.readouterr().err


def test_a_figure_has_the_same_bytes_every_time(tmp_path):
    results = {arm: {name: entry(mean) for name in ("x", "y", "z", "more")} for arm, mean in (("a", 0.5), ("b", 0.6))}
    for name in ("a.png", "b.png"):
        figures.plot({"a": 0.0, "b": 1.0}, results, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert b"Matplotlib" not in (tmp_path / "a.png").read_bytes()
