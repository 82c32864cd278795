"""Tables that commands print."""

from __future__ import annotations

from flowgrpo.escaped import plain
from flowgrpo.log import plain_console


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Print a table, one line per row, at least three columns wide. The third column is kept narrow."""
    from rich import box
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap, table.columns[2].max_width = True, 20
    for row in rows:
        table.add_row(*map(plain, row))
    plain_console().print(table)
