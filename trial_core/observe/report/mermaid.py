"""Curves as Mermaid charts, which Prefect's UI draws.

Mermaid places the values of a line at equal distances, without gaps. So a chart's axis has an entry
for each batch that it draws, and it draws only batches where all its lines were measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal

from trial_core.common import text_format
from trial_core.observe.report.curves import COLOURS, CurveFigure, MeasuredLine

WIDTH = 900
FONT_SIZE = 11
# Of a character on the axis, and of the space between two entries.
CHARACTER_WIDTH, SPACE = 7, 8


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
    title = figure.title.replace('"', "'")
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
