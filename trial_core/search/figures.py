"""The page of a search as HTML: one file that needs no network, with figures.

Names and values that others may have chosen are escaped in figures, because Plotly reads markup.
Parallel coordinates are drawn as lines: Plotly's own need WebGL and a script that makes code, which
the page's policy forbids, and have no logarithmic axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from trial_core.common.text_format import finite, is_finite_number, number, setting, shortened
from trial_core.observe.report.html_report import page, place
from trial_core.search.importance import importance
from trial_core.search.page import SHOWN_NAMES, markdown
from trial_core.search.state import SearchTrial
from trial_core.search.view import SearchedName, SearchView

_BLUE, _FAINT = "#3b82f6", "#9aa5b1"
_RANKS = (("others", 1.0, _FAINT), ("best half", 0.5, _BLUE), ("best 10 %", 0.1, "#d97706"))
"""Groups of trials: up to which share of all, by rank, and their colour."""
_LABEL_CHARACTERS, _TICKS, _NUMBERS = 24, 20, 5


def html(view: SearchView, status: str = "") -> str:
    """The page. For `status` see `markdown`."""
    drawn = figures(view)
    places = [line for i, (title, _) in enumerate(drawn) for line in place(i, title)]
    name = shortened(view.experiment.name, _LABEL_CHARACTERS)
    text = markdown(view, status, places)
    return page(f"{name} · {view.id}", text, [figure for _, figure in drawn])


def figures(view: SearchView) -> list[tuple[str, dict[str, Any]]]:
    """The figures for Plotly, with their titles; none without a result."""
    if not view.ranked:
        return []
    metric = shortened(view.metric, 40)
    found = [
        (f"Best {metric} by batches that all trials have trained", _best(view)),
        (f"{metric} of each trial at its rungs", _curves(view)),
        (f"Hyperparameters and the best {metric} of each trial", _parallel(view)),
    ]
    if (shares := importance(view)) is not None:
        length, each = shares
        title = f"Importance of hyperparameters at {length} {view.unit}"
        found.append((title, _importance(each[:SHOWN_NAMES])))
    return found


def _best(view: SearchView) -> dict[str, Any]:
    points = view.best_so_far
    line = {"shape": "hv", "color": _BLUE}
    return {
        "data": [_scatter("lines", points, name="best", line=line)],
        "layout": {
            "xaxis": {"title": {"text": "batches"}, "rangemode": "tozero", "tickformat": "d"},
            "yaxis": _scale(y for _, y in points),
            "showlegend": False,
        },
    }


def _curves(view: SearchView) -> dict[str, Any]:
    def points(trial: SearchTrial) -> Iterator[tuple[float, float | None, str]]:
        for each in trial.reached:
            if each.metric is not None:
                yield each.length, each.metric, number(each.metric)

    results = [each for trial, *_ in view.ranked for each in points(trial)]
    lengths = sorted({length for length, *_ in results})
    return {
        "data": _by_rank(view, points, "lines+markers"),
        "layout": {
            "hovermode": "closest",
            "xaxis": {
                **_scale(lengths, 8), "title": {"text": view.unit}, "tickvals": lengths[-_TICKS:],
            },
            "yaxis": _scale(y for _, y, _ in results if y is not None),
            "showlegend": True,
        },
    }  # fmt: skip


def _parallel(view: SearchView) -> dict[str, Any]:
    trials = [trial for trial, *_ in view.ranked]
    axes = [
        ParallelAxis(name.short, {t.number: name.of(t) for t in trials}, name.kind == "log")
        for name in view.names[:SHOWN_NAMES]
    ]
    metrics = {trial.number: value for trial, _, value in view.ranked}
    axes.append(ParallelAxis(view.metric, metrics, _scale(metrics.values())["type"] == "log"))

    def points(trial: SearchTrial) -> Iterator[tuple[float, float | None, str]]:
        for i, axis in enumerate(axes):
            yield i, axis.height(trial.number), f"{axis.label} {axis.text(trial.number)}"

    scales = [
        _scatter(
            "lines+text", [(i, height) for height, _ in axis.ticks()],
            text=[text for _, text in axis.ticks()], textposition="middle right",
            hoverinfo="skip", showlegend=False, cliponaxis=False, line={"color": _FAINT, "width": 1},
        )
        for i, axis in enumerate(axes)
    ]  # fmt: skip
    return {
        "data": [*_by_rank(view, points, "lines"), *scales],
        "layout": {
            "hovermode": "closest",
            "xaxis": {
                "tickvals": list(range(len(axes))), "ticktext": [axis.label for axis in axes],
                "showgrid": False, "range": [-0.1, len(axes) - 0.9],
            },
            "yaxis": {"visible": False, "range": [-0.05, 1.05]},
            "showlegend": True,
        },
    }  # fmt: skip


class ParallelAxis:
    """An axis of parallel coordinates: where each trial is on it, from 0 to 1.

    Numbers have a scale. Other values are at equal distances, in the order of their texts.

    Args:
        values: by trial; None if a trial has none.
    """

    def __init__(self, label: str, values: Mapping[int, Any], is_log: bool) -> None:
        self.label = _escaped(label)
        self._values = {trial: value for trial, value in values.items() if value is not None}
        there = list(self._values.values())
        self._is_numeric = bool(there) and all(map(is_finite_number, there))
        self._is_log = is_log and self._is_numeric and min(there) > 0
        if self._is_numeric:
            places = {value: self._place(value) for value in there}
        else:
            texts = sorted({self._key(value) for value in there})
            places = {text: float(i) for i, text in enumerate(texts)}
        self._low, self._high = min(places.values(), default=0.0), max(places.values(), default=0.0)
        self._places = dict(sorted(places.items(), key=lambda each: each[1]))

    def height(self, trial: int) -> float | None:
        if trial not in self._values:
            return None
        value = self._values[trial]
        return self._height(self._places[value if self._is_numeric else self._key(value)])

    def text(self, trial: int) -> str:
        """A trial's value."""
        return self._text(self._values[trial]) if trial in self._values else "none"

    def ticks(self) -> list[tuple[float | None, str]]:
        """The heights and texts of its labels."""
        if self._is_numeric and len(self._places) > _NUMBERS:
            steps = [self._low + i * (self._high - self._low) / 4 for i in range(5)]
            values = [10**step if self._is_log else step for step in steps]
            return [(i / 4, self._text(value)) for i, value in enumerate(values)]
        shown = list(self._places.items())[:: len(self._places) // _TICKS + 1]
        return [(self._height(place), self._text(value)) for value, place in shown]

    def _height(self, place: float) -> float | None:
        width = self._high - self._low
        return finite(round((place - self._low) / width, 4)) if width else 0.5

    def _place(self, value: float) -> float:
        return math.log10(value) if self._is_log else float(value)

    def _key(self, value: Any) -> str:
        return value if isinstance(value, str) else setting(value)

    def _text(self, value: Any) -> str:
        return number(value) if self._is_numeric else _escaped(self._key(value))


def _importance(shares: Sequence[tuple[SearchedName, float]]) -> dict[str, Any]:
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "marker": {"color": _BLUE},
                "x": [round(share, 4) for _, share in reversed(shares)],
                "y": list(range(len(shares))), "hovertemplate": "%{x:.0%}<extra></extra>",
            }
        ],
        "layout": {
            "hovermode": "closest",
            "xaxis": {"range": [0, 1], "tickformat": ".0%"},
            "yaxis": {
                "tickvals": list(range(len(shares))),
                "ticktext": [_escaped(name.short) for name, _ in reversed(shares)],
            },
            "showlegend": False,
        },
    }  # fmt: skip


def _by_rank(
    view: SearchView,
    points: Callable[[SearchTrial], Iterable[tuple[float, float | None, str]]],
    mode: str,
) -> list[dict[str, Any]]:
    """The lines of all trials: a few groups by rank, the best on top; a line ends with a gap."""
    lines = []
    for (name, most, colour), least in zip(
        _RANKS, (*(each[1] for each in _RANKS[1:]), 0), strict=True
    ):
        first, end = (math.ceil(share * len(view.ranked)) for share in (least, most))
        found: list[tuple[float | None, float | None, str]] = []
        for trial, *_ in view.ranked[first:end]:
            found += [(x, y, f"trial {trial.number}: {text}") for x, y, text in points(trial)]
            found.append((None, None, ""))
        if found:
            lines.append(
                _scatter(
                    mode, [(x, y) for x, y, _ in found], name=name, hoverinfo="text",
                    hovertext=[text for *_, text in found], line={"color": colour, "width": 1.5},
                    marker={"size": 5}, opacity=0.5 if most == 1 else 1,
                )
            )  # fmt: skip
    return lines


def _scatter(
    mode: str, points: Iterable[tuple[float | None, float | None]], **fields: Any
) -> dict[str, Any]:
    x, y = zip(*points, strict=True)
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **fields}


def _scale(values: Iterable[float], most: float = 100) -> dict[str, Any]:
    """An axis: logarithmic for positive values of which the largest is `most` times the least."""
    found = list(values)
    is_log = bool(found) and min(found) > 0 and max(found) / most > min(found)
    return {"type": "log" if is_log else "linear", "exponentformat": "power", "minexponent": 5}


def _escaped(text: str) -> str:
    """A text that others may have chosen, as Plotly is to show it."""
    return escape(shortened(text, _LABEL_CHARACTERS))
