"""Sections of a recipe: their keys, descriptions and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flowgrpo.config.base import Section
from flowgrpo.config.reward_rules import WatchRule

Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=8, le=2**16)]
Rows = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
STEPS = 10_000  # denoising steps at most
PIXELS = 2**28  # of a picture, or of all frames of a clip


class Picture(Section):
    """Output size and arguments of the pipeline's call; None keeps the pipeline's own default."""

    height: int | None = Field(None, ge=8, le=2**16, description="pixels")
    width: int | None = Field(None, ge=8, le=2**16, description="pixels")
    frames: int | None = Field(None, ge=1, le=2**16, description="number of frames, for video pipelines")
    fps: float | None = Field(None, gt=0, le=240, description="frames per second of clips, in files, pages and "
                              "rewards, and in the call of a pipeline that takes them; None: the model's own")
    sizes: list[tuple[Side, Side]] = Field(
        [], description="[height, width] pairs in pixels, one per group; evaluations take `height` and `width`, or "
                        "the first pair")
    call: dict[str, Any] = Field({}, description="further arguments of the pipeline's call: {max_sequence_length: 77}")

    @model_validator(mode="after")
    def _small(self) -> Picture:
        for height, width in [(self.height or 8, self.width or 8), *self.sizes]:
            if (pixels := height * width * (self.frames or 1)) > PIXELS:
                raise ValueError(f"height x width x frames of {PIXELS:,} pixels at most, got {pixels:,}")
        if self.fps is not None and (given := {"fps", "frame_rate", "target_fps"} & self.call.keys()):
            raise ValueError(f"fps is {self.fps:g}, and call has {given.pop()} too: leave one out")
        return self


class Text(Section):
    """Prompts, decoding and engine of a language model."""

    max_tokens: int = Field(256, ge=1, le=2**24, description="of a completion, at most")
    system: str | None = Field(None, description="the system message; None: none")
    template: bool | None = Field(None, description="prompts in the tokenizer's chat template; None: where it has one")
    truncated: Literal["keep", "mask", "penalise"] = Field("keep", description="completions that reach max_tokens "
                                                           "without an end: trained like others, not at all, or with "
                                                           "`penalty` taken off")
    penalty: float = Field(1.0, gt=0, description="of `truncated: penalise`, off every transformed reward")
    over_provision: float = Field(0.0, ge=0, description="groups begun beyond those of an epoch, as a share of "
                                                         "`train.prompts`; unfinished ones continue in the next; 0: "
                                                         "none; see docs/performance.md")
    chunk: int = Field(64, ge=1, description="with `over_provision`: tokens between two checks for ended completions")
    shared_prefix: bool = Field(True, description="read a prompt once for all samples of its group, where the model "
                                                  "allows it")
    eval_temperature: float = Field(0.0, ge=0, description="of the evaluation; 0 takes the likeliest token")
    engine: Literal["transformers", "vllm"] = Field("transformers", description="what samples completions; `vllm` has "
                                                    "not been run: docs/language_models.md")
    engine_precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="precision in which a copy of the model samples completions; None: `precision`")
    engine_memory: float = Field(0.4, gt=0, lt=1, description="share of the GPU that vLLM takes")
    correction: Literal["tis", "mis", "none"] = Field("tis", description="weight of tokens of an engine, or of half "
                                                                         "precision, by r = trainer's probability / "
                                                                         "theirs: min(r, cap), 0 above the cap, or "
                                                                         "none")
    correction_cap: float = Field(2.0, ge=1, description="largest r")
    correction_level: Literal["token", "sequence"] = Field("token", description="r of a token, or of its completion")


class Rollout(Section):
    """Engine that samples the images or clips of a rollout, or a feature cache; see docs/rollouts.md."""

    engine: str | None = Field(None, min_length=1, description="address of an SGLang-Diffusion server, such as "
                               "http://127.0.0.1:30000; None: the pipeline itself")
    timeout: float = Field(600.0, gt=0, description="seconds for one request")
    retries: int = Field(2, ge=0, description="further attempts where a connection fails or the server answers 5xx")
    folder: str | None = Field(None, min_length=1, description="folder for each update's LoRA, which the engine "
                                                               "reads too; None: a temporary one of this machine")
    release: bool = Field(False, description="the engine leaves the GPU's memory between rollouts")
    cache: Literal["first_block", "taylorseer", "mag"] | None = Field(
        None, description="diffusers' feature cache in the rollouts of methods that read only final samples")
    cache_threshold: float | None = Field(None, gt=0, description="threshold of `first_block` and `mag`: a higher "
                                                                  "one skips more blocks; None: diffusers' own")
    cache_interval: int | None = Field(None, ge=1, description="steps from one computed step of `taylorseer` to the "
                                                               "next; None: diffusers' own")


class Fused(Section):
    """LoRA that is fused into the weights of the model, and its scale."""

    path: str = Field(min_length=1, description="a finished run, a folder with a LoRA, or its file")
    scale: float = Field(1.0, description="factor of what it changes")


class Inversion(Section):
    """Embeddings of a textual inversion, for a token of prompts."""

    path: str = Field(min_length=1, description="a .safetensors file")
    token: str | None = Field(None, min_length=1, description="in prompts; None: the name in the file, or the file's")


class IPAdapter(Section):
    """IP-Adapter: weights by which the denoiser reads the picture `ip_adapter_image` of a prompt."""

    path: str = Field(min_length=1, description="folder or hub id")
    weights: str = Field(min_length=1, description="name of the file: ip-adapter_sd15.safetensors")
    subfolder: str | None = Field(None, min_length=1, description="of the file: models")
    encoder: str | None = Field(None, min_length=1, description="folder of the image encoder, inside `subfolder`; "
                                "FLUX: its folder or hub id; None: image_encoder")
    scale: float = Field(1.0, ge=0, description="factor of the image part")


class Load(Section):
    """Files from which `model` is loaded; see docs/pipelines.md."""

    variant: str | None = Field(None, min_length=1, description="of the weight files of a repository or folder: `fp16`")
    revision: str | None = Field(None, min_length=1, description="branch, tag or commit of a repository on the hub")
    config: str | None = Field(None, min_length=1, description="for a single file in `model`: folder or hub id of a "
                                                               "pipeline like it; None: the one that diffusers "
                                                               "infers")
    denoiser: str | None = Field(None, min_length=1, description="a .safetensors or .gguf file that replaces the "
                                 "denoiser of `model`")
    vae: str | None = Field(None, min_length=1, description="a .safetensors file, folder or hub id of an autoencoder "
                                                            "that replaces the one of `model`")
    lora: list[str | Fused] = Field([], description="LoRAs fused into the weights first, such as a turbo LoRA: "
                                                    "paths, or {path: FILE, scale: 0.8}")
    textual_inversion: list[str | Inversion] = Field([], description="embeddings for tokens of prompts: .safetensors "
                                                     "files, or {path: FILE, token: NAME}")
    controlnet: str | None = Field(None, min_length=1, description="folder or hub id of a frozen ControlNet, for the"
                                                                   " `control_image` of prompts")
    ip_adapter: IPAdapter | None = Field(None, description="a frozen IP-Adapter, for the `ip_adapter_image` of "
                                                           "prompts: {path: FOLDER, weights: FILE}")

    @property
    def fused(self) -> list[Fused]:
        """LoRAs of `lora` with their scales."""
        return [Fused(path=lora) if isinstance(lora, str) else lora for lora in self.lora]

    @property
    def inversions(self) -> list[Inversion]:
        """Textual inversions of `textual_inversion` with their tokens."""
        return [Inversion(path=each) if isinstance(each, str) else each for each in self.textual_inversion]

    @property
    def gguf(self) -> bool:
        """True if the denoiser is a GGUF file, whose weights are quantised."""
        return self.denoiser is not None and self.denoiser.endswith(".gguf")


class Adapter(Section):
    """Trained weights: a LoRA (rank >= 1) on the denoiser (the method may say: on text encoders), or with `rank: 0` all
    of the denoiser's weights."""

    rank: int = Field(32, ge=0, description="rank of the LoRA; 0 trains all weights")
    alpha: float | None = Field(None, gt=0, description="LoRA alpha of the training; None means a scale of 2: 2 "
                                                      "* rank, of an rsLoRA 2 * sqrt(rank). Files have alpha = rank")
    init: str | None = Field(None, min_length=1, description="a LoRA of the same rank and targets to start from:"
                                                             " a finished run, a folder or a file")
    dora: bool = Field(False, description="a length of its own for every row of a weight (DoRA, 2402.09353)")
    rslora: bool = Field(False, description="the scale alpha / sqrt(rank) (rsLoRA, 2312.03732)")
    targets: list[str] = Field(["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj",
                                "to_add_out"], description="names of the modules that get an adapter; these are a "
                                "denoiser's, in whose place a language model's stand")
    encoder_targets: list[str] = Field(["q_proj", "k_proj", "v_proj", "out_proj", "o_proj", "q", "k", "v", "o"],
                                       description="the same of text encoders, where the method trains them")


class AutoRate(Section):
    """Learning rate that the first updates of a run find: one update then moves its samples by the target."""

    start: float = Field(3e-4, gt=0, description="learning rate of the first update before it is sized, which forgets "
                                                 "it")
    target: float | None = Field(None, gt=0, description="relative change of the predicted velocity, or of completions "
                                 "sqrt(2 KL) of a completion in nats; None: 0.015, of completions 0.2")
    updates: int = Field(12, ge=1, description="updates that are measured; the later ones keep the rate")
    states: int | None = Field(None, ge=1, description="recorded states, or completions, that each measurement replays "
                                                       "on each process; None: 12, of completions 64")


class Optimizer(Section):
    """Optimizer of the training loop: its step size and its schedule."""

    lr: Positive | Literal["auto"] | AutoRate = Field(
        3e-4, description="learning rate of AdamW (the default is a LoRA's; all weights need less); `auto`, or "
                          "{target: 0.02}: found in the first updates; see docs/learning_rate.md")
    warmup: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="of the learning rate, down to 0")
    weight_decay: float = Field(1e-4, ge=0, description="of AdamW")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="of AdamW")
    eps: float = Field(1e-8, ge=0, description="of AdamW; a step is small where gradients are not far above it")
    clip_grad: float = Field(1.0, gt=0, description="largest norm of the gradient")
    optimizer: Literal["adamw", "adamw8bit"] = Field("adamw", description="`adamw8bit`: its moments in 8 bits, by "
                                                                         "bitsandbytes")

    @property
    def calibration(self) -> AutoRate | None:
        """Settings of a learning rate that the run finds; None for a number."""
        if self.lr == "auto":
            return AutoRate()
        return self.lr if isinstance(self.lr, AutoRate) else None

    @property
    def rate(self) -> str:
        """Learning rate in words: a number, or auto."""
        return "auto" if self.calibration else f"{self.lr:g}"

    @property
    def first_lr(self) -> float:
        """Learning rate, or the one with which a calibration begins."""
        return self.calibration.start if self.calibration else float(self.lr)  # type: ignore[arg-type]


class Train(Optimizer):
    """Training loop: its geometry, sampler and optimizer."""

    epochs: int = Field(100, ge=1, description="rollout rounds; each chooses prompts, samples groups and updates")
    prompts: int = Field(8, ge=1, description="prompts per epoch, over all processes")
    group: int = Field(12, ge=1, description="samples per prompt; 1 where the method compares no samples of a group")
    micro_batch: Rows | Literal["auto"] = Field(8, description="rows that go through the denoiser at once; `auto`: as "
                                                "many as fit")
    pack: bool = Field(False, description="several steps in one batch of a replay, where that saves calls of the "
                                          "denoiser; see docs/performance.md")
    updates: int = Field(1, ge=1, description="optimizer steps per pass over an epoch's samples")
    inner_epochs: int = Field(1, ge=1, description="passes over an epoch's samples")
    one_pass: bool | Literal["auto"] = Field(False, description="no replay: the update uses the graphs of the "
                                                                "rollout's own steps, where every sample is trained "
                                                                "once; `auto`: where they fit; see "
                                                                "docs/performance.md")
    steps: int = Field(10, ge=2, le=STEPS, description="denoising steps of a rollout")
    guidance: float = Field(1.0, ge=0, description="guidance scale of the rollout and of its replay")
    grid: Literal["shifted", "stock"] = Field("shifted", description="`shifted`: shift(linspace(1, 0)); `stock`: the"
                                                                     " pipeline's own sigmas, as models that predict"
                                                                     " noise always have")
    shift: float = Field(3.0, gt=0, description="the shift of the `shifted` sigma grid")
    checkpointing: bool | Share | Literal["auto"] = Field(
        False, description="gradient checkpointing: all blocks of the denoiser, or the share that recomputes, such "
                           "as 0.5; `auto`: as few as fit")
    compile: bool = Field(False, description="torch.compile for the denoiser's blocks")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the moving average of the weights; 0 keeps none")
    staleness: int = Field(0, ge=0, description="epochs sampled ahead of their update, while a thread computes "
                                                "rewards; 0: none; see docs/performance.md")
    staleness_cap: float = Field(5.0, ge=1, description="largest importance weight of a decision of older weights; "
                                                        "larger ones become 0")
    extrapolate: int = Field(0, ge=0, description="epochs by which a LoRA jumps ahead along its low-rank path; taken"
                                                  " back if the next reward is lower; 0: none; see "
                                                  "docs/performance.md")
    extrapolate_every: int = Field(8, ge=2, description="epochs between two jumps, whose weights are the path")
    save_every: int = Field(50, ge=1, description="epochs between checkpoints; the last epoch is always saved")
    keep: int = Field(2, ge=1, description="checkpoints kept")

    @property
    def own_shift(self) -> float | None:
        """Shift of the grid; None of the pipeline's own."""
        return self.shift if self.grid == "shifted" else None

    @property
    def rows(self) -> int:
        """Micro-batch; 1 if it is not chosen yet."""
        return 1 if self.micro_batch == "auto" else self.micro_batch

    @property
    def recomputed(self) -> float:
        """Share of blocks that recompute; 0 if it is not chosen yet."""
        return 0.0 if self.checkpointing == "auto" else float(self.checkpointing)


class Phase(Section):
    """Stage of a run, which holds until the next one begins; what it does not name is the recipe's."""

    at: float = Field(ge=0, description="epochs before it; below 1 a share of all epochs")
    reach: float | None = Field(None, description="mean weighted reward of an epoch with which it begins earlier")
    when: dict[str, Any] = Field({}, description="metadata of the prompts that are sampled: {task: counting}, or a "
                                                 "list of values")
    carry: Share = Field(0.0, description="share of the prompts that come from earlier phases, rather hard ones")
    weights: dict[str, float] = Field({}, description="of rewards, by name, in place of the recipe's")
    set: dict[str, Any] = Field({}, description="keys with values, such as {train.steps: 20, text.max_tokens: 512}")


class Memory(Section):
    """Placement and precision of weights and activations; docs/performance.md gives the cost of each option."""

    weights: Literal["full", "int8", "fp8", "nf4"] = Field(
        "full", description="of the denoiser below a LoRA: in `precision`, or by torchao (`int8`, `fp8`) or "
                            "bitsandbytes (`nf4`)")
    encoders: Literal["keep", "cpu"] = Field("keep", description="where text encoders wait while nothing is encoded")
    denoiser: Literal["keep", "cpu"] = Field("keep", description="where frozen weights of the denoiser wait while "
                                             "prompts are encoded; `cpu` goes with `encoders: cpu`")
    offload: Literal["none", "block_level", "leaf_level"] = Field(
        "none", description="frozen blocks of the denoiser kept in CPU memory and copied for their forward: block by"
                            " block, or layer by layer")
    rewards: Literal["keep", "cpu"] = Field("keep", description="where reward models wait while nothing is scored")
    vae: Literal["whole", "sliced", "tiled"] = Field("whole", description="a batch decoded at once, image by "
                                                     "image, or tile by tile too")
    states: Literal["device", "cpu"] = Field("device", description="where a rollout's recorded states wait for their "
                                             "replay")
    attention: Literal["auto", "native", "cudnn", "flash", "flash3", "xformers"] = Field(
        "auto", description="attention kernel of the denoiser: diffusers' default, torch's, cuDNN's, "
                            "FlashAttention's (packages flash_attn, or kernels for 3) or xformers'")
    shard: bool | Literal["nodes"] = Field(False, description="denoiser sharded by FSDP2 over all processes, or over"
                                                              " those of each node (`nodes`)")
    context_parallel: int = Field(1, ge=1, description="processes that share the tokens of one sample (Ulysses)")


class EarlyStop(Section):
    """Early stop of the training, before its last epoch."""

    reward: str = Field(min_length=1, description="one that is measured on held-out prompts")
    patience: int = Field(ge=1, description="evaluations in a row without a better mean")


class Guard(Section):
    """Guard against collapse: returns to the last good weights, see docs/reward_hacking.md; and against rewards that no
    longer answer."""

    window: int = Field(0, ge=0, description="epochs that make the run's band, such as 4; outside of it the run "
                                             "returns to its last good weights; 0: off")
    false_alarms: float = Field(0.01, gt=0, lt=1, description="probability of a return without a cause, from which "
                                                              "all bounds follow")
    reward: str | None = Field(None, min_length=1, description="held-out reward whose fall counts, with "
                                                               "`eval.every`; None: `eval.best`, or the trained one "
                                                               "of the largest weight")
    lr: float = Field(0.5, gt=0, le=1, description="factor of the learning rate at each return")
    unscored: int = Field(3, ge=0, description="epochs in a row in which a trained reward fails on every sample, after "
                                               "which the run is saved and ends; 0: it goes on")
    best: bool = Field(True, description="ends with the best held-out weights, as by `eval.best`; false: with the "
                                         "last ones")


class Eval(Section):
    """Evaluation on held-out prompts, with the pipeline's own scheduler."""

    steps: int = Field(20, ge=1, le=STEPS, description="denoising steps of the evaluation")
    guidance: float = Field(4.5, ge=0, description="guidance scale of the evaluation, before and after alike")
    frames: int | None = Field(None, ge=1, le=2**16, description="number of frames of the evaluation's clips; None: "
                                                                 "`picture.frames`, as in training")
    every: int = Field(0, ge=0, description="epochs between images and held-out scores; 0: only before and after")
    prompts: int = Field(64, ge=1, description="held-out prompts, evenly spread over the file")
    samples: int = Field(1, ge=1, description="images per held-out prompt")
    weights: Literal["current", "ema"] = Field("current", description="which weights are evaluated and saved")
    best: str | None = Field(None, min_length=1, description="held-out reward that selects the weights kept at the "
                                                              "end, of those that `every` measures; `frontier`: those "
                                                              "before reward hacking; None: the last")
    stop: EarlyStop | None = Field(None, description="{reward: NAME, patience: N}: end after N evaluations in a row "
                                                     "without a better mean of it")
    grid: int = Field(12, ge=1, description="prompts on the before/after grid page")
    rewards: list[str] | dict[str, WatchRule] = Field([], description="eval-only rewards: names, or names with rules")
