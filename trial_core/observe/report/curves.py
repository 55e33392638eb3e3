"""Chooses a report's curves, and draws them in Markdown, as Mermaid charts for Prefect's UI.

Training and validation of a metric are in one figure. A line's points are measurements: nothing is
drawn where nothing was measured. Mermaid places the values of a line at equal distances, without
gaps. So a chart's axis has an entry for each batch that it draws, and it draws only batches where
all its lines were measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from trial_core.common import text_format
from trial_core.observe.report.history import Curve, ReportHistory

TRAINING_PREFIXES = ("training_", "train_")
VALIDATION_PREFIXES = ("validation_", "val_", "eval_")
COUNTERS = frozenset({"batches", "epochs"})
"""Of Hugging Face's Trainer, in each of its reports: lines that say nothing."""
TWO_DECADES = 100.0
PALETTE = {
    "blue": "#3b82f6", "orange": "#d97706", "green": "#16a34a", "purple": "#9333ea",
    "red": "#dc2626", "teal": "#0d9488", "pink": "#db2777", "brown": "#92400e",
    "grey": "#6b7580",
}  # fmt: skip
"""The colours of lines, in their order."""
FAINT = "#9aa5b1"
PLACES = {"validation": 1}
"""A line's place among the colours, if it does not follow from its place in the figure."""
NAMED_LINES = 4
WIDTH = 900
FONT_SIZE = 11
# Of a character on Mermaid's axis, and of the space between two entries.
CHARACTER_WIDTH, SPACE = 7, 8


@dataclass(frozen=True)
class MeasuredLine:
    """A line of a figure."""

    metric: str
    name: str  # ``training``, ``validation``, a trial, or empty if one line needs no name
    # (batches, value), at least one, in the order of batches; finite.
    points: Sequence[tuple[int, float]]
    colour: str = ""  # for drawing; empty for the one of its place in the figure


@dataclass(frozen=True)
class CurveFigure:
    """Lines over batches."""

    lines: Sequence[MeasuredLine]
    is_percent: bool = False  # True for an axis from 0 to 100

    @property
    def title(self) -> str:
        """The metric's name, cleaned, since others may have chosen it."""
        return text_format.one_line(", ".join(dict.fromkeys(line.metric for line in self.lines)))

    @property
    def is_log(self) -> bool:
        """True if the axis is logarithmic: values are positive, over more than two decades."""
        values = [value for line in self.lines for _, value in line.points]
        spans = min(values) > 0 and max(values) / min(values) > TWO_DECADES
        return spans and not self.is_percent

    def colours(self) -> list[tuple[str, str]]:
        """Each line's colour: its name, and for drawing."""
        named = list(PALETTE.items())
        places = (PLACES.get(line.name, place) for place, line in enumerate(self.lines))
        found = [named[place % len(named)] for place in places]
        return [
            ("", line.colour) if line.colour else each
            for line, each in zip(self.lines, found, strict=True)
        ]


def figures(history: ReportHistory, searcher_metric: str) -> list[CurveFigure]:
    """The loss, the searcher metric, the other metrics, the throughput, the learning rate."""
    training = curves(history, "training")
    validation = curves(history, "validation")
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
        *((f"throughput ({unit})", each) for unit, each in curves(history, "speed").items()),
        *curves(history, "learning_rate").items(),
    ]
    return [
        *map(CurveFigure, sorted(metrics, key=rank)),
        *(CurveFigure([MeasuredLine(title, "", points)]) for title, points in own),
        *_machine(curves(history, "machine")),
    ]


def _machine(use: Mapping[str, Sequence[tuple[int, float]]]) -> list[CurveFigure]:
    """The machine's processor and memory in one figure, its GPUs in another, and their memory."""
    lines: dict[str, list[MeasuredLine]] = {}
    for name, points in use.items():
        if (found := _USE.fullmatch(name)) is not None:
            gpu, what = found.groups()
            title = _of_machine(_OF_GPUS[what] if gpu else "processor and memory")
            lines.setdefault(title, []).append(MeasuredLine(title, gpu or _OF_ALL[what], points))
    return [CurveFigure(each, is_percent=True) for each in lines.values()]


_USE = re.compile(r"system/(?:(gpu\d+)_)?(cpu|memory|)_?percent")
_OF_ALL, _OF_GPUS = {"cpu": "processor", "memory": "memory"}, {"": "GPUs", "memory": "GPU memory"}


def title_alone(name: str) -> str:
    """The title of a curve of the machine's use in a figure of it alone."""
    if (found := _USE.fullmatch(name)) is None:
        return name.removeprefix("system/")
    gpu, what = found.groups()
    return _of_machine(f"{gpu} {what}".strip() if gpu else _OF_ALL[what])


def _of_machine(what: str) -> str:
    return f"machine of the driver: {what} (%)"


def curves(history: ReportHistory, kind: Curve) -> dict[str, list[tuple[int, float]]]:
    """The finite points of each curve of a kind: (batches, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for point in history.curves.get(kind, []):
        for name, value in point.values.items():
            if math.isfinite(value) and name not in COUNTERS:
                found.setdefault(name, []).append((point.batches, value))
    return found


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
        replace(line, points=[point for point in line.points if point[0] in common])
        for line in figure.lines
    ]
    # Points without a partner in the other line are shown, too.
    alone = [line for line in figure.lines if len(line.points) >= 2 * len(common)]
    return [
        *_chart(replace(figure, lines=together)),
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
    ends = [
        f"{_named(line, name)}{text_format.number(line.points[-1][1])}"
        for line, (name, _) in zip(lines, figure.colours(), strict=True)
    ]
    last = text_format.first_few(ends, NAMED_LINES)
    title = figure.title.replace('"', "'").replace("%{", "% {")  # %%{ is a directive in any text
    note = [f"{len(places)} of {measured} points; all are in the HTML report", ""]
    return [
        "```mermaid",
        f"%%{{init: {_settings(figure)}}}%%",
        "xychart-beta",
        f'  title "{title}: {last}"',
        f'  x-axis "batch" [{batches}]',
        *(['  y-axis "log10"'] if figure.is_log else ["  y-axis 0 --> 100"] * figure.is_percent),
        *(f"  line [{_values(line, places, figure.is_log)}]" for line in lines),
        "```",
        "",
        *(note if len(places) < measured else []),
    ]


def _settings(figure: CurveFigure) -> str:
    label = {"labelFontSize": FONT_SIZE}
    # Mermaid's default colour is nearly white on a white page.
    palette = ", ".join(colour for _, colour in figure.colours())
    return json.dumps(
        {
            "xyChart": {"width": WIDTH, "height": 320, "xAxis": label, "yAxis": label},
            "themeVariables": {"xyChart": {"plotColorPalette": palette}},
        }
    )


def _named(line: MeasuredLine, colour: str) -> str:
    return f"{line.name} ({colour}) " if line.name else ""


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
