"""Sections of a recipe: their keys, descriptions and defaults, and which runs read them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from flowgrpo.config.base import DENOISERS, IMAGE_TOKENS, LANGUAGE, LEFT_TO_RIGHT, Section, Share, When, key
from flowgrpo.config.reward_rules import WatchRule

Side = Annotated[int, Field(ge=8, le=2**16)]
Rows = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
STEPS = 10_000  # denoising steps at most
PIXELS = 2**28  # of an image, or of all frames of a clip
# Arguments of a pipeline's call that other keys set: those of `image`, which may stand in `call` alone, and the others.
OF_IMAGE = {"height": "height", "width": "width", "num_frames": "frames", "fps": "fps", "frame_rate": "fps",
            "target_fps": "fps"}
ELSEWHERE = {"prompt": "prompts", "negative_prompt": "negative_prompt",
             "num_inference_steps": "train.steps or eval.steps", "guidance": "train.guidance or eval.guidance",
             **dict.fromkeys(["generator", "latents"], "seed"),
             **dict.fromkeys(["num_images_per_prompt", "num_videos_per_prompt"], "train.group or eval.samples"),
             **dict.fromkeys(["output_type", "return_dict", "callback_on_step_end", "prompt_embeds",
                              "negative_prompt_embeds"], "every call")}


class Image(Section):
    """Output size and arguments of the pipeline's call; None keeps the pipeline's own default."""

    kinds: ClassVar = DENOISERS

    height: int | None = Field(None, ge=8, le=2**16, description="pixels")
    width: int | None = Field(None, ge=8, le=2**16, description="pixels")
    frames: int | None = Field(None, ge=1, le=2**16, description="number of frames, for video pipelines")
    fps: float | None = Field(None, gt=0, le=240, description="frames per second of clips; None: the model's own")
    sizes: list[tuple[Side, Side]] = Field(
        [], description="[height, width] pairs in pixels, one per group; evaluations take `height` and `width`, or "
                        "the first pair")
    call: dict[str, Any] = Field({}, description="further arguments of the pipeline's call: {max_sequence_length: 77}")

    @model_validator(mode="after")
    def _small(self) -> "Image":
        for height, width in [(self.height or 8, self.width or 8), *self.sizes]:
            if (pixels := height * width * (self.frames or 1)) > PIXELS:
                raise ValueError(f"height x width x frames of {PIXELS:,} pixels at most, got {pixels:,}")
        for name in self.call:
            if name in ELSEWHERE:
                raise ValueError(f"call has {name}, which {ELSEWHERE[name]} sets: leave it out of call")
            if (key := OF_IMAGE.get(name)) and (own := getattr(self, key)):
                raise ValueError(f"{key} is {own:g}, and call has {name} too: leave one out")
        return self


OF_PREFIXES = (*LEFT_TO_RIGHT, *IMAGE_TOKENS)  # kinds whose tokens follow their prompt, one after the other
# Runs whose completions are drawn by other probabilities than are trained.
DRAWN_APART = When(lambda c, m: c.text.engine == "vllm" or c.text.engine_precision not in (None, c.precision)
                   or c.precision != "fp32",
                   "the model itself draws the completions in fp32, in which it is trained",
                   "set text.engine, text.engine_precision or another precision")
CORRECTED = When(lambda c, m: c.text.correction != "none", "text.correction is 'none'",
                 "set text.correction: tis or mis")


class Text(Section):
    """Prompts, decoding and engine of a language model."""

    kinds: ClassVar = (*LANGUAGE, *IMAGE_TOKENS)

    generates: Literal["text", "image"] = Field("text", description="what a completion is: an image comes from the "
                                                                    "image head of a model such as Janus")
    max_tokens: int = key(256, of=LANGUAGE, ge=1, le=2**24, description="of a completion, at most")
    system: str | None = Field(None, description="the system message; None: none")
    template: bool | None = Field(None, description="prompts in the tokenizer's chat template; None: where it has one")
    truncated: Literal["keep", "mask", "penalise"] = key(
        "keep", When(lambda c, m: c.preferences is None, "preferences is set, so that no completion is sampled",
                     "leave preferences out"),
        When(lambda c, m: not (m.for_tokens and m.target.follows_reward),
             "method {0.method} trains {1.target.trains}, whose tokens are not cut off", "use another method"),
        of=LANGUAGE, description="completions that reach max_tokens without an end: trained like others, not at all, "
                                 "or with `penalty` taken off")
    penalty: float = key(1.0, When(lambda c, m: c.text.truncated == "penalise",
                                   "text.truncated is {0.text.truncated!r}", "set text.truncated: penalise"),
                         of=LANGUAGE, gt=0, description="of `truncated: penalise`, off unequal groups' rewards")
    shared_prefix: bool = key(True, of=OF_PREFIXES, description="read a prompt once for all samples of its group, "
                                                              "where the model allows it")
    eval_temperature: float | None = Field(None, ge=0, description="of the evaluation; 0 takes the likeliest token; "
                                                                   "None: 0, and 1 for images")
    engine: Literal["transformers", "vllm"] = key(
        "transformers", of=LEFT_TO_RIGHT, description="what samples completions; `vllm` has not been run: "
                                                      "docs/language_models.md")
    engine_precision: Literal["fp32", "bf16", "fp16"] | None = key(
        None, of=LEFT_TO_RIGHT, description="precision in which a copy of the model samples completions; None: "
                                            "`precision`")
    engine_memory: float = key(0.4, When(lambda c, m: c.text.engine == "vllm", "text.engine is {0.text.engine!r}",
                                         "set text.engine: vllm"),
                               of=LEFT_TO_RIGHT, gt=0, lt=1, description="share of the GPU that vLLM takes")
    correction: Literal["tis", "mis", "none"] = key(
        "tis", DRAWN_APART, of=OF_PREFIXES, description="weight of tokens of an engine, or of half "
        "precision, by r = trainer's probability / theirs: min(r, cap), 0 above the cap, or none")
    correction_cap: float = key(2.0, DRAWN_APART, CORRECTED, of=OF_PREFIXES, ge=1, description="largest r")
    correction_level: Literal["token", "sequence"] = key(
        "token", DRAWN_APART, CORRECTED, of=OF_PREFIXES, description="r of a token, or of its completion")


class Rollout(Section):
    """Engine that samples the images or clips of a rollout, or a feature cache; see docs/performance.md."""

    kinds: ClassVar = DENOISERS


class Fused(Section):
    """LoRA that is fused into the weights of the model, and its scale."""

    path: str = Field(min_length=1, description="a finished run, a folder with a LoRA, or its file")
    scale: float = Field(1.0, description="factor of what it changes")


class Inversion(Section):
    """Embeddings of a textual inversion, for a token of prompts."""

    path: str = Field(min_length=1, description="a .safetensors file")
    token: str | None = Field(None, min_length=1, description="in prompts; None: the name in the file, or the file's")


class IPAdapter(Section):
    """IP-Adapter: weights by which the denoiser reads the image `ip_adapter_image` of a prompt."""

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
    config: str | None = key(None, of=DENOISERS, min_length=1, description="for a single file in `model`: folder "
                             "or hub id of a pipeline like it; None: the one that diffusers infers")
    denoiser: str | None = key(None, of=DENOISERS, min_length=1, description="a .safetensors or .gguf file that "
                               "replaces the denoiser of `model`")
    vae: str | None = Field(None, min_length=1, description="a .safetensors file, folder or hub id of an autoencoder "
                                                            "that replaces the one of `model`")
    lora: list[str | Fused] = key([], of=DENOISERS, description="LoRAs fused into the weights first, such as a "
                                  "turbo LoRA: paths, or {path: FILE, scale: 0.8}")
    scheduler: dict[str, Any] = key({}, of=DENOISERS, description="keys of the scheduler's configuration, and its "
                                    "`class`: {timestep_spacing: trailing}, {class: LCMScheduler}")
    textual_inversion: list[str | Inversion] = Field([], description="embeddings for tokens of prompts: .safetensors "
                                                     "files, or {path: FILE, token: NAME}")
    controlnet: str | None = key(None, of=DENOISERS, min_length=1, description="folder or hub id of a frozen "
                                 "ControlNet, for the `control_image` of prompts")
    ip_adapter: IPAdapter | None = key(None, of=DENOISERS, description="a frozen IP-Adapter, for the "
                                       "`ip_adapter_image` of prompts: {path: FOLDER, weights: FILE}")

    @property
    def loras_with_scales(self) -> list[Fused]:
        """`lora` with the scale 1 for each that is only a path."""
        return [Fused(path=lora) if isinstance(lora, str) else lora for lora in self.lora]

    @property
    def inversions(self) -> list[Inversion]:
        """Textual inversions of `textual_inversion` with their tokens."""
        return [Inversion(path=each) if isinstance(each, str) else each for each in self.textual_inversion]

    @property
    def gguf(self) -> bool:
        """True if the denoiser is a GGUF file, whose weights are quantised."""
        return self.denoiser is not None and self.denoiser.endswith(".gguf")


HAS_LORA = When(lambda c, m: c.adapter.rank > 0, "adapter.rank is 0, which trains all weights without a LoRA",
                "set a rank")


class Adapter(Section):
    """Trained weights: a LoRA (rank >= 1) on the denoiser (the method may say: on text encoders), or with `rank: 0` all
    of the denoiser's weights."""

    rank: int = Field(32, ge=0, description="rank of the LoRA; 0 trains all weights")
    alpha: float | None = key(None, HAS_LORA, gt=0, description="LoRA alpha of the training; None means a scale of 2: "
                              "2 * rank, of an rsLoRA 2 * sqrt(rank). Files have alpha = rank")
    init: str | None = Field(None, min_length=1, description="a LoRA of the same rank and targets to start from:"
                                                             " a finished run, a folder or a file")
    dora: bool = Field(False, description="a length of its own for every row of a weight (DoRA, 2402.09353)")
    rslora: bool = Field(False, description="the scale alpha / sqrt(rank) (rsLoRA, 2312.03732)")
    targets: list[str] = key(
        ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"], HAS_LORA,
        When(lambda c, m: m.for_tokens or m.denoising.adapted.denoisers, "parts.adapted.denoisers is false",
             "set it to true"),
        description="names of the modules that get an adapter; these are a denoiser's")
    encoder_targets: list[str] = key(
        ["q_proj", "k_proj", "v_proj", "out_proj", "o_proj", "q", "k", "v", "o"],
        When(lambda c, m: m.denoising.adapted.encoders, "the method trains no text encoder",
             "set parts.adapted.encoders: true"),
        of=DENOISERS, description="the same of text encoders, where the method trains them")


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


HAS_GRID = When(lambda c, m: m.target.reads_grid, "preferences is set, so that no image is sampled, and parts.times "
                "Stratified reads no grid", "set parts.times: {type: GridTimes}")


class Train(Optimizer):
    """Training loop: its geometry, sampler and optimizer."""

    epochs: int = Field(100, ge=1, description="rollout rounds; each chooses prompts, samples groups and updates")
    prompts: int = Field(8, ge=1, description="prompts per epoch, over all processes")
    group: int = Field(12, ge=1, description="samples per prompt; 1 where the method compares no samples of a group")
    micro_batch: Rows | Literal["auto"] = Field(8, description="rows that go through the denoiser at once; `auto`: as "
                                                "many as fit")
    generation_batch: int | None = key(None, of=(*LANGUAGE, *IMAGE_TOKENS), ge=1,
                                       description="completions that a process samples at once; None: all of a turn; "
                                       "halved when memory runs out")
    pack: bool = key(False, of=DENOISERS, description="several steps in one batch of a replay, where that saves calls "
                                                      "of the denoiser; see docs/performance.md")
    updates: int = Field(1, ge=1, description="optimizer steps per pass over an epoch's samples")
    inner_epochs: int = Field(1, ge=1, description="passes over an epoch's samples")
    steps: int = key(10, HAS_GRID, of=DENOISERS, ge=2, le=STEPS, description="denoising steps of a rollout")
    guidance: float = key(1.0, of=(*DENOISERS, *IMAGE_TOKENS), ge=0,
                          description="guidance scale of the rollout and of its replay")
    grid: Literal["shifted", "stock"] = key(
        "shifted", HAS_GRID, of=DENOISERS, description="`shifted`: shift(linspace(1, 0)); `stock`: the pipeline's own "
        "sigmas, as models that predict noise always have")
    shift: float = key(3.0, HAS_GRID, When(lambda c, m: c.train.grid != "stock",
                                           "train.grid is 'stock', the pipeline's own", "set train.grid: shifted"),
                       of=DENOISERS, gt=0, description="shift of the `shifted` grid")
    checkpointing: bool | Share | Literal["auto"] = Field(
        False, description="gradient checkpointing: all blocks of the denoiser, or the share that recomputes, such "
                           "as 0.5; `auto`: as few as fit")
    compile: bool = key(False, of=DENOISERS, description="torch.compile for the denoiser's blocks")
    ema: float = key(0.0, When(lambda c, m: c.eval.weights == "ema", "eval.weights is {0.eval.weights!r}",
                               "set eval.weights: ema"),
                     ge=0, lt=1, description="decay of the weights' moving average, at most (1 + k) / (10 + k) at "
                     "update k; 0: none")
    save_every: int = Field(50, ge=1, description="epochs between checkpoints; the last is always saved")
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
    def recompute_share(self) -> float:
        """Share of blocks that recompute; 0 if it is not chosen yet."""
        return 0.0 if self.checkpointing == "auto" else float(self.checkpointing)


class Memory(Section):
    """Placement and precision of weights and activations; docs/performance.md gives the cost of each option."""

    kinds: ClassVar = DENOISERS

    weights: Literal["full", "int8", "fp8", "nf4"] = Field(
        "full", description="of the denoiser below a LoRA: in `precision`, or by torchao (`int8`, `fp8`) or "
                            "bitsandbytes (`nf4`)")
    encoders: Literal["keep", "cpu", "ahead"] = Field(
        "keep", description="where text encoders wait while nothing is encoded; `ahead`: they encode all prompts into "
                            "`cache` before the denoiser is loaded")
    denoiser: Literal["keep", "cpu"] = Field("keep", description="where frozen weights of the denoiser wait while "
                                             "prompts are encoded; `cpu` goes with `encoders: cpu`")
    offload: Literal["none", "block_level", "leaf_level"] = Field(
        "none", description="frozen blocks of the denoiser kept in CPU memory and copied for their forward: block by"
                            " block, or layer by layer")
    rewards: Literal["keep", "cpu"] = key("keep", of=(*DENOISERS, *LANGUAGE, *IMAGE_TOKENS),
                                          description="where reward models wait while nothing is scored")
    vae: Literal["whole", "sliced", "tiled"] = Field("whole", description="a batch decoded at once, image by "
                                                     "image, or tile by tile too")
    states: Literal["device", "cpu"] = Field("device", description="where a rollout's recorded states wait for their "
                                             "replay")
    attention: Literal["auto", "native", "cudnn", "flash", "flash3", "xformers"] = Field(
        "auto", description="attention kernel of the denoiser; `flash` needs the package flash_attn, `flash3` kernels")
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

    unscored: int = Field(3, ge=0, description="epochs in a row in which a trained reward fails on every sample, "
                                               "before the run ends; 0: no limit")


class Eval(Section):
    """Evaluation on held-out prompts, with the pipeline's own scheduler."""

    steps: int = key(20, of=DENOISERS, ge=1, le=STEPS, description="denoising steps of the evaluation")
    guidance: float = key(4.5, of=(*DENOISERS, *IMAGE_TOKENS), ge=0, description="guidance scale of the evaluation")
    frames: int | None = key(None, of=DENOISERS, ge=1, le=2**16, description="number of frames of the evaluation's "
                             "clips; None: `image.frames`")
    every: int = Field(0, ge=0, description="epochs between images and held-out scores; 0: only before and after")
    prompts: int = Field(64, ge=0, description="held-out prompts, evenly spread over the file; 0: no evaluation")
    samples: int = Field(1, ge=1, description="images per held-out prompt: the group of a reward")
    weights: Literal["current", "ema"] = Field("current", description="which weights are evaluated and saved")
    best: str | None = Field(None, min_length=1, description="held-out reward that selects the weights kept at the "
                                                              "end, of those that `every` measures; `frontier`: those "
                                                              "before reward hacking; None: the last")
    stop: EarlyStop | None = Field(None, description="{reward: NAME, patience: N}: end after N evaluations in a row "
                                                     "without a better mean of it")
    grid: int = Field(12, ge=1, description="prompts on the before/after grid page")
    rewards: list[str] | dict[str, WatchRule] = Field([], description="eval-only rewards: names, or names with rules")

    @model_validator(mode="after")
    def _check_prompts(self) -> "Eval":
        if not self.prompts and (self.every or self.rewards):
            name = "every" if self.every else "rewards"
            raise ValueError(f"no {name} beside prompts 0, which measures nothing: set eval.{name} to "
                             f"{0 if self.every else '[]'} too")
        return self
