"""Pictures from saved weights: those of a LoRA, and base against tuned on the same prompts and seeds.

All pictures come from the stock pipeline, which loads the weights as for any user of diffusers.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import STEPS, Load, Memory
from flowgrpo.data import splits
from flowgrpo.data.pictures import Clip, picture_size
from flowgrpo.data.prompts import Prompt, load_prompts, require_length
from flowgrpo.device import concrete, drawing, ran_out
from flowgrpo.errors import UserError
from flowgrpo.evaluation import best_of as choice
from flowgrpo.evaluation import checkpoints, lora_fit, picture_files, run_rewards
from flowgrpo.evaluation.checkpoints import config_of, run_config
from flowgrpo.evaluation.enhancer import Enhancer
from flowgrpo.evaluation.measured import Measured, spread
from flowgrpo.evaluation.nouns import SAMPLE
from flowgrpo.evaluation.pages import mp4, singles
from flowgrpo.evaluation.pages.before_after import captions, draw_pairs
from flowgrpo.policies.pipelines import edit_networks, edit_policy, prompt_inputs
from flowgrpo.policies.pipelines.call import guidance_argument, placed, seeded
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline, modality, text_encoders
from flowgrpo.policies.weights import adapters, finite, host_weights
from flowgrpo.policies.weights.lora_files import LORA_FILE, load_lora
from flowgrpo.policies.weights.memory_options import Encoders, decode_in_parts, require_quantiser
from flowgrpo.policies.weights.rlg import Branches
from flowgrpo.samplers.grids import require_steps
from flowgrpo.samplers.rollout import seeder
from flowgrpo.starter import CALLS, EVAL
from flowgrpo.storage.paths import require_file, require_folder, require_room

BLOCK = 4096  # bytes of the disk that a file takes at least

SIZES = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")  # torch's own


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """Context manager and decorator: report a device's lack of memory in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"out of memory ({why}): set memory.weights, memory.encoders or "
                        "memory.vae in the config.yaml of a pipeline's run, free the device, or use the CPU "
                        "(CUDA_VISIBLE_DEVICES=-1)") from error


@memory_told()
def sample(model: str, lora: str | Path | None, prompts: list[str], count: int, seed: int, steps: int | None,
           guidance: float | None, output: str | Path, rlg: float | None = None,
           image: str | Path | None = None, precision: str | None = None, best_of: int = 1,
           by: str | dict[str, Any] = "", enhancer: Enhancer | None = None) -> list[Path]:
    """Draw `count` pictures per prompt to the folder `output`, clips as animated WebP and mp4; returns the paths of the
    pictures or WebPs, in order. An `output` that ends with .mp4 is the file of one clip.

    A PNG says how it was drawn in its text chunk `parameters`, a WebP in its EXIF user comment. No file is overwritten:
    a taken name gets a number.

    lora: a finished run or its checkpoint (the run's `picture`, `memory` and `precision` apply), a folder with a LoRA,
    or its file; None: the base.
    steps, guidance: None takes those of the run's evaluation; without a run a starter's card's, or the pipeline's.
    rlg: draw with base + rlg * (tuned - base), see policies/weights/rlg.py.
    image: file of a picture from which all prompts start. precision: None takes the run's, or the device's default.
    best_of: draws per picture, of which the one with the highest reward `by` is kept, a name or its rule by name.
    enhancer: rewrites the prompts that pictures are drawn from.
    A picture depends only on the seed, its prompt's number and its number within the prompt.
    Raises UserError for a model or weights that do not load, and for an unreadable picture.
    """
    film = Path(output).suffix == ".mp4"
    _require_film(output, len(prompts) * count) if film else require_folder(output)
    given = [Prompt(text, image=None if image is None else str(image)) for text in prompts]
    require_length(given)
    require_disk(output, len(prompts) * count)
    if image is not None:
        picture_size(image)
    run = None if lora is None else Path(lora)
    config = config_of(run) or Config()
    if run:
        require_weights(run)
        lora_fit.require_fit(model, run, files_of(config, model))
    best, written = choice.make(best_of, by, config), enhancer(given) if enhancer else given
    pipe = make_pipeline(model, drawing(config.precision, place(), precision), config.trust_remote_code,
                         memory=config.memory, files=files_of(config, model))
    if image is not None and "image" not in inspect.signature(pipe.__call__).parameters:
        raise UserError(f"--image: {type(pipe).__name__} takes no image: leave it out")
    if film and modality(pipe) != "video":
        raise UserError(f"--output {output}: {type(pipe).__name__} generates images: name a folder")
    arguments = call_arguments(model, run, steps, guidance)
    require_steps(pipe.scheduler, arguments.get("num_inference_steps"))
    folder, paths = Path(output), []
    with contextlib.nullcontext() if run is None else tuned(pipe, run, rlg):
        drawn = _draw(pipe, written, count * best_of, seed, arguments)
        first = next(drawn)
        settings = picture_files.settings(pipe, model, arguments, run, rlg)
        names = _names(prompts, count, "webp" if first.ndim == 4 else "png")
        folder, names = (folder.parent, iter([folder.name])) if film else (folder, names)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = choice.kept(itertools.chain([first], drawn), given, count, seed, settings, best, written)
        for picture, facts in chosen:  # each is saved before the next is drawn
            paths.append(picture_files.free(folder / next(names)))
            picture_files.save(paths[-1], picture, facts)
    return paths


def require_disk(output: str | Path, files: int) -> None:
    """Raise UserError if the disk of `output` has no room for so many files, each of a block at least."""
    require_room(Path(output), BLOCK * files, f"{files:,} samples", "ask for fewer, make room, or name another output")


def _require_film(output: str | Path, clips: int) -> None:
    """Raise UserError if an mp4 cannot be written, or is to hold several clips."""
    if clips != 1:
        raise UserError(f"--output {output}: is the file of one clip, got {clips}: name a folder")
    mp4.require(f"--output {output}")
    require_file(output)


@memory_told()
def grid(run: str | Path, prompts: str | Path | None, count: int, seed: int, output: str | Path,
         rlg: float | None = None) -> Path:
    """Draw base and tuned pictures of `count` prompts side by side, with the run's rewards below; returns `output`. The
    pictures one by one lie in a folder of its name.
    Clips are drawn as their frames, and animated in an additional WebP and mp4.

    run: a folder written by `flowgrpo train`, whose `eval` steps and guidance apply.
    prompts: a prompt file, or None for `count` of the run's held-out prompts, evenly spaced.
    rlg: draw the tuned pictures with base + rlg * (tuned - base).
    Raises UserError for a folder that is not a run, or has no weights yet.
    """
    run = Path(run)
    config = run_config(run)
    require_weights(run)
    require_file(output)
    chosen = spread(load_prompts(prompts) if prompts else splits.resolve(config)[1], count)
    functions = run_rewards.measured(config)
    pipe = make_pipeline(config.model, drawing(config.precision, place()), config.trust_remote_code,
                         memory=config.memory, files=config.load)
    arguments = call_arguments(config.model, run)
    measured: list[Measured] = []
    for state in (contextlib.nullcontext, lambda: tuned(pipe, run, rlg)):
        with state():
            pictures = torch.stack([*_draw(pipe, chosen, 1, seed, arguments, config.negative_prompt)])
        scores = captions(functions, pictures, chosen, measured[0].pictures if measured else pictures)
        measured.append(Measured(chosen, dict(zip(functions, scores.T.tolist())), pictures))
    base, after = measured
    names = ("before", "after" if rlg is None else f"rlg {rlg:g}")
    folders = singles.save_columns(Path(output), names, [[*base.pictures], [*after.pictures]])
    draw_pairs(Path(output), base, after, names, picture_files.facts(
        run, names, chosen, folders, model=config.model, seed=seed, call=arguments))
    return Path(output)


def tuned(pipe: Any, path: Path, rlg: float | None) -> contextlib.AbstractContextManager[None]:
    """Load weights; return the context manager in which the pipeline is tuned, or base + rlg * (tuned - base)."""
    if rlg is not None:
        return load_branches(pipe, path).at(rlg)
    load_tuned(pipe, path)
    return contextlib.nullcontext()


def load_branches(pipe: Any, path: Path) -> Branches:
    """Load weights as `load_tuned` does, and keep the base for RLG. Raises UserError for an edit policy."""
    if checkpoints.holds_edits(path):
        raise UserError(f"--rlg: {path} holds an edit policy, which leaves the denoiser as it is: leave --rlg out")
    first = denoisers(pipe)
    load_tuned(pipe, path)
    return Branches(pipe, first)


def load_tuned(pipe: Any, path: Path) -> None:
    """Load a run's result, its checkpoint, or any LoRA, into a stock pipeline.

    Raises UserError if there is none, or none that fits."""
    modules = denoisers(pipe)
    trained = [name for name in modules if path.is_dir() and (path / name / "config.json").is_file()]
    modules |= text_encoders(pipe)
    if checkpoints.is_checkpoint(path):
        _load_checkpoint(pipe, path)
    elif checkpoints.holds_edits(path):
        config = config_of(path)
        edit_policy.over(pipe, path, config.call if config else {}).attach()
    elif path.is_file():
        _load_lora(pipe, path)
    elif (path / LORA_FILE).is_file() or any((path / name / "adapter_config.json").is_file() for name in modules):
        with _told(path, pipe):
            load_lora(pipe, modules, path)
        _check_lora(pipe, path / LORA_FILE)
    elif trained:
        for name in trained:
            module = getattr(pipe, name)
            with _told(path / name, pipe):
                tuned = type(module).from_pretrained(path / name, dtype=module.dtype).to(module.device)
                pipe.register_modules(**{name: tuned})
    else:
        require_weights(path)
        raise UserError(f"{path} holds no weights of {type(pipe).__name__}: was it trained on another model?")


def _load_checkpoint(pipe: Any, path: Path) -> None:
    """Load a checkpoint's weights as a finished run's are loaded, so that equal weights draw equal pictures: a LoRA is
    trained in fp32, and stock diffusers loads it in the precision of its module."""
    modules = denoisers(pipe) | text_encoders(pipe)
    precisions = {f"{name}.{key}": value.dtype for name, module in modules.items()
                  for key, value in module.named_parameters()}
    weights = checkpoints.load(pipe, path)
    if checkpoints.holds_edits(path):
        return
    if not weights.adapter.rank:
        for key, parameter in weights.named.items():
            parameter.data = parameter.data.to(precisions[key])
        return
    with tempfile.TemporaryDirectory() as folder:
        weights.save(Path(folder))
        for module in weights.modules.values():
            adapters.remove(module)
        load_tuned(pipe, Path(folder))


def require_weights(path: Path) -> None:
    """Raise UserError, before anything is drawn, if a path has no weights, or a LoRA that is not finite."""
    known = any((path / name).is_file() for name in (LORA_FILE, edit_networks.FILE))
    if path.is_file() or checkpoints.is_checkpoint(path) or known or any(
            file for name in ("adapter_config.json", "config.json") for file in path.glob(f"*/{name}")):
        if (path / LORA_FILE).is_file():
            finite.require_file(path / LORA_FILE)
        return
    hint = "the run has not finished: --resume it" if (path / "config.yaml").is_file() else \
        "expected a finished run, a folder with a LoRA, or its file"
    raise UserError(f"no weights at {path} ({LORA_FILE} is missing): {hint}")


def _load_lora(pipe: Any, file: Path) -> None:
    with _told(file, pipe):
        finite.require_file(file)
        pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    _check_lora(pipe, file)


def _check_lora(pipe: Any, file: Path) -> None:
    # diffusers ignores unknown keys
    modules = denoisers(pipe) | text_encoders(pipe)
    if not any(adapters.named(module) for module in modules.values()):
        raise UserError(f"{file} holds no LoRA layer for {type(pipe).__name__}: was it trained on another model?")


@contextlib.contextmanager
def _told(path: Path, pipe: Any) -> Iterator[None]:
    """Context manager: turn diffusers' errors on weights into one line, without its log."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if sizes := SIZES.search(said):
            said = f"size mismatch for {sizes[1]}, {sizes[2]} in the file and {sizes[3]} in the model"
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {said[:200]}{lora_fit.trained_on(path)}"
                        ) from None
    finally:
        logging.set_verbosity(level)


def place(device: torch.device | None = None) -> torch.device:
    """Return the device that pipelines draw on: a GPU, by default the first, or the CPU if there is none."""
    return torch.device(device or "cuda") if torch.cuda.is_available() else torch.device("cpu")


def make_pipeline(model: str, precision: str, trust_remote_code: bool = False, device: torch.device | None = None,
                  memory: Memory = Memory(), files: Load = Load()) -> Any:
    """Load the pipeline on a GPU (by default the first) or on the CPU.

    precision: `auto` takes the device's default.
    files: where the model's weights are.
    memory: as in a run: storage and place of weights, decoding. A LoRA that is loaded later comes with its block. 4-bit
    weights need a GPU and are loaded in full on the CPU.
    Raises UserError if a required package is absent.
    """
    device = place(device)
    gpu = device.type == "cuda"
    weights = "full" if memory.weights == "nf4" and not gpu else memory.weights
    require_quantiser(weights)
    pipe = load_pipeline(model, concrete(precision, device), trust_remote_code, weights, files, checker=False)
    away = None if memory.encoders == "keep" else "cpu"
    modules = denoisers(pipe)
    encoders = Encoders(pipe, device, away, modules if host_weights.later(memory) else ())
    if away is not None:
        encoders.attend(pipe)
        pipe.__class__ = placed(type(pipe), device)  # diffusers takes the place of a part that may be away
    if host_weights.later(memory):
        for module in modules.values():
            module.requires_grad_(False)
        host_weights.place(modules.values(), encoders, device, memory)
    decode_in_parts(pipe, memory.vae)
    return pipe


def files_of(config: Config | None, model: str) -> Load:
    """Return the `load` settings with which a run loaded its model; the defaults for another model."""
    return config.load if config is not None and config.model == model else Load()


def call_arguments(model: str, lora: Path | None, steps: int | None = None, guidance: float | None = None
                   ) -> dict[str, Any]:
    """Return the arguments of the pipeline's calls besides prompt and seed. The guidance scale is `guidance`, whatever
    the pipeline calls it.

    lora: a run's `eval` and `picture` set what is absent; otherwise a starter's card, or the pipeline, does.
    Raises UserError for more than STEPS steps, and for a guidance that is not finite.
    """
    if steps is not None and steps > STEPS:
        raise UserError(f"--steps: got {steps}, expected {STEPS} at most")
    if guidance is not None and not math.isfinite(guidance):
        raise UserError(f"--guidance: got {guidance}, expected a finite number")
    arguments: dict[str, Any] = EVAL.get(model, {}) | CALLS.get(model, {})
    config = config_of(lora)
    if config is not None:
        arguments |= config.eval_call | {"num_inference_steps": config.eval.steps, "guidance": config.eval.guidance}
    given = {"num_inference_steps": steps, "guidance": guidance}
    return arguments | {key: value for key, value in given.items() if value is not None}


def call(pipe: Any, arguments: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """Call the pipeline and return its output. arguments: result of `call_arguments`. inputs: prompts, generators
    and the like. Arguments that the pipeline does not take are dropped."""
    require_steps(pipe.scheduler, arguments.get("num_inference_steps"))
    accepted, merged = inspect.signature(pipe.__call__).parameters, arguments | inputs
    if "guidance" in arguments:
        merged[guidance_argument(accepted, arguments, denoisers(pipe).values())] = arguments["guidance"]
    return pipe(**{key: value for key, value in merged.items() if key in accepted}, return_dict=False)[0]


def _draw(pipe: Any, prompts: list[Prompt], count: int, seed: int, arguments: dict[str, Any],
          negative: str = "") -> Iterator[torch.Tensor]:
    """Draw pictures [3, H, W] or clips [F, 3, H, W] in [0, 1], `count` per prompt, one pipeline call each."""
    seed_of, rows = seeder(seed, 0), ((i, k) for i in range(len(prompts)) for k in range(count))
    unit = SAMPLE["video" if "num_frames" in inspect.signature(pipe.__call__).parameters else "image"]
    for i, k in tqdm(rows, total=len(prompts) * count, desc="sampling", unit=unit, leave=False):
        yield draw_one(pipe, prompts[i], seed_of(i, k), arguments, negative)


@torch.no_grad()
def draw_one(pipe: Any, prompt: Prompt, seed: int, arguments: dict[str, Any], negative: str = "") -> torch.Tensor:
    """Draw a picture [3, H, W] or clip [F, 3, H, W] in [0, 1], by one pipeline call with noise of that seed.

    arguments: further ones of the call, from `call_arguments`. negative: for a prompt without its own.
    Raises UserError for a pipeline with another output, and for a missing input file.
    """
    if (edits := edit_policy.attached(pipe)) is not None:
        return edits.draw([prompt], [seed], arguments, negative)[0]
    generator, image = torch.Generator().manual_seed(seed), _brought(pipe, prompt, arguments)
    with seeded(pipe.scheduler, generator), _picture_missed(pipe, arguments | image):
        pictures = call(pipe, arguments, prompt=prompt.text, generator=generator, output_type="pt", **image,
                    negative_prompt=negative if prompt.negative is None else prompt.negative)
    if pictures.ndim not in (4, 5):
        raise UserError(f"{type(pipe).__name__} gives {list(pictures.shape)}: only images [1, 3, H, W] and clips "
                        "[1, F, 3, H, W] can be written")
    return pictures[0].float().cpu()


def _brought(pipe: Any, prompt: Prompt, call: dict[str, Any]) -> dict[str, Any]:
    """Return what a prompt brings beside its text as arguments of a call.
    Raises UserError for an unreadable file, and for one that the pipeline does not take."""
    values = prompt_inputs.decoded(pipe, prompt.inputs, call) if prompt.brings is not None else {}
    return {name: value.frames if isinstance(value, Clip) else value for name, value in values.items()}


@contextlib.contextmanager
def _picture_missed(pipe: Any, given: dict[str, Any]) -> Iterator[None]:
    """Context manager: if a call without a picture fails on a pipeline that takes one, name that as a possible cause.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        if "image" in given or "image" not in inspect.signature(pipe.__call__).parameters:
            raise
        raise UserError(f"{type(pipe).__name__} takes an image, and fails without one ({' '.join(str(error).split())}):"
                        " give `sample` an --image FILE, or every prompt of the file an `image`") from error


def _names(prompts: list[str], count: int, ending: str = "png") -> Iterator[str]:
    """Yield file names that sort like the pictures: number of the prompt, its words, number of the picture."""
    digits = max(3, len(str(len(prompts) - 1)), len(str(count - 1)))
    words = [re.sub(r"\W+", "-", text.lower()).strip("-")[:40] for text in prompts]
    return (f"{i:0{digits}}-{word}-{k:0{digits}}.{ending}" for i, word in enumerate(words) for k in range(count))
