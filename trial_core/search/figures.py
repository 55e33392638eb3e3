"""The page of a search as HTML: one file that needs no network, with figures.

Names and values that others may have chosen are escaped in figures, because Plotly reads markup.
Parallel coordinates are drawn as lines: Plotly's own need WebGL and a script that makes code, which
the page's policy forbids, and have no logarithmic axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from trial_core.common.text_format import finite, is_finite_number, number, setting, shortened
from trial_core.observe.report.html_report import page, place, plotly_figure
from trial_core.search.page import SHOWN_NAMES, best_figure, markdown
from trial_core.search.view import SearchView

_BLUE, _FAINT = "#3b82f6", "#9aa5b1"
_RANKS = (
    (0.5, 1.0, "others", _FAINT), (0.1, 0.5, "best half", _BLUE), (0.0, 0.1, "best 10 %", "#d97706")
)  # fmt: skip
"""Groups of trials: from and up to which share of all, by rank, and their colour."""
_CHARACTERS, _TICKS = 24, 20
_ROUND = {"exponentformat": "power", "minexponent": 5}

_Point = tuple[float | None, float | None, str]
"""Its place, and the text that is shown there; None for a gap."""


def html(view: SearchView, status: str = "") -> str:
    """The page. For `status` see `markdown`."""
    drawn = figures(view)
    places = [line for i, title in enumerate(drawn) for line in place(i, title)]
    title = f"{shortened(view.experiment.name)} · {view.id}"
    return page(title, markdown(view, status, places), list(drawn.values()))


def figures(view: SearchView) -> Mapping[str, dict[str, Any]]:
    """The figures for Plotly, by title; none without a result."""
    if not view.ranked:
        return {}
    metric = shortened(view.metric, 40)
    return {
        f"Best {metric} by batches that all trials have trained": _best(view),
        f"{metric} of each trial at its rungs": _curves(view),
        f"Hyperparameters and the best {metric} of each trial": _parallel(view),
    }


def _best(view: SearchView) -> dict[str, Any]:
    drawn = plotly_figure(best_figure(view))
    drawn["data"][0] |= {
        "name": "best", "mode": "lines", "line": {"shape": "hv", "color": _BLUE},
        "hovertemplate": "%{customdata}",
    }  # fmt: skip
    return drawn


def _curves(view: SearchView) -> dict[str, Any]:
    lines = [
        [(r.length, r.metric, number(r.metric)) for r in trial.reached if r.metric is not None]
        for trial, *_ in view.ranked
    ]
    lengths = sorted({x for line in lines for x, *_ in line})
    return {
        "data": _by_rank(view, lines, "lines+markers"),
        "layout": {
            "hovermode": "closest",
            "xaxis": {
                "type": _scale(lengths, 8), "title": {"text": view.unit},
                "tickvals": lengths[-_TICKS:],
            },
            "yaxis": {"type": _scale([y for line in lines for _, y, _ in line]), **_ROUND},
        },
    }  # fmt: skip


def _parallel(view: SearchView) -> dict[str, Any]:
    metrics = [value for *_, value in view.ranked]
    names = view.names[:SHOWN_NAMES]
    axes = [_axis([name.of(t) for t, *_ in view.ranked], name.kind == "log") for name in names]
    axes += [_axis(metrics, _scale(metrics) == "log")]
    labels = [_escaped(each) for each in (*(name.short for name in names), view.metric)]
    lines = [
        [(x, axis[0][i], f"{labels[x]} {axis[1][i]}") for x, axis in enumerate(axes)]
        for i in range(len(metrics))
    ]
    scales = [
        {
            "type": "scatter", "mode": "lines+text", "x": [x] * len(ticks),
            "y": list(ticks.values()), "text": list(ticks), "textposition": "middle right",
            "hoverinfo": "skip", "showlegend": False, "cliponaxis": False,
            "line": {"color": _FAINT, "width": 1},
        }
        for x, (*_, ticks) in enumerate(axes)
    ]  # fmt: skip
    return {
        "data": [*_by_rank(view, lines, "lines"), *scales],
        "layout": {
            "hovermode": "closest",
            "xaxis": {
                "tickvals": list(range(len(axes))), "ticktext": labels, "showgrid": False,
                "range": [-0.1, len(axes) - 0.9],
            },
            "yaxis": {"visible": False, "range": [-0.05, 1.05]},
        },
    }  # fmt: skip


def _axis(
    values: Sequence[Any], is_log: bool
) -> tuple[Sequence[float | None], Sequence[str], Mapping[str, float | None]]:
    """An axis of parallel coordinates: each value's height from 0 to 1, its text, and labels.

    Numbers have a scale. Other values are at equal distances, in the order of their texts.
    """
    there = [value for value in values if value is not None]
    is_numeric = all(map(is_finite_number, there))
    is_log = is_log and is_numeric and min(there, default=0) > 0
    text_of: Callable[[Any], str] = number if is_numeric else lambda value: _escaped(setting(value))
    if is_numeric:
        places = [None if v is None else math.log10(v) if is_log else float(v) for v in values]
    else:
        order = {text: float(i) for i, text in enumerate(sorted(set(map(text_of, there))))}
        places = [None if value is None else order[text_of(value)] for value in values]
    known = [each for each in places if each is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    heights = [_height(each, low, high) for each in places]
    texts = ["none" if value is None else text_of(value) for value in values]
    if is_numeric and len(set(known)) > 5:
        steps = [low + i * (high - low) / 4 for i in range(5)]
        labels = {text_of(10**step if is_log else step): _height(step, low, high) for step in steps}
    else:
        labels = dict(sorted(zip(texts, heights, strict=True), key=lambda each: each[1] or 0))
    return heights, texts, dict(list(labels.items())[:: len(labels) // _TICKS + 1])


def _height(place: float | None, low: float, high: float) -> float | None:
    if place is None or low == high:
        return None if place is None else 0.5
    return finite(round((place - low) / (high - low), 4))


def _by_rank(
    view: SearchView, lines: Sequence[Sequence[_Point]], mode: str
) -> list[dict[str, Any]]:
    """A line for each trial of `view.ranked`, in a few groups of one colour, the best on top."""
    groups = []
    for low, high, name, colour in _RANKS:
        first, end = math.ceil(low * len(lines)), math.ceil(high * len(lines))
        found: list[_Point] = []
        for (trial, *_), line in list(zip(view.ranked, lines, strict=True))[first:end]:
            found += [(x, y, f"trial {trial.number}: {text}") for x, y, text in line]
            found.append((None, None, ""))
        x, y, texts = zip(*found, strict=True) if found else ((), (), ())
        groups.append(
            {
                "type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "hovertext": texts,
                "hoverinfo": "text", "line": {"color": colour, "width": 1.5},
                "marker": {"size": 5},
            }
        )  # fmt: skip
    return groups


def _scale(values: Iterable[float], most: float = 100) -> str:
    """Logarithmic for positive values of which the largest is over `most` times the least."""
    found = sorted(values)
    return "log" if found and found[0] > 0 and found[-1] / most > found[0] else "linear"


def _escaped(text: str) -> str:
    """A text that others may have chosen, as Plotly is to show it."""
    return escape(shortened(text, _CHARACTERS))
