"""The page of a search, as Markdown: for Prefect's UI, and made into HTML by `figures`.

Its tables are also those of the terminal. They stay small for any number of trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint import layout
from trial_core.common.text_format import number, plural, shortened
from trial_core.observe.report.curves import CurveFigure, MeasuredLine, charts
from trial_core.observe.report.markdown import code, escaped
from trial_core.observe.report.trial_report import BAR_CELLS
from trial_core.search.importance import importance
from trial_core.search.search import Search
from trial_core.search.simulate import trained
from trial_core.search.state import SearchTrial, described
from trial_core.search.view import SearchView, view_of

SHOWN_BEST, SHOWN_OTHERS, SHOWN_NAMES, SHOWN_LENGTHS = 50, 200, 10, 8
_CELL_CHARACTERS = 120


@dataclass(frozen=True)
class ViewTable:
    """A table for people, whose texts are not escaped. `note`: what it leaves out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def rungs(view: SearchView) -> ViewTable:
    """The rungs of each bracket: how many have reached them, and who is best there."""
    sign = 1 if view.experiment.searcher.smaller_is_better else -1
    promoted = Counter(
        (view.state.trials[each.trial].bracket, each.rung - 1) for each in view.state.promotions
    )
    rows = []
    for bracket, plan in enumerate(view.plans):
        trials = [trial for trial in view.state.trials if trial.bracket == bracket]
        for rung, length in enumerate(plan.rungs):
            there = [(trial, t.metric) for trial in trials for t in trial.reached[rung : rung + 1]]
            values = [(sign * value, trial.number) for trial, value in there if value is not None]
            best = f"{_number(sign * min(values)[0])} (trial {min(values)[1]})" if values else ""
            is_last = rung == len(plan.rungs) - 1
            rows.append(
                (
                    str(bracket + 1), f"{length} {view.unit}", str(len(there)),
                    "" if is_last else str(promoted[bracket, rung]), best,
                )
            )  # fmt: skip
    columns = ("bracket", "trained to", "trials", "promoted", f"best {_name(view.metric)}")
    return ViewTable("Rungs", columns, *_first(rows, SHOWN_OTHERS, "rung"))


def trials(view: SearchView) -> ViewTable:
    """The best trials, those that are due and those that have failed."""
    best = [trial for trial, *_ in view.ranked][:SHOWN_BEST]
    numbers = {trial.number for trial in best}
    rest = [trial for trial in view.state.trials if trial.number not in numbers]
    others = [each for each in rest if each.status in ("due", "failed", "invalid")]
    # Of more than there is room for: the newest, which are those that a person looks for.
    shown = [*best, *others[-SHOWN_OTHERS:]]
    lengths = sorted({each.length for trial in shown for each in trial.reached})[-SHOWN_LENGTHS:]
    names = view.names[:SHOWN_NAMES]
    columns = (
        "trial", *(_name(each.short) for each in names),
        *(f"at {length}" for length in lengths), "status",
    )  # fmt: skip
    rows = []
    for trial in shown:
        values = {each.length: _number(each.metric) for each in trial.reached}
        rows.append(
            (
                str(trial.number), *(each.shown(trial) for each in names),
                *(values.get(length, "") for length in lengths), _described(view, trial),
            )
        )  # fmt: skip
    left, unnamed = len(view.state.trials) - len(shown), len(view.names) - len(names)
    notes = [f"{plural(left, 'more trial')} not shown"] if left else []
    notes += [f"{plural(unnamed, 'more hyperparameter')} not shown"] if unnamed else []
    return ViewTable("Trials", columns, rows, ", ".join(notes))


def promotions(view: SearchView) -> ViewTable:
    """Who was trained further, and why: the newest first."""
    rows = []
    for each in reversed(view.state.promotions):
        bracket = view.plans[view.state.trials[each.trial].bracket]
        why = f"{each.why} {view.unit}"
        rows.append((str(each.trial), f"{bracket.rungs[each.rung]} {view.unit}", why))
    return ViewTable(
        "Promoted", ("trial", "trained to", "because it was"),
        *_first(rows, SHOWN_BEST, "earlier promotion"),
    )  # fmt: skip


def failures(view: SearchView) -> ViewTable:
    """The trials that have failed, the newest first, and those with invalid hyperparameters."""
    rows = [
        (str(trial.number), trial.id, trial.status, shortened(trial.why, _CELL_CHARACTERS))
        for trial in reversed(view.state.trials)
        if trial.status in ("failed", "invalid")
    ]
    return ViewTable(
        "Failures", ("trial", "id", "status", "why"), *_first(rows, SHOWN_BEST, "earlier failure")
    )


def shares(view: SearchView) -> ViewTable:
    """How much each hyperparameter matters: see `importance`."""
    found = importance(view)
    rows = [(_name(name.short), f"{share:.0%}") for name, share in found[1]] if found else []
    title = f"Importance of hyperparameters at {found[0] if found else 0} {view.unit}"
    columns = ("hyperparameter", "explains of the differences")
    return ViewTable(title, columns, *_first(rows, SHOWN_BEST, "hyperparameter"))


def tables(view: SearchView) -> list[ViewTable]:
    """All that have rows."""
    found = (rungs(view), trials(view), promotions(view), shares(view), failures(view))
    return [table for table in found if table.rows]


def headline(view: SearchView) -> str:
    """``12 of 16 trials begun: 3 due, 9 waiting · 1234 batches trained``."""
    counts = Counter(trial.status for trial in view.state.trials)
    states = ", ".join(f"{counts[each]} {word}" for each, word in _STATUSES.items() if counts[each])
    most = sum(plan.max_trials for plan in view.plans)
    begun = f"{len(view.state.trials)} of {plural(most, 'trial')} begun"
    return f"{begun}{states and f': {states}'} · {plural(view.batches, 'batch')} trained"


def settings_line(view: SearchView) -> str:
    """``asha: 16 trials to at most 900 batches; one in 4 continues; the smaller loss is better``."""
    searcher = view.experiment.searcher
    to = f"{plural(sum(plan.max_trials for plan in view.plans), 'trial')}, at most "
    to += f"{searcher.max_length.value} {view.unit} each"
    some = f"; one in {searcher.divisor:g} continues" if len(view.plans[-1].rungs) > 1 else ""
    better = "smaller" if searcher.smaller_is_better else "larger"
    return f"{searcher.name}: {to}{some}; the {better} {_name(view.metric)} is better"


def best_line(view: SearchView) -> tuple[str, str]:
    """The best result, and its trial's hyperparameters; empty without a result."""
    if view.state.best is None:
        return "", ""
    trial, result = view.state.best
    what = f"{_name(view.metric)} {_number(result.metric)} at {result.length} {view.unit}"
    values = [f"{_name(each.short)} {each.shown(trial)}" for each in view.names[:SHOWN_NAMES]]
    more = len(view.names) - len(values)
    return f"{what}, trial {trial.number}", " · ".join(values) + (f" · {more} more" * bool(more))


def markdown(view: SearchView, status: str = "", places: Sequence[str] | None = None) -> str:
    """The page as Markdown; names and messages are not read as markup.

    Args:
        status: of the run that has the search, such as ``running``.
        places: lines in place of the chart.
    """
    share = min(view.state.progress, 1.0)
    filled = round(share * BAR_CELLS)
    state = status or ("over" if view.state.is_over else "not over")
    lines = [
        f"# {escaped(view.experiment.name)}",
        f"**{escaped(state)}** · search {code(view.id)} · {escaped(_time(view))}",
        f"`{'█' * filled}{'░' * (BAR_CELLS - filled)}` **{share:.0%}** · {headline(view)}",
    ]
    found, values = best_line(view)
    if view.state.best is not None:
        trial, result = view.state.best
        where = f", its checkpoint {code(result.checkpoint)}" if result.checkpoint else ""
        where += f" in {code(f'{view.url}/{layout.CHECKPOINTS}')}" * bool(where and view.url)
        lines += [
            f"- best: **{escaped(found)}** ({code(trial.id)}){where}\n"
            f"- its hyperparameters: {_long(values)}"
        ]
    lines += [f"- {escaped(settings_line(view))}"]
    lines += ["\n".join(_chart(view) if places is None else places)]
    for table in tables(view):
        lines += [f"## {escaped(table.title)}", "\n".join(_rows(table))]
        lines += [escaped(table.note)] if table.note else []
    return "\n\n".join(filter(None, lines)) + "\n"


def simulated_text(search: Search) -> str:
    """What a simulated search has done, as text: trials at each rung, batches, best, promotions."""
    view = view_of(search)
    found, values = best_line(view)
    everything = sum(view.plans[each.bracket].rungs[-1] for each in view.state.trials)
    lines = [settings_line(view), "", "bracket  trained to  trials  promoted"]
    for bracket, length, count, promoted, _ in rungs(view).rows:
        lines.append(f"{bracket:>7}  {length.split()[0]:>10}  {count:>6}  {promoted:>8}")
    total = trained(search)
    part = f", {total / everything:.1%} of all trials trained to their ends" if everything else ""
    lines += ["", f"trained: {total} {view.unit} in total{part}"]
    lines += [f"best: {found}", f"      {values}"] if found else ["best: none"]
    table = promotions(view)
    lines += [f"promoted: {len(view.state.promotions)}"]
    lines += [f"  trial {trial} to {to}: {why}" for trial, to, why in table.rows]
    lines += [f"  {table.note}"] if table.note else []
    return "\n".join(lines)


_STATUSES = {
    "due": "due", "waits": "waiting", "ended": "ended", "failed": "failed", "invalid": "invalid"
}  # fmt: skip


def _chart(view: SearchView) -> list[str]:
    points = view.best_so_far
    line = MeasuredLine(f"best {_name(view.metric)} by batches of all trials", "", points)
    return charts(CurveFigure([line])) if points else []


def _rows(table: ViewTable) -> list[str]:
    cells = [table.columns, ["---"] * len(table.columns)]
    cells += [list(map(escaped, row)) for row in table.rows]
    cells[0] = list(map(escaped, table.columns))
    return [f"| {' | '.join(row)} |" for row in cells]


def _first(rows: Sequence[Any], most: int, noun: str) -> tuple[Sequence[Any], str]:
    left = len(rows) - most
    return rows[:most], f"{left} more {noun}{'s' if left > 1 else ''} not shown" if left > 0 else ""


def _described(view: SearchView, trial: SearchTrial) -> str:
    return shortened(described(view.state, trial, view.unit), _CELL_CHARACTERS)


def _number(metric: float | None) -> str:
    return "not finite" if metric is None else number(metric)


def _name(name: str) -> str:
    """A name that others chose, for a column or a line."""
    return shortened(name, 40)


def _long(text: str) -> str:
    """Escaped, in parts, since `escaped` shortens."""
    return " · ".join(map(escaped, text.split(" · ")))


def _time(view: SearchView) -> str:
    at = view.events[-1].at
    return f"last record {at[:19].replace('T', ' ')} UTC" if at else "simulated"
