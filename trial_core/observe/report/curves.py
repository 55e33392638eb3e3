"""Chooses a report's curves: training and validation of a metric are in one figure.

A line's points are measurements. Nothing is drawn where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trial_core.common import text_format
from trial_core.observe.report.history import Curve, ReportHistory

TRAINING_PREFIXES = ("training_", "train_")
VALIDATION_PREFIXES = ("validation_", "val_", "eval_")
TWO_DECADES = 100.0
COLOURS: Mapping[str, tuple[str, str]] = {
    "training": ("blue", "#3b82f6"), "validation": ("orange", "#d97706"), "": ("", "#3b82f6")
}  # fmt: skip
"""A line's colour by its name: for Mermaid's text, and for drawing."""


@dataclass(frozen=True)
class MeasuredLine:
    """A line of a figure.

    Attributes:
        metric: the measured metric.
        name: ``training``, ``validation``, or empty if the figure has one line that needs no name.
        points: (batches, value), at least one, in the order of batches; finite.
    """

    metric: str
    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class CurveFigure:
    """One or two lines over batches."""

    lines: Sequence[MeasuredLine]

    @property
    def title(self) -> str:
        """The metric's name, cleaned, since others may have chosen it."""
        return text_format.one_line(", ".join(dict.fromkeys(line.metric for line in self.lines)))

    @property
    def is_log(self) -> bool:
        """True if the axis is logarithmic: values are positive, over more than two decades."""
        values = [value for line in self.lines for _, value in line.points]
        return min(values) > 0 and max(values) / min(values) > TWO_DECADES


def figures(history: ReportHistory, searcher_metric: str) -> list[CurveFigure]:
    """The loss, the searcher metric, the other metrics, the throughput, the learning rate."""
    training = _curves(history, "training")
    validation = _curves(history, "validation")
    partner = _partners(training, validation)
    metrics: list[list[MeasuredLine]] = []
    for name, points in training.items():
        metrics.append([MeasuredLine(name, "training", points)])
        if (other := partner.get(name)) is not None:
            metrics[-1].append(MeasuredLine(other, "validation", validation[other]))
    for name in validation.keys() - set(partner.values()):
        metrics.append([MeasuredLine(name, "validation", validation[name])])

    def rank(lines: Sequence[MeasuredLine]) -> tuple[bool, bool, list[str]]:
        names = [line.metric for line in lines]
        return "loss" not in names, searcher_metric not in names, names

    own = [
        *((f"throughput ({unit})", each) for unit, each in _curves(history, "speed").items()),
        *_curves(history, "learning_rate").items(),
    ]
    return [
        *map(CurveFigure, sorted(metrics, key=rank)),
        *(CurveFigure([MeasuredLine(title, "", points)]) for title, points in own),
    ]


def _curves(history: ReportHistory, kind: Curve) -> dict[str, list[tuple[int, float]]]:
    """The points of each metric of one kind."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in history.curves.get(kind, []):
        for name, value in point.values.items():
            if math.isfinite(value):
                curves.setdefault(name, []).append((point.batches, value))
    return curves


def _partners(training: Iterable[str], validation: Iterable[str]) -> dict[str, str]:
    """For each training metric, the name of the same metric in validations."""
    partner = {name: name for name in set(training) & set(validation)}
    # `loss` takes `validation_loss` before `train_loss` can.
    for name in sorted(training, key=lambda name: (_base(name, TRAINING_PREFIXES) != name, name)):
        for other in sorted(validation):
            is_free = name not in partner and other not in partner.values()
            if is_free and _base(name, TRAINING_PREFIXES) == _base(other, VALIDATION_PREFIXES):
                partner[name] = other
    return partner


def _base(name: str, prefixes: Sequence[str]) -> str:
    prefix = next((each for each in prefixes if name.startswith(each)), "")
    return name[len(prefix) :]
