"""Usage snippets of a model card: Python that loads a run's weights with stock libraries."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.policies import build, sources
from flowgrpo.policies.pipelines import edits, load, modular, prompt_inputs
from flowgrpo.policies.pipelines.call import guidance_argument
from flowgrpo.policies.pipelines.frames import call_parameters, is_video, with_fps
from flowgrpo.policies.weights.lora_files import LORA_FILE, below
from flowgrpo.published import MODELS
from flowgrpo.starter import FOLDERS, MERGED
from flowgrpo.storage.json_files import read_object

TASKS = {"image": ("text-to-image", "image-to-image"), "clip": ("text-to-video", "image-to-video"),
         "completion": ("text-generation", "image-text-to-text")}  # by sample: from a text, and from an image too
LOADED = "expected what the model was loaded from"
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
    if model in FOLDERS:
        return ["from flowgrpo.starter import FOLDERS"], f"str(FOLDERS[{model!r}])"
    return [], repr(model)


def _path(place: str, file: str) -> str:
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
    index = _index(config)
    cls = modular.class_of(index.get("_class_name"))
    imports, made = _making(config, index, cls)
    accepted = list(call_parameters(cls)) if cls else []
    embedded = _embeds_guidance(config, index)
    scale = "guidance_scale" if embedded else guidance_argument(accepted)
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
    blocks = modular.blocks_of(cls)
    # The guidance of such a pipeline is no argument of its call.
    guider = f"pipe.guider.new(guidance_scale={config.eval.guidance!r})"
    if blocks and "guider" in {part.name for part in blocks.expected_components}:
        loading.append(f"pipe.update_components(guider={guider})")
    elif "guider" in index:
        loading.append(f"pipe.guider = {guider}")

    def first(output: str) -> str:
        return f"pipe({arguments}, output={blocks.outputs[0].name!r})[0]" if blocks else \
            f"pipe({arguments}).{output}[0]"

    if cls and is_video(cls):
        imports.append("from diffusers.utils import export_to_video")
        shown = [f"frames = {first('frames')}", 'export_to_video(frames, "clip.mp4", '
                 f"fps={load.rate_ahead(config.model, config.load, call, config.fps):g})"]
    else:
        shown = [f"image = {first('images')}", 'image.save("image.png")']
    return ["import torch", *sorted({*imports, *more}), "", *made, *loading,
            'pipe.to("cuda" if torch.cuda.is_available() else "cpu")', *lines, *shown]


def _making(config: Config, index: dict[str, Any], cls: Any) -> tuple[list[str], list[str]]:
    """Return imports and lines that make `pipe`: with diffusers alone, where it loads what the run did by itself."""
    import diffusers

    files, whole, dtype = config.load, sources.is_file(config.model), DTYPE.get(config.precision, "torch.float32")
    given = {**dict.fromkeys(load.denoiser_names(index), files.denoiser), "vae": files.vae}
    parts = {name: (file, str(index[name][1])) for name, file in given.items() if file and name in index}
    kinds = [*(getattr(diffusers, kind) for _, kind in parts.values()), *([cls] if whole else [])]
    # What diffusers alone does not load is loaded as the run did.
    ours = files.lora or files.scheduler or files.controlnet or files.ip_adapter or files.textual_inversion
    if config.model in MERGED or ours or len(parts) < bool(files.denoiser) + bool(files.vae) or not all(
            hasattr(kind, "from_single_file") for kind in kinds):
        set_files = {name: value for name, value in files.model_dump(exclude_defaults=True).items() if value}
        loads = ", ".join(f"{name}={value!r}" for name, value in set_files.items())
        arguments = f", {config.precision!r}, files=Load({loads})" if loads else ""
        return ["from flowgrpo.policies.pipelines.load import load_pipeline",
                *["from flowgrpo.config.sections import Load"] * bool(loads)], [
            f"pipe = load_pipeline({config.model!r}{arguments})"]
    folder = files.config or load.config_source(config.model, files) if whole else config.model
    imports, source = _source(folder)
    if (blocks := modular.blocks_of(cls)) and not parts:
        lines = [f"pipe = ModularPipeline.from_pretrained({source}{_at(config, 'revision')})"]
        if rewriting := modular.rewriting(blocks):
            lines += ["blocks = pipe.blocks",
                      *(f"blocks.sub_blocks.pop({name!r})  # prompts as they are" for name in rewriting),
                      f"pipe = blocks.init_pipeline({source})"]
        return ["from diffusers import ModularPipeline"], [
            *lines, f"pipe.load_components(dtype={dtype}{_at(config, 'variant')})"]
    lines, absent = [], [name for name, value in index.items() if isinstance(value, list) and value[0] is None]
    for name, (file, kind) in parts.items():  # parts from files of their own, given to the pipeline
        arguments = f"{file!r}, dtype={dtype}"
        if sources.is_file(file):
            arguments += f", config={source}, subfolder={name!r}"
            arguments += f", config_revision={files.revision!r}" if files.revision else ""
        if file == files.denoiser and files.gguf:
            arguments += f", quantization_config=GGUFQuantizationConfig(compute_dtype={dtype})"
            imports.append("from diffusers import GGUFQuantizationConfig")
        imports.append(f"from diffusers import {kind}")
        lines.append(f"{name} = {kind}.from_{'single_file' if sources.is_file(file) else 'pretrained'}({arguments})")
    encoders = load.encoders_apart(config.model, folder, index) if whole and Path(config.model).is_file() else {}
    for name, encoder in encoders.items():
        imports.append(f"from transformers import {encoder.__name__}")
        lines.append(f"{name} = {encoder.__name__}.from_pretrained({source}, subfolder={name!r}, dtype={dtype})")
    # The pipeline: a part that its index leaves out stays None.
    name = cls.__name__ if whole else "DiffusionPipeline"
    arguments = f"from_single_file({config.model!r}, " if whole else f"from_pretrained({source}, "
    arguments += f"config={source}, " if files.config else ""
    arguments += f"dtype={dtype}{_at(config, 'variant', 'revision')}"
    arguments += "".join(f", {part}={None if part in absent else part}" for part in (*parts, *encoders, *absent))
    return [*imports, f"from diffusers import {name}"], [*lines, f"pipe = {name}.{arguments})"]


def _loading(run: Path, place: str) -> tuple[list[str], list[str]]:
    """Return imports and lines that load a run's weights into `pipe`."""
    imports, lines = [], []
    if (run / LORA_FILE).is_file():
        lines.append(f"pipe.load_lora_weights({place!r})")
    for file in below(run, LORA_FILE):
        lines.append(f"pipe.load_lora_weights({place!r}, subfolder={file.parent.name!r}, load_into_transformer_2=True)")
    parts = [file.parent.name for file in below(run, "adapter_config.json")]
    if parts:  # of a class without a loader
        imports = ["from flowgrpo.policies.weights.lora_files import load_lora", "from pathlib import Path"]
        named, folder = ", ".join(f"{part!r}: pipe.{part}" for part in parts), repr(place)
        if not Path(place).is_dir():
            imports.append("from huggingface_hub import snapshot_download")
            folder = f"snapshot_download({place!r})"
        lines.append(f"load_lora(pipe, {{{named}}}, Path({folder}))")
    for file in below(run, "config.json") if not lines else []:
        part = file.parent.name
        lines.append(f"pipe.{part} = type(pipe.{part}).from_pretrained({place!r}, subfolder={part!r}, "
                     f"dtype=pipe.{part}.dtype)")
    return imports, lines


def _of_language(config: Config, place: str, prompt: str) -> list[str]:
    imports, source = _source(config.model)
    folder = Path(FOLDERS.get(config.model, config.model))
    kept = folder / "tokenizer_config.json"
    # A hub's language model is taken to have a chat template.
    template = not folder.is_dir() or (folder / "chat_template.jinja").is_file() or (
        kept.is_file() and "chat_template" in read_object(kept, LOADED))
    templated = config.text.template is not False and template
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


def _at(config: Config, *names: str) -> str:
    return "".join(f", {name}={value!r}" for name in names if (value := getattr(config.load, name)) is not None)


def _index(config: Config) -> dict[str, Any]:
    index = load.index_ahead(config.model, config.load)
    known = MODELS.get(config.model)
    return index or ({"_class_name": known.pipeline} | {name: ["", kind] for name, (kind, _) in known.parts.items()}
                     if known else {})


def _embeds_guidance(config: Config, index: dict[str, Any]) -> bool:
    """True if a part of a folder's or published pipeline takes the guidance scale as an input."""
    import diffusers

    if config.model in MODELS and not Path(config.model).is_dir():
        parts = [(getattr(diffusers, kind), described) for kind, described in MODELS[config.model].parts.values()
                 if hasattr(diffusers, kind)]
        defaults = [inspect.signature(cls).parameters.get("guidance_embeds") for cls, _ in parts]
        return any(described.get("guidance_embeds", default is not None and default.default)
                   for default, (_, described) in zip(defaults, parts))
    files = (Path(index.get("_folder", "")) / name / "config.json" for name in index)
    return any(read_object(file, LOADED).get("guidance_embeds") for file in files if file.is_file())


def task(config: Config, sample: str, brought: Sequence[tuple[str, str]]) -> str:
    """Hub's name of a model's task. sample: name of a sample. brought: what the first prompt brings."""
    keys, cls = {key for key, _ in brought}, modular.class_of(_index(config).get("_class_name"))
    sample = "clip" if cls and is_video(cls) else sample
    if not keys and cls and prompt_inputs.needs_image(cls):
        keys = {"image"}
    if "video" in keys and sample == "clip":
        return "video-to-video"
    return TASKS[sample][bool(keys - {"ip_adapter_image"})]
