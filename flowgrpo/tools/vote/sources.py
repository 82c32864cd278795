"""Pairs to vote on: a run's samples before and after, those of a grid page, two folders with equal file names; or drawn
for the vote: the same prompts and seeds with two LoRAs of a model, with the base and one, or two samples of a model.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from PIL import ExifTags, Image

from flowgrpo.data.open_image import open_checked
from flowgrpo.data.prompts import Prompt, load_prompts, to_jsonl
from flowgrpo.errors import UserError
from flowgrpo.files import parse_json, text_of, unsafe
from flowgrpo.nouns import quantity
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.places import CONFIG
from flowgrpo.tools.vote.ballot import Comparison

PAGE = "before_after.png"  # of a run
PAGE_PIXELS = 2**27  # its header alone is read
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
Sides = tuple[str, str]  # names of A and B


def pairs(places: Sequence[Path]) -> tuple[list[Comparison], Sides]:
    """Pairs of a run, of the PNG of a grid page, or of two folders, and the names of their sides. Raises UserError for
    anything else, and if no images are there."""
    if len(places) == 2:
        return of_folders(places[0], places[1])
    if len(places) != 1:
        raise UserError(f"got {len(places)} paths, expected a run, the PNG of a grid, or two folders of images")
    [place] = places
    if (place / CONFIG).is_file():
        return of_page(place / PAGE)
    if place.suffix.lower() == ".png" and place.is_file():
        return of_page(place)
    raise UserError(f"{place}: expected a finished run, the PNG that `flowgrpo compare grid` wrote, or two folders of "
                    "images")


def of_page(page: Path) -> tuple[list[Comparison], Sides]:
    """Pairs of a page: of its first and its last column. Raises UserError for a page without images beside it."""
    facts = _facts(page)
    folders, names, prompts = (_texts(facts.get(key)) for key in ("folders", "columns", "prompts"))
    tasks = _texts(facts.get("tasks"), str, NoneType)
    if len(folders) < 2 or not names:
        raise UserError(f"{page} names no two folders of images: expected the page of an image or video run, written "
                        "by this version; `flowgrpo compare grid RUN` writes one")
    sides = [page.parent / folders[at] for at in (0, -1)]
    if not all(side.resolve().is_relative_to(page.parent.resolve()) for side in sides):
        raise UserError(f"{page} names images outside its folder: expected what `flowgrpo compare grid` wrote")
    columns = []
    for side in sides:
        try:
            files = sorted(file for file in side.glob("*") if re.fullmatch(r"\d+\.(png|webp)", file.name))
        except OSError as error:
            raise UserError(f"{page} names a folder that cannot be read ({error.strerror}): sample it again") from None
        columns.append([file for file in files if file.suffix == ".webp"] or files)  # of clips the WebPs
    if not all(len(column) == len(prompts) > 0 for column in columns):
        raise UserError(f"{page} has {quantity(len(prompts), 'prompt')}, but {len(columns[0])} and {len(columns[1])} "
                        f"images in {sides[0]} and {sides[1]}: sample it again")
    tasks = tasks if len(tasks) == len(prompts) else [None] * len(prompts)
    # What each prompt brings, but for files outside of the page's folder.
    listed, folder = facts.get("sources"), page.parent.resolve()
    rows = [[page.parent / name for name in _texts(names)] for names in listed] if isinstance(listed, list) else []
    brought = [tuple(file for file in row if file.suffix in ENDINGS and file.resolve().is_relative_to(folder))
               for row in rows]
    brought = brought if len(brought) == len(prompts) else [()] * len(prompts)
    return [Comparison(*row) for row in zip(prompts, *columns, tasks, brought)], (names[0], names[-1])


def _texts(value: Any, *kinds: type) -> list[Any]:
    whole = isinstance(value, list) and all(isinstance(text, kinds or str) and not unsafe(str(text)) for text in value)
    return value if whole else []


def _facts(page: Path) -> dict[str, Any]:
    """JSON of a page's text chunk `flowgrpo`; empty without one."""
    if not page.is_file():
        raise UserError(f"no images at {page}: expected a finished run, or the PNG that `flowgrpo compare grid` "
                        "wrote")
    try:
        with open_checked(page, PAGE_PIXELS, "a page") as image:  # which tells of text that is no JSON too
            facts = parse_json(str(image.info.get("flowgrpo", "{}")))
    except UserError as error:
        raise UserError(f"{error}: sample it again") from None
    return facts if isinstance(facts, dict) else {}


def of_folders(a: Path, b: Path) -> tuple[list[Comparison], Sides]:
    """Pairs of two folders: images of the same file name; others are left out.

    A prompt is that of the folder's prompts.jsonl (`flowgrpo sample --prompts`), else what the image says of its
    drawing, else the text of a .txt file of the same name, else the file's name.
    Raises UserError if no name is in both, and if a pair has two prompts.
    """
    for folder in (a, b):
        if not folder.is_dir():
            raise UserError(f"no folder at {folder}: expected two folders of images with equal file names")
    left, right = list_images(a), list_images(b)
    if not left.keys() & right.keys():
        raise UserError(f"{a} and {b} have no images of equal file names ({len(left)} and {len(right)} images): "
                        f"expected {', '.join(ENDINGS)}")
    comparisons = []
    for name in left:
        if name not in right:
            continue
        (one, prompt), (other, of_other) = left[name], right[name]
        if prompt.text != of_other.text:
            raise UserError(f"{one} was generated for {prompt.text[:60]!r}, and {other} for {of_other.text[:60]!r}: "
                            "expected the same prompt under the same name")
        brought = tuple(Path(path) for key, path in prompt.inputs.paths() if key != "video")
        comparisons.append(Comparison(prompt.text, one, other, prompt.metadata.get("task"), brought))
    first, second = a.resolve(), b.resolve()
    names = (first.name, second.name) if first.name != second.name else (str(a), str(b))
    return comparisons, names


def list_images(folder: Path) -> dict[str, tuple[Path, Prompt]]:
    """Images of a folder and their prompts by file name; none if it has none."""
    listing = folder / "prompts.jsonl"
    if listing.is_file():
        given = [(own_image(folder, str(prompt.metadata.get("base_image", ""))), prompt)
                 for prompt in load_prompts(listing)]
        if images := {path.name: (path, prompt) for path, prompt in given if path is not None}:
            return images
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in ENDINGS)
    moving = {file.stem for file in files if file.suffix == ".webp"}  # beside one, a PNG holds a clip's frames
    return {file.name: (file, Prompt(_prompt(file))) for file in files
            if file.suffix == ".webp" or file.stem not in moving}


def own_image(folder: Path, name: str) -> Path | None:
    """Image that a folder's prompts.jsonl names; None if there is no such file.

    A whole path, as `sample` writes it, is that of the same file in a folder that was moved or copied since.
    Raises UserError for a file outside the folder, and for one that is no image by its ending."""
    path = folder / name
    if path.is_absolute() and not path.resolve().is_relative_to(folder.resolve()):
        ends = (folder.joinpath(*path.parts[at:]) for at in range(1, len(path.parts)))
        path = next((end for end in ends if end.is_file()), path)
    if not path.is_file():
        return None
    if path.suffix.lower() not in ENDINGS or not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder / 'prompts.jsonl'} names {path}, expected an image inside its folder "
                        f"({', '.join(ENDINGS)})")
    return path


def _prompt(file: Path) -> str:
    try:
        with open_checked(file) as image:
            said = facts(image)
    except UserError as error:
        raise UserError(f"{error}: expected an image") from None
    beside = file.with_suffix(".txt")
    if not said and beside.is_file():
        said = text_of(beside)
    return re.split(r"\nNegative prompt: |\nSteps: ", said)[0].strip() or file.stem


def facts(image: Image.Image) -> str:
    """Generation settings in an image's file: a PNG's parameters, or the EXIF user comment; empty without either."""
    if said := image.info.get("parameters"):
        return str(said)
    content = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
    return content[8:].decode("utf-16-be", "replace") if content[:8] == b"UNICODE\0" else ""


def drawn_pairs(source: Path, loras: Sequence[Path], prompts: Path | None, count: int, seed: int, folder: Path
                ) -> tuple[list[Comparison], Sides]:
    """Draw at most `count` prompts for each side into `folder`, and return the pairs; existing images are kept.

    source: a run, for its model and held-out prompts, or a model. loras: one, which is compared with the base, or two;
    none: both sides are the model's, from the seeds `seed` and `seed` + 1.
    prompts: a file or a set of prompts in place of the run's held-out ones.
    Raises UserError as `images.sample_file` does, for a model without `prompts`, and for weights that are missing.
    """
    from flowgrpo.data import sets
    from flowgrpo.evaluation import images
    from flowgrpo.evaluation.measured import spread
    from flowgrpo.policies import loading
    from flowgrpo.policies.checkpoints import config_of

    config = config_of(source)
    if len(loras) > 2:
        raise UserError(f"--lora: got {len(loras)}, expected one, which is compared with the base, or two")
    if prompts is not None:
        chosen = spread(sets.resolve_prompts(prompts), count)
    elif config is not None:
        chosen = spread(sets.resolve(config)[1], count)
    else:
        raise UserError(f"{source} is no run, whose held-out prompts could be used: expected --prompts FILE too")
    for lora in loras:
        loading.require_weights(lora)
    listing = folder / "prompts.jsonl"
    model = config.model if config is not None else str(source)
    sides: list[Path | None] = [None] * (2 - len(loras)) + [*loras]
    with paths.undone(folder):
        atomic.write_text(listing, to_jsonl(chosen))
        for number, (name, side) in enumerate(zip("ab", sides)):
            own = seed if loras else seed + number
            images.sample_file(model, listing, folder / name, lora=side, seed=own, key="base_image")
    a, b = (side.resolve().name if side is not None else "base" for side in sides) if loras else \
        (f"seed {seed}", f"seed {seed + 1}")
    return of_folders(folder / "a", folder / "b")[0], (a, b)
