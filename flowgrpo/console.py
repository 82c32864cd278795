"""Where tables and lines are printed."""

from __future__ import annotations

import sys


def plain_console():
    """A rich console to which a string is what it says: no markup and no names of emoji, since names, paths and tasks
    are foreign text."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)  # a pipe has no edge
