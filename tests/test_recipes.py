"""The recipes: each loads, fits its pipeline, and makes a batch that can be dealt out; papers' settings, and levels."""

import json
import math
import random
import re
from inspect import signature
from pathlib import Path

import paper_tables
import pytest
import torch
import verify_recipe
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler

from flowgrpo.config import load
from flowgrpo.config.geometry import geometry
from flowgrpo.contrib.questions.answer_losses import of_claims
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.sets import SETS
from flowgrpo.gaussian import log_prob
from flowgrpo.gpus import GPUS
from flowgrpo.methods import keys_read, validate
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.forward_process import NegativeAware
from flowgrpo.objectives.ratios import PlainRatio
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.policies import build, options
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.clip import SubjectScore
from flowgrpo.rewards.find import locate
from flowgrpo.samplers.grids import make_grid, shift_grid
from flowgrpo.samplers.kernels import CPS, process
from flowgrpo.samplers.preview import require_choice
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.image_lm import ImageLM
from flowgrpo.tools.check import report, tiny
from flowgrpo.types import Gaussian, Scored
from tests.helpers import loop, tiny_text, tiny_vision

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs"
# The pipeline class of each recipe's model, and the process of its scheduler.
PIPELINES = {name: (pipeline, kind) for kind, pipelines in {
    "vp": {"StableDiffusionPipeline": "sd15",
           "StableDiffusionXLPipeline": "sdxl sdxl_turbo_24gb sdxl_4steps_24gb"},
    "flow": {"FluxPipeline": "flux_schnell_24gb flux_dev", "StableDiffusion3Pipeline": "sd35_medium",
             "FluxKontextPipeline": "flux_kontext", "Flux2KleinPipeline": "flux2_klein flux2_klein_9b_24gb",
             "QwenImagePipeline": "qwen_image qwen_image_2512_24gb", "QwenImageEditPlusPipeline": "qwen_image_edit",
             "ZImagePipeline": "z_image z_image_base_24gb z_image_4steps_24gb", "SanaPipeline": "sana",
             "WanPipeline": "wan21_1b wan21_14b wan21_1b_4steps_24gb", "WanPipeline (2.2)": "wan22",
             "WanPipeline (2.2, dense)": "wan22_5b", "LTX2Pipeline": "ltx2 ltx25_80gb",
             "HunyuanVideoPipeline": "hunyuan_video", "HunyuanVideo15Pipeline": "hunyuan_video15",
             "HunyuanSkyreelsImageToVideoPipeline": "skyreels_i2v", "Flux2Pipeline": "flux2_dev",
             "Krea2Pipeline": "krea2_24gb", "ErnieImagePipeline": "ernie_image_24gb",
             "QwenImage21Pipeline": "qwen_image_21_24gb", "HunyuanImagePipeline": "hunyuan_image_21_24gb",
             "AnimaModularPipeline": "anima_24gb", "Flux3ModularPipeline": "flux3_klein_24gb",
             "ChromaPipeline": "chroma_24gb"}}.items()
    for pipeline, names in pipelines.items() for name in names.split()}
# For other GPUs, of the recipe whose name they begin with: one of them, or eight.
SHORTER = ("sd15_24gb", "sdxl_24gb", "sdxl_48gb", "sd35_medium_24gb", "flux_dev_24gb", "flux_dev_48gb",
           "flux_kontext_48gb", "flux2_klein_24gb", "qwen_image_48gb", "qwen_image_80gb", "z_image_24gb", "sana_24gb",
           "qwen_image_24gb", "wan21_1b_24gb", "wan22_5b_24gb", "sd15_short", "sdxl_short", "z_image_short",
           "flux2_klein_short")
DISTILLED = {"flux2_klein_short": "black-forest-labs/FLUX.2-klein-4B"}  # beside the base model of its namesake
SMALLER = ("qwen_image_edit_48gb", "hunyuan_video15_48gb")  # of recipes that are for one GPU already
EIGHT = ("sdxl_8x80", "sd35_medium_8x80", "flux_dev_8x80", "flux_kontext_8x80", "qwen_image_8x80", "wan22_8x80")
PIPELINES |= {name: PIPELINES[name.rpartition("_")[0]] for name in (*SHORTER, *SMALLER, *EIGHT)}
LANGUAGE_MODELS = {"qwen3_0_6b", "smollm2_135m"}
DRAWING = {"janus_pro_1b"}  # models of image tokens
STARTERS = {path.stem for path in FOLDER.glob("starter*.yaml")}


def test_every_recipe_is_tried_here_and_has_its_table_on_the_current_page():
    assert {path.stem for path in FOLDER.glob("*.yaml")} - STARTERS == {*PIPELINES, *LANGUAGE_MODELS, *DRAWING}
    configs = {name: load(FOLDER / f"{name}.yaml") for name in PIPELINES}
    assert set(CPS_RECIPES) == {name for name, config in configs.items()
                                if config.parts.get("kernel", {}).get("type") == "CPS"}
    files = {file.stem for file in paper_tables.FOLDER.glob("*.yaml")}
    assert files == {f"{paper}_{task}" for paper, task in RECIPES}
    assert paper_tables.PAGE.read_text(encoding="utf-8") == paper_tables.page(), "run scripts/docs/paper_tables.py"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_run_reads_all_keys_of_a_recipe(path):
    config = load(path)
    assert keys_read.check(loop.setup(config, build.kind(config))) is None


@pytest.mark.parametrize("path", sorted([*FOLDER.glob("**/*.yaml")]), ids=lambda path: path.stem)
def test_no_recipe_trains_on_a_test_set(path):
    if path.parent.name != "accelerate":
        config = load(path)
        assert sets.test_set(config.prompts) is None and not config.train_on_test_set
        sets.require_suited(config)


@pytest.mark.parametrize("name", sorted(LANGUAGE_MODELS))
def test_a_recipe_fits_its_language_model(name):
    """Its method, its rewards and its adapter on every layer, of a tiny model of the same class."""
    config = load(FOLDER / f"{name}.yaml")
    assert build.kind(config) == build.CAUSAL_LM and validate.resolve(config, "tokens").for_tokens
    assert all(locate(rule.use or label) for label, rule in config.trained.items())
    model, tokenizer = tiny_text.model()
    weights = CausalLM(model.to(torch.bfloat16), tokenizer, config.adapter, config.text, precision="bf16").weights
    assert {key.split(".")[3] for key in weights.named} == {"0", "1"} and len(weights.named) == 2 * 7 * 2
    geometry(config.train)


@pytest.mark.parametrize("method", ["unirl", "unirl_sft"])
@pytest.mark.parametrize("name", sorted(DRAWING))
def test_a_recipe_fits_its_model_of_image_tokens(name, method):
    """Both modes, its rewards, its questions, and its adapter on the layers and the head of a tiny model."""
    config = load(FOLDER / f"{name}.yaml", {"method": method})
    assert build.kind(config) == build.IMAGE_TOKENS
    part = validate.resolve(config, build.process(build.IMAGE_TOKENS)).loss.data
    assert part.reader == "prompt" and part.source.right == 1.0 and bool(part.images) is (method == "unirl_sft")
    assert all(locate(rule.use or label) for label, rule in config.trained.items())
    dice, prompts = random.Random(0), sets.resolve(config)[0]
    assert all(of_claims(prompt, dice) for prompt in prompts[:40])
    own = ImageLM(*tiny_vision.janus(), config.adapter, config.text, guidance=config.train.guidance)
    assert {key.split(".")[2] for key in own.weights.named} == {"language_model", "generation_head"}
    geometry(config.train)


def on_a_cpu(name, **options):
    """Return a recipe with int8 in place of nf4, which is loaded onto a GPU alone."""
    recipe = FOLDER / f"{name}.yaml"
    return load(recipe, options | ({"memory.weights": "int8"} if load(recipe).memory.weights == "nf4" else {}))


@pytest.mark.parametrize("name", PIPELINES)
def test_a_recipe_fits_its_pipeline_and_a_tiny_instance(name):
    """Its method on the pipeline's own process and grid, the arguments of its call, its adapter on every denoiser."""
    config, (cls, kind) = on_a_cpu(name), PIPELINES[name]
    pipe, call = tiny.make(cls)
    assert process(pipe.scheduler) == kind
    method = validate.resolve(config, kind)
    options.require_memory(loop.setup(config))
    further = {key: value for key, value in config.call.items() if key not in (*call, "height", "width")}
    policy = PipelinePolicy(pipe, config.adapter, call=call | further, memory=config.memory)
    assert {key.split(".")[0] for key in policy.weights.named} == set(policy.denoisers)
    train = config.train
    grid, timesteps = make_grid(train.grid, train.steps, train.shift, pipe.scheduler, policy.strength,
                                lambda steps: policy.stock_grid(policy.encode(["a cat"]), steps))
    explorations = method.explorations(grid, train.group, train.own_shift, 0, config.seed, timesteps)
    noised = method.noising_spec(grid, train.group, 0, config.seed)
    assert explorations and all(each.schedule.trained for each in (explorations if noised is None else [noised]))
    if method.rollout.preview:
        require_choice(explorations, method.rollout.preview.pool)
    # In the precision of the GPUs that it is for: a replay repeats the rollout bit for bit.
    told = report.report(PIPELINES[name][0], on_a_cpu(name, precision="bf16"))
    assert told["supported"], told["reason"]
    assert told["replay_error"] == told["first_log_ratio"] == 0 and told["lora_grad"] > 0


def test_sana_and_flow_grpo_are_trained_as_published():
    """NVlabs/Sana's set-up: 96 noises seen in 6 steps, of which 24 are trained by DiffusionNFT at 6 of 10 times."""
    config = load(FOLDER / "sana.yaml")
    method, train = validate.resolve(config, "flow"), config.train
    assert (method.rollout.preview.pool, method.rollout.preview.steps, train.group, train.steps) == (96, 6, 24, 10)
    assert (train.prompts, train.guidance, train.lr, config.adapter.rank) == (48, 1.0, 3e-4, 32)
    assert method.loss.surrogate == NegativeAware(beta=1.0) and method.loss.kl.weight == 1e-4
    times = method.noising_spec(make_grid("shifted", 10, 3.0, FlowMatchEulerDiscreteScheduler())[0], 24, 0, 0)
    assert len(times.schedule.trained) == 6
    # 0.9 at every eighth update, here at every one.
    assert load(FOLDER / "sd35_medium.yaml").train.ema ** 8 == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in PIPELINES if name.startswith(("flux_kontext", "qwen_image_edit"))])
def test_edits_are_rewarded_for_their_likeness_to_the_prompts_image(name):
    config = load(FOLDER / f"{name}.yaml")
    args = config.trained["subject_score"].args
    assert config.rewards == {"geneval_fast": 0.5, "subject_score": 0.5}
    assert set(args) <= set(signature(SubjectScore).parameters)
    assert args["key"] in Prompt("make it red", image="a.png").metadata


# Of models that do not fit into 24 GB in bf16: billions of weights of their denoisers and of their text encoders.
BILLIONS = {"flux_dev": (11.9, 4.9), "flux_kontext": (11.9, 4.9), "flux_kontext_48gb": (11.9, 4.9),
            "qwen_image": (20.4, 8.3), "qwen_image_edit": (20.4, 8.3), "wan21_14b": (14.3, 5.7), "wan22": (28.6, 5.7),
            "hunyuan_video": (12.8, 7.7), "skyreels_i2v": (12.8, 7.7)}
NF4 = (4 + 32 / 64) / 8  # bytes: 4 bits, and of 64 weights a scale in fp32


@pytest.mark.parametrize("name", BILLIONS)
def test_where_nf4_is_told_to_fit_the_text_encoders_in_bf16_fit_beside_it(name):
    """While prompts are encoded, unless every prompt is said to be in a cache."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    said = re.split(r"(\d+) GB: ", " ".join(line[2:] for line in lines if line.startswith("#")))
    told = {int(size): text for size, text in zip(said[1::2], said[2::2])}
    sizes = [size for size, text in told.items() if "nf4" in text and "cache" not in text]
    denoisers, encoders = BILLIONS[name]
    assert sizes and all((denoisers * NF4 + encoders * 2) * 1e9 < size * 2**30 for size in sizes)


# Of recipes with CPS(0.8): the grid, and by what 1e-4 on the density is looser than the released 1e-5, which has no
# 1/(2 s^2), at each step that can be trained: 10 * 2 s^2, with s = 0.951057 sigma' of the next grid point.
CPS_RECIPES = {
    # sigma' 27/28, 12/13, 7/8, 9/11, 3/4
    "sd35_medium_24gb": (shift_grid(10, 3.0), [16.821, 15.414, 13.850, 12.110, 10.176]),
    # sigma' 0.90374, 0.78970, 0.65247: 1024 tokens, mu 0.63
    "flux_dev": (shift_grid(6, math.exp(0.63)), [14.775, 11.282, 7.702]),
    # sigma' 21/22, 9/10, 5/6, 3/4
    "z_image": (shift_grid(8, 3.0), [16.483, 14.653, 12.563, 10.176]),
    # sigma' 3/4, 1/2, 1/4
    "flux_schnell_24gb": (shift_grid(4, 1.0), [10.176, 4.5226, 1.1307]),
    # sigma' 0.95809, 0.88398, 0.71750: 1024 tokens, mu 2.03069 of four steps
    "flux2_klein_short": (shift_grid(4, math.exp(2.03069)), [16.605, 14.136, 9.313]),
    # sigma' 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875
    "ltx25_80gb": (torch.tensor([*load(FOLDER / "ltx25_80gb.yaml").call["sigmas"], 0.0]),
                   [17.865, 17.641, 17.418, 17.197, 14.96, 9.5086, 3.2197])}
CPS_RECIPES |= {f"{name}_24gb": CPS_RECIPES[name] for name in ("flux_dev", "z_image")}
CPS_RECIPES["z_image_short"] = CPS_RECIPES["z_image"]
CPS_RECIPES |= {f"flux_dev_{name}": CPS_RECIPES["flux_dev"] for name in ("48gb", "8x80")}


@pytest.mark.parametrize("name", CPS_RECIPES)
def test_recipes_with_cps_clip_where_the_released_code_does(name):
    """At |mean((x' - mean_old)^2) - mean((x' - mean_new)^2)| = 1e-5, on both sides and at every trained step."""
    grid, looser = CPS_RECIPES[name]
    method = validate.resolve(load(FOLDER / f"{name}.yaml"), "flow")
    loss, kernel, grid = method.loss, method.rollout.kernel, grid.double()
    assert kernel == CPS(0.8) and loss.kl.weight == (0.004 if name == "flux_schnell_24gb" else 0)
    sides = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)  # the advantages, and where the policy moves
    for step, factor in enumerate(looser):
        std = kernel(torch.zeros(1, 1).double(), torch.zeros(1, 1).double(), grid, step).std
        old = moved(std, 0 * sides)
        for share, clips in ((0.99, False), (1.01, True)):
            log_ratio = loss.log_ratio(moved(std, share * 1e-5 * sides), old)
            torch.testing.assert_close(log_ratio, share * 1e-5 * sides, rtol=1e-6, atol=0)
            assert loss.surrogate.clip_mask(log_ratio, sides, old.logp).tolist() == [[clips], [clips]]
            plain = PlainRatio()(moved(std, share * factor * 1e-5 * sides), old)
            assert Clip(1e-4, 1e-4).clip_mask(plain, sides, old.logp).tolist() == [[clips], [clips]]


def moved(std, released):
    """Return the score of x' = s, of the old mean 0, under the mean that makes the released log-ratio [b, 1]."""
    mean = std - (std.square() - released).sqrt()
    logp = log_prob(Gaussian(mean, std), std.expand(mean.shape))[:, None]
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), mean[:, None], std.reshape(1))


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_its_batch_can_be_dealt_out_to_one_process_and_to_eight(name, processes):
    train = load(FOLDER / f"{name}.yaml").train
    found = geometry(train, processes)
    assert found.prompts * processes == train.prompts and found.updates == train.updates


@pytest.mark.parametrize("name", PIPELINES)
def test_it_says_whose_set_up_it_is_and_what_to_change(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    said = "".join(line for line in text.splitlines(True) if line.startswith("#"))
    assert "24 GB" in said and "80 GB" in said and "Several GPUs" in said
    assert re.search(r"^# Licence: .+, (not )?gated\b", said, re.M)
    assert "published" in said or any(source in said for source in ("2305.", "2505.", "2507.", "2604.", "its code"))
    assert all((FOLDER / file).exists() for file in re.findall(r"\w+\.yaml", said))


@pytest.mark.parametrize("name", PIPELINES)
def test_it_says_what_an_epoch_and_the_run_take_on_a_gpu(name):
    """Numbers of `recipe_table.py`, which agree with its keys and with each other; the GPU has the memory."""
    text, train = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), load(FOLDER / f"{name}.yaml").train
    count = 8 if name.endswith("_8x80") else "One"
    line = re.search(rf"^# {count} (\w+) \((\d+) GB\): ([\d,]+) (?:images|clips) an epoch in ([\d,]+) s, "
                     r"(\d+) epochs in ([\d,.]+) h, peak ([\d.]+) GiB \(computed\)$", text, re.M)
    gpu = line[1]
    memory, count, seconds, epochs, hours = (float(each.replace(",", "")) for each in line.groups()[1:6])
    assert (count, epochs) == (train.prompts * train.group, train.epochs)
    exact = epochs * seconds / 3600
    assert hours == (round(exact) if exact >= 10 else round(exact, 1))
    assert 0.92 * memory <= GPUS[gpu].memory <= memory
    assert float(line[7]) * 2**30 <= GPUS[gpu].room
    assert not re.search(r"_\d+gb$", name) or int(name[-4:-2]) == memory


PAGES = {"README.md": (r"check (\w+) --gpu 4090` computes ([\d.]+) GiB and ([\d.]+) hours",),
         "docs/get_started/one_gpu.md": (
             r"check (\w+) --gpu 4090 +# fits: ([\d.]+) of 22.0 GiB, ([\d.]+) h on one 4090 \(computed",
             r"^\| `(\w+)` \|.*\| ([\d.]+) GiB, ([\d.]+) h \|$")}


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_memory_and_hours_are_those_of_the_recipes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    told = [found for pattern in PAGES[page] for found in re.findall(pattern, text, re.M)]
    assert len(told) >= len(PAGES[page])
    for name, peak, hours in told:
        recipe = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"epochs in {hours} h, peak {peak} GiB (computed)" in recipe, name


@pytest.mark.parametrize("name", SHORTER)
def test_a_recipe_for_one_gpu_has_fewer_images_than_the_published_set_up(name):
    short, whole = (load(FOLDER / f"{which}.yaml") for which in (name, name.rpartition("_")[0]))
    assert short.model == DISTILLED.get(name, whole.model) and short.train.prompts * short.train.group <= 128
    assert short.train.prompts * short.train.group < whole.train.prompts * whole.train.group


@pytest.mark.parametrize("name", [*SMALLER, *EIGHT, *(name for name in SHORTER if name.endswith("_48gb"))])
def test_a_recipe_for_another_memory_class_states_only_what_differs(name):
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    base, config = (load(FOLDER / file) for file in (raw["extends"], f"{name}.yaml"))
    assert config.model == base.model == load(FOLDER / f"{name.rpartition('_')[0]}.yaml").model
    assert (config.prompts, config.rewards, config.name) == (base.prompts, base.rewards, name)
    assert set(raw) <= {"extends", "method", "parts", "image", "memory", "train", "eval"}


@pytest.mark.parametrize("name", PIPELINES)
def test_it_trains_on_a_set_and_measures_two_rewards_that_it_does_not_train_on(name):
    """But edits and clips that go on from an image need images, which no set has. Small ones need no hub."""
    config = load(FOLDER / f"{name}.yaml")
    if not name.startswith(("flux_kontext", "qwen_image_edit", "skyreels_i2v")):
        assert SETS[config.prompts].is_packaged or config.prompts == "pickapic" and not name.endswith("_24gb")
        assert SETS[config.prompts].kind == ("video" if (config.image.frames or 1) > 1 else "image")
    used = [{rule.args.get("reward", rule.use or label) for label, rule in rules.items()}
            for rules in (config.trained, config.extra_rewards)]
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    said = re.search(r"^# Trained on: (.*)\. Eval-only: (.*)\.$", text, re.M)
    assert [set(names.split(", ")) for names in said.groups()] == used
    assert len(used[1]) == 2 and not used[0] & used[1] and all(locate(reward) for reward in used[1])


RECIPES = [(paper, task) for paper, facts in paper_tables.papers().items() for task in facts["recipes"]]


@pytest.mark.parametrize("paper, task", RECIPES)
def test_a_recipe_has_keys_that_are_read_and_shares_its_samples_among_eight(paper, task):
    config, method = paper_tables.recipe(paper, task)
    keys_read.check(Setup(config, build.PIPELINE, method))
    assert paper_tables.GPUS * geometry(config.train, paper_tables.GPUS).prompts == config.train.prompts


@pytest.mark.parametrize("paper, task, key, ours", [
    ("flow_grpo", "geneval", "train.guidance", 4.5), ("flow_grpo", "pickscore", "parts.kl.weight", 0.001),
    ("flow_grpo", "ocr", "parts.advantage.scale", "batch"), ("mix_grpo", "flux", "parts.plan.size", 4),
    ("mix_grpo", "flux", "reward", "hpsv2.1, pickscore, imagereward"), ("diffusion_nft", "ocr", "parts.lag.after", 75),
    ("diffusion_nft", "geneval", "parts.surrogate.beta", 1.0), ("diffusion_nft", "ocr", "gpus", 8)])
def test_a_value_is_that_of_the_resolved_recipe(paper, task, key, ours):
    assert paper_tables.value(key, *paper_tables.recipe(paper, task)) == ours


def test_costs_are_those_of_a_dry_run_and_what_one_gpu_cannot_do_is_said(monkeypatch):
    """246.8 s, 1,000 epochs, 8 GPUs: 68.6 h, 548 GPU-hours."""
    assert set(paper_tables.costs()) == {f"{paper}_{task}" for paper, task in RECIPES}
    text = paper_tables.cost("flow_grpo", "geneval")
    assert re.search(r" 6\d\.\d GiB each, 247 s an epoch, 69 h for 1,000 epochs, 548 GPU-hours\. That is too long "
                     "for one GPU", text)
    known = paper_tables.costs()
    known["flow_grpo_geneval"] |= {"epochs": 10}
    monkeypatch.setattr(paper_tables, "costs", lambda: known)
    with pytest.raises(ValueError, match="its costs are of 10 epochs, and it has 1000: run scripts/"):
        paper_tables.cost("flow_grpo", "geneval")


def test_a_difference_needs_a_reason(monkeypatch):
    changed = paper_tables.papers()
    row = next(row for row in changed["flow_grpo"]["rows"] if row[1] == "train.lr")
    row[2] = 1e-4
    monkeypatch.setattr(paper_tables, "papers", lambda: changed)
    with pytest.raises(ValueError, match="flow_grpo_ocr: learning rate is 0.0001 there and 0.0003 here: write why"):
        paper_tables.rows("flow_grpo", "ocr")


NAME = "sdxl_24gb"
RECIPE = load(verify_recipe.ROOT / "configs" / f"{NAME}.yaml")


def run(folder: Path, epochs: int = 0, low: float | None = None, device: str = "cuda:0 (NVIDIA H100)", **changes
        ) -> Path:
    """The files of a run of the recipe with so many epochs; low: the lower end of the reward's change at the end."""
    made = folder / NAME
    (made / "report").mkdir(parents=True, exist_ok=True)
    (made / "config.yaml").write_text(load(verify_recipe.ROOT / "configs" / f"{NAME}.yaml", changes).yaml())
    (made / "report" / "machine.json").write_text(json.dumps({"device": device, "processes": "1", "commit": "abc"}))
    (made / "metrics.jsonl").write_text("".join(f'{{"epoch": {epoch + 1}}}\n' for epoch in range(epochs)))
    (made / "before.json").write_text("{}")
    if low is not None:
        rows = {verify_recipe.ALL: {"change": {"low": low}}}
        (made / "summary.json").write_text(json.dumps({"compared": {name: rows for name in RECIPE.trained}}))
    return made


@pytest.mark.parametrize("epochs, low, level", [
    (0, None, "loads"), (1, None, "1 epoch"), (12, 0.1, "12 epochs"), (RECIPE.train.epochs, 0.1, "curve"),
    (RECIPE.train.epochs, -0.1, f"{RECIPE.train.epochs} epochs"),
    (RECIPE.train.epochs, None, f"{RECIPE.train.epochs} epochs")])
def test_the_level_is_what_the_files_show(epochs, low, level, tmp_path):
    assert verify_recipe.level(run(tmp_path, epochs, low), RECIPE) == level


@pytest.mark.parametrize("given, told", [
    ({"device": "cpu"}, "ran on a CPU"), ({"train.lr": 1e-3}, "differs from its recipe in train"),
    ({"prompts": "ocr"}, "differs from its recipe in prompts")])
def test_another_run_does_not_count(given, told, tmp_path):
    with pytest.raises(SystemExit, match=told):
        verify_recipe.level(run(tmp_path, 3, **given), RECIPE)


def test_levels_and_names_of_the_file(tmp_path):
    assert verify_recipe.level(run(tmp_path, 2, **{"train.epochs": 2}), RECIPE) == "2 epochs"
    file = tmp_path / "verified.json"
    file.write_text("{}")
    assert verify_recipe.verified(NAME, file) == "gated"
    verify_recipe.main(run(tmp_path, 5), file)
    assert verify_recipe.verified(NAME, file) == "5 epochs" and json.loads(file.read_text())[NAME]["commit"] == "abc"
    assert all((verify_recipe.ROOT / "configs" / f"{name}.yaml").is_file() for name in json.loads(
        verify_recipe.FILE.read_text(encoding="utf-8")))
