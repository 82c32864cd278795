"""Qwen2-VL as a reward model: it reads an image or video and an instruction, and a head reads its states at marks.
HPSv3 (2508.03789) is human preference of images; VideoReward (VideoAlign, 2501.13918) judges a video's visual quality,
motion and text alignment.
"""

import ast
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.image_reward import rename_tensors
from flowgrpo.rewards.local_model import Head, ImageModel, LocalModel, fill, from_hub, load_pretrained, loading, tensors
from flowgrpo.rewards.preprocessing import resize_images
from flowgrpo.rewards.released_text import strings, texts

PROMPT = "{text_prompt}"  # in an instruction
# The releases' names (before and after transformers 4.52) and those of Qwen2VLModel; the language head has none.
NAMES = ((r"^model\.(?=visual\.|language_model\.)", ""), (r"^model\.", "language_model."), (r"^rm_head\.", "rm_head."),
         (r"^visual\.", "visual."))
AREA = 256 * 28 * 28  # approximate pixels of every scaled image: 448 by 448 for a square
MARK = "<|Reward|>"
AXES = ("VQ", "MQ", "TA")
MARKS = tuple(f"<|{axis}_reward|>" for axis in AXES)
LEAST, MOST = 128 * 28 * 28, 448 * 448  # pixels of a scaled frame
FEWEST, LONGEST = 4, 768  # frames
USUAL = 16.0  # frames per second of clips whose rate is not known
CONSTANTS = {"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105,
             "TA_std": 2.5121}
FIX = "give the folder of KwaiVGI/VideoReward as args: {model: FOLDER}"


def base(reward: str, name: str, option: str, marks: Sequence[str]) -> tuple[Any, Any]:
    """Load the configuration and the processor of Qwen2-VL, a folder or hub id, and add the marks to its tokens.
    Raises UserError, which names `option`, the reward's argument for it, if they are unavailable."""
    from transformers import Qwen2VLConfig, Qwen2VLProcessor

    config = load_pretrained(reward, Qwen2VLConfig, name, None, option)
    processor = load_pretrained(reward, Qwen2VLProcessor, name, None, option)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.add_tokens([*marks], special_tokens=True)
    return config, processor


def states(model: Any, processor: Any, kind: str, instruction: str, prompts: Sequence[str], shown: Tensor,
           marks: Sequence[str]) -> Tensor:
    """Last states at the marks in the messages of B prompts: [B * len(marks), D], in the order in which they stand.

    kind: image or video. shown: [B * N, D], the visual network's outputs.
    """
    messages = [message(processor, kind, instruction, prompt, len(shown) // len(prompts)) for prompt in prompts]
    tokens = processor.tokenizer
    read = tokens(messages, padding=True, return_tensors="pt").to(shown.device)
    words = model.get_input_embeddings()(read.input_ids)
    there = read.input_ids == tokens.convert_tokens_to_ids(placeholder(kind))
    words = words.masked_scatter(there[..., None], shown.to(words))
    places = torch.arange(words.shape[1], device=words.device).expand(3, len(messages), -1)
    hidden = model.language_model(inputs_embeds=words, attention_mask=read.attention_mask, position_ids=places)
    marked = torch.isin(read.input_ids, torch.tensor(tokens.convert_tokens_to_ids([*marks]), device=words.device))
    return hidden.last_hidden_state[marked]


def message(processor: Any, kind: str, instruction: str, prompt: str, count: int) -> str:
    """The whole conversation, with `count` placeholders for the image or video. Chat marks in a prompt are removed."""
    said = instruction.replace(PROMPT, re.sub(r"<\|\w+\|>", "", prompt))
    content = [{"type": kind}, {"type": "text", "text": said}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                         add_generation_prompt=True)
    return chat.replace(placeholder(kind), placeholder(kind) * count)


def placeholder(kind: str) -> str:
    return f"<|{kind}_pad|>"


def assemble_model(config: Any, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build Qwen2VLModel with every tensor of `state`. Raises ValueError for a missing or an extra tensor."""
    from transformers import Qwen2VLModel

    # A release has rows for its marks; the base model has more, for no token.
    config.text_config.vocab_size = len(state["language_model.embed_tokens.weight"])
    loaded: Any = Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype,
                                               output_loading_info=True)
    model, info = loaded
    if wrong := {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}:
        raise ValueError(f"missing or unknown: {', '.join(map(str, sorted(wrong, key=str)[:3]))}")
    return model


@built_in("hpsv3", "human preference aesthetic beauty beautiful general quality")
class HpsV3(ImageModel):
    """HPSv3: mean preference for an image given its prompt, around -5 to 15.

    The weights were trained on one instruction. It is read from the source of the package hpsv3, which is never run
    (`pip install --no-deps hpsv3`: its requirements are old), or from a text file.

    instruction: that file, with {text_prompt} for the prompt and one <|Reward|>.
    checkpoint: a file, or `owner/name/file` on the hub. revision: of the hub.
    model: configuration and processor of Qwen2-VL-7B, a folder or hub id.
    dtype (bf16; fp32 of the head), device and batch_size (4): as in `LocalModel`.
    Raises UserError if the weights, the instruction or one of its marks are missing.
    """

    checkpoint: str = "MizzenAI/HPSv3/HPSv3.safetensors"
    revision: str | None = None
    model: str = "Qwen/Qwen2-VL-7B-Instruct"
    instruction: str | None = None
    dtype: str = field(default="bf16", kw_only=True)
    batch_size: int = field(default=4, kw_only=True)
    text: str = field(init=False, repr=False)
    reward, parameters = "hpsv3", 8.29e9
    differentiable = True
    about = About(modality="image", range=(None, None), needs="hpsv3", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        vars(self)["text"] = hpsv3_instruction(self.instruction)
        super().__post_init__()

    def _load(self) -> tuple[Any, nn.Module, Any]:
        state = rename_tensors(tensors("hpsv3", self.checkpoint, self.revision, "checkpoint"), NAMES)
        config, processor = base("hpsv3", self.model, "model", [MARK])
        with loading(f"reward 'hpsv3': {self.checkpoint}", "give the checkpoint that was made for this reward"):
            width = state["language_model.embed_tokens.weight"].shape[1]
            head = Head(nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(),
                        nn.Linear(16, 2))
            of_head = [key for key in state if key.startswith("rm_head.")]
            fill("hpsv3", head, {key.removeprefix("rm_head."): state.pop(key).float() for key in of_head}, "the head")
            return assemble_model(config, state, self.float_type), head, processor

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, head, processor = self.models
        pictures = resize_images(images.to(self.device), sides(*images.shape[-2:]))
        pictures = pictures if pictures.requires_grad else pictures.to(torch.uint8)
        seen = processor.image_processor(images=list(pictures), do_resize=False, return_tensors="pt").to(self.device)
        shown = model.visual(seen.pixel_values.to(model.dtype), grid_thw=seen.image_grid_thw).pooler_output
        return head(states(model, processor, "image", self.text, prompts, shown, [MARK]).float())[:, 0]


def sides(height: int, width: int, least: int = AREA, most: int = AREA) -> tuple[int, int]:
    """Height and width of `least` to `most` pixels, in steps of two patches, as Qwen2-VL's resizing does."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    return smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)


def hpsv3_instruction(file: str | None) -> str:
    """Instruction in a file; None: the one in the source of the package hpsv3, which is read and not run."""
    if file is None:
        spec = importlib.util.find_spec("hpsv3")
        if spec is None:
            raise UserError("reward 'hpsv3' needs the instruction of its weights: pip install --no-deps hpsv3, or "
                            "give it as args: {instruction: FILE}")
        assert spec.submodule_search_locations is not None  # hpsv3 is a package
        source = Path(spec.submodule_search_locations[0], "dataset", "data_collator_qwen.py")
        with loading(f"reward 'hpsv3': the instruction in {source}", "give it as args: {instruction: FILE}"):
            said = {node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]  # plain names
                    for node in ast.parse(source.read_text(encoding="utf-8")).body
                    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)}
            return said["INSTRUCTION"] + said["prompt_with_special_token"]
    with loading(f"reward 'hpsv3': {file}", "give a text file as args: {instruction: FILE}"):
        text = Path(file).read_text(encoding="utf-8")
    if text.count(MARK) != 1 or PROMPT not in text:
        raise UserError(f"reward 'hpsv3': {file} has {text.count(MARK)} times {MARK} and {text.count(PROMPT)} times "
                        f"{PROMPT}, expected one and at least one")
    return text


@built_in("videoalign", "quality motion human preference")
class VideoReward(LocalModel):
    """VideoReward: weighted sum of a video's visual quality, motion quality and text alignment, each around -3 to 3.

    The weights were trained on one instruction, DETAILED_PROMPT_WITH_SPECIAL_TOKEN of the release's prompt_template.py
    (MIT, KwaiVGI/VideoAlign). `flowgrpo reward fetch videoalign` copies it, word for word.

    instruction: None for the fetched one; that file, which is read and never run; or a text file with {text_prompt}
    and the three marks.
    axes: weights of VQ, MQ and TA; an axis that is not named has none.
    model: the release, a folder or hub id, with model_config.json and checkpoint-*/model.safetensors or model.pth.
    base: configuration and processor of Qwen2-VL-2B, a folder or hub id.
    fps: frames per second of the clips; None: those that the model makes (16 where that is not known).
    dtype (bf16; fp32 of the head), device and batch_size (2 clips): as in `LocalModel`.
    Raises UserError if the weights, the instruction or one of its marks are missing.
    """

    instruction: str | None = None
    axes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 1.0))
    model: str = "KwaiVGI/VideoReward"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    fps: float | None = None
    dtype: str = field(default="bf16", kw_only=True)
    batch_size: int = field(default=2, kw_only=True)
    text: str = field(init=False, repr=False)
    reward, parameters = "videoalign", 2.21e9
    about = About(modality="video", range=(None, None), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if not self.axes or not set(self.axes) <= set(AXES) or not (self.fps is None or self.fps > 0):
            raise UserError(f"reward 'videoalign': axes is {self.axes} and fps {self.fps}, expected weights of "
                            f"{', '.join(AXES)} and a number above 0, or None")
        vars(self)["text"] = instruction(self.instruction)
        super().__post_init__()

    def _load(self) -> tuple[Any, nn.Module, Any, dict[str, float]]:
        with loading(f"reward 'videoalign': {self.model}", FIX, self.model):
            file, weights = files(self.model)
            released = json.loads(file.read_text(encoding="utf-8"))
        config, processor = base("videoalign", self.base, "base", MARKS)
        state = tensors("videoalign", str(weights), None, "model")
        with loading(f"reward 'videoalign': {weights}", FIX):
            state = rename_tensors(merge_lora(state, released["peft_lora_config"]), NAMES)
            weight = state.pop("rm_head.weight").float()
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            model = assemble_model(config, state, self.float_type)
        return model, Head(linear), processor, CONSTANTS | (released.get("inference_config") or {})

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float | None = None) -> Tensor:
        return self.score_batches(partial(self._scores, fps=fps), videos, prompts)

    def _scores(self, videos: Tensor, prompts: list[str], fps: float | None) -> Tensor:
        constants = self.models[-1]
        raw = self.scores(videos, prompts, fps)
        return sum((weight * (raw[:, AXES.index(axis)] - constants[f"{axis}_mean"]) / constants[f"{axis}_std"]
                    for axis, weight in self.axes.items()), torch.zeros(len(raw), device=raw.device))

    @torch.no_grad()
    def scores(self, videos: Tensor, prompts: list[str], fps: float | None = None) -> Tensor:
        """The head's values [B, 3] of clips [B, F, 3, H, W] in [0, 1], before the constants. fps: of the clips.
        Raises UserError for clips of one frame."""
        model, head, processor, _ = self.models
        seen = self._patches(videos, fps)
        shown = model.visual(seen.pixel_values_videos.to(model.dtype), grid_thw=seen.video_grid_thw).pooler_output
        hidden = states(model, processor, "video", self.text, prompts, shown, MARKS)
        values = head(hidden.float()).unflatten(0, (len(prompts), len(AXES)))
        return values.diagonal(dim1=1, dim2=2) if values.shape[-1] == len(AXES) else values[..., 0]

    def _patches(self, videos: Tensor, fps: float | None = None) -> Any:
        frames = videos[:, frame_indices(videos.shape[1], self.fps or fps or USUAL)]
        height, width = videos.shape[-2:]
        scaled = sides(height, width, LEAST, MOST)
        pictures = resize_images(frames.to(self.device).flatten(0, 1), scaled, "bytes")
        pictures = pictures.to(torch.uint8).unflatten(0, frames.shape[:2])
        process = self.models[2].video_processor
        return process(videos=list(pictures), do_resize=False, do_sample_frames=False, return_tensors="pt"
                       ).to(self.device)


def frame_indices(count: int, fps: float) -> list[int]:
    """Frames of a clip of `count` frames that are seen: 2 a second, evenly spread, an even number.
    Raises UserError for fewer than two frames."""
    if count < 2:
        raise UserError("reward 'videoalign': got clips of one frame, expected at least two")
    most = min(LONGEST, count) // 2 * 2
    number = 2 * round(min(max(2 * count / fps, FEWEST), most) / 2)
    return torch.linspace(0, count - 1, number).round().long().tolist()


def files(model: str) -> tuple[Path, Path]:
    """Configuration and weights of the release in a folder, else on the hub. Raises FileNotFoundError without them."""
    folder = Path(model)
    if not folder.is_dir():
        return from_hub(f"{model}/model_config.json", None), from_hub(f"{model}/checkpoint-11352/model.pth", None)
    for name in ("model.safetensors", "model.pth"):
        if weights := sorted(folder.glob(f"checkpoint-*/{name}")):
            return folder / "model_config.json", weights[-1]
    raise FileNotFoundError("no checkpoint-*/model.safetensors or model.pth")


def merge_lora(state: dict[str, Tensor], lora: dict[str, Any]) -> dict[str, Tensor]:
    """Checkpoint of PEFT with its LoRA added to the weights, under the names without PEFT's parts. lora: its
    configuration, with `lora_r` and `lora_alpha`."""
    rank, alpha = lora["lora_r"], lora["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    plain = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    result = {key.replace(".base_layer.", "."): value for key, value in plain.items() if ".lora_" not in key}
    for key, down in plain.items():
        if ".lora_A." in key:
            up, name = plain[key.replace(".lora_A.", ".lora_B.")], key.partition(".lora_A.")[0] + ".weight"
            result[name] = (result[name].float() + scale * up.float() @ down.float()).to(result[name].dtype)
    return result


def instruction(file: str | None) -> str:
    """Fetched instruction, or that in a file: a text, or the release's source, which is read and not run."""
    if file is None:
        return texts("videoalign", "instruction")["video"]
    with loading(f"reward 'videoalign': {file}", "give prompt_template.py of KwaiVGI/VideoAlign or a text file"):
        text = Path(file).read_text(encoding="utf-8")
        if file.endswith(".py"):
            [text] = [said for said in strings(text) if PROMPT in said and all(mark in said for mark in MARKS)]
    if [mark for mark in re.findall(r"<\|\w+_reward\|>", text)] != list(MARKS) or PROMPT not in text:
        raise UserError(f"reward 'videoalign': {file} has not {PROMPT} and {', '.join(MARKS)} once each, in "
                        "this order")
    return text
