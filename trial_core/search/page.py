"""The page of a search, as Markdown: for Prefect's UI, and made into HTML by `figures`.

Its tables are also those of the terminal. They stay small for any number of trials.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trial_core.checkpoint import layout
from trial_core.common.text_format import is_finite_number, number, plural, setting, shortened
from trial_core.observe.report.curves import CurveFigure, MeasuredLine, charts
from trial_core.observe.report.markdown import code, escaped, table
from trial_core.observe.report.trial_report import BAR_CELLS
from trial_core.search.state import described, in_unit
from trial_core.search.view import SearchedName, SearchView

SHOWN_ROWS, SHOWN_OTHERS, SHOWN_NAMES, SHOWN_LENGTHS = 50, 200, 10, 8
_CHARACTERS = 120
ENOUGH, GROUPS = 20, 4
"""Of `importance`: the fewest results that it compares, and the groups that it makes of numbers."""
_STATUSES = {
    "due": "due", "waits": "waiting", "ended": "ended", "failed": "failed", "invalid": "invalid"
}  # fmt: skip


@dataclass(frozen=True)
class ViewTable:
    """A table for people, whose texts are not escaped."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # says what it leaves out


def tables(view: SearchView) -> list[ViewTable]:
    """Rungs, trials, promotions, importance of hyperparameters, failures: those that have rows."""
    found = (_rungs(view), _trials(view), _promotions(view), _importance(view), _failures(view))
    return [each for each in found if each.rows]


def glance(view: SearchView) -> tuple[list[str], list[Sequence[str]]]:
    """A search at a glance: lines, and the table of rungs with its columns."""
    rungs = _rungs(view)
    found, values = best_lines(view)
    best = [f"best: {found}", "  ".join(values)] if found else []
    return [headline(view), *best], [rungs.columns, *rungs.rows]


def _rungs(view: SearchView) -> ViewTable:
    """The rungs of each bracket: how many have reached them, and who is best there."""
    bracket_of = [trial.bracket for trial in view.state.trials]
    promoted = Counter((bracket_of[each.trial], each.rung - 1) for each in view.state.promotions)
    rows = []
    for bracket, plan in enumerate(view.state.plans):
        for rung, length in enumerate(plan.rungs):
            there = [
                (trial.number, trial.reached[rung].metric)
                for trial in view.state.trials
                if trial.bracket == bracket and len(trial.reached) > rung
            ]
            values = [(view.sign * value, trial) for trial, value in there if value is not None]
            value, best = min(values, default=(0.0, None))
            rows.append(
                (
                    str(bracket + 1), in_unit(length, view.unit), str(len(there)),
                    "" if length == plan.rungs[-1] else str(promoted[bracket, rung]),
                    "" if best is None else f"{number(view.sign * value)} (trial {best})",
                )
            )  # fmt: skip
    columns = ("bracket", "trained to", "trials", "promoted", f"best {_name(view.metric)}")
    return _table("Rungs", columns, rows)


def _trials(view: SearchView) -> ViewTable:
    """The best trials, and the newest others that are due or have failed."""
    order = [trial for trial, *_ in view.ranked]
    ranked = {trial.number for trial in order}
    order += [trial for trial in view.state.trials if trial.number not in ranked]
    shown, rest = order[:SHOWN_ROWS], order[SHOWN_ROWS:]
    others = [trial for trial in rest if trial.status in ("due", "failed", "invalid")]
    shown += sorted(others, key=lambda trial: trial.number)[-SHOWN_OTHERS:]
    lengths = sorted({each.length for trial in shown for each in trial.reached})[-SHOWN_LENGTHS:]
    names = view.names[:SHOWN_NAMES]
    rows = []
    for trial in shown:
        metrics = {each.length: _number(each.metric) for each in trial.reached}
        row = [str(trial.number), *(name.shown(trial) for name in names)]
        row += [metrics.get(length, "") for length in lengths]
        rows.append([*row, shortened(described(view.state, trial, view.unit), _CHARACTERS)])
    short = [_name(name.short) for name in names]
    columns = ("trial", *short, *(f"at {length}" for length in lengths), "status")
    left = {
        "trial": len(view.state.trials) - len(shown),
        "hyperparameter": len(view.names) - len(names),
    }
    notes = [plural(count, f"more {what}") for what, count in left.items() if count]
    return ViewTable("Trials", columns, rows, f"not shown: {', '.join(notes)}" if notes else "")


def _promotions(view: SearchView) -> ViewTable:
    """Who was trained further, and why: the newest first."""
    rows = []
    for each in reversed(view.state.promotions):
        lengths = view.state.rungs_of(view.state.trials[each.trial])
        here, there = (in_unit(lengths[each.rung - i], view.unit) for i in (0, 1))
        rows.append((str(each.trial), here, f"{each.why} at {there}"))
    return _table("Promoted", ("trial", "trained to", "because it was"), rows)


def _importance(view: SearchView) -> ViewTable:
    length, shares = importance(view) or (0, [])
    rows = [(_name(name.short), f"{share:.0%}") for name, share in shares]
    title = f"Importance of hyperparameters at {in_unit(length, view.unit)}"
    return _table(title, ("hyperparameter", "explains of the differences"), rows)


def importance(view: SearchView) -> tuple[int, list[tuple[SearchedName, float]]] | None:
    """The share of the differences between trials that each hyperparameter explains, from 0 to 1.

    Trials are compared by their ranks at one length, the one that most have reached. They are put
    in groups by a hyperparameter: by its choice, or numbers in four groups of equal size. The share
    is the ranks' variance between the groups (epsilon squared), less what chance gives on average.
    What two hyperparameters do together is not seen.

    Returns:
        The length, and the shares, the largest first; None of fewer than 20 results.
    """
    counts = Counter(each.length for trial in view.state.trials for each in trial.reached)
    length, count = max(counts.items(), key=lambda each: (each[1], -each[0]), default=(0, 0))
    if count < ENOUGH:
        return None
    there = {
        trial.number: (trial, math.inf if each.metric is None else view.sign * each.metric)
        for trial in view.state.trials
        for each in trial.reached
        if each.length == length
    }
    ranks = _ranks([value for _, value in there.values()])
    values = {name: [name.of(trial) for trial, _ in there.values()] for name in view.names}
    shares = [(name, _share(each, ranks)) for name, each in values.items()]
    return length, sorted(shares, key=lambda each: -each[1])


def _ranks(values: Sequence[float]) -> list[float]:
    """The values' ranks; equal values have their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, each) + bisect_right(ordered, each)) / 2 for each in values]


def _share(values: Sequence[Any], ranks: Sequence[float]) -> float:
    groups: Sequence[Any] = [setting(value) for value in values]
    if all(map(is_finite_number, values)) and len(set(values)) > GROUPS:
        groups = [min(int(GROUPS * rank / len(values)), GROUPS - 1) for rank in _ranks(values)]
    inside: dict[Any, list[float]] = defaultdict(list)
    for group, rank in zip(groups, ranks, strict=True):
        inside[group].append(rank)
    total = sum((rank - fmean(ranks)) ** 2 for rank in ranks)
    if not total or len(inside) in (1, len(ranks)):
        return 0.0
    between = sum(len(each) * (fmean(each) - fmean(ranks)) ** 2 for each in inside.values())
    by_chance = (len(ranks) - 1) / (len(ranks) - len(inside))
    return max(0.0, 1 - (1 - between / total) * by_chance)


def _failures(view: SearchView) -> ViewTable:
    """The newest first; with those that have invalid hyperparameters."""
    rows = [
        (str(trial.number), trial.id, trial.status, shortened(trial.why, _CHARACTERS))
        for trial in reversed(view.state.trials)
        if trial.status in ("failed", "invalid")
    ]
    return _table("Failures", ("trial", "id", "status", "why"), rows)


def headline(view: SearchView) -> str:
    """``12 of 16 trials begun: 3 due, 9 waiting · 1234 batches trained``."""
    counts: Counter[str] = Counter(trial.status for trial in view.state.trials)
    states = ", ".join(f"{counts[each]} {word}" for each, word in _STATUSES.items() if counts[each])
    begun = f"{len(view.state.trials)} of {plural(view.max_trials, 'trial')} begun"
    begun += ", the sampler has no more" * view.state.has_no_more
    return f"{begun}{states and f': {states}'} · {plural(view.batches, 'batch')} trained"


def settings_line(view: SearchView) -> str:
    """``asha: 16 trials of at most 900 batches; one in 4 continues; …``."""
    settings = view.experiment.searcher
    trials = f"{plural(view.max_trials, 'trial')} of at most {settings.max_length.value}"
    divisor = view.state.plans[0].divisor
    some = f"; one in {divisor:g} continues" if divisor > 1 else ""
    better = f"the {'smaller' if settings.smaller_is_better else 'larger'} {_name(view.metric)}"
    return f"{settings.name}: {trials} {view.unit}{some}; {better} is better"


def best_lines(view: SearchView) -> tuple[str, Sequence[str]]:
    """The best result, and its trial's hyperparameters; empty without a result."""
    if view.state.best is None:
        return "", []
    trial, result = view.state.best
    what = f"{_name(view.metric)} {_number(result.metric)} at {in_unit(result.length, view.unit)}"
    values = [f"{_name(each.short)} {each.shown(trial)}" for each in view.names[:SHOWN_NAMES]]
    more = len(view.names) - len(values)
    return f"{what}, trial {trial.number}", [*values, *([f"{more} more"] if more else [])]


def markdown(view: SearchView, status: str = "", places: Sequence[str] | None = None) -> str:
    """The page as Markdown; names and messages are not read as markup. `status` is that of the run
    that has the search, such as ``running``; `places` are lines in place of the chart."""
    share = min(view.state.progress, 1.0)
    filled, at = round(share * BAR_CELLS), view.events[-1].at[:19].replace("T", " ")
    state = status or ("over" if view.state.is_over else "not over")
    parts = [
        f"# {escaped(view.experiment.name)}",
        f"**{escaped(state)}** · search {code(view.id)} · last record {escaped(at)} UTC",
        f"`{'█' * filled}{'░' * (BAR_CELLS - filled)}` **{share:.0%}** · {headline(view)}",
    ]
    if view.state.best is not None:
        trial, result = view.state.best
        found, values = best_lines(view)
        where = f", checkpoint {code(result.checkpoint)}" if result.checkpoint else ""
        where += f" in {code(f'{view.url}/{layout.CHECKPOINTS}')}" if where and view.url else ""
        parts += [f"- best: **{escaped(found)}** ({code(trial.id)}){where}"]
        parts += [f"- its hyperparameters: {' · '.join(map(escaped, values))}"]
    parts += [f"- {escaped(settings_line(view))}"]
    parts += ["\n".join(_chart(view) if places is None else places)]
    for each in tables(view):
        parts += [f"## {escaped(each.title)}", table(each.columns, each.rows), escaped(each.note)]
    return "\n\n".join(filter(None, parts)) + "\n"


def trained_line(view: SearchView) -> str:
    """``trained: 272 batches, 26.6% of every trial to its end``."""
    trials = view.state.trials
    whole = sum(view.state.rungs_of(trial)[-1] for trial in trials)
    total = sum(trial.reached[-1].length for trial in trials if trial.reached)
    return f"trained: {total} {view.unit}, {total / max(whole, 1):.1%} of every trial to its end"


def _chart(view: SearchView) -> list[str]:
    return charts(best_figure(view)) if view.best_so_far else []


def best_figure(view: SearchView) -> CurveFigure:
    """The best so far by batches that all trials have trained; of a search with a result."""
    title = f"best {_name(view.metric)} by batches of all trials"
    return CurveFigure([MeasuredLine(title, "", view.best_so_far)])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> ViewTable:
    left = len(rows) - SHOWN_ROWS
    return ViewTable(title, columns, rows[:SHOWN_ROWS], f"not shown: {left} more" * (left > 0))


def _number(metric: float | None) -> str:
    return "not finite" if metric is None else number(metric)


def _name(name: str) -> str:
    """A name that others chose, for a column or a line."""
    return shortened(name, 40)
