"""`flowgrpo list rewards` and `flowgrpo reward score`, `fetch`, `train`, `train-text` and `serve`."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.options import parse_reward_arguments
from flowgrpo.cli.root import Words, list_app, matching, print_table, reward_app
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

NONE = "the reward does not apply"


@list_app.command("rewards", short_help="List the rewards that --reward takes by name.")
def rewards(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with what each does.")] = False,
) -> None:
    """List the rewards that --reward takes by name: what each does, its range, its needs, and its licence unless it
    is Apache-2.0. Words such as sharp, style, hands or nsfw find those for it."""
    from flowgrpo.cli import reward_table as table

    listed = matching("rewards", words, table.list_rewards(), dict.values)
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    groups: dict[str, list[list[str]]] = {title: [] for title in table.TITLES}
    for reward in listed:
        modalities = set((reward["modality"] or "").split("/"))
        place = 3 if not reward["modality"] else 2 if {"text"} < modalities else "text" in modalities
        groups[table.TITLES[place]].append(table.cells(reward))
    for title, rows in groups.items():
        if rows:
            print_table([f"rewards {title}", "what it does", "facts"], rows)
    for reward in listed:
        if reward["broken"]:
            typer.echo(reward["broken"])
    typer.echo('Needs are installed as "flowgrpo[NAME]" or by their own name. `flowgrpo docs rewards` helps to choose.')


@reward_app.command("score", short_help="Score image, video or text files with a reward.")
def score(
    reward: Annotated[str, typer.Argument(metavar="REWARD", help="A reward's name, or path/to/file.py:function.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Images, folders of frames, or .txt "
                                                                           "files.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt of all files.")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE|SET", help="A prompt for each, in order.")] = None,
    args: Annotated[str, typer.Option(metavar="YAML", help="Arguments of a reward that is a class.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a reward gives to images, videos or completions, from files."""
    from flowgrpo.cli import reward_table as table
    from flowgrpo.data import sets
    from flowgrpo.data.prompts import Prompt
    from flowgrpo.rewards.failures import Failed

    if prompt is not None and prompts is not None:
        raise UserError("got --prompt and --prompts, expected one of them")
    given = sets.resolve_prompts(prompts) if prompts else [Prompt(prompt or "")] * len(images)
    if len(given) != len(images):
        raise UserError(f"--prompts {prompts} has {quantity(len(given), 'prompt')} for "
                        f"{quantity(len(images), 'file')}, expected one for each")
    scores = table.score_files(reward, parse_reward_arguments(reward, args), images, given)
    why = [str(value) if isinstance(value, Failed) else NONE if value != value else None for value in scores]
    known = [value if reason is None else None for value, reason in zip(scores, why)]
    if as_json:
        rows = [{"file": str(file), "prompt": entry.text, "score": value} | ({"reason": reason} if reason else {})
                for file, entry, value, reason in zip(images, given, known, why)]
        typer.echo(json.dumps({"reward": reward, "scores": rows}, indent=2))
    else:
        cells = [[str(file), entry.text, "-" if value is None else f"{value:.4f}", reason or ""]
                 for file, entry, value, reason in zip(images, given, known, why)]
        width = 4 if any(why) else 3
        print_table(["file", "prompt", reward, "why"][:width], [row[:width] for row in cells])


@reward_app.command("fetch", short_help="Fetch the words that a released reward model was trained on.")
def fetch_text(
    name: Annotated[str, typer.Argument(metavar="NAME", help="videoalign, unified_reward or unified_reward_pairs.")],
    source: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A clone of the repository, for a machine "
                                                                       "without a network.")] = None,
) -> None:
    """Fetch the words that a released reward model was trained on, from its authors' repository."""
    from flowgrpo.rewards import released_text

    for text in released_text.fetch(name, source):
        typer.echo(f"{text.repository}/{text.path} at {text.commit[:10]} ({text.licence}): {text.file}")


@reward_app.command("train", short_help="Train a reward from preference pairs.")
def train_reward(
    pairs: Annotated[Path, typer.Argument(
        metavar="PAIRS", help="A .jsonl file: lines with `prompt`, `chosen` and `rejected` (images, relative to the "
        "file; with --model completions), and maybe `aspects`: names with chosen, rejected or tie.")],
    output: Annotated[Path, typer.Option(help="The folder of the reward: --reward FOLDER, or FOLDER:ASPECT.")],
    held_out: Annotated[str, typer.Option("--held-out", "--held_out", metavar="SHARE|FILE", help=
                                          "Pairs to measure with: a share of the prompts, or another file of pairs.")
                        ] = "0.1",
    text: Annotated[str, typer.Option(help="Model whose text encoder the network starts from: starter, or a "
                                           "pipeline's folder or hub id.")] = "starter",
    size: Annotated[int, typer.Option(min=16, help="Pixels per side that the network sees.")] = 128,
    clip: Annotated[str | None, typer.Option(metavar="NAME", help="Another network: a head on this model of open_clip, "
                                             "frozen; --text and --size are not used then.")] = None,
    pretrained: Annotated[str | None, typer.Option(metavar="TAG|FILE", help="The weights of --clip.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="For pairs of completions: a head on this "
                                                                   "language model, which is trained too; a large "
                                                                   "one takes a lower --lr.")] = None,
    frozen: Annotated[bool, typer.Option("--frozen", help="With --model: train only the head.")] = False,
    margins: Annotated[float, typer.Option(min=0, metavar="W", help="Learn scores that differ by at least W times "
                                                                    "the pair's margins, of `flowgrpo reward "
                                                                    "label`.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs at most.")] = 20,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better held-out accuracy before it stops; "
                                                      "the best epoch is kept.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Pairs per step.")] = 64,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate at its highest; it falls to 0.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split, the first weights and the order.")] = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16; scores are float32 all the same.")] = False,
    device: Annotated[str | None, typer.Option(help="Without: a GPU where there is one.")] = None,
) -> None:
    """Train a reward from preference pairs of images or completions (Bradley-Terry), with one or several aspects."""
    from flowgrpo.data.pairs import aspects, load_pairs, split

    texts = model is not None
    share: float | str = held_out
    with contextlib.suppress(ValueError):  # the name of a file
        share = float(held_out)
    sides = split(load_pairs(pairs, texts), share, texts)
    aspects(*sides)  # report mistakes before torch is loaded
    from flowgrpo.tools.learned_rewards import training

    accuracies = training.train(*sides, output, training.Settings(
        text=text, size=size, clip=clip, pretrained=pretrained, model=model, frozen=frozen, margins=margins,
        epochs=epochs, patience=patience, batch=batch, lr=lr, seed=seed, bf16=bf16, device=device))
    print_table(["aspect", "accuracy", "95 %", "prompts"],
                [[name, f"{accuracy.mean:.3f}", f"{accuracy.low:.3f} to {accuracy.high:.3f}", str(accuracy.prompts)]
                 for name, accuracy in accuracies.items()])
    typer.echo(f"Accuracies are of the held-out pairs, which chose the epoch too. Use it as --reward {output}")


@reward_app.command("train-text", short_help="Train a linear reward of completions from labels or pairs.")
def train_text_reward(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A .jsonl file: lines with `text` and `labels` "
                                                                "(names and numbers), or `chosen` and `rejected`; "
                                                                "maybe `prompt` and `category`.")],
    output: Annotated[Path, typer.Option(help="The reward's file: `text_scorer` with args: {file: FILE}.")],
    encoder: Annotated[str | None, typer.Option(metavar="NAME", help="A model of transformers whose mean last states "
                                                "are the features; without: hashed words and pairs of words.")] = None,
    penalty: Annotated[float, typer.Option(min=1e-9, help="Penalty on the squared weights.")] = 1.0,
    held_out: Annotated[float, typer.Option("--held-out", "--held_out", min=0.001, max=0.9,
                                            help="Share of the completions to measure with.")] = 0.1,
    degrade: Annotated[bool, typer.Option("--degrade", help="Learn to prefer the completions to degraded copies of "
                                          "themselves; labels are not read.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the held-out share, and of --degrade.")] = 0,
) -> None:
    """Train a reward of completions from labels or pairs: a linear head per aspect and category."""
    from flowgrpo.tools.learned_rewards.text_training import load_labelled

    labelled = load_labelled(texts)
    from flowgrpo.tools.learned_rewards import text_training as training

    results = training.train(labelled, output, encoder, penalty, held_out, degrade, seed)
    print_table(["category", "aspect", "measure", "value", "held-out completions"],
                [[category or "-", aspect, measure, f"{value:.3f}", str(count)]
                 for category, aspect, measure, value, count in results])
    typer.echo(f"Use it as the reward text_scorer with args: {{file: {output}}}")


@reward_app.command("serve", short_help="Serve a reward to other processes or machines.")
def serve_reward(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A reward's name, or path/to/file.py:function.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
    token_file: Annotated[Path | None, typer.Option(
        help="A file with the token that clients have to send; without: the environment's FLOWGRPO_REWARD_TOKEN. "
             "Where neither is set, a reward that may run code, read files or use a key makes one.")] = None,
    max_mb: Annotated[float, typer.Option(min=0.001, help="MiB of one request.")] = 64,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples of one request.")] = 64,
    args: Annotated[str, typer.Option(metavar="YAML", help="Arguments of a reward that is a class.")] = "{}",
) -> None:
    """Serve a reward to other processes or machines: its name in their recipes is the URL that this prints."""
    from flowgrpo.packages import import_optional
    from flowgrpo.rewards import find
    from flowgrpo.serving.client import token
    from flowgrpo.serving.wire import Limits

    import_optional("uvicorn", "server", "serve-reward")
    from flowgrpo.serving.server import serve

    secret, reward = token(token_file), find(name, parse_reward_arguments(name, args))
    serve(name, reward, host, port, Limits(int(max_mb * 2**20), max_batch), secret, typer.echo)
