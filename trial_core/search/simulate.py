"""What a search would do with given curves, without training: a file of curves in, its end out."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_core.errors import ConfigError
from trial_core.search.log import SearchEvent, SearchLog
from trial_core.search.search import Search
from trial_core.search.settings import SearchExperiment

LearningCurve = Sequence[tuple[int, float]]
"""(length, metric), by length: what a trial's validations give."""
COLUMNS = ("trial", "length", "metric")


class _Memory(SearchLog):
    """A log that no storage has."""

    def __init__(self) -> None:
        self.events: list[SearchEvent] = []

    def append(self, kind: type[SearchEvent], **fields: Any) -> None:
        event = kind(number=len(self.events) + 1, search="simulated", at="", by="", **fields)
        self.events.append(event)

    def settle(self) -> None:
        pass


def in_memory(experiment: SearchExperiment) -> Search:
    """A search that no storage has."""
    return Search(experiment, _Memory(), "simulated")


def read_curves(path: Path) -> list[LearningCurve]:
    """The curves in a CSV file with the columns trial, length and metric; a row a validation.
    Trials that are numbers have their places; of one that is left out the curve is empty.
    ConfigError if the file cannot be read, or has other columns."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if set(COLUMNS) - set(rows.fieldnames or ()):
                raise ConfigError(
                    f"{path}: expected the columns {', '.join(COLUMNS)}, got "
                    f"{', '.join(rows.fieldnames or ()) or 'none'}"
                )
            for row in rows:
                curves[row["trial"]].append((int(row["length"]), float(row["metric"])))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: line {rows.line_num}: {error}") from None
    if not curves:
        raise ConfigError(f"{path}: has no curves")
    names = [*curves]
    if all(name.isdecimal() for name in names):  # as `search show --csv` writes them
        names = [str(number) for number in range(1 + max(map(int, names)))]
    return [sorted(curves[name]) for name in names]


def simulate(experiment: SearchExperiment, curves: Sequence[LearningCurve]) -> Search:
    """Run a search to its end, a trial at a time. Trial *n* has curve *n*; then they repeat. A
    curve has at a length the value of the last validation until then, else of the first."""
    search = in_memory(experiment)
    while (leg := search.next(())) is not None:
        length = int(leg.until.value)  # type: ignore[arg-type]
        if curve := curves[leg.trial.number % len(curves)]:
            until = [value for batches, value in curve if batches <= length] or [curve[0][1]]
            search.reached(leg, length, {experiment.searcher.metric: until[-1]}, None)
        else:
            search.failed(leg, "it has no curve", is_counted=False)
    return search
