"""The report as a page: one file that needs no network, made of the report in Markdown.

Plotly draws the figures; its JavaScript (4.8 MB) is part of the page. Names that others may have
chosen never go into a figure, because Plotly reads markup in its texts.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from plotly.offline import get_plotlyjs

from trial_core.common import text_format
from trial_core.observe.report.curves import (
    NAMED_LINES,
    PALETTE,
    CurveFigure,
    MeasuredLine,
    figures,
)
from trial_core.observe.report.markdown import escaped, shortened, template
from trial_core.observe.report.trial_report import TrialFacts

# Last values closer than this share of the axis would overlap at the same height.
CLOSE = 0.1
# More points than this get smaller dots, which else hide the line.
MANY_POINTS = 100


def render_html(facts: TrialFacts) -> str:
    drawn = figures(facts.history, facts.searcher_metric)
    places = [line for number, each in enumerate(drawn) for line in place(number, each.title)]
    return page(
        f"{shortened(facts.name)} · {facts.trial}",
        facts.markdown(places),
        [plotly_figure(figure) for figure in drawn],
        is_live=not facts.is_over,
    )


def page(
    title: str, markdown: str, figures: Sequence[Mapping[str, Any]], is_live: bool = False
) -> str:
    """The page of a report.

    Args:
        markdown: has a `place` for each figure.
        figures: for Plotly: their data and layout, with names that others chose escaped.
        is_live: whether the page says that it will be written again.
    """
    return _TEMPLATE.render(
        title=title,
        content=_MARKDOWN.render(markdown),
        is_live=is_live,
        figures=figures,
        plotly_js=get_plotlyjs(),
        nonce=secrets.token_urlsafe(),
    )


def place(number: int, title: str) -> list[str]:
    """Markdown with a place for a figure: only figures have a code block with a language."""
    return [f"## {escaped(title)}", "", "```figure", str(number), "```", ""]


def plotly_figure(figure: CurveFigure) -> dict[str, Any]:
    """A figure for Plotly: a point per measurement, and the last value as text at its point."""
    heights, colours = _heights_of_last_values(figure), figure.colours()
    last_batch = max(line.points[-1][0] for line in figure.lines)
    return {
        "data": [
            _line(line, colour, height)
            for line, (_, colour), height in zip(figure.lines, colours, heights, strict=True)
        ],
        "layout": {
            "xaxis": {
                "title": {"text": "batch"}, "tickformat": "d", "rangemode": "tozero",
                "unifiedhovertitle": {"text": "batch %{x:d}"},
                # Else Plotly puts ticks between two batches.
                **({"dtick": 1} if last_batch < 8 else {}),
            },
            "yaxis": {
                "type": "log" if figure.is_log else "linear",
                "exponentformat": "power", "minexponent": 5,
                **({"range": [0, 101]} if figure.is_percent else _range_of_a_constant(figure)),
            },
            "showlegend": 1 < len(figure.lines) <= len(PALETTE),
            **({} if len(figure.lines) <= NAMED_LINES else {"hovermode": "closest"}),
        },
    }  # fmt: skip


def _line(line: MeasuredLine, colour: str, height: str) -> dict[str, Any]:
    shown = [text_format.number(value) for _, value in line.points]
    return {
        "type": "scatter",
        "mode": f"lines+markers{'+text' * bool(height)}",
        "name": line.name,
        "x": [batches for batches, _ in line.points],
        "y": [value for _, value in line.points],
        "text": [*("" for _ in shown[:-1]), shown[-1]],
        "textposition": f"{height or 'middle'} right",
        "cliponaxis": False,  # the last value is written next to the axes
        "line": {"color": colour, "width": 1.5},
        "marker": {"size": 5 if len(line.points) <= MANY_POINTS else 3},
        "customdata": shown,
        "hovertemplate": f"{line.name} %{{customdata}}<extra></extra>".lstrip(),
    }


def _range_of_a_constant(figure: CurveFigure) -> dict[str, Any]:
    """An axis with zero for a constant value; Plotly's own would reach from -1 to 1."""
    values = {value for line in figure.lines for _, value in line.points}
    if len(values) > 1 or values == {0.0}:
        return {}
    return {"range": sorted([0.0, 2 * values.pop()])}


def _heights_of_last_values(figure: CurveFigure) -> Sequence[str]:
    """The position of each line's last value: next to its point, or above and below; empty in a
    figure of more lines than two, whose values are read with the pointer."""
    if len(figure.lines) != 2:
        return ["middle" if len(figure.lines) == 1 else ""] * len(figure.lines)

    def at(value: float) -> float:
        return math.log10(value) if figure.is_log else value

    values = [at(value) for line in figure.lines for _, value in line.points]
    first, second = (at(line.points[-1][1]) for line in figure.lines)
    if abs(first - second) > CLOSE * (max(values) - min(values)):
        return ["middle", "middle"]
    return ["top", "bottom"] if first > second else ["bottom", "top"]


def _markdown() -> MarkdownIt:
    """A renderer for reports; HTML in a report's text stays text."""

    def figure(renderer: Any, tokens: Sequence[Token], index: int, *_: Any) -> str:
        return f'<div class="figure" data-figure="{tokens[index].content.strip()}"></div>\n'

    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.add_render_rule("fence", figure)
    return made


_MARKDOWN = _markdown()
_TEMPLATE = template("trial_report.html.j2")
