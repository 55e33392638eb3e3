"""The page of a search as HTML: one file that needs no network, with figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.common.text_format import shortened
from trial_core.observe.report.curves import PALETTE
from trial_core.observe.report.html_report import page, place, plotly_figure
from trial_core.observe.report.ranked_lines import (
    RankedTrial,
    curves_by_rank,
    parallel_coordinates,
    scale,
)
from trial_core.search.page import SHOWN_NAMES, best_figure, markdown
from trial_core.search.view import SearchView

_TICKS = 20


def html(view: SearchView) -> str:
    """The page."""
    drawn = figures(view)
    places = [line for i, title in enumerate(drawn) for line in place(i, title)]
    title = f"{shortened(view.experiment.name)} · {view.id}"
    return page(title, markdown(view, places=places), list(drawn.values()))


def figures(view: SearchView) -> Mapping[str, dict[str, Any]]:
    """The figures for Plotly, by title; none without a result."""
    if not view.ranked:
        return {}
    metric, names = shortened(view.metric, 40), view.names[:SHOWN_NAMES]
    trials = [
        RankedTrial(
            f"trial {trial.number}", [name.of(trial) for name in names], best,
            [(each.length, each.metric) for each in trial.reached if each.metric is not None],
        )
        for trial, _, best in view.ranked
    ]  # fmt: skip
    rungs = curves_by_rank(trials, view.unit)
    lengths = sorted({length for trial in trials for length, _ in trial.points})
    rungs["layout"]["xaxis"] |= {"type": scale(lengths, 8), "tickvals": lengths[-_TICKS:]}
    return {
        f"Best {metric} by batches that all trials have trained": _best(view),
        f"{metric} of each trial at its rungs": rungs,
        f"Hyperparameters and the best {metric} of each trial": parallel_coordinates(
            trials,
            [name.short for name in names],
            [name.kind == "log" for name in names],
            view.metric,
        ),
    }


def _best(view: SearchView) -> dict[str, Any]:
    drawn = plotly_figure(best_figure(view))
    drawn["data"][0] |= {
        "name": "best", "mode": "lines", "line": {"shape": "hv", "color": PALETTE["blue"]},
        "hovertemplate": "%{customdata}",
    }  # fmt: skip
    return drawn
