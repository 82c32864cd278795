"""Trainers that are built as TRL's are, on tiny models: `DDPOTrainer` and `FlowGRPOTrainer`."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import flowgrpo
from flowgrpo.config import load
from flowgrpo.config.parse import validate
from flowgrpo.methods import PRESETS
from flowgrpo.methods.overlay import preset, with_parts
from flowgrpo.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline, FlowGRPOConfig, FlowGRPOTrainer
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import message, refused

SMALL = {"eval": {"prompts": 2, "steps": 2, "guidance": 1.0}, "held_out": 0.3, "device": "cpu", "precision": "fp32",
         "adapter": {"rank": 2}}
ANIMALS = ["cat", "dog", "horse", "frog", "duck", "goat"]


# --- a script of TRL's DDPO ---
@dataclass
class DdpoArguments:
    pretrained_model: str = field(default="runwayml/stable-diffusion-v1-5", metadata={"help": "the pipeline"})
    use_lora: bool = field(default=True, metadata={"help": "train a LoRA"})


def redness():
    """A reward function in the form of DDPO's: rewards, and facts about them."""
    def _fn(images, prompts, metadata):
        assert images.ndim == 4 and 0 <= images.min() and images.max() <= 1
        assert isinstance(prompts, tuple) and all(entry["legs"] == 4 for entry in metadata)
        return images[:, 0].mean((1, 2)), {}
    return _fn


def prompt_fn():
    return np.random.choice(ANIMALS), {"legs": 4}


def outputs_logger(seen):
    def hook(image_data, global_step, accelerate_logger):
        images, prompts, _, rewards, _ = image_data[-1]
        seen.append((global_step, sum(len(batch[1]) for batch in image_data)))
        result = {f"{prompts[i]:.25} | {rewards[i].item():.2f}": image.unsqueeze(0).float()
                  for i, image in enumerate(images)}
        accelerate_logger.log_images(result, step=global_step)
    return hook


@pytest.mark.fast
def test_the_ddpo_script_runs(tmp_path, monkeypatch):
    from transformers import HfArgumentParser
    monkeypatch.chdir(tmp_path)
    np.random.seed(0)
    tiny.save(tiny.sd15(), tmp_path / "sd")
    script_args, training_args = HfArgumentParser((DdpoArguments, DDPOConfig)).parse_args_into_dataclasses([
        "--pretrained_model=sd", "--num_epochs=2", "--sample_num_steps=4", "--sample_batch_size=2",
        "--sample_num_batches_per_epoch=2", "--train_batch_size=2", "--train_gradient_accumulation_steps=1",
        "--per_prompt_stat_tracking=True", "--per_prompt_stat_tracking_buffer_size=8",
        "--per_prompt_stat_tracking_min_count=2", "--output_dir=saved"])
    training_args.project_kwargs = {"logging_dir": "./logs", "total_limit": 5}
    training_args.options = SMALL
    pipeline = DefaultDDPOStableDiffusionPipeline(script_args.pretrained_model, pretrained_model_revision="main",
                                                  use_lora=script_args.use_lora)
    seen: list[tuple[int, int]] = []
    trainer = DDPOTrainer(training_args, redness(), prompt_fn, pipeline, image_samples_hook=outputs_logger(seen))
    summary = trainer.train()
    trainer.save_model(training_args.output_dir)
    assert summary["method"] == "ddpo" and summary["epochs"] == 2 and summary["updates"] == 4
    assert seen == [(seen[0][0], 4), (seen[0][0] + 1, 4)]
    assert (tmp_path / "saved" / "pytorch_lora_weights.safetensors").is_file()
    folder = tmp_path / "saved" / "ddpo"
    recipe = yaml.safe_load((folder / "config.yaml").read_text())
    assert recipe["parts"]["advantage"] == {"clamp": 5.0, "buffer": 8, "least": 2}
    assert recipe["train"]["guidance"] == 5.0 and recipe["train"]["group"] == 1 and recipe["train"]["prompts"] == 4
    [first, last] = sorted((folder / "hook").glob("epoch_*"))
    captions = json.loads((last / "captions.json").read_text())
    assert captions and all(caption.split(" | ")[0] in ANIMALS for caption in captions)
    assert Image.open(last / "000.png").size == (16, 16)
    assert "push_to_hub: not supported here: flowgrpo push saved/ddpo" in message(trainer.push_to_hub, "mine")


def test_ddpo_prompts_are_sampled_as_often_as_they_are_given_and_keys_checked_at_once():
    given = iter([("cat", {}), ("dog", {"legs": 4}), ("cat", {}), ("cat", {})])
    trainer = DDPOTrainer(DDPOConfig(num_epochs=2), redness(), lambda: next(given), tiny.sd15())
    assert trainer.prompts == [{"prompt": "cat", "metadata": {}, "weight": 3},
                               {"prompt": "dog", "metadata": {"legs": 4}, "weight": 1}]
    told = message(DDPOTrainer, DDPOConfig(sample_eta=-1.0, num_epochs=1), redness(), prompt_fn, tiny.sd15())
    assert told.startswith("parts.kernel: ") and "eta" in told


def test_ddpo_settings_and_refused_ones():
    keys = DDPOConfig(sample_batch_size=6, sample_num_batches_per_epoch=4, train_batch_size=3, log_with="wandb",
                      train_timestep_fraction=0.5, mixed_precision="bf16", train_clip_range=1e-3,
                      options={"train": {"lr": 1e-5}}).keys(None)
    assert keys["train"]["prompts"] == 24 and keys["train"]["updates"] == 8 and keys["train"]["lr"] == 1e-5
    assert keys["parts"]["plan"] == {"type": "RandomSubset", "fraction": 0.5}
    assert keys["parts"]["surrogate"] == {"low": 1e-3, "high": 1e-3} and keys["precision"] == "bf16"
    assert DDPOConfig().keys(0)["adapter"] == {"rank": 0}
    assert validate(keys).tracker == "wandb"
    assert DDPOConfig(train_max_grad_norm=0.0).keys(None)["train"]["clip_grad"] == float("inf")
    assert "train_batch_size: got 0, expected an integer of 1 or more" in message(DDPOConfig, train_batch_size=0)
    refused("pretrained_model_name: './nope' does not load .* expected a folder of a",
            DefaultDDPOStableDiffusionPipeline, "./nope")


@pytest.mark.parametrize("settings, told", [
    ({"train_batch_size": 4, "sample_batch_size": 3}, "an epoch has 6 samples"),
    ({"train_cfg": False, "num_epochs": 0, "push_to_hub": True},
     "num_epochs: got 0, .*; train_cfg is False, which is not supported: .*; push_to_hub: got True, which is not")])
def test_what_ddpo_cannot_do_here_is_told(settings, told):
    refused(told, DDPOConfig, **settings)


# --- FlowGRPOTrainer ---
def reddish(prompts, completions, legs, **columns):
    assert len(prompts) == len(legs) == len(completions) and not columns
    return [float(image[0].mean()) for image in completions]


@pytest.mark.fast
def test_flow_grpo_trainer_trains_on_a_dataset(tmp_path):
    from datasets import Dataset
    args = {"output_dir": str(tmp_path), "run_name": "mine", "max_steps": 2, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "num_generations": 4, "num_inference_steps": 6,
            "reward_weights": [1.0, 0.5], "options": SMALL | {"image": {"call": tiny.CALL}}}
    rows = Dataset.from_list([{"prompt": text, "legs": 4} for text in tiny.PROMPTS])
    summary = flowgrpo.FlowGRPOTrainer(tiny.sd3(), [reddish, tiny.red], args, rows).train()
    assert summary["rewards"]["trained"] == {"reddish": 1.0, "red": 0.5} and summary["epochs"] == 2
    config = load(tmp_path / "mine" / "config.yaml")
    assert (config.train.prompts, config.train.group, config.train.micro_batch) == (2, 4, 4)
    assert (tmp_path / "mine" / "pytorch_lora_weights.safetensors").is_file()


def test_a_language_model_needs_no_method(tmp_path):
    """The default is of the model's kind."""
    args = FlowGRPOConfig(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=2,
                          options={"held_out": 0.4, "eval": {"prompts": 1}, "device": "cpu", "text": {"max_tokens": 4}})
    rows = [{"prompt": text, "answer": "3"} for text in tiny_text.PROMPTS]
    def length(prompts, completions, answer, **columns):
        assert set(answer) == {"3"}
        return [float(len(text)) for text in completions]
    summary = flowgrpo.FlowGRPOTrainer("starter_text", length, args, rows).train()
    assert summary["method"] == "grpo" and summary["epochs"] == 1


def test_settings_of_trl_become_keys(monkeypatch):
    """By hand: 4 x 2 samples are two groups of 4; a round takes 2 optimizer steps on them, so 5 steps are 3 rounds."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 5,
             "num_iterations": 2, "save_steps": 4, "beta": 0.1, "epsilon": 0.2, "max_grad_norm": 0.0}
    keys = FlowGRPOConfig(**given, bf16=True, method="flow_grpo", options={"train": {"lr": 1e-5}, "seed": 7}).keys()
    assert keys == {
        "name": "trl", "output": "runs", "seed": 7, "tracker": "none", "method": "flow_grpo", "precision": "bf16",
        "parts": {"kl": {"weight": 0.1}, "surrogate": {"low": 0.2, "high": 0.2}},
        "train": {"epochs": 3, "inner_epochs": 2, "save_every": 2, "prompts": 2, "group": 4, "micro_batch": 4,
                  "lr": 1e-5, "clip_grad": float("inf")}}
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert FlowGRPOConfig(**given).keys()["train"]["prompts"] == 6
    assert DDPOConfig(sample_batch_size=2).samples == 12


def test_names_that_trl_has_itself_are_one_line():
    import flowgrpo.trl as ours
    assert message(getattr, ours, "GRPOTrainer") == (
        "flowgrpo.trl has no GRPOTrainer: run a language model's script by TRL itself, or call "
        "flowgrpo.align(model, rewards, prompts, 'grpo')")
    assert not hasattr(ours, "TrlParser")


# --- what is rejected when an object is made ---
@pytest.mark.parametrize("kind, given, told", [
    (FlowGRPOConfig, {"num_generations": 3}, "a step has 8 samples (per_device_train_batch_size x "
     "gradient_accumulation_steps x processes), expected a multiple of num_generations, 3"),
    (FlowGRPOConfig, {"num_generations": 0, "learning_rate": "1e-4", "max_steps": -1, "epsilon": 2},
     "num_generations: got 0, expected an integer of 1 or more; max_steps: got -1, expected an integer of 1 or more; "
     "learning_rate: got '1e-4', expected a number; epsilon: got 2, expected 0 to 1"),
    (FlowGRPOConfig, {"options": [1]}, "options: got [1], expected a dictionary of flowgrpo's keys"),
    (DDPOConfig, {"train_learning_rate": 0, "seed": -1},
     "seed: got -1, expected an integer of 0 or more; train_learning_rate: got 0, expected above 0")])
def test_values_out_of_range_are_named_as_trl_names_them(kind, given, told):
    assert message(kind, **given) == told


@pytest.mark.parametrize("model, given, told", [
    ("starter_text", {"args": {"num_inference_steps": 4}}, "train.steps"),
    ("starter", {"args": {"options": {"evall": {}}}}, "the options: unknown key 'evall': did you mean 'eval'?"),
    ("starter_tex", {}, "no model 'starter_tex', and no folder of that name: did you mean 'starter_text'?"),
    ("starter", {"args": 3}, "args: got int, expected a FlowGRPOConfig or a dictionary"),
    ("starter", {"args": {"reward_weights": [1.0, 2.0]}}, "reward_weights: got 2 for 1 reward_funcs"),
    ("starter", {"reward_funcs": None}, "rewards: got NoneType None, expected a name, a function"),
    ("starter", {"train_dataset": None}, "prompts: got NoneType None, expected a file, or a list"),
    ("starter", {"train_dataset": iter("a")}, "prompts: got str_ascii_iterator"),
    ("starter", {"train_dataset": [3]}, "prompts: got int 3, expected a file, or a list of strings or dictionaries")])
def test_a_trainer_checks_its_arguments_when_it_is_made(model, given, told):
    assert message(FlowGRPOTrainer, model, **{"reward_funcs": "scene", "train_dataset": ["a star"]} | given
                   ).startswith(told)


@pytest.mark.parametrize("kind, given, told", [
    (FlowGRPOConfig, {"learning_rat": 1e-5, "num_generation": 4},
     "FlowGRPOConfig: unknown argument 'learning_rat': did you mean 'learning_rate'? unknown argument "
     "'num_generation': did you mean 'num_generations'?"),
    (FlowGRPOConfig, {"zzz": 1}, "FlowGRPOConfig: unknown argument 'zzz'; help(flowgrpo.trl.FlowGRPOConfig) lists all"),
    (DDPOConfig, {"train_batchsize": 1}, "DDPOConfig: unknown argument 'train_batchsize': did you mean "
     "'train_batch_size'?"),
    (FlowGRPOTrainer, {"train_datset": []}, "FlowGRPOTrainer: unknown argument 'train_datset': did you mean "
     "'train_dataset'?"),
    (DDPOTrainer, {"zzz": 1}, "DDPOTrainer: unknown argument 'zzz'; there are: config, reward_function, "
     "prompt_function, sd_pipeline, image_samples_hook")])
def test_an_unknown_argument_has_the_nearest(kind, given, told):
    assert message(kind, **given) == message(kind, error=TypeError, **given) == told


def test_the_table_of_the_page_has_our_keys():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text()
    rows = [line.split(" | ")[1].strip(" |") for line in page.splitlines() if line.startswith("| `") or "peft" in line]
    calls = [call for row in rows for call in re.findall(r"`([^`]+)`", row)]
    assert len(calls) == 9
    for call in calls:
        config = validate({"method": "grpo", "model": "starter_text"} | eval(f"dict({call})"))
        with_parts(preset(config.method), config.parts)
    named = re.findall(r"`(\w+)`", page.partition("text_policy_gradients.md) are")[2].partition(" and more")[0])
    assert len(named) == 6 and set(named) <= PRESETS.keys()
