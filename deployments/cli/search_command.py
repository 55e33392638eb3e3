"""`trialflow search FILE`: searches for hyperparameters in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError, SearchError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED_RUN,
    Experiment,
    RunChanges,
    named_trial,
    open_store_of,
    read_as,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.search import print_search
from trialflow.deployments.cli.tables import fact_lines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.search.settings import SearchExperiment
    from trialflow.flows.search import SearchResult


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
            print("\n".join(_summary(run.result, experiment, run.later_ui)))
    elif run.stopped_by is not None:
        console.note("to continue the search, repeat the command with --resume")
    run.note_unsent(config, changes.storage)
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


def _summary(result: SearchResult, experiment: SearchExperiment, later_ui: str | None) -> list[str]:
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
        ("more", f"trialflow search show {result.search}"),
        ("HTML report", result.report_path),
        ("UI", later_ui),
    ]
    headline = f"{result.search} {how} ({text_format.plural(result.trials, 'trial')})"
    return [headline, *fact_lines(facts)]
