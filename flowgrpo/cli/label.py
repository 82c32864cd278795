"""`flowgrpo reward label`: preference pairs by rewards and judges."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo import trust
from flowgrpo.cli.options import LORA, PRECISION, TRUST, Precision, local_lora, local_source, opening
from flowgrpo.cli.root import reward_app
from flowgrpo.config import parse
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

LARGEST = 1e9


@reward_app.command("label", short_help="Label preference pairs with rewards or judges.")
def label(
    context: typer.Context,
    places: Annotated[list[str], typer.Argument(
        metavar="FOLDER... | MODEL_OR_RUN", show_default=False, help="Folders of samples, of `flowgrpo sample "
        "--prompts` or of images; or with --prompts a model or run, which generates them.")],
    rewards: Annotated[str, typer.Option(metavar="A,B|FILE.yaml", help="Rewards or judges, or a file of them with "
                                         "weights and args, as under `reward`. Several are aspects of each pair.")],
    output: Annotated[Path, typer.Option(help="The pairs, for --preferences and `flowgrpo reward train`; the same "
                                              "command continues.")] = Path("pairs.jsonl"),
    prompts: Annotated[str | None, typer.Option(metavar="FILE|SET", help="Generate samples of these prompts: a file "
                                                                         "or a set of `flowgrpo list "
                                                                         "prompts`.")] = None,
    count: Annotated[int, typer.Option(min=2, help="With --prompts: samples per prompt.")] = 4,
    lora: Annotated[str | None, typer.Option(help=f"With --prompts: {LORA}")] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --prompts: seed of the samples.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, help="With --prompts: temperature of a language model; "
                                                      "without: 1.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --prompts: samples per call of the model. Without: 1 "
                                              "image, 8 completions.")] = None,
    precision: Annotated[Precision | None, typer.Option(help=f"With --prompts: {PRECISION}")] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help="Metadata key that names a sample in a folder's "
                                            "prompts.jsonl. Without: base_image or base_text.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Write all pairs of a prompt, not only the best and "
                                                      "the worst.")] = False,
    least: Annotated[float, typer.Option(min=0, max=LARGEST, help="Leave out pairs whose totals differ by this or "
                                         "less.")] = 0.0,
    tie: Annotated[float, typer.Option(min=0, max=LARGEST, help="Call an aspect a tie up to this difference.")] = 0.0,
    trust_run: Annotated[bool, typer.Option(trust.FLAG, help=TRUST)] = False,
) -> None:
    """Label preference pairs of images or completions with rewards or judges: a verdict and a margin for each."""
    rules = rules_of(rewards)
    from flowgrpo.tools.vote import judged, labels

    labels.require(output, rules)
    if prompts is not None and len(places) != 1:
        raise UserError(f"--prompts: goes with one model or run, got {len(places)}")
    drawing = {"--lora": lora, "--temperature": temperature, "--batch": batch, "--precision": precision}
    for option, value in drawing.items() if prompts is None else ():
        if value is not None:
            raise UserError(f"{option}: goes with --prompts: leave it out")
    opening(context, trust_run, rules)
    folders = [Path(place) for place in places] if prompts is None else [_sample(
        places[0], prompts, output, rules, dict(lora=local_lora(lora), count=count, seed=seed, batch=batch,
                                                precision=precision, key=key, temperature=temperature))]
    groups = judged.groups(folders, key)
    pairs, without, failed = labels.label(groups, rules, output, labels.Choice(every, least, tie))
    for name, (number, said) in failed.items():
        typer.echo(f"left out: {quantity(number, 'sample')} that {name!r} failed on, which the same command scores "
                   f"again; the last: {said}", err=True)
    typer.echo(f"{output}: {quantity(pairs, 'pair')} of {quantity(len(groups), 'prompt')}, {without} of which have "
               "none")


def rules_of(text: str) -> dict[str, RewardRule]:
    """Parse --rewards: names as `A,B`, or a YAML file of weights or rules by name, as under `reward`."""
    if not text.endswith((".yaml", ".yml")):
        given: Any = {name.strip(): 1.0 for name in text.split(",") if name.strip()}
    elif not (given := parse.read_yaml(Path(text))):
        raise UserError(f"{text}: expected rewards with their rules, such as colour: {{use: judge, weight: 2}}")
    else:
        parse.require_own(text, {"reward": given}, flag=None)
    return dict(parse.validate({"reward": given}, where=text).trained) if given else {}


def _sample(source: str, prompts: str, output: Path, rules: dict[str, RewardRule], options: dict[str, Any]) -> Path:
    """Draw the samples that are missing into the folder STEM-samples beside `output`, and return it."""
    from flowgrpo import rewards
    from flowgrpo.data import sets
    from flowgrpo.data.prompts import to_jsonl
    from flowgrpo.evaluation import images
    from flowgrpo.storage import atomic, paths

    with rewards.lazily():  # finds mistakes before a model is loaded
        rewards.compose(rules)
    if note := sets.note_on_test_sets(prompts):
        typer.echo(note, err=True)
    given = sets.resolve_prompts(prompts)
    folder = output.with_name(f"{output.stem}-samples")
    listing = folder.with_name(f"{output.stem}-prompts.jsonl")
    with paths.undone(listing, folder):
        atomic.write_text(listing, to_jsonl(given))
        images.sample_file(local_source(source), listing, folder, **options)
    return folder
