"""Pictures from saved weights: those that a LoRA draws, and base beside tuned on the same prompts and seeds.

All goes through the stock pipeline, which loads the weights as any user of diffusers would.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo import data, rewards
from flowgrpo.config import Config, load
from flowgrpo.data import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.held_out import Measured, draw_pairs, spread
from flowgrpo.policies.adapters import LORA_FILE
from flowgrpo.policies.pipeline import DENOISERS, load_pipeline
from flowgrpo.samplers.rollout import seeder
from flowgrpo.starter import CALL, EVAL_GUIDANCE, EVAL_STEPS


def sample(model: str, lora: str | Path | None, prompts: list[str], count: int, seed: int, steps: int | None,
           guidance: float | None, output: str | Path) -> list[Path]:
    """Draw `count` pictures per prompt and write them to the folder `output`; returns their paths, in order.

    lora: a finished run (its `picture` settings are kept), a folder with a LoRA, or its file; None draws with the base.
    steps and guidance: None takes the pipeline's own defaults, for the starter those of its card. A picture depends on
    the seed, the number of its prompt and its number among the prompt's, and on nothing else. UserError for a model or
    weights that do not load.
    """
    from torchvision.utils import save_image

    pipe = _pipeline(model, "bf16")
    if lora is not None:
        load_tuned(pipe, Path(lora))
    asked = _asked(model, None if lora is None else Path(lora), steps, guidance)
    pictures = _draw(pipe, [Prompt(text) for text in prompts], count, seed, asked)
    paths, folder = _names(prompts, count), Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for path, picture in zip(paths, pictures):
        save_image(picture, folder / path)
    return [folder / path for path in paths]


def grid(run: str | Path, prompts: str | Path | None, count: int, seed: int, output: str | Path) -> Path:
    """Draw base and tuned pictures of `count` prompts side by side, with the run's rewards below; returns `output`.

    run: a folder that `flowgrpo train` wrote; prompts: a prompt file, or None for the run's held-out prompts, of which
    `count` are taken evenly. Steps and guidance are the run's `eval` ones. UserError for a folder that is not a run, or
    that has no weights yet.
    """
    run = Path(run)
    config = _config(run)
    chosen = spread(data.load_prompts(prompts) if prompts else data.resolve(config)[1], count)
    functions = {name: rewards.find(name) for name in [*config.rewards, *config.eval.rewards]}
    pipe = _pipeline(config.model, config.precision, config.trust_remote_code)
    asked = _asked(config.model, run, config.eval.steps, config.eval.guidance)
    found = []
    for tune in (lambda: None, lambda: load_tuned(pipe, run)):
        tune()
        pictures = torch.stack(_draw(pipe, chosen, 1, seed, asked, config.negative_prompt))
        scores = rewards.score(functions, pictures, [p.text for p in chosen], [p.metadata for p in chosen])
        found.append(Measured(chosen, dict(zip(functions, scores.T.tolist())), pictures))
    draw_pairs(Path(output), *found)
    return Path(output)


def load_tuned(pipe: Any, path: Path) -> None:
    """Load a run's result, or any LoRA, into a stock pipeline. UserError where there is none, or none that fits."""
    trained = [name for name in DENOISERS if path.is_dir() and (path / name / "config.json").is_file()]
    if (path / LORA_FILE).is_file() or path.is_file():
        _load_lora(pipe, path if path.is_file() else path / LORA_FILE)
    elif trained:
        for name in trained:
            module = getattr(pipe, name)
            with _told(f"{path / name} does not load into {type(pipe).__name__}"):
                tuned = type(module).from_pretrained(path / name).to(module.device, module.dtype)
                pipe.register_modules(**{name: tuned})
    else:
        hint = "the run has not finished: --resume it" if (path / "config.yaml").is_file() else \
            "expected a finished run, a folder with a LoRA, or its file"
        raise UserError(f"no weights at {path} ({LORA_FILE} is missing): {hint}")


def _load_lora(pipe: Any, file: Path) -> None:
    with _told(f"{file} does not load into {type(pipe).__name__}"):
        pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    if not pipe.get_active_adapters():  # diffusers passes over keys that it does not know
        raise UserError(f"{file} holds no LoRA layer for {type(pipe).__name__}: was it trained on another model?")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what diffusers raises on a file into one line, without its log."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:200]}") from None
    finally:
        logging.set_verbosity(level)


def _config(run: Path) -> Config:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run: it has no config.yaml; expected a folder that `flowgrpo train` wrote")
    return load(run / "config.yaml")


def _pipeline(model: str, precision: str, trust_remote_code: bool = False) -> Any:
    """The pipeline on the GPU in `precision`, or on the CPU in fp32."""
    if not torch.cuda.is_available():
        return load_pipeline(model, "fp32", trust_remote_code)
    return load_pipeline(model, precision, trust_remote_code).to("cuda")


def _asked(model: str, lora: Path | None, steps: int | None, guidance: float | None) -> dict[str, Any]:
    """The arguments of the pipeline's calls beside prompt and seed; what is absent is left to the pipeline."""
    given = {"num_inference_steps": steps, "guidance_scale": guidance}
    asked = {"num_inference_steps": EVAL_STEPS, "guidance_scale": EVAL_GUIDANCE, **CALL} if model == "starter" else {}
    asked |= {key: value for key, value in given.items() if value is not None}
    return asked | (_config(lora).call if lora is not None and (lora / "config.yaml").is_file() else {})


@torch.no_grad()
def _draw(pipe: Any, prompts: list[Prompt], count: int, seed: int, asked: dict[str, Any],
          negative: str = "") -> list[torch.Tensor]:
    """Pictures [3, H, W] in [0, 1], `count` per prompt, one call of the pipeline each."""
    accepted, seed_of, pictures = inspect.signature(pipe.__call__).parameters, seeder(seed, 0), []
    rows = [(i, k) for i in range(len(prompts)) for k in range(count)]
    for i, k in tqdm(rows, desc="drawing", unit="picture", leave=False):
        unwanted = negative if prompts[i].negative is None else prompts[i].negative
        arguments = asked | {"prompt": prompts[i].text, "negative_prompt": unwanted,
                             "generator": torch.Generator().manual_seed(seed_of(i, k)), "output_type": "pt"}
        made = pipe(**{key: value for key, value in arguments.items() if key in accepted}, return_dict=False)[0]
        if made.ndim != 4:
            raise UserError(f"{type(pipe).__name__} gives {list(made.shape)}: only pictures [1, 3, H, W] can be drawn")
        pictures.append(made[0].float().cpu())
    return pictures


def _names(prompts: list[str], count: int) -> list[str]:
    """File names that sort as the pictures do: number of the prompt, its words, number of the picture."""
    digits = max(3, len(str(len(prompts) - 1)), len(str(count - 1)))
    words = [re.sub(r"\W+", "-", text.lower()).strip("-")[:40] for text in prompts]
    return [f"{i:0{digits}}-{word}-{k:0{digits}}.png" for i, word in enumerate(words) for k in range(count)]
