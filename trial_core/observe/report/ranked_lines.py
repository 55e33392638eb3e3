"""Figures of many trials: a line for each, coloured by its trial's rank; parallel coordinates.

Names and values that others may have chosen are escaped, because Plotly reads markup. Parallel
coordinates are drawn as lines: Plotly's own need WebGL and a script that makes code, which the
page's policy forbids, and have no logarithmic axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trial_core.common.text_format import finite, is_finite_number, number, setting, shortened
from trial_core.observe.report.curves import FAINT, PALETTE

_RANKS = (
    (0.5, 1.0, "others", FAINT), (0.1, 0.5, "best half", PALETTE["blue"]),
    (0.0, 0.1, "best 10 %", PALETTE["orange"]),
)  # fmt: skip
"""Groups of trials: from and up to which share of all, by rank, and their colour."""
_CHARACTERS, _TICKS = 24, 20
_ROUND = {"exponentformat": "power", "minexponent": 5}

_Point = tuple[float | None, float | None, str]
"""Its place, and the text that is shown there; None for a gap."""


@dataclass(frozen=True)
class RankedTrial:
    """A trial among others."""

    name: str  # shown at its lines
    # Of the hyperparameters, in their order; None for one that it does not have.
    values: Sequence[Any]
    metric: float  # its best value of the metric by which trials are ranked
    points: Sequence[tuple[int, float]] = ()  # (length, metric) of its curve


def curves_by_rank(trials: Sequence[RankedTrial], unit: str) -> dict[str, Any]:
    """The curves of trials, the best one first; lengths are in `unit`."""
    lines = [[(x, y, number(y)) for x, y in trial.points] for trial in trials]
    return {
        "data": _by_rank(trials, lines, "lines+markers"),
        "layout": {
            "hovermode": "closest",
            "xaxis": {"title": {"text": unit}},
            "yaxis": {"type": scale([y for line in lines for _, y, _ in line]), **_ROUND},
        },
    }


def parallel_coordinates(
    trials: Sequence[RankedTrial], names: Sequence[str], is_log: Sequence[bool], metric: str
) -> dict[str, Any]:
    """An axis for each hyperparameter, logarithmic where that is asked for and possible, and for
    the metric; a line for each trial, the best first."""
    metrics = [trial.metric for trial in trials]
    axes = [_axis([trial.values[i] for trial in trials], log) for i, log in enumerate(is_log)]
    axes += [_axis(metrics, scale(metrics) == "log")]
    labels = [_escaped(each) for each in (*names, metric)]
    lines = [
        [(x, axis[0][i], f"{labels[x]} {axis[1][i]}") for x, axis in enumerate(axes)]
        for i in range(len(metrics))
    ]
    scales = [
        {
            "type": "scatter", "mode": "lines+text", "x": [x] * len(ticks),
            "y": list(ticks.values()), "text": list(ticks), "textposition": "middle right",
            "hoverinfo": "skip", "showlegend": False, "cliponaxis": False,
            "line": {"color": FAINT, "width": 1},
        }
        for x, (*_, ticks) in enumerate(axes)
    ]  # fmt: skip
    return {
        "data": [*_by_rank(trials, lines, "lines"), *scales],
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
    Numbers have a scale; other values are at equal distances, in the order of their texts."""
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
    trials: Sequence[RankedTrial], lines: Sequence[Sequence[_Point]], mode: str
) -> list[dict[str, Any]]:
    """A line for each trial, in a few groups of one colour, the best on top."""
    groups = []
    for low, high, name, colour in _RANKS:
        first, end = math.ceil(low * len(lines)), math.ceil(high * len(lines))
        found: list[_Point] = []
        for trial, line in list(zip(trials, lines, strict=True))[first:end]:
            found += [(x, y, f"{escape(trial.name)}: {text}") for x, y, text in line]
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


def scale(values: Iterable[float], most: float = 100) -> str:
    """Logarithmic for positive values of which the largest is over `most` times the least."""
    found = sorted(values)
    return "log" if found and found[0] > 0 and found[-1] / most > found[0] else "linear"


def _escaped(text: str) -> str:
    """A text that others may have chosen, as Plotly is to show it."""
    return escape(shortened(text, _CHARACTERS))
