"""Configurations by TRL's names: `GRPOConfig` and `RLOOConfig` with its defaults, `FlowGRPOConfig` with this package's.

All fields of TRL 1.16 and of transformers' TrainingArguments are here. `UNREAD` has those without an effect on what is
learned, `REFUSED` those that are not supported if they are changed; each says why. `keys` reads all others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.packages import present
from flowgrpo.parts import Above, AtLeast, Range
from flowgrpo.trl.arguments import NamedArguments

ALWAYS = "every round is logged to metrics.jsonl, the tracker and the report"
DATA = "prompts are in memory, and no loader process reads them"
WRAPPED = "the model is in no DistributedDataParallel"
MEASURED = "evaluations run rewards on held-out prompts, before and after training too"
SENT = "flowgrpo push RUN OWNER/NAME uploads a run"
SHARDED = "set options={'memory': {'shard': True}} and launch by accelerate or torchrun"
FASTER = "it changes speed, not what is sampled"
VLLM = "of vLLM, options={'text': {...}} has engine, engine_memory and correction"

# Fields that change nothing of what is learned: taken, and named in a line if they are set.
UNREAD = dict.fromkeys((
    "logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node",
    "log_level", "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics",
    "log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal", "project",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), ALWAYS) | dict.fromkeys((
    "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
    "length_column_name", "label_names"), DATA) | dict.fromkeys((
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    "ddp_timeout", "local_rank", "average_tokens_across_devices", "ds3_gather_for_generation"), WRAPPED
    ) | dict.fromkeys((
    "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
    "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "do_train",
    "do_eval", "do_predict"), MEASURED) | dict.fromkeys((
    "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged",
    "cache_implementation", "use_cache", "use_liger_kernel", "liger_kernel_config", "torch_empty_cache_steps", "tf32",
    "pad_to_multiple_of", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "vllm_mode",
    "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_max_model_length"), FASTER) | dict.fromkeys((
    "hub_strategy", "hub_always_push"), SENT) | {
    "disable_dropout": "dropout is always off", "cast_lm_head_to_fp32": "log-probabilities are float32 anyway",
    "full_determinism": "a run with the same seed on the same machine has the same numbers",
    "save_only_model": "a checkpoint can always be resumed", "save_on_each_node": "the first process saves",
    "enable_jit_checkpoint": "SIGTERM saves the last whole round",
    "use_bias_correction_kl": "the KL has no importance weight, which is 1 in the first update of a round"}

# Fields that are not supported if they are changed, and what does it instead.
REFUSED = dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"), SHARDED
    ) | dict.fromkeys((
    "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "vllm_group_port", "vllm_tensor_parallel_size", "vllm_importance_sampling_clip_min"), VLLM
    ) | dict.fromkeys((
    "push_to_hub", "hub_token", "log_completions_hub_repo"), SENT) | dict.fromkeys((
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    "the entropy bonus has a fixed weight, entropy_coef") | dict.fromkeys((
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    "options={'parts': {'reference': {'type': 'EMA'}}} has a moving reference") | dict.fromkeys((
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg"), "the losses sapo and vespo are not supported") | dict.fromkeys((
    "bf16_full_eval", "fp16_full_eval"), "evaluation has the precision of the training") | dict.fromkeys((
    "torch_compile_backend", "torch_compile_mode"), "torch_compile compiles with torch's defaults") | {
    "optim_args": "set adam_beta1, adam_beta2, adam_epsilon and weight_decay",
    "optim_target_modules": "peft_config.target_modules chooses what is trained",
    "lr_scheduler_kwargs": "schedules are constant, linear and cosine, without arguments",
    "label_smoothing_factor": "a policy gradient has no labels", "neftune_noise_alpha":
    "noise on embeddings would change the ratio of the first update", "eval_delay": "evaluations begin with the run",
    "ignore_data_skip": "a resumed run goes on with the prompts that come next",
    "restore_callback_states_from_checkpoint": "checkpoints hold no state of callbacks",
    "data_seed": "seed is of prompts too", "train_sampling_strategy": "prompts are sampled at random",
    "shuffle_dataset": "prompts are sampled at random", "debug": "an infinite or NaN loss already ends the run",
    "router_aux_loss_coef": "no loss of a mixture's router is added", "generation_kwargs":
    "set temperature, top_p, top_k, min_p and max_completion_length",
    "repetition_penalty": "the replay would not have the sampled distribution",
    "max_tool_calling_iterations": "completions call no tools", "off_policy_mask_threshold":
    "options={'parts': {'surrogate': {'type': 'DivergenceMask'}}} is near to it", "greater_is_better":
    "of rewards, more is better"}

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw",
              "adamw_bnb_8bit": "adamw8bit", "adamw_8bit": "adamw8bit"}
CORRECTIONS = {"token_truncate": ("tis", "token"), "token_mask": ("mis", "token"),
               "sequence_truncate": ("tis", "sequence"), "sequence_mask": ("mis", "sequence")}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"type": "SequenceMean"}, "dapo": {"type": "TokenMean"}, "cispo": {"type": "TokenMean"},
    "dr_grpo": {"type": "SequenceSum", "budgeted": True}, "luspo": {"type": "SequenceSum"}}
SCALES = {"True": "group", "group": "group", "batch": "batch", "False": "none", "none": "none"}
ORDERS = {"sum_then_normalize": "rewards", "normalize_then_sum": "gdpo"}
LEVELS = {"token": "PlainRatio", "sequence": "SequenceRatio"}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
# Fields that only a language model reads, and those that only a pipeline does.
OF_COMPLETIONS = ("max_completion_length", "mask_truncated_completions", "temperature", "top_p", "top_k", "min_p",
                  "use_vllm", "loss_type", "top_entropy_quantile", "entropy_coef")
OF_PIPELINES = ("num_inference_steps", "guidance_scale")
# Fields of a choice, with what an error says is expected.
CHOICES = (("optim", (*OPTIMIZERS,), ", ".join(OPTIMIZERS)),
           ("lr_scheduler_type", (*SCHEDULES,), ", ".join(SCHEDULES)),
           ("save_strategy", ("no", "steps", "epoch"), "no, steps, epoch"),
           ("eval_strategy", (None, "no", "steps", "epoch"), "None, no, steps, epoch"),
           ("scale_rewards", (None, *SCALES), "group, batch or none"),
           ("multi_objective_aggregation", (None, *ORDERS), " or ".join(ORDERS)),
           ("importance_sampling_level", (None, *LEVELS), "token or sequence"),
           ("loss_type", (None, *REDUCTIONS), ", ".join(REDUCTIONS)))
# Ranges of numbers; a field that is None is in none.
RANGES: dict[str, Range] = {
    "learning_rate": Above(0), "weight_decay": AtLeast(0), "adam_beta1": AtLeast(0, below=1),
    "adam_beta2": AtLeast(0, below=1), "adam_epsilon": AtLeast(0), "max_grad_norm": AtLeast(0),
    "warmup_steps": AtLeast(0), "save_steps": Above(0), "eval_steps": AtLeast(0), "logging_steps": AtLeast(0),
    "beta": AtLeast(0), "temperature": Above(0), "top_p": Above(0, to=1), "min_p": AtLeast(0, to=1),
    "epsilon": AtLeast(0, to=1), "epsilon_high": AtLeast(0), "delta": Above(1), "top_entropy_quantile": Above(0, to=1)}
INIT = ("dtype", "torch_dtype", "revision", "trust_remote_code", "attn_implementation", "device_map", "use_cache",
        "low_cpu_mem_usage")  # of model_init_kwargs


@dataclass
class GRPOConfig(NamedArguments):
    """Settings of `GRPOTrainer`: the names and defaults of TRL's GRPOConfig, whose documentation says what they mean.

    output_dir, run_name: the run's folder is output_dir/run_name.
    max_steps, eval_steps, save_steps, warmup_steps: in optimizer steps, or below 1 as a share of all.
    log_completions and other fields of `UNREAD`: taken, and named in a line. Fields of `REFUSED`, and wrong values: one
        UserError of all of them, when the object is made.
    options: any further keys of flowgrpo's configuration, such as {"eval": {"prompts": 8}}.
    """

    # --- of transformers' TrainingArguments ---
    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: str | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim_target_modules: str | None = None
    gradient_accumulation_steps: int = 1
    average_tokens_across_devices: bool = True
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    bf16: bool | None = None
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: str | None = None
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: str | None = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    logging_strategy: str = "steps"
    logging_steps: float = 10
    logging_first_step: bool = False
    log_on_each_node: bool = True
    logging_nan_inf_filter: bool = True
    include_num_input_tokens_seen: str = "no"
    log_level: str = "passive"
    log_level_replica: str = "warning"
    disable_tqdm: bool | None = None
    report_to: str = "none"
    run_name: str | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | None = None
    eval_strategy: str | None = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = False
    eval_on_start: bool = False
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    eval_accumulation_steps: int | None = None
    include_for_metrics: list[str] | None = None
    batch_eval_metrics: bool = False
    save_only_model: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_on_each_node: bool = False
    save_total_limit: int | None = None
    enable_jit_checkpoint: bool = False
    push_to_hub: bool = False
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = False
    restore_callback_states_from_checkpoint: bool = False
    full_determinism: bool = False
    seed: int = 42
    data_seed: int | None = None
    use_cpu: bool = False
    accelerator_config: str | None = None
    parallelism_config: str | None = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    remove_unused_columns: bool | None = False
    label_names: list[str] | None = None
    train_sampling_strategy: str = "random"
    length_column_name: str = "length"
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_backend: str | None = None
    ddp_timeout: int = 1800
    fsdp: str | None = None
    fsdp_config: str | None = None
    deepspeed: str | None = None
    debug: str = ""
    skip_memory_metrics: bool = True
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | None = None
    local_rank: int = -1
    # --- of TRL's GRPOConfig ---
    model_init_kwargs: str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    generation_kwargs: str | None = None
    chat_template_kwargs: str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float | None = 0.0
    num_iterations: int = 1
    epsilon: float | None = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str | None = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str | None = "sum_then_normalize"
    scale_rewards: str | None = "group"
    loss_type: str | None = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: str | None = None
    use_transformers_paged: bool = False
    vllm_importance_sampling_cap: float | None = None
    # --- of this package ---
    options: dict[str, Any] = field(default_factory=dict)

    # --- what is made of them ---

    def __post_init__(self) -> None:
        self.keys(1)

    def unread(self) -> str:
        """Return a line that names the fields that are set and not read, with the reasons; "" if there are none."""
        reasons: dict[str, list[str]] = {}
        for name in changed_fields(self):
            if name in UNREAD:
                reasons.setdefault(UNREAD[name], []).append(name)
        if self.use_vllm and not present("vllm"):
            reasons["vllm is not installed, so transformers samples the same distribution"] = ["use_vllm"]
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        return f"{type(self).__name__}, not read: {told}" if told else ""

    @property
    def samples(self) -> int:
        """Samples of a rollout, of all processes."""
        if self.generation_batch_size is not None:
            if self.steps_per_generation is not None:
                raise UserError("generation_batch_size and steps_per_generation: got both, expected one of them")
            return self.generation_batch_size
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.per_device_train_batch_size * steps * processes()

    @property
    def updates(self) -> int:
        """Optimizer steps of a pass over a rollout's samples."""
        batch = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes()
        if self.samples % batch:
            raise UserError(f"a rollout has {self.samples} samples, expected a multiple of an optimizer step's {batch} "
                            "(per_device_train_batch_size x gradient_accumulation_steps x processes): change "
                            "steps_per_generation or generation_batch_size")
        return self.samples // batch

    def keys(self, prompts: int) -> dict[str, Any]:
        """Return flowgrpo's configuration. prompts: number of training prompts.

        Raises UserError if a rollout's samples are no whole groups, and for a field that is not supported.
        """
        self._require()
        if self.samples % self.num_generations:
            of = "generation_batch_size" if self.generation_batch_size is not None else \
                f"per_device_train_batch_size x {self._accumulation_key} x processes"
            raise UserError(f"a step has {self.samples} samples ({of}), expected a multiple of num_generations, "
                            f"{self.num_generations}")
        groups, a_round = self.samples // self.num_generations, self.updates * self.num_iterations
        a_pass = self.num_train_epochs * prompts / groups
        rounds = max(math.ceil(self.max_steps / a_round if self.max_steps > 0 else a_pass), 1)
        total = rounds * a_round

        def every(steps: float) -> int:
            return max(1, round((steps * total if 0 < steps < 1 else steps) / a_round)) if steps else 0

        a_pass = max(1, math.ceil(prompts / groups))
        evaluated = 0 if self.eval_strategy == "no" else a_pass if self.eval_strategy == "epoch" else \
            every(self.eval_steps or (self.logging_steps if self.eval_strategy else 0))
        saved = rounds if self.save_strategy == "no" else a_pass if self.save_strategy == "epoch" else \
            max(1, every(self.save_steps))
        recompute = self.gradient_checkpointing if self.activation_checkpointing is None else \
            self.activation_checkpointing
        warmup = self.warmup_steps * total if 0 < self.warmup_steps < 1 else self.warmup_steps
        train = {"epochs": rounds, "prompts": groups, "group": self.num_generations, "updates": self.updates,
                 "micro_batch": "auto" if self.auto_find_batch_size else self.per_device_train_batch_size,
                 "inner_epochs": self.num_iterations, "lr": self.learning_rate,
                 "clip_grad": self.max_grad_norm or math.inf, "weight_decay": self.weight_decay,
                 "betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_epsilon,
                 "optimizer": OPTIMIZERS[self.optim], "warmup": int(warmup),
                 "schedule": SCHEDULES[self.lr_scheduler_type], "checkpointing": bool(recompute), "save_every": saved,
                 "compile": self.torch_compile}
        if self.save_total_limit is not None:
            train["keep"] = self.save_total_limit
        evaluation: dict[str, Any] = {"every": evaluated}
        if self.num_generations_eval is not None:
            evaluation["samples"] = self.num_generations_eval
        if self.load_best_model_at_end:
            evaluation["best"] = self.metric_for_best_model
        made: dict[str, Any] = {
            "name": self.folder[1], "output": self.folder[0], "parts": self._parts(), "seed": self.seed,
            "tracker": "none" if self.report_to in (None, []) else self.report_to, "precision": self._precision(),
            "train": train, "eval": evaluation}
        if self.use_cpu:
            made["device"] = "cpu"
        if text := self._text():
            made["text"] = text
        return over(over(made, self._own()), mapping(self.options))

    @property
    def folder(self) -> tuple[str, str]:
        """The folder of all runs, and the run's name."""
        return self.output_dir or "runs", self.run_name or "trl"

    @property
    def _accumulation_key(self) -> str:
        return "steps_per_generation" if self.steps_per_generation else "gradient_accumulation_steps"

    def _own(self) -> dict[str, Any]:
        """Return keys of the class."""
        init = self.init_kwargs()
        made: dict[str, Any] = {}
        if self.trust_remote_code or init.get("trust_remote_code"):
            made["trust_remote_code"] = True
        if init.get("revision") not in (None, "main"):
            made["load"] = {"revision": init["revision"]}
        return made

    def init_kwargs(self) -> dict[str, Any]:
        """Return model_init_kwargs. Raises UserError for one that is not supported."""
        given = self.model_init_kwargs
        init = json.loads(given) if isinstance(given, str) else dict(given or {})
        wrong = [name for name in init if name not in INIT]
        wrong += ["attn_implementation"] if init.get("attn_implementation") else []
        if wrong:
            raise UserError(f"model_init_kwargs: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not supported"
                            ", expected dtype, revision and trust_remote_code: load the model yourself, and pass it "
                            "with processing_class")
        return init

    def template_kwargs(self) -> dict[str, Any]:
        """Return chat_template_kwargs."""
        given = self.chat_template_kwargs
        return json.loads(given) if isinstance(given, str) else dict(given or {})

    def _require(self) -> None:
        """Raise UserError for all fields of a wrong type or value, and all that are not supported."""
        for name in ("optim", "save_strategy", "eval_strategy", "lr_scheduler_type"):
            setattr(self, name, getattr(getattr(self, name), "value", getattr(self, name)))
        self.lr_scheduler_type = str(self.lr_scheduler_type)
        if isinstance(self.report_to, (list, tuple)) and len(self.report_to) == 1:
            self.report_to = self.report_to[0]
        refused = self._not_supported()
        named = {name: refused[name] for name in changed_fields(self) if name in refused and not self._same_seed(name)}
        if wrong := [*self._wrong_values(), *not_supported(self, named)]:
            raise UserError("; ".join(wrong))

    def _not_supported(self) -> dict[str, str]:
        """Return the fields that are not supported if they are changed, with the reasons."""
        return REFUSED

    def require_kind(self, kind: str) -> None:
        """Raise UserError for all fields that are set and that a model of this kind (`policies.build`) does not have.
        """
        defaults = {each.name: each.default for each in fields(self)}
        names, why = (OF_COMPLETIONS, "a pipeline samples no tokens") if kind == "pipeline" else \
            (OF_PIPELINES, "a language model has no steps and no guidance")
        if wrong := [*not_supported(self, {name: why for name in names if name in defaults
                                           and getattr(self, name) != defaults[name]})]:
            raise UserError("; ".join(wrong))

    def _counts(self) -> dict[str, int]:
        """Return the fields that are integers, with the least of each."""
        group = 1 if {"method", "parts"} & mapping(self.options).keys() else 2
        counts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_generations": group,
                  "num_iterations": 1, "seed": 0}
        maybe = {"steps_per_generation": 1, "generation_batch_size": 1, "num_generations_eval": 1,
                 "max_completion_length": 1, "top_k": 0}
        return counts | {name: least for name, least in maybe.items() if getattr(self, name) is not None}

    def _wrong_values(self) -> Iterator[str]:
        """Yield what is wrong of fields of another type or value than expected."""
        yield from wrong_numbers(self, self._counts(), RANGES)
        if not isinstance(self.max_steps, int) or isinstance(self.max_steps, bool):
            yield f"max_steps: got {self.max_steps!r}, expected an integer"
        if not (_is_number(self.num_train_epochs) and 0 < self.num_train_epochs < math.inf):
            yield f"num_train_epochs: got {self.num_train_epochs!r}, expected a number above 0"
        if self.load_best_model_at_end and not self.metric_for_best_model:
            yield "load_best_model_at_end: expected the name of a reward in metric_for_best_model"
        for name, known, expected in CHOICES:
            value = getattr(self, name)
            if (str(value) if isinstance(value, bool) else value) not in known:
                same = ": dapo is the same over the whole batch" if value == "bnpo" else ""
                yield f"{name}: got {value!r}, expected {expected}{same}"

    def _same_seed(self, name: str) -> bool:
        return name == "data_seed" and self.data_seed == self.seed

    def _precision(self) -> str:
        dtype = str(self.init_kwargs().get("dtype", self.init_kwargs().get("torch_dtype", "")))
        if self.bf16 or dtype.endswith("bfloat16"):
            return "bf16"
        if self.fp16 or dtype.endswith("float16"):
            return "fp16"
        return "auto" if self.bf16 is None else "fp32"

    def _text(self) -> dict[str, Any]:
        """Return keys of the section `text`."""
        text: dict[str, Any] = {}
        if self.max_completion_length is not None:
            text["max_tokens"] = self.max_completion_length
        if self.mask_truncated_completions:
            text["truncated"] = "mask"
        if self.use_vllm and present("vllm"):
            text |= {"engine": "vllm", "engine_memory": self.vllm_gpu_memory_utilization}
            if not self.vllm_importance_sampling_correction:
                text["correction"] = "none"
            else:
                mode = self.vllm_importance_sampling_mode
                if mode not in CORRECTIONS:
                    raise UserError(f"vllm_importance_sampling_mode: got {mode!r}, expected {', '.join(CORRECTIONS)}")
                cap = self.vllm_importance_sampling_cap or self.vllm_importance_sampling_clip_max
                text["correction"], text["correction_level"] = CORRECTIONS[mode]
                text["correction_cap"] = math.inf if cap is None else cap
        return text

    def _parts(self) -> dict[str, Any]:
        """Return the parts of the method that fields name; a field that is None leaves the method's."""
        parts: dict[str, Any] = {} if self.beta is None else {"kl": {"weight": self.beta}}
        cuts = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        if given := {name: value for name, value in cuts.items() if value is not None}:
            parts["decoding"] = given
        advantage = {}
        if self.scale_rewards is not None:
            advantage["scale"] = SCALES[str(self.scale_rewards)]
        if self.multi_objective_aggregation is not None:
            advantage["order"] = ORDERS[self.multi_objective_aggregation]
        if advantage:
            parts["advantage"] = advantage
        if self.importance_sampling_level is not None:
            parts["log_ratio"] = {"type": LEVELS[self.importance_sampling_level]}
        if self.loss_type is not None:
            parts["reduction"] = REDUCTIONS[self.loss_type]
        return parts | self._surrogate()

    def _surrogate(self) -> dict[str, Any]:
        """Return the part `surrogate`, in a bonus or a selection of tokens."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clip: dict[str, Any] = {}
        if self.epsilon is not None:
            clip = {"low": self.epsilon, "high": high}
        if self.loss_type == "cispo":  # bounds the ratio by epsilon_high itself
            if high is None or high <= 0:
                raise UserError(f"epsilon_high: got {high!r}, expected a bound of the ratio above 0, such as 5")
            clip = {"type": "TruncatedIS", "low": 1.0, "high": high - 1}
        elif self.delta is not None:
            clip = {"type": "DualClip", "dual": self.delta} | clip
        elif self.loss_type is not None:
            clip = {"type": "Clip"} | clip
        if self.top_entropy_quantile < 1:
            clip = {"type": "HighEntropy", "share": self.top_entropy_quantile, "surrogate": clip}
        if self.entropy_coef:
            clip = {"type": "EntropyBonus", "weight": self.entropy_coef, "surrogate": clip}
        return {"surrogate": clip} if clip else {}


@dataclass
class RLOOConfig(GRPOConfig):
    """Settings of `RLOOTrainer`: the names and defaults of TRL's RLOOConfig.

    The KL is a term of the loss (k2), whose gradient is in expectation that of TRL's KL in the reward.
    """

    num_generations: int = 2
    beta: float | None = 0.05
    loss_type: str | None = None
    importance_sampling_level: str | None = None
    scale_rewards: str | None = None
    multi_objective_aggregation: str | None = None
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    def _not_supported(self) -> dict[str, str]:
        return REFUSED | dict.fromkeys(("normalize_advantages", "reward_clip_range"),
                                       "set a reward's transform in options")

    def _parts(self) -> dict[str, Any]:
        parts = super()._parts()
        return parts | {"log_ratio": {"type": "CompletionRatio"}, "kl": {"estimator": "k2"} | parts.get("kl", {}),
                        "surrogate": {"type": "Clip"} | parts["surrogate"]}


@dataclass
class FlowGRPOConfig(GRPOConfig):
    """Settings of `FlowGRPOTrainer`: `GRPOConfig` with this package's defaults, for pipelines and language models.

    method: presets joined by +; None: mix_grpo, of a language model grpo. A field that is None leaves the method's.
    num_generations: samples per prompt.
    per_device_train_batch_size: rows that go through the model at once. A step generates
        per_device_train_batch_size x gradient_accumulation_steps x processes samples.
    num_inference_steps, guidance_scale: of a rollout of a pipeline.
    lora_r: 0 trains the model itself.
    """

    method: str | None = None
    learning_rate: float = 3e-4
    num_train_epochs: float = 1.0
    lr_scheduler_type: str = "constant"
    weight_decay: float = 1e-4
    gradient_checkpointing: bool = False
    bf16: bool | None = False
    seed: int = 0
    save_steps: float = 50
    eval_strategy: str | None = None
    max_completion_length: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    beta: float | None = None
    epsilon: float | None = None
    importance_sampling_level: str | None = None
    multi_objective_aggregation: str | None = None
    scale_rewards: str | None = None
    loss_type: str | None = None
    num_inference_steps: int = 10
    guidance_scale: float = 1.0
    lora_r: int | None = None

    def _own(self) -> dict[str, Any]:
        made = super()._own() | {"train": {"steps": self.num_inference_steps, "guidance": self.guidance_scale}}
        if self.method is not None:
            made["method"] = self.method
        return made if self.lora_r is None else made | {"adapter": {"rank": self.lora_r}}

    def _counts(self) -> dict[str, int]:
        return super()._counts() | {"num_generations": 1, "num_inference_steps": 1}


def not_supported(config: Any, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield what an error says of fields that are not supported, those of one reason together."""
    for why in dict.fromkeys(reasons.values()):
        names = [f"{name}: got {getattr(config, name)!r}" for name in reasons if reasons[name] == why]
        yield f"{', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not supported: {why}"


def changed_fields(config: GRPOConfig) -> list[str]:
    """Return the names of fields that are not TRL's default nor the class's."""
    of_trl = {each.name: each.default for each in fields(GRPOConfig)}
    return [each.name for each in fields(config) if getattr(config, each.name) not in (
        of_trl.get(each.name), None, [], {}, each.default)]


def processes() -> int:
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def wrong_numbers(config: Any, counts: Mapping[str, int], ranges: Mapping[str, Range]) -> Iterator[str]:
    """Yield what is wrong of fields that are no integers of the given least or more, or no numbers of their range."""
    for name, least in counts.items():
        if not isinstance(value := getattr(config, name), int) or isinstance(value, bool) or value < least:
            yield f"{name}: got {value!r}, expected an integer of {least} or more"
    for name, taken in ranges.items():
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and taken.takes(value)):
            yield f"{name}: got {value!r}, expected " + (str(taken) if _is_number(value) else "a number")


def mapping(options: Any) -> Mapping[str, Any]:
    """Return options. Raises UserError for any other type than a dictionary."""
    if not isinstance(options, Mapping):
        raise UserError(f"options: got {' '.join(repr(options).split())[:80]}, expected a dictionary of flowgrpo's "
                        "keys")
    return options


def over(base: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with nested ones over those of a base."""
    result = dict(base)
    for key, value in keys.items():
        below = result.get(key)
        result[key] = over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result
