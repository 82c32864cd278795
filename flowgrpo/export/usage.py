"""Usage snippets of a model card: Python that loads a run's weights with stock libraries."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.policies import build, sources
from flowgrpo.policies.pipelines import edits, prompt_inputs
from flowgrpo.policies.pipelines.call import guidance_argument
from flowgrpo.policies.pipelines.frames import is_video, with_fps
from flowgrpo.policies.pipelines.load import MERGED, rate_ahead
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.published import MODELS
from flowgrpo.starter import FOLDERS

INDEX = "model_index.json"
TASKS = {"image": ("text-to-image", "image-to-image"), "clip": ("text-to-video", "image-to-video"),
         "completion": ("text-generation", "image-text-to-text")}  # by sample: from a text, and from an image too
DTYPE = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def snippet(config: Config, run: Path, place: str, prompt: str, brought: Sequence[tuple[str, str]] = ()) -> str:
    """Return Python that draws, or writes, for a prompt.

    place: what the run's weights are loaded from: its folder or a repository of a hub. brought: what the prompt brings,
    as keys of a prompt file with paths below that place.
    """
    if (run / edits.FILE).is_file():
        lines = ["from flowgrpo.policies.pipelines.edits import EditPolicy",
                 "from flowgrpo.policies.pipelines.load import load_pipeline", "",
                 f"policy = EditPolicy(load_pipeline({config.model!r}), {place!r})  # no stock pipeline loads it"]
    elif build.kind(config) == build.PIPELINE:
        lines = _of_pipeline(config, run, place, prompt, brought)
    elif build.kind(config) == build.CAUSAL_LM:
        lines = _of_language(config, place, prompt)
    elif build.kind(config) == build.IMAGE_TOKENS:
        lines = _of_drawing(config, place, prompt)
    else:
        shown = f", image={_path(place, brought[0][1])}" if brought else ""
        lines = ["from pathlib import Path", "", *_downloading(place, brought), "from flowgrpo.text import evaluation",
                 "", f"print(evaluation.sample({config.model!r}, Path({place!r}), [{prompt!r}], count=1, seed=0{shown})"
                 "[0])"]
    return "\n".join(lines)


def _source(model: str) -> tuple[list[str], str]:
    """Return imports and the expression that a model is loaded from."""
    if model in FOLDERS:
        return ["from flowgrpo.starter import FOLDERS"], f"str(FOLDERS[{model!r}])"
    return [], repr(model)


def _path(place: str, file: str) -> str:
    """Return the expression for the path of a file of the run. place: as of `snippet`."""
    return repr(f"{place}/{file}") if Path(place).is_dir() else f"hf_hub_download({place!r}, {file!r})"


def _downloading(place: str, brought: Sequence[tuple[str, str]]) -> list[str]:
    return ["from huggingface_hub import hf_hub_download"] if brought and not Path(place).is_dir() else []


def _opening(cls: Any, config: Config, place: str, brought: Sequence[tuple[str, str]]
             ) -> tuple[list[str], list[str], dict[str, str]]:
    """Return imports and lines that read what a prompt brings, as the pipeline was given it, and the arguments of the
    call. A pipeline that starts from an image gets one of the user's where none is known."""
    known, call = prompt_inputs.names(cls), config.eval_call
    if not brought and prompt_inputs.needs_image(cls):
        brought, place = [("image", "source.png")], "."
    size = (call["width"], call["height"]) if call.get("height") and call.get("width") else None
    imports, lines, given = _downloading(place, brought), list[str](), dict[str, list[str]]()
    for key, file in brought:
        argument, read = known.get(key), f"load_image({_path(place, file)})"
        if argument is None:
            continue
        name = f"{argument}_{len(given[argument]) + 1}" if argument in given else argument
        if key == "mask_image":
            read += '.convert("L")'
        elif key == "video":
            read = f'[frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open({_path(place, file)}))]'
            imports.append("from PIL import Image, ImageSequence")
        if key in ("video", "control_image") and size:
            imports += ["from PIL import Image", "from PIL import ImageOps"]
            scaled = f"{size}, Image.Resampling.LANCZOS"
            read = f"ImageOps.fit({read}, {scaled})" if key != "video" else \
                f"[ImageOps.fit(frame, {scaled}) for frame in {read}]"
        imports += ["from diffusers.utils import load_image"] if key != "video" else []
        lines.append(f"{name} = {read}")
        given.setdefault(argument, []).append(name)
    return imports, lines, {name: each[0] if len(each) == 1 else f"[{', '.join(each)}]" for name, each in given.items()}


def _of_pipeline(config: Config, run: Path, place: str, prompt: str, brought: Sequence[tuple[str, str]]) -> list[str]:
    imports, source = _source(config.model)
    index, dtype = _index(config.model), DTYPE.get(config.precision, "torch.float32")
    absent = "".join(f", {name}=None" for name, value in index.items() if isinstance(value, list) and value[0] is None)
    further = f"dtype={dtype}{_at(config, 'variant', 'revision')}{absent}"
    made = f"pipe = DiffusionPipeline.from_pretrained({source}, {further})"
    needed = ["from diffusers import DiffusionPipeline"]
    if config.model in MERGED or sources.needs_assembly(config.model, config.load):
        imports, needed = ["from flowgrpo.policies.pipelines.load import load_pipeline"], []
        named, further = _load_arguments(config)
        imports, made = imports + named, f"pipe = load_pipeline({config.model!r}{further})"
    cls = _class(index)
    accepted = list(prompt_inputs.call_parameters(cls)) if cls else []
    embedded = _embeds_guidance(config.model, index)
    scale = "guidance_scale" if embedded else guidance_argument(accepted, config.call, ())
    call = {"num_inference_steps": config.eval.steps, scale: config.eval.guidance, **config.eval_call}
    if cls and is_video(cls):
        call = with_fps(cls, call, config.fps)
    if accepted:  # without a negative prompt some take zeros for it (SDXL), others guide nothing (Qwen-Image)
        call.setdefault("negative_prompt", config.negative_prompt)
        call = {key: value for key, value in call.items() if key in accepted}
    more, loading = _loading(run, place)
    opening, lines, given = _opening(cls, config, place, brought) if cls else ([], [], {})
    more += opening
    arguments = ", ".join([f"prompt={prompt!r}", *(f"{key}={name}" for key, name in given.items()),
                           *(f"{key}={value!r}" for key, value in call.items() if key not in given)])
    if "guider" in index:  # the guidance of such a pipeline is no argument of its call
        loading.append(f"pipe.guider = pipe.guider.new(guidance_scale={config.eval.guidance!r})")
    if cls and is_video(cls):
        needed.append("from diffusers.utils import export_to_video")
        shown = [f"frames = pipe({arguments}).frames[0]", 'export_to_video(frames, "clip.mp4", '
                 f"fps={rate_ahead(config.model, config.load, call, config.fps):g})"]
    else:
        shown = [f"image = pipe({arguments}).images[0]", 'image.save("image.png")']
    return ["import torch", *sorted({*needed, *imports, *more}), "", made, *loading,
            'pipe.to("cuda" if torch.cuda.is_available() else "cpu")', *lines, *shown]


def _loading(run: Path, place: str) -> tuple[list[str], list[str]]:
    """Return imports and lines that load a run's weights into `pipe`."""
    imports, lines = [], []
    if (run / LORA_FILE).is_file():
        lines.append(f"pipe.load_lora_weights({place!r})")
    for file in sorted(run.glob(f"*/{LORA_FILE}")):
        lines.append(f"pipe.load_lora_weights({place!r}, subfolder={file.parent.name!r}, load_into_transformer_2=True)")
    parts = [file.parent.name for file in sorted(run.glob("*/adapter_config.json"))]
    if parts:  # of a class without a loader
        imports = ["from flowgrpo.policies.weights.lora_files import load_lora", "from pathlib import Path"]
        named, folder = ", ".join(f"{part!r}: pipe.{part}" for part in parts), repr(place)
        if not Path(place).is_dir():
            imports.append("from huggingface_hub import snapshot_download")
            folder = f"snapshot_download({place!r})"
        lines.append(f"load_lora(pipe, {{{named}}}, Path({folder}))")
    for file in sorted(run.glob("*/config.json")) if not lines else []:
        part = file.parent.name
        lines.append(f"pipe.{part} = type(pipe.{part}).from_pretrained({place!r}, subfolder={part!r}, "
                     f"dtype=pipe.{part}.dtype)")
    return imports, lines


def _of_language(config: Config, place: str, prompt: str) -> list[str]:
    imports, source = _source(config.model)
    templated = config.text.template is not False and _has_template(config.model)
    said = [{"role": "system", "content": config.text.system}] if config.text.system and templated else []
    text = f"{config.text.system}\n{prompt}" if config.text.system and not templated else prompt
    asked = (f"inputs = tokenizer.apply_chat_template({[*said, {'role': 'user', 'content': prompt}]!r}, "
             "add_generation_prompt=True, return_tensors=\"pt\", return_dict=True)") if templated else \
        f"inputs = tokenizer({text!r}, return_tensors=\"pt\")"
    lora = config.adapter.rank > 0
    weights = source + _at(config, "variant", "revision") if lora else f"{place!r}, subfolder=\"model\""
    return [*sorted({*imports, "from transformers import AutoModelForCausalLM, AutoTokenizer",
                     *(["from peft import PeftModel"] if lora else [])}), "",
            f"tokenizer = AutoTokenizer.from_pretrained({source}{_at(config, 'revision')})",
            f"model = AutoModelForCausalLM.from_pretrained({weights})",
            *([f"model = PeftModel.from_pretrained(model, {place!r})"] if lora else []), asked,
            f"output = model.generate(**inputs, max_new_tokens={config.text.max_tokens}, do_sample=False)",
            'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))']


def _of_drawing(config: Config, place: str, prompt: str) -> list[str]:
    imports, source = _source(config.model)
    if config.eval.guidance <= 1 or config.text.template is False or config.text.eval_temperature not in (None, 1.0):
        return ["from pathlib import Path", "", "from flowgrpo.text import evaluation", "",
                f"print(evaluation.sample_images({config.model!r}, Path({place!r}), [{prompt!r}], count=1, seed=0, "
                'output=Path("images")))']
    said = [{"role": "system", "content": [{"type": "text", "text": config.text.system}]}] if config.text.system else []
    said.append({"role": "user", "content": [{"type": "text", "text": prompt}]})
    lora = config.adapter.rank > 0
    weights = source + _at(config, "variant", "revision") if lora else f"{place!r}, subfolder=\"model\""
    return [*sorted({*imports, "import torch", "from PIL import Image",
                     "from transformers import AutoModelForImageTextToText, AutoProcessor",
                     *(["from peft import PeftModel"] if lora else [])}), "",
            f"processor = AutoProcessor.from_pretrained({source}{_at(config, 'revision')})",
            f"model = AutoModelForImageTextToText.from_pretrained({weights})",
            *([f"model = PeftModel.from_pretrained(model, {place!r}).merge_and_unload()"] if lora else []),
            f"inputs = processor.apply_chat_template({said!r}, add_generation_prompt=True, tokenize=True, "
            'return_dict=True, return_tensors="pt", processor_kwargs={"generation_mode": "image"})',
            'tokens = model.generate(**inputs, generation_mode="image", do_sample=True, top_k=0, '
            f"guidance_scale={config.eval.guidance!r})",
            "pixels = (model.decode_image_tokens(tokens)[0].float() + 1) * 127.5",
            'Image.fromarray(pixels.clamp(0, 255).round().to(torch.uint8).cpu().numpy()).save("image.png")']


def _load_arguments(config: Config) -> tuple[list[str], str]:
    """Return imports and arguments of `load_pipeline` besides the model."""
    files = {name: value for name, value in config.load.model_dump(exclude_defaults=True).items() if value}
    if not files:
        return [], ""
    given = ", ".join(f"{name}={value!r}" for name, value in files.items())
    return ["from flowgrpo.config.sections import Load"], f", {config.precision!r}, files=Load({given})"


def _at(config: Config, *names: str) -> str:
    """Return the set ones of these `load` settings as arguments of a call."""
    return "".join(f", {name}={value!r}" for name in names if (value := getattr(config.load, name)) is not None)


def _index(model: str) -> dict[str, Any]:
    """Return a pipeline's index, of a folder or of a published model; empty for another."""
    file = Path(FOLDERS.get(model, model)) / INDEX
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    known = MODELS.get(model)
    return {"_class_name": known.pipeline} | {name: ["", kind] for name, (kind, _) in known.parts.items()} if known \
        else {}


def _embeds_guidance(model: str, index: dict[str, Any]) -> bool:
    """True if a part of a folder's or published pipeline takes the guidance scale as an input."""
    import diffusers

    if model in MODELS and not Path(model).is_dir():
        parts = [(getattr(diffusers, kind), config) for kind, config in MODELS[model].parts.values()
                 if hasattr(diffusers, kind)]
        defaults = [inspect.signature(cls).parameters.get("guidance_embeds") for cls, _ in parts]
        return any(config.get("guidance_embeds", default is not None and default.default)
                   for default, (_, config) in zip(defaults, parts))
    files = (Path(FOLDERS.get(model, model)) / name / "config.json" for name in index)
    return any(json.loads(file.read_text(encoding="utf-8")).get("guidance_embeds") for file in files if file.is_file())


def _class(index: dict[str, Any]) -> Any:
    """Return the class of a pipeline's index; None for an unknown one."""
    import diffusers

    return getattr(diffusers, str(index.get("_class_name")), None)


def task(config: Config, sample: str, brought: Sequence[tuple[str, str]]) -> str:
    """Return the hub's name of a model's task. sample: name of a sample. brought: what the first prompt brings."""
    keys, cls = {key for key, _ in brought}, _class(_index(config.model))
    sample = "clip" if cls and is_video(cls) else sample
    if not keys and cls and prompt_inputs.needs_image(cls):
        keys = {"image"}
    if "video" in keys and sample == "clip":
        return "video-to-video"
    return TASKS[sample][bool(keys - {"ip_adapter_image"})]


def _has_template(model: str) -> bool:
    """Return True for a folder whose tokenizer has a chat template; a hub's language model is taken to have one."""
    folder = Path(FOLDERS.get(model, model))
    if not folder.is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8")))
