"""`trialflow search`: searches for hyperparameters; lists the searches of a storage, shows one."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError, SearchError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    HERE,
    UNCHANGED_RUN,
    Experiment,
    RunChanges,
    StoragePlace,
    named_trial,
    open_store_of,
    read_as,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.tables import fact_lines, local_time, print_table
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.search.settings import SearchExperiment
    from trial_core.search.view import SearchView
    from trialflow.flows.search import SearchResult

app = App(name="search", help="Search for hyperparameters; list searches, and show one.")

_COLUMNS = ("search", "experiment", "searcher", "trials", "best", "progress", "last record")


@app.default
def search(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: RunChanges = UNCHANGED_RUN,
    resume: bool = False,
    named: Annotated[str | None, Parameter(name="--search")] = None,
    take_over: bool = False,
    simulate: Path | None = None,
    quiet: bool = False,
    json_: AsJson = False,
) -> int:
    """Search for hyperparameters: train many trials, and the better ones further.

    The experiment's searcher says how, and hyperparameters have ranges. Ctrl-C saves what is being
    trained; --resume continues.

    Args:
        resume: Continue a search where it was; by default the experiment's newest.
            searcher.max_trials and max_length may be greater than before.
        named: With --resume: the search to continue, as `trialflow search list` names it. Default:
            the experiment's newest.
        take_over: With --resume: continue the search even if another run may be at it, for example
            on a machine that was lost. A run that still lives ends.
        simulate: Train nothing: print what the search would do with the curves in this CSV file,
            with the columns trial, length and metric. Default: train.
        quiet: Print only the outcome or the error.
    """
    from trial_core.search.settings import SearchExperiment

    for option, value in (("--search", named), ("--take-over", take_over)):
        if value and not resume:
            raise ConfigError(f"{option} continues a search: give --resume as well")
    experiment = read_as(SearchExperiment, config, changes)
    if simulate is not None:
        return _simulate(experiment, simulate, json_)
    store = open_store_of(experiment)
    place = changes.place(config, store.url)
    refuse_what_cannot_run(experiment, store)
    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    continued = _to_resume(store, experiment, named, display.say) if resume else None

    def call(on_running: StateHook) -> SearchResult | State[Any]:
        from trialflow.flows.search import search as search_flow

        flow = search_flow.with_options(on_running=[on_running])
        return flow(experiment, search=continued, take_over=take_over)

    run: FlowRun[SearchResult] = FlowRun(display, experiment)
    exit_code = run.run(call)
    if run.result is not None:
        if json_:
            print_json("search", asdict(run.result))
        else:
            print("\n".join(_summary(run.result, experiment, place, run.later_ui)))
    elif run.stopped_by is not None:
        console.note("to continue the search, repeat the command with --resume")
    run.note_unsent(place)
    return exit_code


def _simulate(experiment: SearchExperiment, curves: Path, as_json: bool) -> int:
    from trial_core.search.simulate import read_curves, simulate
    from trial_core.search.view import view_of

    view = view_of(simulate(experiment, read_curves(curves)))
    if as_json:
        print_json("search show", view.details())
    else:
        print_search(view)
    return 0


def _to_resume(
    store: CheckpointStore, experiment: SearchExperiment, named: str | None, say: Any
) -> str | None:
    """The search to continue: the one named, else the experiment's newest, or None.

    Warns of searches that cannot be read.

    Raises:
        ConfigError: there is no such search.
        SearchError: the one named cannot be read.
    """
    from trial_core.search.log import SearchLog, searches
    from trial_core.search.state import opened

    storage, found, unreadable = store.storage, dict[str, str](), dict[str, SearchError]()
    for name in searches(storage):
        try:
            events = SearchLog(storage, name).events
            if opened(events).experiment == experiment.name:
                found[name] = events[-1].at
        except SearchError as error:
            unreadable[name] = error
    search = None if named is None else named_trial(named, [*found, *unreadable])
    if search in unreadable:
        raise unreadable[search]
    if unreadable:
        first = next(iter(unreadable.values()))
        console.warning(f"searches that cannot be read: {', '.join(unreadable)}; {first}")
    if named is not None:
        if search is None:
            raise ConfigError(
                f"--search {named}: no search of experiment {experiment.name} in {store.url} "
                "begins so; `trialflow search list` shows them"
            )
        return search
    if not found:
        say(
            f"nothing to resume: no search of experiment {experiment.name} in {store.url}; "
            "beginning a new one"
        )
        return None
    newest = max(found, key=found.__getitem__)
    say(f"continuing search {newest}")
    return newest


def _summary(
    result: SearchResult, experiment: SearchExperiment, place: StoragePlace, later_ui: str | None
) -> list[str]:
    """The lines that end the command's output."""
    how = "completed" if result.is_over else f"stopped: {result.stop_reason}"
    best = None
    if result.best_trial is not None and result.metric is not None:
        value = text_format.number(result.metric)
        best = f"{result.best_trial}: {experiment.searcher.metric} {value}"
    facts = [
        ("best", best),
        ("with", json.dumps(result.hyperparameters) if best else None),
        ("checkpoint", result.checkpoint_uuid),
        ("continue with", None if result.is_over else f"--resume --search {result.search}"),
        ("more", f"trialflow search show {result.search}{place.options}"),
        ("HTML report", result.report_path),
        ("UI", later_ui),
    ]
    headline = f"{result.search} {how} ({text_format.plural(result.trials, 'trial')})"
    return [headline, *fact_lines(facts)]


@app.command(name="list")
def list_(*, place: StoragePlace = HERE, json_: AsJson = False) -> None:
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
) -> None:
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
    store = place.open_store()
    view = named_view(store, name)
    if json_:
        best = kept_best(store, view)
        print_json("search show", view.details() | {"best_checkpoint": best and best.uuid})
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
        kept_best(store, view)


def kept_best(store: CheckpointStore, view: SearchView) -> Manifest | None:
    """See `best_checkpoint`. A note tells if it is not that of the best result."""
    from trial_core.search.view import best_checkpoint

    with waiting(f"reading {store.url}"):
        found = best_checkpoint(store, view)
    recorded = view.state.best and view.state.best[1].checkpoint
    if recorded != (found and found.uuid):
        instead = "its trial has none as good"
        if found is not None:
            instead = f"its trial has one as good or better, {found.uuid} of batch "
            instead += str(found.progress.batches_trained)
        console.note(f"checkpoint {recorded} of the best result is gone or damaged; {instead}")
    return found


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
