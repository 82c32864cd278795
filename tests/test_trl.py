"""Trainers under TRL's names: a script of its DDPO with another import, and FlowGRPOTrainer, on tiny pipelines."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import flowgrpo
from flowgrpo.config import load
from flowgrpo.errors import UserError
from flowgrpo.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline, FlowGRPOConfig, FlowGRPOTrainer
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import message

SMALL = {"eval": {"prompts": 2, "steps": 2, "guidance": 1.0}, "held_out": 0.3, "device": "cpu", "precision": "fp32",
         "adapter": {"rank": 2}}
ANIMALS = ["cat", "dog", "horse", "frog", "duck", "goat"]


# --- a script of TRL's DDPO ---

@dataclass
class ScriptArguments:
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
    script_args, training_args = HfArgumentParser((ScriptArguments, DDPOConfig)).parse_args_into_dataclasses([
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


def test_prompts_are_drawn_as_often_as_the_function_gives_them():
    given = iter([("cat", {}), ("dog", {"legs": 4}), ("cat", {}), ("cat", {})])
    trainer = DDPOTrainer(DDPOConfig(num_epochs=2), redness(), lambda: next(given), tiny.sd15())
    assert trainer.prompts == [{"prompt": "cat", "metadata": {}, "weight": 3},
                               {"prompt": "dog", "metadata": {"legs": 4}, "weight": 1}]


def test_settings_of_ddpo_are_keys_of_the_configuration():
    keys = DDPOConfig(sample_batch_size=6, sample_num_batches_per_epoch=4, train_batch_size=3, log_with="wandb",
                      train_timestep_fraction=0.5, mixed_precision="bf16", train_clip_range=1e-3,
                      options={"train": {"lr": 1e-5}}).keys(None)
    assert keys["train"]["prompts"] == 24 and keys["train"]["updates"] == 8 and keys["train"]["lr"] == 1e-5
    assert keys["parts"]["plan"] == {"type": "RandomSubset", "fraction": 0.5}
    assert keys["parts"]["surrogate"] == {"low": 1e-3, "high": 1e-3} and keys["precision"] == "bf16"
    assert DDPOConfig().keys(0)["adapter"] == {"rank": 0}
    from flowgrpo.config.parse import validate
    assert validate(keys).tracker == "wandb"


@pytest.mark.parametrize("settings, told", [
    ({"train_batch_size": 4, "sample_batch_size": 3}, "an epoch has 6 samples"),
    ({"train_cfg": False}, "train_cfg is False, which is not supported")])
def test_what_ddpo_cannot_do_here_is_told(settings, told):
    with pytest.raises(UserError, match=told):
        DDPOConfig(**settings).keys(None)


# --- FlowGRPOTrainer ---

class Listener:
    """A callback that notes the moments, as transformers calls them."""

    def __init__(self):
        self.moments = []

    def on_train_begin(self, args, state, control, **_):
        self.moments.append("begin")

    def on_log(self, args, state, control, logs=None, **_):
        self.moments.append((state.global_step, logs["epoch"], "reward/reddish/mean" in logs))

    def on_step_end(self, args, state, control, **_):
        self.moments.append("step")

    def on_train_end(self, args, state, control, **_):
        self.moments.append("end")


def reddish(prompts, completions, legs, **columns):
    assert len(prompts) == len(legs) == len(completions)
    return [float(image[0].mean()) for image in completions]


def test_flow_grpo_trainer_trains_and_tells_its_callbacks(tmp_path):
    listener = Listener()
    args = flowgrpo.FlowGRPOConfig(
        output_dir=str(tmp_path), run_name="mine", max_steps=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, num_generations=4, num_inference_steps=6, reward_weights=[1.0, 0.5],
        options=SMALL | {"image": {"call": tiny.CALL}})
    trainer = flowgrpo.FlowGRPOTrainer(
        tiny.sd3(), [reddish, tiny.red], args, [{"prompt": text, "legs": 4} for text in tiny.PROMPTS],
        callbacks=[listener])
    summary = trainer.train()
    assert summary["rewards"]["trained"] == {"reddish": 1.0, "red": 0.5} and summary["epochs"] == 2
    [begin, first, _, second, _, end] = listener.moments
    assert (begin, end) == ("begin", "end") and first[1:] == (1, True) and second[1:] == (2, True)
    config = load(tmp_path / "mine" / "config.yaml")
    assert (config.train.prompts, config.train.group, config.train.micro_batch) == (2, 4, 4)
    trainer.save_model(str(tmp_path / "out"))
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").is_file()


def test_a_language_model_needs_no_method(tmp_path):
    """The default is of the model's kind."""
    args = FlowGRPOConfig(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=2,
                          max_completion_length=4, options={"held_out": 0.4, "eval": {"prompts": 1}, "device": "cpu"})
    rows = [{"prompt": text, "answer": "3"} for text in tiny_text.PROMPTS]
    def length(prompts, completions, answer, **columns):
        assert set(answer) == {"3"}
        return [float(len(text)) for text in completions]
    summary = flowgrpo.FlowGRPOTrainer("starter_text", length, args, rows).train()
    assert summary["method"] == "grpo" and summary["epochs"] == 1


def test_passes_over_the_prompts_are_rounds():
    args = FlowGRPOConfig(per_device_train_batch_size=8, num_generations=4, num_train_epochs=1.5, beta=0.1, epsilon=0.2)
    keys = args.keys(10)
    assert keys["train"]["epochs"] == 8 and keys["train"]["prompts"] == 2  # 15 prompts, two a round
    assert keys["parts"] == {"kl": {"weight": 0.1}, "surrogate": {"low": 0.2, "high": 0.2}}
    with pytest.raises(UserError, match=r"a step has 8 samples .* expected a multiple of num_generations, 3"):
        FlowGRPOConfig(num_generations=3).keys(10)


@pytest.mark.parametrize("arguments, told", [
    ({}, "got no train_dataset"), ({"train_dataset": [3]}, "train_dataset: got 3, expected strings or records"),
    ({"train_dataset": ["a"], "args": FlowGRPOConfig(reward_weights=[1.0, 2.0])}, "reward_weights: got 2 for 1")])
def test_wrong_arguments_are_told(arguments, told):
    with pytest.raises(UserError, match=told):
        FlowGRPOTrainer("starter", "scene", **arguments)


def test_a_reward_by_name_is_watched_under_its_name(tmp_path):
    trainer = FlowGRPOTrainer("starter", "scene_graded", train_dataset=["a"], callbacks=[Listener()])
    [(watched, rule)] = trainer.epochs.watching(trainer.rewards).items()
    assert watched.__name__ == "scene_graded" and rule == {"weight": 1.0}
    assert torch.is_tensor(torch.as_tensor(0)) and trainer.epochs.watching(trainer.rewards).keys() != {"scene_graded"}


# --- arguments that TRL would not take either ---

@pytest.mark.parametrize("given, told", [
    ({"num_generations": 0}, "num_generations: got 0, expected an integer of 1 or more"),
    ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size: got '8', expected an integer of 1 or more"),
    ({"num_train_epochs": float("nan")}, "num_train_epochs: got nan, expected a number above 0"),
    ({"num_train_epochs": float("inf")}, "num_train_epochs: got inf, expected a number above 0"),
    ({"max_steps": "1"}, "max_steps: got '1', expected an integer"),
    ({"options": [1]}, "options: got [1], expected a dictionary of flowgrpo's keys")])
def test_arguments_of_another_kind_are_refused(given, told):
    assert message(lambda: FlowGRPOConfig(**given).keys(4)) == told


@pytest.mark.parametrize("given, told", [
    ({"callbacks": 3}, "callbacks: got a value of type int, expected a list of callbacks"),
    ({"callbacks": [object()]}, "expected objects of a TrainerCallback of transformers"),
    ({"peft_config": {"r": 4}}, "peft_config: got a dict without r and lora_alpha, expected a LoraConfig of peft")])
def test_objects_of_another_kind_are_refused(given, told):
    assert told in message(FlowGRPOTrainer, "starter", "scene", None, ["a star"], **given)


def test_settings_of_ddpo_of_another_kind_are_refused():
    with pytest.raises(UserError, match="train_batch_size: got 0, expected an integer of 1 or more"):
        DDPOConfig(train_batch_size=0).keys(None)
    with pytest.raises(UserError, match="pretrained_model_name: './nope' does not load .* expected a folder of a"):
        DefaultDDPOStableDiffusionPipeline("./nope")
