"""The table of docs/guides/resuming.md: what was changed, by the kind of trial, and what counts.

``python -m tests.resuming.table`` writes it into the page. `test_resuming` checks each cell.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "resuming.md"
MARKS = ("<!-- table: python -m tests.resuming.table -->\n", "<!-- end of table -->\n")
NEW, REFUSED, SAME, KEPT = "new", "refused", "bit for bit", "checkpoint's"
NONE = "–"


class Row(NamedTuple):
    """A change, and what counts for each kind of trial; `trainer` is a script with `Trainer`."""

    change: str
    torch: str
    deepspeed: str
    trainer: str


ROWS = {
    "lr": Row("learning rate", NEW, NEW, NEW),
    "weight_decay": Row("weight decay", NEW, NEW, NEW),
    "betas": Row("betas", NEW, NEW, NEW),
    "eps": Row("eps", NEW, NEW, NEW),
    "clip": Row("gradient clipping", NEW, NEW, NEW),
    "length": Row("length of a schedule, and its first rate", NEW, NEW, NEW),
    "schedule": Row("class of the scheduler", REFUSED, REFUSED, REFUSED),
    "scale": Row("how the loss scale grows", NEW, NONE, NEW),
    "smaller": Row("samples of a batch, if they divide those of this epoch so far", NEW, NEW, NEW),
    "batch": Row("samples of a batch, otherwise", REFUSED, REFUSED, REFUSED),
    "micro": Row("micro-batch, gradient accumulation", NEW, NEW, NEW),
    "seed": Row("seed of the data's order", NEW, NEW, NEW),
    "shuffle": Row("shuffling", NEW, NEW, NEW),
    "optimizer": Row("class of the optimizer", REFUSED, REFUSED, REFUSED),
    "groups": Row("number of parameter groups", REFUSED, REFUSED, REFUSED),
    "ema": Row("decay of an average of weights", NEW, NEW, NEW),
    "nothing": Row("nothing", SAME, SAME, SAME),
}  # fmt: skip

HEAD = ["what was changed", "`PyTorchTrial`", "`DeepSpeedTrial`", "script with `Trainer`"]


def table() -> str:
    """The table, as the page has it."""
    rows = [HEAD, ["---"] * len(HEAD), *ROWS.values()]
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def with_table(page: str) -> str:
    """`page` with the table between its marks."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
