"""`flowgrpo list prompts` and `flowgrpo prompts write`: prompt sets that training and evaluation take, and new ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.options import require_new_file
from flowgrpo.cli.root import list_app, print_table, prompts_app
from flowgrpo.data.prompts import Prompt, as_line, load_prompts, to_jsonl
from flowgrpo.errors import UserError, nearest
from flowgrpo.nouns import quantity
from flowgrpo.storage import atomic

AT_ONCE = 25  # prompts of one request
EMPTY = 5  # requests without a new prompt after which a language model is taken to have no more


@list_app.command("prompts", short_help="List prompt sets, or show some prompts of one.")
def prompts(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE|hub:OWNER/NAME]", help="A set, a prompt file or a "
                                               "dataset of the hub, to preview.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of a preview.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the prompt sets that --prompts and --suite take by name, or preview one."""
    from flowgrpo.data import sets
    from flowgrpo.data.hub import is_dataset

    if name is None:
        heads = ["name", "kind", "role", "where", "licence", "about"]
        rows = [[known, one.kind, one.role, "packaged" if one.is_packaged else "hub", one.licence, one.about]
                for known, one in sets.SETS.items()]
        if as_json:
            typer.echo(json.dumps([dict(zip(heads, row)) for row in rows], indent=2))
        else:
            print_table(heads, rows)
        return
    given = sets.SETS.get(name)
    if given is None and not is_dataset(name) and not Path(name).suffix:
        raise UserError(f"prompts {name!r}: no such set{nearest(name, list(sets.SETS))}; `flowgrpo list prompts` "
                        "lists them")
    train = sets.load(given.train if given else name)
    facts: dict[str, Any] = {"training": len(train)}
    if given:
        held_out = len(sets.load(given.held_out)) if given.held_out else "a share of them (held_out)"
        facts |= {"role": given.role, "held out": held_out, "licence": given.licence, "source": given.source,
                  "rewards": ", ".join(given.rewards) or "any"}
    # Some training prompts, spread evenly over the set.
    count = min(count, len(train))
    shown = [as_line(train[(2 * place + 1) * len(train) // (2 * count)]) for place in range(count)]
    if as_json:
        typer.echo(json.dumps(facts | {"prompts": shown}, indent=2, ensure_ascii=False))
        return
    for key, value in facts.items():
        typer.echo(f"{key.replace('_', ' '):<10}  {value}")
    for line in shown:
        typer.echo(json.dumps(line, ensure_ascii=False))


@prompts_app.command("write", short_help="Write prompts from templates, or by a language model.")
def write_prompts(
    output: Annotated[Path, typer.Option(help="The .jsonl file to write; it must not exist.")],
    templates: Annotated[Path | None, typer.Argument(metavar="[TEMPLATES.yaml]", help="`templates`, such as \"a photo "
                                                     "of {count} {animal}\", and the words of their `slots`.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts at most; none is written twice.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of words.")] = 0,
    about: Annotated[str | None, typer.Option(help="In place of templates: a language model writes prompts about "
                                                   "this subject.")] = None,
    like: Annotated[Path | None, typer.Option(metavar="FILE", help="In place of templates: a language model writes "
                                                                   "variants of this file's prompts, with their "
                                                                   "metadata.")] = None,
    url: Annotated[str, typer.Option(help="With --about and --like: an OpenAI-compatible endpoint.")]
    = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Likewise: the model, where several are served.")] = None,
    key_env: Annotated[str | None, typer.Option(help="Likewise: the environment variable with the key.")] = None,
) -> None:
    """Write a prompt file from templates with slots, or by a language model."""
    from flowgrpo.data.prompt_writer import load_templates, variants
    from flowgrpo.rewards.vlm_judge.client import Endpoint

    if sum(given is not None for given in (templates, about, like)) != 1:
        raise UserError("write-prompts: expected a file of templates, --about SUBJECT or --like FILE")
    require_new_file(output)
    if templates is not None:
        made = load_templates(templates).write(count, seed)
    else:
        known = [] if like is None else load_prompts(like)
        endpoint = Endpoint(url=url, model=model, key_env=key_env, temperature=1.0, max_tokens=4096)

        def ask(messages: list[dict[str, Any]]) -> str:
            return endpoint.ask(lambda _: messages, 1)[0].text

        if like is not None:  # as many variants of each as make `count`
            made = variants(known, -(-count // len(known)), ask)[:count]
        else:
            made = [Prompt(text) for text in _request_prompts(str(about), count, ask)]
    atomic.write_text(output, to_jsonl(made))
    fewer = f", all that there are of the {count}" if len(made) < count else ""
    typer.echo(f"{output}: {quantity(len(made), 'prompt')}{fewer}")


@prompts_app.command("proxy", short_help="Write prompts whose answer is known by construction.")
def proxy_prompts(
    kind: Annotated[str, typer.Argument(metavar="caption_error|critique|inversion",
                                         help="Task that the prompts set.")],
    file: Annotated[Path, typer.Argument(help="A prompt file whose metadata have `caption`; `solutions`, a list of "
                                         "{text, right}; or `choices` and `answer`.")],
    output: Annotated[Path, typer.Option(help="The .jsonl file to write; it must not exist.")],
    share: Annotated[float, typer.Option(help="Share of critiques; the other prompts are the file's.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the mistakes, and of the chosen critiques.")] = 0,
) -> None:
    """Write prompts whose right answer is known by construction: a caption's error, critiques of solutions, or
    inverted choices."""
    from flowgrpo.data.prompt_writer import caption_errors, critiques, with_inversions

    if kind not in ("caption_error", "critique", "inversion"):
        raise UserError(f"proxy-prompts: got {kind!r}, expected caption_error, critique or inversion")
    require_new_file(output)
    prompts = load_prompts(file)
    made = {"caption_error": lambda: caption_errors(prompts, seed), "inversion": lambda: with_inversions(prompts),
            "critique": lambda: critiques(prompts, share, seed)}[kind]()
    atomic.write_text(output, to_jsonl(made))
    typer.echo(f"{output}: {quantity(len(made), 'prompt')}")


def _request_prompts(about: str, count: int, ask: Callable[[list[dict[str, Any]]], str]) -> list[str]:
    """Prompts of a language model, each once; `ask` sends it messages."""
    from flowgrpo.data.prompt_writer import of_answer, request

    texts: dict[str, None] = {}
    empty = 0
    while len(texts) < count and empty < EMPTY:
        messages = request(about, min(AT_ONCE, count - len(texts)), list(texts)[-AT_ONCE:])
        before = len(texts)
        texts |= dict.fromkeys(of_answer(ask(messages)))
        empty = empty + 1 if len(texts) == before else 0
    return list(texts)[:count]
