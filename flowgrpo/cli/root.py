"""Typer application of all commands, in panels and groups, `main`, which runs it, and the tables that they print."""

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from flowgrpo import __version__, trust
from flowgrpo.distributed import launchers
from flowgrpo.distributed.signals import exit_code, leave
from flowgrpo.errors import UserError
from flowgrpo.escaped import line, plain
from flowgrpo.files import at_home
from flowgrpo.log import plain_console, silence
from flowgrpo.packages import import_failure, require_versions
from flowgrpo.storage import paths
from flowgrpo.user_code import forget_changed

Words = Annotated[list[str] | None, typer.Argument(metavar="WORD", show_default=False,
                                                  help="List only those that have all of these words.")]
TRAIN, LOOK, SHARE, EXTEND = "Train", "Look", "Share", "Extend"  # panels of the first screen
T = TypeVar("T")
# Base class of all errors that Typer itself raises; Typer does not export it.
UsageError: Any = typer.BadParameter.__base__

# Commands of the first screen, in order. Below it stand `compare`, `verify` and `contrib`; all others are in groups.
ORDER = ("demo", "train", "taste", "check", "prepare", "list", "sample", "eval", "report", "export", "push", "new",
         "reward", "prompts")
# Names of 0.1, which work until 0.3.
RENAMED = {"encode": "prompts encode", "data": "prompts mix", "write-prompts": "prompts write",
           "proxy-prompts": "prompts proxy", "methods": "list methods", "rewards": "list rewards", "runs": "list runs",
           "score": "reward score", "train-reward": "reward train", "train-text-reward": "reward train-text",
           "serve-reward": "reward serve", "label": "reward label", "vote": "compare vote", "grid": "compare grid",
           "bench": "compare methods", "evolve": "contrib evolve", "learn-experience": "contrib lessons"}


class Commands(TyperGroup):
    """Commands in the order of the first screen, with their earlier names.

    ctx: of a class that Typer does not export.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*ORDER, *(name for name in self.commands if name not in ORDER)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the first argument. An earlier name prints a line with the new one."""
        new = RENAMED.get(args[0])
        if args[0] == "prompts":  # now the name of a group; alone, or with a set's name, it was `list prompts`
            own = {command.name for command in prompts_app.registered_commands}
            new = "list prompts" if len(args) < 2 or args[1] not in own | {"--help"} else None
        if new is not None:
            typer.echo(f"flowgrpo: `flowgrpo {args[0]}` is now `flowgrpo {new}`; the earlier name ends with 0.3",
                       err=True)
            args = [*new.split(), *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(name="flowgrpo", cls=Commands, no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False, rich_markup_mode="rich", help="Align diffusers generators and "
                  "language models to a reward by group-relative RL.", epilog="Also: [bold]flowgrpo compare[/], "
                  "[bold]reproduce[/], [bold]verify[/], [bold]contrib[/], [bold]docs[/] and [bold]constraints[/].")


def _group(name: str, about: str, **shown: Any) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    app.add_typer(group, name=name, help=about, **shown)
    return group


list_app = _group("list", "List recipes, methods, rewards, prompt sets or runs.", rich_help_panel=LOOK)
reward_app = _group("reward", "Score with a reward, train one from preferences, serve one.", rich_help_panel=EXTEND)
prompts_app = _group("prompts", "Write, mix, filter and encode prompt files.", rich_help_panel=EXTEND)
compare_app = _group("compare", "Compare images of runs, by eye or by votes, and methods.", hidden=True)
contrib_app = _group("contrib", "Rarely used ways to train.", hidden=True)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"flowgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _flowgrpo(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    require_versions()


@functools.cache
def program() -> Any:
    """All commands as one click command. They are built once: it reads the types of every option."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0; 2 after a user or file error; 3 if a run trained nothing;
    130 after an interrupt, or 128 and the number of a second signal.

    Without arguments it is the program, which then ends whatever threads of rewards still do.
    """
    code = _run(arguments)
    if code != 130:
        return code
    if arguments is None:
        leave(exit_code())
    return exit_code()


def _run(arguments: list[str] | None) -> int:
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # else its import prints notes about optional packages
    silence()
    forget_changed()
    try:
        given = [_at_home(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
        with trust.command():
            return program()(given, prog_name="flowgrpo", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UserError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message() + _describe_value(error, sys.argv[1:] if arguments is None else arguments)
    except Exception as error:
        refusal = paths.refusal(error) or import_failure(error)
        if refusal is None:
            from flowgrpo.device import ran_out

            if not ran_out(error):
                raise
            first = next(iter(str(error).splitlines()), "")[:300]
            refusal = f"out of memory ({first or type(error).__name__}): ask for less at once, smaller samples or a " \
                "smaller model"
        message = refusal
    finally:
        # Of a launcher's process, which may abort although its work is done if it exits with live threads.
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    launchers.let_the_first_speak(line(message))
    if message:  # Typer's error for a call without a command is the help text it has already printed
        print(f"flowgrpo: error: {line(message)}", file=sys.stderr)
    return 2


def _at_home(argument: str) -> str:
    """Argument with the home folder in place of the ~ of --KEY=~/PATH or of a quoted ~/PATH."""
    key, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if key in ("--prompt", "--negative-prompt", "--negative_prompt", "--text.system"):
        return argument
    if (key, value) == ("--output", "~"):
        value += "/"
    return key + equals + at_home(value)


def _describe_value(error: Any, arguments: list[str]) -> str:
    """End of a message on an option's value: the value, where the message does not have it."""
    names = getattr(getattr(error, "param", None), "opts", [])
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            value = value if equals else arguments[place + 1] if place + 1 < len(arguments) else ""
            return "" if repr(value) in error.format_message() else f", got {value!r}"
    return ""


def matching(of: str, words: list[str] | None, rows: Iterable[T], cells: Callable[[T], Iterable[Any]]) -> list[T]:
    """Rows of `flowgrpo list OF WORD...` whose cells have all words, in upper or lower case. Raises UserError if none
    has."""
    found = [row for row in rows
             if all(word.lower() in " ".join(map(str, cells(row))).lower() for word in words or [])]
    if not found:
        told = " and ".join(map(repr, words or []))
        raise UserError(f"no {of.removesuffix('s')} has {told}: `flowgrpo list {of}` lists all")
    return found


def print_groups(rows: Iterable[tuple[str, list[str]]], *heads: str) -> None:
    """Print a table per title of rows (title, cells), whose second head is the title."""
    groups: dict[str, list[list[str]]] = {}
    for title, cells in rows:
        groups.setdefault(title, []).append(cells)
    for title, listed in groups.items():
        print_table([heads[0], title, *heads[1:]], listed)


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print a table, one line per row, at least three columns wide. The third column is kept narrow."""
    from rich import box
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap, table.columns[2].max_width = True, 20
    for column in table.columns:
        column.overflow = "fold"  # a name is copied, and none is cut
    for row in rows:
        table.add_row(*map(plain, row))
    plain_console().print(table)
