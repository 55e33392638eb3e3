"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from trial_core.common import text_format

# Piped output has no terminal width: lines are not cut.
PIPED_WIDTH = 1000
NUMBERS = ("batches", "size", "files", "rank")


def local_time(created_at: str) -> str:
    """A manifest's UTC time in the local time zone; an impossible time as it is."""
    try:
        moment = datetime.fromisoformat(created_at).astimezone()
    except (ValueError, OverflowError):  # no such date, or none in the local time zone
        return created_at
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def shortest_unique(uuids: Sequence[str]) -> int:
    """The number of leading characters that makes these uuids distinct; at least `SHORT_UUID`."""
    length = text_format.SHORT_UUID
    while len({uuid[:length] for uuid in uuids}) < len(set(uuids)):
        length += 1
    return length


def fact_lines(facts: Iterable[tuple[str, str | None]]) -> list[str]:
    """Lines with the names and the values of facts, in columns; without facts that are missing."""
    shown = [(name, fact) for name, fact in facts if fact is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"  {name:<{width}}  {fact}" for name, fact in shown]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout. The last column may wrap; the others are never cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns[:-1]:
        table.add_column(name, no_wrap=True, justify="right" if name in NUMBERS else "left")
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(text_format.clean(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
