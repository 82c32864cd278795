"""Models of few steps: known by tiny instances of each class, by files and by names; defaults that fit."""

import json
import re

import pytest

from flowgrpo.config import Config, validate
from flowgrpo.config.sections import Load
from flowgrpo.evaluation.samplers import call_arguments
from flowgrpo.methods import validate as methods
from flowgrpo.policies import options
from flowgrpo.policies.pipelines import few_steps
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.tools.check.tiny import make
from flowgrpo.tools.check.tiny.parts import flux_transformer
from tests.helpers import tiny
from tests.helpers.refusals import message


def turbo(name, scheduler=None, **options):
    """A tiny pipeline with a scheduler of these options."""
    import diffusers
    pipe = make(name)[0]
    kind = type(pipe.scheduler) if scheduler is None else getattr(diffusers, scheduler)
    pipe.scheduler = kind.from_config(dict(pipe.scheduler.config) | options)
    return pipe


def schnell():
    return tiny.flux(transformer=flux_transformer(guidance_embeds=False))


LCM = {"method": "rlcm", "train": (4, 8.5), "eval": (4, 8.5)}
SDXL = {"method": "ddpo", "train": (4, 1), "eval": (4, 1)}
FLOW = {"method": "flow_grpo", "train": (4, 1), "eval": (4, 1)}
PIPES = [
    (lambda: make("LatentConsistencyModelPipeline")[0], "m", "its scheduler is a LCMScheduler", LCM),
    (lambda: turbo("StableDiffusionXLPipeline", "LCMScheduler"), "m", "its scheduler is a LCMScheduler",
     SDXL | {"method": "rlcm"}),
    (lambda: turbo("StableDiffusionXLPipeline", "EulerAncestralDiscreteScheduler", timestep_spacing="trailing"),
     "stabilityai/sdxl-turbo", "its scheduler spaces timesteps from the last one (trailing)", SDXL),
    (schnell, "m", "its transformer has no guidance, as that of FLUX schnell", FLOW),
    (lambda: make("StableDiffusion3Pipeline")[0], "owner/sd3.5-large-turbo", "by its name", FLOW),
    (lambda: make("FluxPipeline")[0], "owner/Hyper-FLUX-8steps", "by its name",
     FLOW | {"train": (8, 3.5), "eval": (8, 3.5)}),
    (lambda: make("ZImagePipeline")[0], "Tongyi-MAI/Z-Image-Turbo", "by its name",
     FLOW | {"train": (8, 0), "eval": (8, 0)}),
    (lambda: make("StableDiffusionPipeline")[0], "owner/plain", None, None),
    (lambda: make("FluxPipeline")[0], "calcms", None, None)]


def of(config):
    return {"method": config.method, "train": (config.train.steps, config.train.guidance),
            "eval": (config.eval.steps, config.eval.guidance)}


@pytest.mark.parametrize("make_pipe, model, why, expected", PIPES)
def test_a_loaded_model_of_few_steps_gets_defaults_that_fit(make_pipe, model, why, expected):
    pipe, plain = make_pipe(), Config(model=model)
    config, said = options.fitting(plain, pipe)
    assert few_steps.of_pipe(pipe, model).why == why
    if why is None:
        assert config == plain and not said
        return
    assert of(config) == expected and config.train.grid == "stock"
    assert said.startswith(f"a model of few steps ({why}), so by default: method {expected['method']}, ")
    assert config.parts == ({"kernel": {"type": "CPS", "level": 0.8}} if expected["method"] == "flow_grpo" else {})
    methods.resolve(config, "flow" if expected["method"] == "flow_grpo" else "vp")  # every step is trained


def test_given_values_always_win():
    own = validate({"model": "m", "method": "mix_grpo", "parts": {"plan": {"size": 2}},
                    "train": {"steps": 6, "guidance": 2.0, "grid": "shifted"}, "eval": {"steps": 5, "guidance": 3.0}})
    assert options.fitting(own, schnell()) == (own, "")
    some = validate({"model": "m", "train": {"steps": 6, "shift": 1.0}, "parts": {"kernel": {"level": 0.5}}})
    config, said = options.fitting(some, schnell())
    assert of(config) == {"method": "flow_grpo", "train": (6, 1), "eval": (6, 1)} and config.train.grid == "shifted"
    assert config.parts == {"kernel": {"level": 0.5}}
    assert said.endswith("method flow_grpo, eval.steps 6, eval.guidance 1")
    planned = validate({"model": "m", "parts": {"plan": {"size": 2}}})
    assert options.fitting(planned, schnell())[0].method == "mix_grpo"


@pytest.mark.parametrize("name, expected", [
    ("stabilityai/sdxl-turbo", SDXL), ("black-forest-labs/FLUX.1-schnell", FLOW),
    ("SimianLuo/LCM_Dreamshaper_v7", LCM), ("latent-consistency/lcm-sdxl", LCM | {"train": (4, 5), "eval": (4, 5)}),
    ("owner/lcm-lora-merged", SDXL | {"method": "rlcm"}), ("ByteDance/SDXL-Lightning", SDXL),
    ("owner/Wan2.1-T2V-14B-StepDistill", FLOW), ("owner/wan-tmd", FLOW),
    ("Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers", FLOW | {"train": (2, 4.5), "eval": (2, 4.5)}),
    ("owner/FLUX.1-turbo", FLOW | {"train": (4, 3.5), "eval": (4, 3.5)}),
    ("owner/turbot-2step", FLOW | {"train": (2, 1), "eval": (2, 1)})])
def test_a_model_that_is_not_here_is_known_by_its_name(name, expected):
    assert of(few_steps.few_step_config(Config(model=name), few_steps.ahead(name))) == expected


def test_a_fused_lightning_lora_makes_a_model_of_few_steps():
    files = Load(lora=["loras/Qwen-Image-Lightning-8steps-V1.1.safetensors"])
    config, said = options.fitting(Config(model="Qwen/Qwen-Image", method="mix_grpo", load=files))
    assert (config.train.steps, config.eval.steps, config.eval.guidance) == (8, 8, 1)
    assert said.startswith("a model of few steps (by the name loras/Qwen-Image-Lightning-8steps-V1.1.safetensors)")
    assert few_steps.ahead("Qwen/Qwen-Image").why is None


def test_a_folder_says_it_by_its_files_before_it_is_loaded(tmp_path):
    model = tiny.save(make("LatentConsistencyModelPipeline")[0], tmp_path / "plain")
    config, said = options.fitting(Config(model=str(model)))
    assert of(config) == LCM and "its scheduler is a LCMScheduler" in said
    assert call_arguments(str(model), None) == {"num_inference_steps": 4, "guidance": 8.5}
    assert call_arguments(str(model), None, steps=2)["num_inference_steps"] == 2
    index = json.loads((model / "model_index.json").read_text())
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "PNDMScheduler"}))
    (model / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert few_steps.ahead(str(model)).why == "it is distilled"


def test_the_packaged_models_have_the_settings_of_their_cards():
    config, said = options.fitting(Config(model="starter_consistency"))
    assert of(config) == {"method": "rlcm", "train": (4, 1), "eval": (4, 1)} and config.train.grid == "stock"
    assert said.startswith("a model of few steps (its scheduler is a FlowMatchLCMScheduler)")
    config, said = options.fitting(Config())
    assert of(config) == {"method": "mix_grpo", "train": (10, 1), "eval": (20, 1)} and not said
    assert options.fitting(Config(model="starter_video"))[0].eval.guidance == 4
    assert options.fitting(Config(model="starter_text"))[0].method == "grpo"


def test_another_scheduler_is_read_with_the_models_configuration(tmp_path):
    model = str(tiny.save(make("StableDiffusionXLPipeline")[0], tmp_path / "xl"))
    files = Load(scheduler={"class": "LCMScheduler"})
    pipe = load_pipeline(model, files=files)
    assert type(pipe.scheduler).__name__ == "LCMScheduler"
    assert pipe.scheduler.config.beta_end == make("StableDiffusionXLPipeline")[0].scheduler.config.beta_end
    assert options.fitting(Config(model=model, load=files))[0].method == "rlcm"
    trailing = Load(scheduler={"timestep_spacing": "trailing"})
    assert load_pipeline(model, files=trailing).scheduler.config.timestep_spacing == "trailing"
    assert options.fitting(Config(model=model, load=trailing))[0].method == "ddpo"
    for keys, told in (({"class": "Nothing"}, "class is 'Nothing', expected a scheduler of diffusers"),
                       ({"timestep_space": "x"}, "EulerDiscreteScheduler has no 'timestep_space': did you mean")):
        assert re.search(told, message(load_pipeline, model, files=Load(scheduler=keys)))
