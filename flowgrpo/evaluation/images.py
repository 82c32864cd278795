"""Images from saved weights: those of a LoRA, and samples of every prompt of a file with a prompt file that names them
(for `base_similarity`, or texts of a model).
"""

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from flowgrpo import domains
from flowgrpo.config.schema import Config
from flowgrpo.data import sets, sources
from flowgrpo.data.images import read_image
from flowgrpo.data.prompts import USER_PROMPT, Prompt, require_length, to_jsonl
from flowgrpo.device import require_generators
from flowgrpo.errors import UserError
from flowgrpo.evaluation import best_of as choice
from flowgrpo.evaluation import draw, image_files, samplers
from flowgrpo.evaluation.evaluate import PlanOptions, make_plan
from flowgrpo.evaluation.pages import clips
from flowgrpo.evaluation.plan import BASE, TUNED, Place, Plan, digest
from flowgrpo.evaluation.samplers import Enhancer
from flowgrpo.log import bar
from flowgrpo.nouns import SAMPLE
from flowgrpo.policies import loading
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.policies.pipelines.load import modality
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.paths import require_file, require_folder, require_room

BLOCK = 4096  # bytes of the disk that a file takes at least
FILE = "prompts.jsonl"
PROMPT = "prompt"  # the key that makes a text the prompt of its line
FILES = {"image": (".png",), "video": (".webp", ".mp4")}  # endings of one sample's file, by what is generated
KEYS = {draw.IMAGES: "base_image", draw.DRAWINGS: "base_image", draw.TEXTS: "base_text"}


@loading.memory_told()
def sample(model: str, lora: str | Path | None, prompts: list[str], count: int, seed: int, steps: int | None,
           guidance: float | None, output: str | Path, rlg: float | None = None,
           image: str | Path | None = None, precision: str | None = None, best_of: int = 1,
           by: str | dict[str, Any] = "", enhancer: Enhancer | None = None) -> list[Path]:
    """Draw `count` images per prompt to the folder `output`, clips as animated WebP and mp4; returns the paths of the
    images or WebPs, in order. An `output` that ends as in FILES is the file of one sample.

    A PNG says how it was drawn in its text chunk `parameters`, a WebP in its EXIF user comment. No file is overwritten:
    a taken name gets a number.

    lora: a finished run or its checkpoint (the run's `image`, `memory` and `precision` apply), a folder with a LoRA,
    or its file; None: the base.
    steps, guidance: None takes those of the run's evaluation; without a run a starter's card's, or the pipeline's.
    rlg: draw with base + rlg * (tuned - base), see policies/pipelines/rlg.py.
    image: file of an image from which all prompts start. precision: None takes the run's, or the device's default.
    best_of: draws per image, of which the one with the highest reward `by` is kept, a name or its rule by name.
    enhancer: rewrites the prompts that images are drawn from.
    An image depends only on the seed, its prompt's number and its number within the prompt.
    Raises UserError for a model or weights that do not load, and for an unreadable image.
    """
    one = one_file(output, len(prompts) * count)
    given = [Prompt(text, image=None if image is None else str(image)) for text in prompts]
    require_length(given)
    require_disk(output, len(prompts) * count)
    if image is not None:
        read_image(image)
    run = None if lora is None else Path(lora)
    config = config_of(run) or Config()
    if run:
        loading.require_weights(run)
    best = choice.make(best_of, by, config)
    arm, weight = (BASE, 0.0) if run is None else (TUNED, 1.0 if rlg is None else rlg)
    plan = Plan(model, run, {arm: weight}, rlg, config.model_copy(update={"negative_prompt": ""}),
                samplers.call_arguments(model, run, steps, guidance), count, seed, draw.IMAGES, precision, best,
                enhancer)
    painter = draw.Drawer(plan, loading.place())
    painter.require_fit()
    if enhancer:
        enhancer(given)  # several at a time, and before a pipeline is loaded
    pipe = painter.sampler.load(plan.arm(arm))
    if image is not None and "image" not in inspect.signature(pipe.__call__).parameters:
        raise UserError(f"--image: {type(pipe).__name__} takes no image: leave it out")
    kind = modality(type(pipe))
    if one and Path(output).suffix.lower() not in FILES[kind]:
        raise UserError(f"--output {output}: {type(pipe).__name__} generates {SAMPLE[kind]}s: expected the name of a "
                        f"{' or '.join(FILES[kind])} file, or of a folder")
    folder, names = (Path(output).parent, iter([Path(output).name])) if one else (
        Path(output), names_of(prompts, count, "webp" if kind == "video" else "png"))
    return [*draw_files(painter, arm, given, count, folder, names, SAMPLE[kind], plan.fps)]


def draw_files(hand: draw.Drawer, arm: str, prompts: Sequence[Prompt], count: int, folder: Path, names: Iterator[str],
               unit: str, fps: float | None = None) -> Iterator[Path]:
    """Draw `count` images per prompt and yield their paths; each is saved before the next is drawn."""
    places = (Place(arm, i, k) for i in range(len(prompts)) for k in range(count))
    for place in bar(places, total=len(prompts) * count, title="sampling", unit=unit):
        prompt = prompts[place.prompt]
        [image] = hand.draw([prompt], [place])
        folder.mkdir(parents=True, exist_ok=True)
        path = image_files.free(folder / next(names))
        image_files.save(path, image, hand.facts(prompt, place, image) or "", fps)
        yield path


def require_disk(output: str | Path, files: int) -> None:
    """Raise UserError if the disk of `output` has no room for so many files, each of a block at least."""
    require_room(Path(output), BLOCK * files, f"{files:,} samples", "ask for fewer, make room, or name another output")


def one_file(output: str | Path, count: int, endings: Sequence[str] = tuple(itertools.chain(*FILES.values()))) -> bool:
    """True if `output` is the file of one sample, by its ending; False for a folder.

    Raises UserError if it cannot be written, or is a file and there are several samples.
    """
    ending = Path(output).suffix.lower()
    if ending not in endings or Path(output).is_dir():
        require_folder(output, f" or of one sample's {', '.join(endings)} file")
        return False
    if count != 1:
        raise UserError(f"--output {output}: is the file of one sample, got {count}: name a folder")
    if ending == ".mp4" and clips.encoder() is None:
        raise UserError(f"--output {output}: {clips.MISSING}")
    require_file(output)
    return True


def names_of(prompts: list[str], count: int, ending: str = "png") -> Iterator[str]:
    """Yield file names that sort like the images: number of the prompt, its words, number of the image."""
    digits = max(3, len(str(len(prompts) - 1)), len(str(count - 1)))
    words = [re.sub(r"\W+", "-", text.lower()).strip("-")[:40] for text in prompts]
    return (f"{i:0{digits}}-{word}-{k:0{digits}}.{ending}" for i, word in enumerate(words) for k in range(count))


@loading.memory_told()
def sample_file(source: str, prompts: str | Path, output: str | Path, *, count: int = 1, rlg: float | None = None,
                batch: int | None = None, key: str | None = None, **options: Unpack[PlanOptions]) -> Path:
    """Draw `count` samples of each prompt of a file, as `evaluate` does; returns `output`/prompts.jsonl.

    That file has a line per sample: the prompt with its metadata, and under `key` the absolute path of the image (of
    a clip's animated WebP), or the text itself. key: None means "base_image" or "base_text";
    with "prompt" a text becomes the line's prompt (see `_with_sample`). Existing samples in the folder are kept.
    batch: see `evaluate`. source: see `make_plan`. options: see `PlanOptions`.
    Raises UserError as `evaluate` does, for a folder with samples of other settings, and for images as prompts.
    """
    plan = make_plan(source, samples=count, rlg=[] if rlg is None else [rlg], **options)
    if key == PROMPT and plan.medium is not draw.TEXTS:
        raise UserError("--key prompt: makes a text the prompt of its line, and the model generates images: name "
                        "another key")
    paths.require_folder(output)
    given, [arm] = sets.resolve_prompts(prompts), plan.arms
    sources.require(given)
    require_disk(output, len(given) * count)
    require_generators(len(given) * count, "samples")
    ledger = plan.medium.ledger(Path(output))
    settings = plan.as_json() | {"prompt file": digest([repr(prompt) for prompt in given]), "rewards": {}}
    ledger.check(settings)
    places = [Place(arm, i, k) for i in range(len(given)) for k in range(count)]
    with paths.undone(ledger.folder):
        ledger.settle(settings)
        hand = draw.Drawer(plan, loading.place())
        missing = [place for place in places if not ledger.has(place)]
        with bar(total=len(places), done=len(places) - len(missing), title="sampling", unit=plan.medium.unit) as shown:
            hand.fill(ledger, given, missing, batch or plan.medium.together, shown.update)
    name, path = key or KEYS[plan.medium], ledger.folder / FILE
    atomic.write_text(path, to_jsonl(_with_sample(given[place.prompt], name, ledger.entry(place)) for place in places))
    return path


def _with_sample(prompt: Prompt, key: str, sample: str) -> Prompt:
    """Prompt whose metadata has a sample under `key`. For PROMPT: with the sample as its text, and the user's text in
    its metadata; a sample without a text changes nothing."""
    if key != PROMPT:
        return replace(prompt, metadata=prompt.metadata | {key: sample})
    text = domains.sampled_by("tokens").rewritten(sample) or prompt.text
    return replace(prompt, text=text, metadata={USER_PROMPT: prompt.text} | prompt.metadata)
