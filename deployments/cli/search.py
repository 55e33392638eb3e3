"""`trialflow search`: lists the searches of a storage, and shows one."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError, SearchError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    HERE,
    StoragePlace,
    named_trial,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.tables import local_time, print_table
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.search.view import SearchView

app = App(name="search", help="Search for hyperparameters; list searches, and show one.")

_COLUMNS = ("search", "experiment", "searcher", "trials", "best", "progress", "last record")


@app.command(name="list")
def list_(*, place: StoragePlace = HERE, json_: AsJson = False) -> int:
    """List the searches of a storage, with their best result; the last one to record is last."""
    from trial_core.search.log import searches
    from trial_core.search.view import stored_view

    store = place.open_store()
    found: list[dict[str, Any]] = []
    with waiting(f"reading {store.url}"):
        for name in searches(store.storage):
            try:
                found.append(stored_view(store.storage, name).summary())
            except SearchError as error:  # the others are still listed
                console.warning(f"search {name}: {error}")
                found.append({"search": name, "problem": str(error)})
    found.sort(key=lambda each: each.get("last_at", ""))
    if json_:
        print_json("search list", {"searches": found})
    elif not found:
        print(f"no searches in {store.url}")
    else:
        print_table(_COLUMNS, map(_row, found))
    return 0


@app.command
def show(
    name: str,
    /,
    *,
    json_: AsJson = False,
    csv_: Annotated[bool, Parameter(name="--csv")] = False,
    html: Path | None = None,
    optuna: str | None = None,
    place: StoragePlace = HERE,
) -> int:
    """Show a search: the best result, its rungs, its trials, who was promoted, and failures.

    `--json` has all trials with their results. The rows of `--csv` are curves for `--simulate`.

    Args:
        name: The search's id, or the first characters of it.
        csv_: Print a row of CSV for each result.
        html: Write a page with figures to this file. Default: no.
        optuna: Store it as an Optuna study in this database, for example sqlite:///study.db, which
            Optuna's dashboard opens. Default: no.
    """
    if json_ + csv_ + (html is not None) + (optuna is not None) > 1:
        raise ConfigError("give one of --json, --csv, --html and --optuna")
    view = named_view(place.open_store(), name)
    if json_:
        print_json("search show", view.details())
    elif csv_:
        csv.writer(sys.stdout, lineterminator="\n").writerows(_results(view))
    elif html is not None:
        from trial_core.search import figures

        try:
            html.write_text(figures.html(view), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: {error.strerror}") from None
        print(html)
    elif optuna is not None:
        try:
            from trial_core.search.optuna_sampler import store_study
        except ImportError as error:
            raise ConfigError(f"--optuna: {error}: pip install 'trialflow[search]'") from None
        store_study(view.experiment, view.state, optuna, view.id)
        print(f"stored as the Optuna study {view.id}")
    else:
        print_search(view)
    return 0


def named_view(store: CheckpointStore, name: str) -> SearchView:
    """The search with an id, else the only one whose id begins so.

    Raises SearchError and ConfigError.
    """
    from trial_core.search.log import searches
    from trial_core.search.view import stored_view

    with waiting(f"reading {store.url}"):
        search = named_trial(name, searches(store.storage), "search") or name
        return stored_view(store.storage, search)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    """A search in the list."""
    if "problem" in found:
        return (found["search"], "", "unreadable", "", "", "", "")
    best = "" if found["best"] is None else text_format.number(found["best"])
    metric = text_format.shortened(found["metric"], 40)
    return (
        found["search"], text_format.shortened(found["experiment"], 40), found["searcher"],
        f"{found['trials']} of {found['max_trials']}", best and f"{metric} {best}",
        "over" if found["is_over"] else f"{found['progress']:.0%}", local_time(found["last_at"]),
    )  # fmt: skip


def _results(view: SearchView) -> list[list[Any]]:
    """Rows with the columns trial, length and metric, as curves have them, and more."""
    names = [name.dotted for name in view.names]
    rows: list[list[Any]] = [
        ["trial", "length", "metric", "batches", "checkpoint", "status", "id", "bracket", *names]
    ]
    for trial in view.state.trials:
        values = [name.of(trial) for name in view.names]
        for each in trial.reached:
            metric = "nan" if each.metric is None else each.metric
            row = [trial.number, each.length, metric, each.batches, each.checkpoint]
            rows.append([*row, trial.status, trial.id, trial.bracket, *values])
    return [
        [text_format.clean(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    ]


def print_search(view: SearchView) -> None:
    """Print a search, which may be simulated, as tables."""
    from trial_core.search import page

    lines, is_simulated = [page.settings_line(view), page.trained_line(view)], not view.url
    if not is_simulated:
        at = local_time(view.events[-1].at)
        lines = [f"{view.id}: {page.headline(view)} · last record {at}", lines[0]]
    if view.state.best is not None:
        found, values = page.best_lines(view)
        trial, result = view.state.best
        where = "" if is_simulated else f", {trial.id}, checkpoint {result.checkpoint or 'none'}"
        lines.append(f"best: {found}{where}")
        lines.append("  ".join(["     ", *values]))
    print(text_format.clean("\n".join(lines)))
    for table in page.tables(view):
        print(f"\n{table.title}\n")
        print_table(table.columns, table.rows)
        if table.note:
            print(table.note)
