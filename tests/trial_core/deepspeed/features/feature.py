"""A feature of DeepSpeed, and what happens with it when a trial trains, saves, resumes, …"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Column = Literal["train", "save", "resume", "ranks", "export"]
COLUMNS: tuple[Column, ...] = get_args(Column)
Outcome = Literal["works", "refused", "fails", "wrong"]
UNTRIED = "not tried yet"


@dataclass(frozen=True)
class Cell:
    """What is expected of a feature in a column.

    Attributes:
        words: in the error.
        outcome: "refused": trialflow raises an error with `words`; "fails": DeepSpeed, or torch,
            does; "wrong": it runs, and the test's comparison fails with `words`.
        test: the id of another test that holds the cell; else the matrix runs it.
    """

    outcome: Outcome = "works"
    words: str = ""
    test: str = ""


WORKS = Cell()


def refused(words: str) -> Cell:
    """trialflow refuses it with these words."""
    return Cell("refused", words)


def fails(words: str) -> Cell:
    """DeepSpeed raises an error with these words."""
    return Cell("fails", words)


def wrong(words: str) -> Cell:
    """It runs, but its result is wrong."""
    return Cell("wrong", words)


def held(test: str) -> Cell:
    """It works, as another test shows."""
    return Cell(test=test)


@dataclass(frozen=True)
class Need:
    """What a machine must have for a feature; `is_met` on a rank's machine."""

    what: str
    is_met: Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Feature:
    """A row of the table.

    Attributes:
        heading: of its part of the page.
        name: unique; the id of its tests.
        about: what it is, for readers of the page; Markdown.
        config: is merged into DeepSpeed's config of the toy; ``{folder}`` is a folder of the run.
        trial: a class of the toys.
        hparams: hyperparameters of the trial, by the number of ranks.
        ranks: the numbers of ranks: that of the columns, and the other one of "ranks".
        tolerance: relative, of losses on other numbers of ranks; None: the model draws random
            numbers, which are others there.
        need: what the machine must have.
        fewest: ranks on which the feature means something.
        gpu: what is expected of training on a GPU, where that differs.
        is_default: whether it belongs to the default tests.
    """

    heading: str
    name: str
    about: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    zero: int = 1
    trial: str = "feature_trials:AnyConfig"
    hparams: Callable[[int], dict[str, Any]] = lambda ranks: {}
    experiment: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (2, 1)
    tolerance: float | None = 1e-4
    need: Need | None = None
    fewest: int = 1
    gpu: Cell | None = None
    is_default: bool = False
    train: Cell = WORKS
    save: Cell = WORKS
    resume: Cell = WORKS
    other_ranks: Cell = WORKS
    export: Cell = WORKS

    def cell(self, column: Column) -> Cell | None:
        """What is expected in a column; None: nothing, because an earlier column does not work."""
        cells: dict[Column, Cell] = {
            "train": self.train, "save": self.save, "resume": self.resume,
            "ranks": self.other_ranks, "export": self.export,
        }  # fmt: skip
        before = {"train": (), "save": ("train",)}.get(column, ("train", "save"))
        if any(cells[each].outcome != "works" for each in before):
            return None
        return cells[column]

    @property
    def digest(self) -> str:
        """Changes with what is run, and with what is expected of it."""
        run = [self.trial, self.zero, self.config, self.hparams(max(self.ranks)), self.experiment]
        expected = [(cell.outcome, cell.words) for _, cell in self.cells]
        return hashlib.sha256(json.dumps([run, expected]).encode()).hexdigest()[:12]

    def on_gpus(self) -> Feature:
        """What is expected on GPUs."""
        return replace(self, train=self.gpu or self.train)

    def lacks(self, column: Column, gpus: int) -> str:
        """What a cell says on a machine that has not what it needs; empty: it has.

        Args:
            gpus: how many the machine has; 0: ranks are on the CPU.
        """
        fewest = max(self.ranks) if column == "ranks" else self.fewest
        if 0 < gpus < fewest:
            return f"needs {fewest} GPUs: {UNTRIED}"
        if self.need is not None and not self.need.is_met():
            return f"needs {self.need.what}: {UNTRIED}"
        return ""

    @property
    def cells(self) -> list[tuple[Column, Cell]]:
        """The columns in which something is expected."""
        cells = ((column, self.cell(column)) for column in COLUMNS)
        return [(column, cell) for column, cell in cells if cell is not None]

    @property
    def own_columns(self) -> list[Column]:
        """The columns that the matrix itself tests."""
        return [column for column, cell in self.cells if not cell.test]
