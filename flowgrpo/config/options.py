"""Types of the options of `flowgrpo.align`: the keys of the configuration, sections as dictionaries.

Written by scripts/docs/build_docs.py from the sections and the features. A type checker finds a wrong key or type.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict


class PhaseOptions(TypedDict, total=False):
    at: float
    reach: float | None
    when: dict[str, Any]
    carry: float
    weights: dict[str, float]
    set: dict[str, Any]


class FusedOptions(TypedDict, total=False):
    path: str
    scale: float


class InversionOptions(TypedDict, total=False):
    path: str
    token: str | None


class IPAdapterOptions(TypedDict, total=False):
    path: str
    weights: str
    subfolder: str | None
    encoder: str | None
    scale: float


class LoadOptions(TypedDict, total=False):
    variant: str | None
    revision: str | None
    config: str | None
    denoiser: str | None
    vae: str | None
    lora: Sequence[str | FusedOptions]
    scheduler: dict[str, Any]
    textual_inversion: Sequence[str | InversionOptions]
    controlnet: str | None
    ip_adapter: IPAdapterOptions | None


class ImageOptions(TypedDict, total=False):
    height: int | None
    width: int | None
    frames: int | None
    fps: float | None
    sizes: Sequence[Sequence[int]]
    call: dict[str, Any]


class TextOptions(TypedDict, total=False):
    generates: Literal["text", "image"]
    max_tokens: int
    system: str | None
    template: bool | None
    truncated: Literal["keep", "mask", "penalise"]
    penalty: float
    over_provision: float
    chunk: int
    shared_prefix: bool
    eval_temperature: float | None
    engine: Literal["transformers", "vllm"]
    engine_precision: Literal["fp32", "bf16", "fp16"] | None
    engine_memory: float
    correction: Literal["tis", "mis", "none"]
    correction_cap: float
    correction_level: Literal["token", "sequence"]


class RolloutOptions(TypedDict, total=False):
    engine: str | None
    timeout: float
    retries: int
    folder: str | None
    release: bool
    cache: Literal["first_block", "taylorseer", "mag"] | None
    cache_threshold: float | None
    cache_interval: int | None


class AdapterOptions(TypedDict, total=False):
    rank: int
    alpha: float | None
    init: str | None
    dora: bool
    rslora: bool
    targets: Sequence[str]
    encoder_targets: Sequence[str]


class MemoryOptions(TypedDict, total=False):
    weights: Literal["full", "int8", "fp8", "nf4"]
    encoders: Literal["keep", "cpu", "ahead"]
    denoiser: Literal["keep", "cpu"]
    offload: Literal["none", "block_level", "leaf_level"]
    rewards: Literal["keep", "cpu"]
    vae: Literal["whole", "sliced", "tiled"]
    states: Literal["device", "cpu"]
    attention: Literal["auto", "native", "cudnn", "flash", "flash3", "xformers"]
    shard: bool | Literal["nodes"]
    context_parallel: int


class AutoRateOptions(TypedDict, total=False):
    start: float
    target: float | None
    updates: int
    states: int | None


class TrainOptions(TypedDict, total=False):
    lr: float | Literal["auto"] | AutoRateOptions
    warmup: int
    schedule: Literal["constant", "linear", "cosine"]
    weight_decay: float
    betas: Sequence[float]
    eps: float
    clip_grad: float
    optimizer: Literal["adamw", "adamw8bit"]
    epochs: int
    prompts: int
    group: int
    micro_batch: int | Literal["auto"]
    generation_batch: int | None
    pack: bool
    updates: int
    inner_epochs: int
    one_pass: bool | Literal["auto"]
    steps: int
    guidance: float
    grid: Literal["shifted", "stock"]
    shift: float
    checkpointing: bool | float | Literal["auto"]
    compile: bool
    ema: float
    staleness: int
    staleness_cap: float
    rollout_ranks: int
    extrapolate: int
    extrapolate_every: int
    sibling: Literal["orthogonal", "replay"] | None
    sibling_share: float
    sibling_rank: int
    save_every: int
    keep: int


class GuardOptions(TypedDict, total=False):
    window: int
    false_alarms: float
    edge_width: float | None
    diversity: float | None
    reward: str | None
    lr: float
    unscored: int
    best: bool


class OnOptions(TypedDict, total=False):
    model: str | None
    lora: str | None
    lora_scale: float
    scheduler: dict[str, Any]
    steps: int | None
    guidance: float | None
    weight: float


class EarlyStopOptions(TypedDict, total=False):
    reward: str
    patience: int


class RetryOptions(TypedDict, total=False):
    retry: int
    wait: float
    then: Literal["raise", "skip"]


class WatchRuleOptions(TypedDict, total=False):
    use: str | None
    args: dict[str, Any]
    when: dict[str, Any]
    on_error: Literal["raise", "skip"] | RetryOptions
    timeout: float | None
    cache: bool


class EvalOptions(TypedDict, total=False):
    steps: int
    guidance: float
    frames: int | None
    every: int
    prompts: int
    samples: int
    weights: Literal["current", "ema"]
    best: str | None
    on: OnOptions | None
    stop: EarlyStopOptions | None
    grid: int
    rewards: Sequence[str] | dict[str, WatchRuleOptions]


class Options(TypedDict, total=False):
    name: str
    parts: dict[str, Any]
    held_out: float | str
    train_on_test_set: bool
    preferences: str | None
    labels: Literal["file", "rewards"]
    negative_prompt: str
    cache: str | None
    output: str
    seed: int
    device: Literal["auto", "cuda", "mps", "cpu"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    tracker: Literal["tensorboard", "wandb", "trackio", "none"]
    trust_remote_code: bool
    phases: Sequence[PhaseOptions]
    load: LoadOptions
    image: ImageOptions
    text: TextOptions
    rollout: RolloutOptions
    adapter: AdapterOptions
    memory: MemoryOptions
    train: TrainOptions
    guard: GuardOptions
    eval: EvalOptions
