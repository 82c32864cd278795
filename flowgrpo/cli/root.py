"""Typer application of all commands, and `main`, which runs it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from flowgrpo import __version__
from flowgrpo.distributed.signals import exit_code, leave
from flowgrpo.errors import UserError
from flowgrpo.escaped import line
from flowgrpo.log import silence
from flowgrpo.packages import broken, require_versions
from flowgrpo.storage import paths

# Base class of all errors that Typer itself raises; Typer does not export it.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(name="flowgrpo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode="rich", help="Align diffusers generators and language models to a reward by "
                                                "group-relative RL.")


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0; 2 after a user or file error; 130 after an interrupt, or 128
    and the number of a second signal.

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
    try:
        return app(arguments, prog_name="flowgrpo", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UserError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message()
    except Exception as error:
        refusal = paths.refusal(error) or broken(error) or _without_room(error)
        if refusal is None:
            raise
        message = refusal
    finally:
        _leave_group()
    if message:  # Typer's error for a call without a command is the help text it has already printed
        print(f"flowgrpo: error: {line(message)}", file=sys.stderr)
    return 2


def _without_room(error: Exception) -> str | None:
    """Return the message for an error that says that memory ran out; None for other errors."""
    from flowgrpo.device import ran_out

    first = next(iter(str(error).splitlines()), "")[:300]
    return f"out of memory ({first or type(error).__name__}): ask for less at once, smaller samples or a smaller " \
        "model" if ran_out(error) else None


def _leave_group() -> None:
    """End the process group of a launcher's processes. A process that exits with live threads may abort although its
    work is done."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
