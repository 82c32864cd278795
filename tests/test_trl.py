"""Trainers under TRL's names, on tiny models: DDPO, GRPO and RLOO, fields, prompts and rewards."""

import dataclasses
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import flowgrpo
from flowgrpo.config import load
from flowgrpo.config.parse import validate
from flowgrpo.errors import UserError
from flowgrpo.trl import (
    DDPOConfig,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    FlowGRPOConfig,
    FlowGRPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    RLOOConfig,
    RLOOTrainer,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from flowgrpo.trl.config import REFUSED, UNREAD
from flowgrpo.trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import message

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


def test_ddpo_prompts_and_passes_are_rounds():
    given = iter([("cat", {}), ("dog", {"legs": 4}), ("cat", {}), ("cat", {})])
    trainer = DDPOTrainer(DDPOConfig(num_epochs=2), redness(), lambda: next(given), tiny.sd15())
    assert trainer.prompts == [{"prompt": "cat", "metadata": {}, "weight": 3},
                               {"prompt": "dog", "metadata": {"legs": 4}, "weight": 1}]
    args = FlowGRPOConfig(per_device_train_batch_size=8, num_generations=4, num_train_epochs=1.5, beta=0.1, epsilon=0.2)
    keys = args.keys(10)
    assert keys["train"]["epochs"] == 8 and keys["train"]["prompts"] == 2  # 15 prompts, two a round
    assert keys["parts"] == {"kl": {"weight": 0.1}, "surrogate": {"low": 0.2, "high": 0.2}}
    with pytest.raises(UserError, match=r"a step has 8 samples .* expected a multiple of num_generations, 3"):
        FlowGRPOConfig(num_generations=3)


def test_ddpo_settings_and_refused_ones():
    keys = DDPOConfig(sample_batch_size=6, sample_num_batches_per_epoch=4, train_batch_size=3, log_with="wandb",
                      train_timestep_fraction=0.5, mixed_precision="bf16", train_clip_range=1e-3,
                      options={"train": {"lr": 1e-5}}).keys(None)
    assert keys["train"]["prompts"] == 24 and keys["train"]["updates"] == 8 and keys["train"]["lr"] == 1e-5
    assert keys["parts"]["plan"] == {"type": "RandomSubset", "fraction": 0.5}
    assert keys["parts"]["surrogate"] == {"low": 1e-3, "high": 1e-3} and keys["precision"] == "bf16"
    assert DDPOConfig().keys(0)["adapter"] == {"rank": 0}
    from flowgrpo.config.parse import validate
    assert validate(keys).tracker == "wandb"
    with pytest.raises(UserError, match="train_batch_size: got 0, expected an integer of 1 or more"):
        DDPOConfig(train_batch_size=0)
    with pytest.raises(UserError, match="pretrained_model_name: './nope' does not load .* expected a folder of a"):
        DefaultDDPOStableDiffusionPipeline("./nope")


@pytest.mark.parametrize("settings, told", [
    ({"train_batch_size": 4, "sample_batch_size": 3}, "an epoch has 6 samples"),
    ({"train_cfg": False, "num_epochs": 0, "push_to_hub": True},
     "num_epochs: got 0, .*; train_cfg is False, which is not supported: .*; push_to_hub: got True, which is not")])
def test_what_ddpo_cannot_do_here_is_told(settings, told):
    with pytest.raises(UserError, match=told):
        DDPOConfig(**settings)


def test_ddpo_checks_its_keys_when_the_trainer_is_made():
    told = message(DDPOTrainer, DDPOConfig(sample_eta=-1.0, num_epochs=1), redness(), prompt_fn, tiny.sd15())
    assert told.startswith("parts.kernel: ") and "eta" in told


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
    assert message(FlowGRPOConfig, **given) == told


@pytest.mark.parametrize("kind, given, told", [
    (GRPOConfig, {"learning_rate": -1, "num_generations": 1},
     "num_generations: got 1, expected an integer of 2 or more; learning_rate: got -1, expected above 0"),
    (FlowGRPOConfig, {"num_generations": 1, "learning_rate": "1e-4", "top_k": -1},
     "top_k: got -1, expected an integer of 0 or more; learning_rate: got '1e-4', expected a number"),
    (GRPOConfig, {"temperature": 0.0, "adam_beta2": 1.0, "epsilon": 2},
     "adam_beta2: got 1.0, expected 0 to below 1; temperature: got 0.0, expected above 0; epsilon: got 2, expected 0 "
     "to 1"),
    (RLOOConfig, {"lr_scheduler_type": "polynomial"},
     "lr_scheduler_type: got 'polynomial', expected linear, cosine, constant, constant_with_warmup"),
    (DDPOConfig, {"train_learning_rate": 0, "seed": -1},
     "seed: got -1, expected an integer of 0 or more; train_learning_rate: got 0, expected above 0")])
def test_values_out_of_range_are_named_as_trl_names_them(kind, given, told):
    assert message(kind, **given) == told


def test_values_of_transformers_that_mean_nothing_else():
    """Without a largest norm, and with a warm-up before a constant rate; groups of one where a method takes them."""
    train = GRPOConfig(max_grad_norm=0.0, lr_scheduler_type="constant_with_warmup", warmup_steps=2).keys(8)["train"]
    assert (train["clip_grad"], train["schedule"], train["warmup"]) == (float("inf"), "constant", 2)
    assert DDPOConfig(train_max_grad_norm=0.0, train_adam_epsilon=1e-6).keys(None)["train"]["eps"] == 1e-6
    assert GRPOConfig(num_generations=1, options={"method": "ddpo"}).keys(8)["train"]["group"] == 1


@pytest.mark.parametrize("given, told", [
    ({"callbacks": 3}, "callbacks: got a value of type int, expected a list of callbacks"),
    ({"callbacks": [object()]}, "expected objects of a TrainerCallback of transformers"),
    ({"peft_config": {"r": 4}}, "peft_config: got a dict without r and lora_alpha, expected a LoraConfig of peft")])
def test_objects_of_another_kind_are_refused(given, told):
    assert told in message(FlowGRPOTrainer, "starter", "scene", None, ["a star"], **given)


# All fields of TRL 1.16's GRPOConfig, and of the TrainingArguments of transformers 5.24 below it.
NAMES = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval cache_implementation
cast_lm_head_to_fp32 chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout disable_tqdm do_eval do_predict do_train
ds3_gather_for_generation enable_jit_checkpoint entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min
entropy_target epsilon epsilon_high eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps
eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism generation_batch_size
generation_kwargs gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
importance_sampling_level include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_completions
log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts
logging_first_step logging_nan_inf_filter logging_steps logging_strategy loss_type lr_scheduler_kwargs
lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs multi_objective_aggregation
neftune_noise_alpha num_completions_to_print num_generations num_generations_eval num_iterations num_train_epochs
off_policy_mask_threshold optim optim_args optim_target_modules output_dir pad_to_multiple_of parallelism_config
per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty report_to
restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights router_aux_loss_coef run_name
sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model save_steps save_strategy
save_total_limit scale_rewards seed shuffle_dataset skip_memory_metrics steps_per_generation sync_ref_model
temperature tf32 top_entropy_quantile top_k top_p torch_compile torch_compile_backend torch_compile_mode
torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
transformers_continuous_batching_config trust_remote_code use_adaptive_entropy use_bias_correction_kl use_cache
use_cpu use_liger_kernel use_transformers_continuous_batching use_transformers_paged use_vllm
vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size warmup_steps weight_decay
""".split()
NORMALIZED = ["normalize_advantages", "reward_clip_range"]  # further fields of RLOOConfig
SMALL_TEXT = {"held_out": 0.4, "eval": {"prompts": 1}, "device": "cpu", "tracker": "none"}
SYSTEM = {"role": "system", "content": "12"}


def small(tmp_path, **given):
    return dict(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=2,
                max_completion_length=4, bf16=False, options=SMALL_TEXT) | given


def talks(system=None):
    return [{"prompt": [*([system] if system else []), {"role": "user", "content": text}], "answer": "3"}
            for text in tiny_text.PROMPTS]


def short(completions, **_):
    return [float(len(turns[0]["content"]) < 3) for turns in completions]


# --- fields ---
@pytest.mark.fast
def test_fields_and_arguments_of_trl_have_a_reason():
    names = {each.name for each in dataclasses.fields(GRPOConfig)}
    assert names == {*NAMES, "options"}
    assert not UNREAD.keys() & REFUSED.keys() and {*UNREAD, *REFUSED} <= names
    assert {each.name for each in dataclasses.fields(RLOOConfig)} == names | {*NORMALIZED}
    for name in ("tools", "rollout_func", "environment_factory", "quantization_config", "reward_processing_classes"):
        with pytest.raises(UserError, match=f"^{name}: not supported here: "):
            GRPOTrainer("starter_text", short, train_dataset=["a"], **{name: [len]})


OTHER = {bool: True, int: 7, float: 0.5, str: "other"}


@pytest.mark.parametrize("name", [*REFUSED, *NORMALIZED])
def test_a_field_that_is_not_supported_is_one_line(name):
    kinds = {each.name: str(each.type) for each in dataclasses.fields(RLOOConfig)}
    default = getattr(RLOOConfig(), name)
    kind = next((kind for kind in OTHER if kind.__name__ in kinds[name]), str)
    value = not default if kind is bool else OTHER[kind]
    with pytest.raises(UserError, match=f"^{name}: got {value!r}, which is not supported: .+$"):
        RLOOConfig(num_generations=4, **{name: value})


def test_all_fields_that_are_not_supported_are_one_line():
    """Fields of one reason together, after fields of a wrong value."""
    given = {"entropy_target": 0.5, "deepspeed": "x", "entropy_coef_min": 0.1, "loss_type": "sapo", "max_steps": "1"}
    told = ("max_steps: got '1', expected an integer; loss_type: got 'sapo', expected grpo, dapo, cispo, dr_grpo, "
            "luspo; deepspeed: got 'x', which is not supported: set options={'memory': {'shard': True}}"
            " and launch by accelerate or torchrun; entropy_coef_min: got 0.1, entropy_target: got 0.5, which are not "
            "supported: the entropy bonus has a fixed weight, entropy_coef")
    assert message(GRPOConfig, **given) == told
    args = GRPOConfig()
    for name, value in given.items():  # as scripts change an object after it is made
        setattr(args, name, value)
    assert message(GRPOTrainer, "starter_text", short, args, ["1+1="]) == told
    assert message(GRPOTrainer, "starter_text", short, None, ["1+1="], tools=[len], rollout_func=len) == (
        "tools: not supported here: completions call no tools; rollout_func: not supported here: "
        "options={'text': {...}} has the engines")


@pytest.mark.parametrize("model, given, told", [
    ("starter", {"temperature": 0.5, "max_completion_length": 4, "loss_type": "dapo"},
     "max_completion_length: got 4, temperature: got 0.5, loss_type: got 'dapo', which are not supported: a pipeline "
     "samples no tokens"),
    ("starter_text", {"num_inference_steps": 4, "guidance_scale": 2.0},
     "num_inference_steps: got 4, guidance_scale: got 2.0, which are not supported: a language model has no steps and "
     "no guidance"),
    ("starter_text", {"options": {"parts": {"decoding": {"top_p": 3}}}},
     "parts.decoding: Decoding: top_p is 3 and min_p 0.0, expected above 0 to 1 and 0 to 1"),
    ("starter", {"options": {"evall": {}}}, "the options: unknown key 'evall': did you mean 'eval'?"),
    ("starter_tex", {}, "no model 'starter_tex', and no folder of that name: did you mean 'starter_text'?")])
def test_a_trainer_checks_what_its_model_reads_when_it_is_made(model, given, told):
    assert message(FlowGRPOTrainer, model, reddish, FlowGRPOConfig(**given), ["a star"]) == told


@pytest.mark.parametrize("kind, given, told", [
    (GRPOConfig, {"learning_rat": 1e-5, "num_generation": 4},
     "GRPOConfig: unknown argument 'learning_rat': did you mean 'learning_rate'? unknown argument 'num_generation': "
     "did you mean 'num_generations'?"),
    (RLOOConfig, {"zzz": 1}, "RLOOConfig: unknown argument 'zzz'; help(flowgrpo.trl.RLOOConfig) lists all"),
    (DDPOConfig, {"train_batchsize": 1}, "DDPOConfig: unknown argument 'train_batchsize': did you mean "
     "'train_batch_size'?"),
    (ModelConfig, {"lora_rr": 1}, "ModelConfig: unknown argument 'lora_rr': did you mean 'lora_r'?"),
    (GRPOTrainer, {"evl_dataset": []}, "GRPOTrainer: unknown argument 'evl_dataset': did you mean 'eval_dataset'?"),
    (DDPOTrainer, {"zzz": 1}, "DDPOTrainer: unknown argument 'zzz'; there are: config, reward_function, "
     "prompt_function, sd_pipeline, image_samples_hook")])
def test_an_unknown_argument_has_the_nearest(kind, given, told):
    assert message(kind, **given) == message(kind, error=TypeError, **given) == told


def test_fields_and_defaults_of_trl():
    line = GRPOConfig(log_completions=True, num_completions_to_print=2, ddp_timeout=9).unread()
    assert line == ("GRPOConfig, not read: ddp_timeout (the model is in no DistributedDataParallel); log_completions, "
                    "num_completions_to_print (every round is logged to metrics.jsonl, the tracker and the report)")
    assert GRPOConfig().unread() == FlowGRPOConfig().unread() == ""
    config = GRPOConfig().keys(10)
    assert config["parts"] == {
        "kl": {"weight": 0.0}, "decoding": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
        "advantage": {"scale": "group", "order": "rewards"}, "log_ratio": {"type": "PlainRatio"},
        "reduction": {"type": "TokenMean"}, "surrogate": {"type": "Clip", "low": 0.2, "high": 0.2}}
    assert config["train"]["epochs"] == 30 and config["train"]["lr"] == 1e-6 and config["seed"] == 42
    assert config["text"] == {"max_tokens": 512} and config["train"]["schedule"] == "linear"
    assert validate(config | {"method": "grpo"}).train.checkpointing is True


@pytest.mark.parametrize("given, parts", [
    ({"loss_type": "dr_grpo", "scale_rewards": False},
     {"reduction": {"type": "SequenceSum", "budgeted": True}, "advantage": {"scale": "none", "order": "rewards"}}),
    ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
     {"log_ratio": {"type": "SequenceRatio"}, "surrogate": {"type": "Clip", "low": 3e-4, "high": 4e-4},
      "reduction": {"type": "SequenceMean"}}),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"surrogate": {"type": "TruncatedIS", "low": 1.0, "high": 4.0}}),
    ({"delta": 1.5}, {"surrogate": {"type": "DualClip", "dual": 1.5, "low": 0.2, "high": 0.2}}),
    ({"top_entropy_quantile": 0.2}, {"surrogate": {"type": "HighEntropy", "share": 0.2, "surrogate":
                                                   {"type": "Clip", "low": 0.2, "high": 0.2}}}),
    ({"entropy_coef": 0.01}, {"surrogate": {"type": "EntropyBonus", "weight": 0.01, "surrogate":
                                            {"type": "Clip", "low": 0.2, "high": 0.2}}}),
    ({"multi_objective_aggregation": "normalize_then_sum"}, {"advantage": {"scale": "group", "order": "gdpo"}})])
def test_losses_of_trl_are_parts(given, parts):
    keys = GRPOConfig(**given).keys(8)
    assert {name: keys["parts"][name] for name in parts} == parts
    from flowgrpo.methods.overlay import preset, with_parts
    with_parts(preset("grpo"), validate(keys | {"method": "grpo"}).parts)


def test_generations_are_reused_as_in_trl():
    keys = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8,
                      num_generations=8, max_steps=10, num_iterations=2, save_steps=0.5, eval_strategy="steps",
                      eval_steps=8, warmup_steps=0.1).keys(100)
    train = keys["train"]
    assert (train["prompts"], train["updates"], train["inner_epochs"]) == (4, 4, 2)
    assert train["epochs"] == 2 and train["save_every"] == 1 and train["warmup"] == 1 and keys["eval"]["every"] == 1
    with pytest.raises(UserError, match="a rollout has 12 samples, expected a multiple of an optimizer step's 8"):
        GRPOConfig(generation_batch_size=12, num_generations=2)


@pytest.mark.parametrize("given, told", [
    ({"loss_type": "bnpo"}, "loss_type: got 'bnpo', expected grpo, dapo, cispo, dr_grpo, luspo: dapo is the same"),
    ({"optim": "sgd"}, "optim: got 'sgd', expected adamw_torch"),
    ({"scale_rewards": "row"}, "scale_rewards: got 'row', expected group, batch or none"),
    ({"model_init_kwargs": {"quantization_config": 1}}, "model_init_kwargs: quantization_config is not supported"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end: expected the name of a reward")])
def test_values_that_are_not_here_are_one_line(given, told):
    assert message(GRPOConfig, **given).startswith(told)


# --- runs ---
def test_grpo_takes_messages_and_gives_rewards_what_trl_gives(tmp_path):
    from datasets import Dataset
    seen = []
    async def counted(prompts, completions, completion_ids, answer, trainer_state, **columns):
        seen.append((prompts[0], completions[0], completion_ids[0], answer[0], columns.keys()))
        return [float(len(ids)) for ids in completion_ids]
    model, tokenizer = tiny_text.model()
    trainer = GRPOTrainer(model, [counted, short], GRPOConfig(**small(tmp_path, run_name="talks")),
                          Dataset.from_list(talks(SYSTEM)), Dataset.from_list(talks(SYSTEM)[:2]), tokenizer)
    assert trainer.options["text"] == {"system": "12"}
    summary = trainer.train()
    assert summary["method"] == "grpo" and summary["rewards"]["trained"] == {"counted": 1.0, "short": 1.0}
    prompt, completion, ids, answer, further = seen[-1]
    assert prompt[0] == SYSTEM and prompt[1]["role"] == "user" and answer == "3"
    assert [*completion[0]] == ["role", "content"] and completion[0]["role"] == "assistant"
    assert tokenizer.decode(ids, skip_special_tokens=True) == completion[0]["content"] and "log_metric" in further
    config = load(tmp_path / "talks" / "config.yaml")
    assert config.adapter.rank == 0 and config.held_out == str(tmp_path / "talks_eval.jsonl")
    held = [json.loads(line) for line in (tmp_path / "talks_eval.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in held] == tiny_text.PROMPTS[:2]


def test_messages_of_several_turns_are_written_by_the_chat_template(tmp_path):
    model, tokenizer = tiny_text.model()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }};{% endfor %}{{ '+' if plus }}"
    talk = [SYSTEM, {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"},
            {"role": "user", "content": "4+4="}]
    trainer = GRPOTrainer(model, short, GRPOConfig(**small(tmp_path, chat_template_kwargs={"plus": True})),
                          [{"prompt": talk}], processing_class=tokenizer)
    assert trainer.options["text"] == {"template": False}
    assert [row["prompt"] for row in trainer.prompts] == ["12;1+2=;3;4+4=;+"]
    assert trainer.prompts[0]["metadata"]["conversation"] == talk
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="need a chat template, and the tokenizer has none"):
        GRPOTrainer(model, short, None, [{"prompt": talk}], processing_class=tokenizer)


def test_rloo_trains_a_lora(tmp_path):
    from peft import LoraConfig
    model, tokenizer = tiny_text.model()
    trainer = RLOOTrainer(model, short, RLOOConfig(**small(tmp_path, run_name="rloo", lr_scheduler_type="cosine")),
                          talks(), processing_class=tokenizer, peft_config=LoraConfig(r=2, lora_alpha=4))
    assert trainer.train()["method"] == "rloo"
    config = load(tmp_path / "rloo" / "config.yaml")
    assert (config.adapter.rank, config.adapter.alpha, config.train.schedule) == (2, 4, "cosine")
    assert config.parts["surrogate"] == {"type": "Clip", "low": 0.2, "high": 0.2}
    assert config.parts["kl"] == {"estimator": "k2", "weight": 0.05}


def test_flow_grpo_trainer_takes_coroutines_and_streams(tmp_path):
    async def length(completions, prompts):
        return [float(len(text)) for text in completions]
    rows = ({"prompt": text} for text in tiny_text.PROMPTS)
    args = FlowGRPOConfig(**small(tmp_path))
    trainer = FlowGRPOTrainer("starter_text", length, args, rows)
    [function] = trainer.rewards
    assert function(["ab"], ["1+"], [{}]) == [2.0] and len(trainer.prompts) == 4
    with pytest.raises(UserError, match="train_dataset: got a stream of unknown length, expected max_steps"):
        FlowGRPOTrainer("starter_text", length, FlowGRPOConfig(), iter(["a"]))


def test_a_push_without_a_repository_says_the_command(tmp_path, capsys):
    GRPOTrainer("starter_text", short, GRPOConfig(output_dir="out"), ["1+1="]).push_to_hub(dataset_name="mine")
    assert "flowgrpo push out/trl OWNER/NAME" in capsys.readouterr().out


# --- what scripts read ---
def test_arguments_of_a_script(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\nuse_peft: true\n")
    script, args, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(
        ["--config", str(tmp_path / "run.yaml"), "--output_dir", "out", "--lora_target_modules", "q_proj", "v_proj",
         "--log_completions", "--lora_r", "4", "--scale_rewards", "batch"])
    assert args.log_completions and args.scale_rewards == "batch" and float(args.learning_rate) == 1e-5
    peft = get_peft_config(model)
    assert peft.r == 4 and peft.target_modules == {"q_proj", "v_proj"} and script.dataset_train_split == "train"
    assert get_peft_config(ModelConfig()) is None
    (tmp_path / "run.yaml").write_text("learning_rat: 1e-5\n")
    assert message(TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config, ["--config", str(
        tmp_path / "run.yaml")]).endswith("run.yaml: unknown argument 'learning_rat': did you mean 'learning_rate'?")


def test_rewards_of_trl():
    written = [[{"role": "assistant", "content": text}] for text in ("<think>a\nb</think>c", "c", "<think>a",
                                                                     "<think>a<think>b</think>c")]
    assert think_format_reward(written) == [1.0, 0.0, 0.0, 0.0]
    assert get_soft_overlong_punishment(10, 4)([[0] * 6, [0] * 8, [0] * 11]) == [0.0, -0.5, -1.0]
    answers = [[{"role": "assistant", "content": text}] for text in ("so \\boxed{\\frac{1}{2}}", "\\boxed{3}")]
    assert accuracy_reward(answers, ["$\\frac{1}{2}$", "It is \\boxed{4}."]) == [1.0, 0.0]
