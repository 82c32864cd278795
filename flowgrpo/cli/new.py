"""`flowgrpo new`: a commented file that begins a method, a reward or a recipe."""

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo.cli.root import EXTEND, app
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic, paths

Kind = Literal["method", "reward", "recipe"]
TEMPLATES = Path(__file__).with_name("templates")
# Files of each kind, by their templates.
FILES = {"method": {"method": "{}.py", "method_test": "test_{}.py"},
         "reward": {"reward": "{}.py", "reward_test": "test_{}.py"},
         "recipe": {"recipe": "{}.yaml"}}


@app.command(rich_help_panel=EXTEND, short_help="Start a method, a reward or a recipe of your own.")
def new(
    kind: Annotated[Kind, typer.Argument(metavar="method|reward|recipe", show_default=False,
                                         help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="A Python name, such as my_loss.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The folder of the files.")] = Path("."),
) -> None:
    """Write a commented file to begin with: NAME.py and its test, or NAME.yaml. No file is overwritten."""
    texts = {output / pattern.format(name): (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
             for template, pattern in FILES[kind].items()}
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise UserError(f"got the name {name!r}, expected letters, digits and underscores, such as my_loss")
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    if title == name:  # the class in a method's file is not the function
        title = f"{name}Loss"
    imported = re.findall(r"\w+", " ".join(re.findall(r"^(?:from|import) .*", "".join(texts.values()), re.M)))
    if name in sys.stdlib_module_names or not {name, title}.isdisjoint(imported):
        raise UserError(f"got the name {name!r}, which Python or flowgrpo has already: expected another one, such as "
                        f"my_{name}")
    if existing := [str(path) for path in texts if path.exists()]:
        raise UserError(f"no file is overwritten, and there is {' and '.join(existing)}: give another name, or "
                        "--output another folder")
    paths.require_folder(output)
    for path, text in texts.items():
        atomic.write_text(path, text.replace("[[NAME]]", name).replace("[[CLASS]]", title))
        typer.echo(path)
