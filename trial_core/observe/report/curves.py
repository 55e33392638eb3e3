"""Chooses a report's curves, and draws them in Markdown, as Mermaid charts for Prefect's UI.

Training and validation of a metric are in one figure. A line's points are measurements: nothing is
drawn where nothing was measured. Mermaid places the values of a line at equal distances, without
gaps. So a chart's axis has an entry for each batch that it draws, and it draws only batches where
all its lines were measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from trial_core.common import text_format
from trial_core.observe.report.history import Curve, ReportHistory

TRAINING_PREFIXES = ("training_", "train_")
VALIDATION_PREFIXES = ("validation_", "val_", "eval_")
COUNTERS = frozenset({"batches", "epochs"})
"""Of Hugging Face's Trainer, in each of its reports: lines that say nothing."""
TWO_DECADES = 100.0
COLOURS: Mapping[str, tuple[str, str]] = {
    "training": ("blue", "#3b82f6"), "validation": ("orange", "#d97706"), "": ("", "#3b82f6")
}  # fmt: skip
"""A line's colour by its name: for Mermaid's text, and for drawing."""
WIDTH = 900
FONT_SIZE = 11
# Of a character on Mermaid's axis, and of the space between two entries.
CHARACTER_WIDTH, SPACE = 7, 8


@dataclass(frozen=True)
class MeasuredLine:
    """A line of a figure.

    Attributes:
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
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in history.curves.get(kind, []):
        for name, value in point.values.items():
            if math.isfinite(value) and name not in COUNTERS:
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


def charts(figure: CurveFigure) -> list[str]:
    """The text lines of a figure's charts; none if there are fewer than two points."""
    common = set.intersection(*({batches for batches, _ in line.points} for line in figure.lines))
    if len(figure.lines) == 1 or len(common) < 2:
        return [text for line in figure.lines for text in _chart(CurveFigure([line]))]
    together = [
        MeasuredLine(line.metric, line.name, [point for point in line.points if point[0] in common])
        for line in figure.lines
    ]
    # Points without a partner in the other line are shown, too.
    alone = [line for line in figure.lines if len(line.points) >= 2 * len(common)]
    return [
        *_chart(CurveFigure(together)),
        *(text for line in alone for text in _chart(CurveFigure([line]))),
    ]


def _chart(figure: CurveFigure) -> list[str]:
    """A chart of lines with the same batches."""
    lines = figure.lines
    measured = len(lines[0].points)
    if measured < 2:
        return []
    places = _thinned(lines[0].points)
    batches = ", ".join(str(lines[0].points[place][0]) for place in places)
    last = ", ".join(f"{_named(line)}{text_format.number(line.points[-1][1])}" for line in lines)
    title = figure.title.replace('"', "'").replace("%{", "% {")  # %%{ is a directive in any text
    note = [f"{len(places)} of {measured} points; all are in the HTML report", ""]
    return [
        "```mermaid",
        f"%%{{init: {_settings(lines)}}}%%",
        "xychart-beta",
        f'  title "{title}: {last}"',
        f'  x-axis "batch" [{batches}]',
        *(['  y-axis "log10"'] if figure.is_log else []),
        *(f"  line [{_values(line, places, figure.is_log)}]" for line in lines),
        "```",
        "",
        *(note if len(places) < measured else []),
    ]


def _settings(lines: Sequence[MeasuredLine]) -> str:
    label = {"labelFontSize": FONT_SIZE}
    # Mermaid's default colour is nearly white on a white page.
    palette = ", ".join(COLOURS[line.name][1] for line in lines)
    return json.dumps(
        {
            "xyChart": {"width": WIDTH, "height": 320, "xAxis": label, "yAxis": label},
            "themeVariables": {"xyChart": {"plotColorPalette": palette}},
        }
    )


def _named(line: MeasuredLine) -> str:
    return f"{line.name} ({COLOURS[line.name][0]}) " if line.name else ""


def _thinned(points: Sequence[tuple[int, float]]) -> list[int]:
    """The indices of as many points as have room for their batch; with both ends."""
    room = max(2, WIDTH // (CHARACTER_WIDTH * len(str(points[-1][0])) + SPACE))
    count = min(room, len(points))
    return [round(i * (len(points) - 1) / (count - 1)) for i in range(count)]


def _values(line: MeasuredLine, places: Sequence[int], is_log: bool) -> str:
    values = [line.points[place][1] for place in places]
    return ", ".join(_plain(math.log10(value) if is_log else value) for value in values)


def _plain(value: float) -> str:
    """Six digits without an exponent, which Mermaid's grammar does not have."""
    return f"{Decimal(f'{value:.6g}'):f}"
