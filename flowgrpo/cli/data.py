"""`flowgrpo prompts mix`: prompt files from prompt sets, filtered, without duplicates, mixed; and `flowgrpo prompts
encode`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo.cli.options import Trusted, parse_rewards, recipe_and_options, recipe_argument, require_new_file
from flowgrpo.cli.root import prompts_app
from flowgrpo.config import parse
from flowgrpo.data.prompts import to_jsonl
from flowgrpo.errors import UserError
from flowgrpo.nouns import inflect, quantity
from flowgrpo.storage import atomic, paths

By = Literal["hardest", "variance", "middling"]


@prompts_app.command("mix", short_help="Mix, filter and deduplicate prompt files.")
def data(
    sets: Annotated[list[str], typer.Argument(metavar="SET[=WEIGHT]", help="Sets of `flowgrpo list prompts`, "
                                              "prompt files or hub:OWNER/NAME; with weights a mixture.")],
    output: Annotated[Path, typer.Option(help="The .jsonl file to write; it must not exist.")],
    dedupe: Annotated[bool, typer.Option("--dedupe", help="Drop prompts whose words repeat an earlier one's.")] = False,
    near: Annotated[float | None, typer.Option(min=0, max=1, help="Drop prompts that share this part of their groups "
                                                                  "of three words with an earlier one, such as "
                                                                  "0.7.")] = None,
    rates: Annotated[Path | None, typer.Option(metavar="EVAL|RUN|FILE.jsonl", help="Success rates: an evaluation of "
                                               "the set, a run that records them, or lines of prompt and rate.")
                     ] = None,
    measure: Annotated[str | None, typer.Option(metavar="MODEL", help="Measure them: sample --samples of every prompt "
                                                "and score them by --reward; kept beside the output.")] = None,
    likelihood: Annotated[str | None, typer.Option(metavar="MODEL", help="Rate: the likelihood of every prompt's "
                                                                         "answer under a language model.")] = None,
    reward: Annotated[str | None, typer.Option(help="The reward that is the rate, within 0 to 1.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per prompt, with --measure.")] = 8,
    low: Annotated[float, typer.Option(help="Keep prompts of this rate or more.")] = 0.0,
    high: Annotated[float, typer.Option(help="Keep prompts of this rate or less.")] = 1.0,
    by: Annotated[By, typer.Option(help="Rank of --keep: the lowest rate, the largest variance, or the nearest to "
                                        "1/2.")] = "hardest",
    keep: Annotated[int | None, typer.Option(min=1, help="Prompts of the first rank that are kept.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Prompts of the mixture; without: all, at the sets' "
                                                          "shares.")] = None,
    mixture: Annotated[Path | None, typer.Option(metavar="TRIED.jsonl", help="Choose the weights: lines of {weights: "
                                                 "[..], score: ..} of earlier runs.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the mixture.")] = 0,
) -> None:
    """Write a prompt file from others: without duplicates, by success rates, in a mixture."""
    require_new_file(output)
    sources = {"--rates": rates, "--measure": measure, "--likelihood": likelihood}
    known = [name for name, given in sources.items() if given]
    if len(known) > 1 or not known and (keep or (low, high) != (0.0, 1.0)):
        raise UserError("--keep, --low and --high select by success rate: expected one of --rates, --measure and "
                        f"--likelihood, got {' and '.join(known) or 'none'}")
    from flowgrpo.data import selection
    from flowgrpo.data import sets as known_sets

    names, weights = _parse_weights(sets)
    pools: list[list[Any]] = []
    for name in names:
        if note := known_sets.note_on_test_sets(name):
            typer.echo(note, err=True)
        pools.append(known_sets.resolve_prompts(name))
    if dedupe or near is not None:
        pools = _split_by_set(selection.deduplicate([prompt for pool in pools for prompt in pool], near), pools)
    if mixture is not None:
        weights = _surrogate_weights(mixture, names, seed)
    if known:
        found = _rates(pools, output, names, rates, measure, likelihood, reward, samples)
        pools = [selection.within(pool, found, low, high) for pool in pools]
        if keep:
            ranked = selection.rank([prompt for pool in pools for prompt in pool], found, by)
            pools = _split_by_set(ranked[:keep], pools)
    left = [(pool, weight) for pool, weight in zip(pools, weights) if pool and weight > 0]
    if not left:
        raise UserError("no prompt is left: choose a wider --low and --high, or other rates")
    prompts = selection.mix([pool for pool, _ in left], [weight for _, weight in left], count, seed)
    atomic.write_text(output, to_jsonl(prompts))
    typer.echo(f"{output}: {quantity(len(prompts), 'prompt')}")


def _parse_weights(sets: Sequence[str]) -> tuple[list[str], list[float]]:
    """Names of sets and their weights, 1 where none is given."""
    names, weights = [], []
    for given in sets:
        name, mark, weight = given.rpartition("=")
        try:
            number = float(weight) if mark and name else 1.0
        except ValueError:  # a part of the name, as in hub:OWNER/NAME?split=test
            name, number = given, 1.0
        if not 0 < number < float("inf"):
            raise UserError(f"{given}: expected a weight above 0")
        names.append(name if mark and name else given)
        weights.append(number)
    return names, weights


def _split_by_set(kept: Sequence[Any], pools: Sequence[Sequence[Any]]) -> list[list[Any]]:
    of = {id(prompt): place for place, pool in enumerate(pools) for prompt in pool}
    return [[prompt for prompt in kept if of[id(prompt)] == place] for place in range(len(pools))]


def _surrogate_weights(tried: Path, names: Sequence[str], seed: int) -> list[float]:
    """Weights that a surrogate of the tried mixtures likes best; print them."""
    from flowgrpo.data.selection import best_mixture

    try:
        lines = [json.loads(line) for line in tried.read_text(encoding="utf-8").splitlines() if line.strip()]
        mixtures, scores = [line["weights"] for line in lines], [float(line["score"]) for line in lines]
        if not lines or any(len(mixture) != len(names) or not sum(mixture) > 0 or min(mixture) < 0
                            for mixture in mixtures):
            raise ValueError(f"expected {len(names)} weights of 0 or more, one per set")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--mixture {tried}: expected lines such as {{\"weights\": [1, 2], \"score\": 0.6}}, a weight "
                        f"per set ({error})") from None
    weights = best_mixture(mixtures, scores, seed).tolist()
    typer.echo("weights: " + ", ".join(f"{name} {weight:.3f}" for name, weight in zip(names, weights)))
    return weights


def _rates(pools: Sequence[Sequence[Any]], output: Path, names: Sequence[str], rates: Path | None,
           measure: str | None, likelihood: str | None, reward: str | None, samples: int) -> dict[str, list[float]]:
    """Success rates by prompt key."""
    from flowgrpo.evaluation import rates as recorded

    prompts = [prompt for pool in pools for prompt in pool]
    if rates is not None:
        return recorded.load(rates, names, reward)
    if likelihood is not None:
        from flowgrpo.device import pick_device
        from flowgrpo.policies import build
        from flowgrpo.text.policies import engines

        config = parse.load(None, {"model": likelihood, "method": "grpo"})
        if build.kind(config) not in (build.CAUSAL_LM, build.VISION_LM):
            raise UserError(f"--likelihood: got {likelihood}, expected a causal language model")
        return recorded.likelihoods(engines.load(config, None, pick_device(config.device)), prompts)
    if reward is None:
        raise UserError("--measure: needs --reward, the reward that gives the rate")
    from flowgrpo.evaluation.evaluate import evaluate

    folder = output.with_suffix(".rates")
    file = folder / "prompts.jsonl"
    with paths.undone(folder):
        atomic.write_text(file, to_jsonl(prompts))
        evaluate(str(measure), str(file), parse_rewards(reward), folder / "samples", samples=samples)
    return recorded.load(folder / "samples", [str(file)])


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
    import torch

    from flowgrpo.data import pairs
    from flowgrpo.data import sets as known_sets
    from flowgrpo.device import describe, pick_device
    from flowgrpo.log import bar
    from flowgrpo.policies import build
    from flowgrpo.policies.pipelines import encoded_prompts
    from flowgrpo.policies.policy import resolve_precision

    named, options = recipe_and_options(arguments or [], others=("recipe", "trust"))
    if recipe is not None and named is not None:
        raise UserError(f"expected one recipe, got {named} and {recipe}")
    chosen = {key: value for key, value in dict(cache=cache, device=device, precision=precision).items()
              if value is not None}
    settings = parse.load(recipe or named, options | chosen, trusted)
    if build.kind(settings) != build.PIPELINE:
        raise UserError(f"encode: got the language model {settings.model}, expected a pipeline")
    encoded_prompts.require(settings)
    known_sets.require_suited(settings)
    sides = pairs.in_place(settings, known_sets.resolve(settings))
    paths.require_folder(settings.cache or "")
    at = torch.device(pick_device(settings.device))
    settings, said = resolve_precision(settings, at)
    typer.echo(f"device: {describe(at)}\nprecision: {said}")
    filled = encoded_prompts.fill(settings, [prompt for side in sides for prompt in side], at,
                                  lambda rows: bar(rows, title="encoding", unit="prompt"))
    typer.echo(f"{filled.folder}: {filled.prompts:,} {inflect(filled.prompts, 'prompt')} ({len(sides[0]):,} to train "
               f"on, {len(sides[1]):,} held out), {filled.new:,} new, {filled.size / 2**20:,.1f} MiB")
