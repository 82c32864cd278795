"""`flowgrpo prompts encode`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flowgrpo.cli.options import Trusted
from flowgrpo.cli.root import prompts_app
from flowgrpo.cli.train import recipe_and_options, recipe_argument
from flowgrpo.errors import UserError
from flowgrpo.nouns import named


@prompts_app.command("encode", short_help="Encode a recipe's prompts ahead of its run.",
                     context_settings={"ignore_unknown_options": True}, no_args_is_help=False)
def encode(
    arguments: Annotated[list[str] | None, recipe_argument(
        "As for `flowgrpo train`: the recipe, and keys of the configuration such as --prompts=FILE.")] = None,
    recipe: Annotated[str | None, typer.Option(help="The recipe, in place of the argument.")] = None,
    cache: Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder of encoded prompts, `cache` of the "
                                                                     "recipe.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the run that will read them.")] = None,
    trusted: Trusted = False,
) -> None:
    """Encode a recipe's prompts ahead of its run, training and held-out ones, on any machine.

    Loads only text encoders and tokenizers. A run with this `cache` then loads no text encoder.
    """
    from flowgrpo.config import parse

    named, options = recipe_and_options(arguments or [], others=("recipe", "trust"))
    if recipe is not None and named is not None:
        raise UserError(f"expected one recipe, got {named} and {recipe}")
    chosen = {key: value for key, value in dict(cache=cache, device=device, precision=precision).items()
              if value is not None}
    settings = parse.load(recipe or named, options | chosen, trusted)
    _encode(settings)


def _encode(settings: Any) -> None:
    """Fill the cache of a configuration and print what it holds."""
    import torch
    from tqdm import tqdm

    from flowgrpo.data import recorded_pairs, splits
    from flowgrpo.device import described, pick_device
    from flowgrpo.policies import build
    from flowgrpo.policies.pipelines import encoded_prompts
    from flowgrpo.policies.policy import resolve_precision
    from flowgrpo.storage import paths

    if build.kind(settings) != build.PIPELINE:
        raise UserError(f"encode: got the language model {settings.model}, expected a pipeline")
    encoded_prompts.require(settings)
    splits.require_suited(settings)
    sides = recorded_pairs.in_place(settings, splits.resolve(settings))
    paths.require_folder(settings.cache)
    device = torch.device(pick_device(settings.device))
    settings, said = resolve_precision(settings, device)
    typer.echo(f"device: {described(device)}\nprecision: {said}")
    filled = encoded_prompts.fill(settings, [prompt for side in sides for prompt in side], device,
                                  lambda rows: tqdm(rows, desc="encoding", unit="prompt", leave=False, disable=None))
    typer.echo(f"{filled.folder}: {filled.prompts:,} {named(filled.prompts, 'prompt')} ({len(sides[0]):,} to train on, "
               f"{len(sides[1]):,} held out), {filled.new:,} new, {filled.size / 2**20:,.1f} MiB")
