"""A page that compares trials: what differs, their results, and their curves over batches."""

from __future__ import annotations

import difflib
import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.trial_code import code_of_checkpoint
from trial_core.common.text_format import (
    clean,
    is_finite_number,
    number,
    plural,
    setting,
)
from trial_core.errors import CheckpointError
from trial_core.observe.report.curves import PALETTE, CurveFigure, MeasuredLine, curves, title_alone
from trial_core.observe.report.history import Curve
from trial_core.observe.report.html_report import page, place, plotly_figure
from trial_core.observe.report.markdown import code as as_code, escaped, table
from trial_core.observe.report.ranked_lines import (
    RankedTrial,
    curves_by_rank,
    parallel_coordinates,
    scale,
)
from trial_core.observe.report.stored_trial import StoredTrial, differing

MANY_TRIALS = 10
"""From so many trials on, lines are coloured by rank, and there are parallel coordinates."""
SHOWN_NAMES, SHOWN_FIGURES, SHOWN_DIFFERENCES, SHOWN_LINES = 10, 24, 10, 200
LARGEST_TEXT_BYTES, COMPARED_LINES, LINE_CHARACTERS = 200_000, 500, 300
"""Lines that differ beyond a file's common begin and end: more would take minutes to compare."""
_KINDS: Mapping[Curve, str] = {
    "validation": "validation", "training": "training", "speed": "throughput",
    "learning_rate": "", "machine": "",
}  # fmt: skip

_RIGHT = "---:"  # the page breaks no cell that is aligned so: a phone scrolls the table
_Figures = dict[str, dict[str, Any]]


def comparison_page(trials: Sequence[StoredTrial], store: CheckpointStore) -> str:
    """The page as HTML: one file that needs no network. Fetches the trials' code from `store`."""
    if len(trials) >= MANY_TRIALS:
        trials = _by_best(trials)
    figures = _figures(trials)
    drawn, left = dict(islice(figures.items(), SHOWN_FIGURES)), len(figures) - SHOWN_FIGURES
    places = [line for i, title in enumerate(drawn) for line in place(i, title)]
    names = ", ".join(dict.fromkeys(each.newest.experiment for each in trials))
    parts = [
        f"# {plural(len(trials), 'trial')} of {escaped(names)}",
        f"in {as_code(store.url)}",
        *_tables(trials),
        "\n".join(places),
        *([f"not shown: {plural(left, 'more curve')}"] if left > 0 else []),
        *_code(trials, store),
    ]
    return page(f"{plural(len(trials), 'trial')} compared", "\n\n".join(parts), [*drawn.values()])


def _tables(trials: Sequence[StoredTrial]) -> list[str]:
    """Results with the hyperparameters that differ; other settings; what is the same."""
    values = [each.hyperparameters for each in trials]
    differ = differing(values)
    names, more = differ[:SHOWN_NAMES], differ[SHOWN_NAMES:]
    results = list(dict.fromkeys(name for each in trials for name in each.results))
    rows = [
        [each.trial, *(_value(own.get(name)) for name in names),
         *(_number(each.results.get(name)) for name in results)]
        for each, own in zip(trials, values, strict=True)
    ]  # fmt: skip
    parts = ["## Hyperparameters and results", table(["trial", *names, *results], rows, _RIGHT)]
    if more:
        parts.append(f"{plural(len(more), 'more hyperparameter')} differ: {_listed(more)}")
    if same := [f"{name} {_value(values[0][name])}" for name in values[0] if name not in differ]:
        parts.append(f"the same in all: {_listed(same, ' · ')}")
    others = [each.other_settings for each in trials]
    if names := differing(others):
        rows = [
            [each.trial, *(_value(own.get(name)) for name in names)]
            for each, own in zip(trials, others, strict=True)
        ]
        parts += ["## Other settings that differ", table(["trial", *names], rows, _RIGHT)]
    return parts


def _by_best(trials: Sequence[StoredTrial]) -> list[StoredTrial]:
    """The trials, the best one first; last those without the first one's searcher metric."""
    metric, settings = trials[0].metric, trials[0].settings
    sign = -1 if settings.get("searcher.smaller_is_better") is False else 1

    def rank(trial: StoredTrial) -> tuple[bool, float]:
        has_none = trial.best is None or trial.metric != metric
        return has_none, sign * (trial.best or 0.0)

    return sorted(trials, key=rank)


def _figures(trials: Sequence[StoredTrial]) -> _Figures:
    """Parallel coordinates of many trials; a figure for each curve, the searcher metric first."""
    metric, is_many = trials[0].metric, len(trials) >= MANY_TRIALS
    judged = [each for each in trials if each.metric == metric and each.best is not None]
    found: _Figures = {}
    names = differing([each.hyperparameters for each in judged])[:SHOWN_NAMES]
    if len(judged) >= MANY_TRIALS and names:
        ranked = [
            RankedTrial(
                each.trial, [each.hyperparameters.get(name) for name in names], each.best or 0.0
            )
            for each in judged
        ]
        columns = [[row.values[i] for row in ranked] for i in range(len(names))]
        found[f"Hyperparameters and the best {metric} of each trial"] = parallel_coordinates(
            ranked, names, [_is_log(column) for column in columns], metric
        )
    by_trial = {kind: [curves(each.history, kind) for each in trials] for kind in _KINDS}
    for kind, of in _KINDS.items():
        names = list(dict.fromkeys(name for each in by_trial[kind] for name in each))
        for name in sorted(names, key=lambda name: name not in (metric, "loss")):
            lines = [
                (t.trial, own.get(name, [])) for t, own in zip(trials, by_trial[kind], strict=True)
            ]
            found[f"{name} ({of})" if of else title_alone(name)] = (
                curves_by_rank([RankedTrial(t, (), 0.0, line) for t, line in lines], "batch")
                if is_many
                else _a_colour_each(name, lines)
            )
    return found


def _a_colour_each(
    name: str, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]]
) -> dict[str, Any]:
    """A figure in which a trial has the colour of its place, as in all others."""
    found = [
        MeasuredLine(name, escape(trial), line, colour)
        for (trial, line), colour in zip(lines, PALETTE.values(), strict=False)
        if line
    ]
    return plotly_figure(CurveFigure(found))


def _is_log(values: Sequence[Any]) -> bool:
    numbers = [each for each in values if is_finite_number(each)]
    return len(numbers) == len(values) and scale(numbers) == "log"


def _code(trials: Sequence[StoredTrial], store: CheckpointStore) -> list[str]:
    """How the code of the other trials differs from that of the first."""
    first = trials[0]
    others = {each.code: each for each in trials[1:] if each.code != first.code}
    parts = ["## Code"]
    if not others:
        return [*parts, f"the same in all: {as_code(first.code or 'none stored')}"]
    with tempfile.TemporaryDirectory(prefix="trialflow-compare-") as folder:
        old = _texts(first, store, Path(folder) / "0")
        for i, (digest, other) in enumerate(islice(others.items(), SHOWN_DIFFERENCES), 1):
            alike = [each.trial for each in trials if each.code == digest]
            parts.append(f"### {escaped(first.trial)} and {_listed(alike)}")
            new = _texts(other, store, Path(folder) / str(i))
            for missing in (each for each in (old, new) if isinstance(each, str)):
                parts.append(escaped(missing))
            if not isinstance(old, str) and not isinstance(new, str):
                parts.append(_difference(old, new))
    if left := len(others) - SHOWN_DIFFERENCES:
        parts += [f"not shown: {left} more versions"] * (left > 0)
    return parts


def _texts(
    trial: StoredTrial, store: CheckpointStore, folder: Path
) -> Mapping[str, Sequence[str]] | str:
    """The lines of each of its files; why there are none. A large or binary file has one line."""
    try:
        code_of_checkpoint(CheckpointSource(trial.newest, store), folder)
    except CheckpointError as error:
        return str(error)
    found = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        data = path.read_bytes()
        try:
            text = data[: LARGEST_TEXT_BYTES + 1].decode()
        except UnicodeDecodeError:
            text = ""
        is_shown = text and len(data) <= LARGEST_TEXT_BYTES
        stands = f"{len(data)} bytes, sha256:{hashlib.sha256(data).hexdigest()[:12]}"
        name = path.relative_to(folder).as_posix()
        found[name] = text.splitlines() if is_shown else [stands]
    return found


def _difference(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> str:
    """The differences of files as an indented block, which no line in it can end."""
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    lines: list[str] = []
    while names and len(lines) <= SHOWN_LINES:
        name = names.pop(0)
        lines += _changes(name, old.get(name, ()), new.get(name, ()))
    if len(lines) > SHOWN_LINES:
        more = f", and {plural(len(names), 'more file')}" if names else ""
        lines[SHOWN_LINES:] = [f"… {plural(len(lines) - SHOWN_LINES, 'more line')}{more}"]
    shown = (clean(line[:LINE_CHARACTERS]) + "…" * (line[LINE_CHARACTERS:] != "") for line in lines)
    return "\n".join(f"    {line}" for line in shown) or "only modes of files differ"


def _changes(name: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The changes of a file, after the lines that both begin with."""
    alike = (a == b for a, b in zip(old, new, strict=False))
    same = max(len([*takewhile(bool, alike)]) - 2, 0)
    alike = (a == b for a, b in zip(reversed(old[same:]), reversed(new[same:]), strict=False))
    end = max(len([*takewhile(bool, alike)]) - 2, 0)
    before, after = old[same : len(old) - end], new[same : len(new) - end]
    if max(len(before), len(after)) > COMPARED_LINES:
        counts = f"{len(old)} lines, and {len(new)}"
        return [f"--- {name}", f"+++ {name}", f"too much differs to be shown: {counts}"]
    found = [*difflib.unified_diff(before, after, name, name, lineterm="", n=2)]
    return [_moved(line, same) if line.startswith("@@ ") else line for line in found]


def _moved(header: str, by: int) -> str:
    """The header of a hunk, with other numbers of lines."""
    return re.sub(r"([-+])(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", header)


def _listed(texts: Sequence[str], between: str = ", ") -> str:
    return between.join(map(escaped, texts))


def _value(value: Any) -> str:
    return "" if value is None else setting(value)


def _number(value: Any) -> str:
    return "" if value is None else number(value)
