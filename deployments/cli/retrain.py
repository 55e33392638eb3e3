"""`trialflow retrain` retrains a model in this process; `data-arrived` has a server start it."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED,
    Changes,
    Experiment,
    open_store_of,
    read_retraining,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.tables import fact_lines
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State

    from trialflow.flows.retraining.outcome import RetrainResult


def retrain(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: Changes = UNCHANGED,
    data: Annotated[list[str] | None, Parameter(name="--data")] = None,
    quiet: bool = False,
    json_: AsJson = False,
) -> int:
    """Train a challenger on this machine, and promote it if it is better than the champion.

    The champion is first validated on the same data. Templates in the experiment's data are
    rendered for the present time.

    Args:
        data: Set a field of the experiment's data for this run: --data path=s3://bucket/new. The
            value is YAML, and is not rendered. May be given several times. Default: the
            experiment's data.
        quiet: Print only the outcome or the error.
    """
    from trial_core.models.data_templates import parse_data, render_data

    experiment = read_retraining(config, changes)
    run_data = parse_data(data or [])
    render_data(experiment.data, datetime.now(timezone.utc))  # report errors before the start
    store = open_store_of(experiment)
    refuse_what_cannot_run(experiment, store)

    def call(on_running: StateHook) -> RetrainResult | str | State[Any]:
        from trialflow.flows.retrain import SKIPPED, retrain as retrain_flow

        skipped: list[str] = []

        def on_completion(flow: Any, flow_run: Any, state: Any) -> None:
            if state.name == SKIPPED:
                skipped.append(str(state.message))

        flow = retrain_flow.with_options(on_running=[on_running], on_completion=[on_completion])
        result = flow(experiment, data=run_data or None)
        return skipped[0] if skipped else result

    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    run: FlowRun[RetrainResult | str] = FlowRun(display, experiment)
    exit_code = run.run(call)
    if run.result is not None:
        if json_:
            print_json("retrain", _as_data(run.result))
        else:
            print("\n".join(_summary_lines(run.result, run.later_ui)))
    run.note_unsent(changes.place(config, store.url))
    return exit_code


def _summary_lines(result: RetrainResult | str, later_ui: str | None) -> list[str]:
    """The outcome for people; a text is why the run was skipped."""
    if isinstance(result, str):
        return [result]
    if result.stop_reason:
        headline = f"model {result.model}: nothing was decided"
    elif result.promoted:
        headline = f"model {result.model}: version {result.challenger} promoted"
    else:
        kept = "no champion" if result.champion is None else f"version {result.champion} kept"
        headline = f"model {result.model}: {kept}"
    facts = [
        ("why", result.why),
        ("champion", _model(result.champion, result.metric, result.champion_value)),
        ("challenger", _model(result.challenger, result.metric, result.challenger_value)),
        ("checkpoint", result.checkpoint_uuid),
        ("report", result.report_path),
        ("UI", later_ui),
    ]
    shown = ((name, text_format.one_line(fact)) for name, fact in facts if fact)
    return [headline, *fact_lines(shown)]


def _as_data(result: RetrainResult | str) -> dict[str, Any]:
    """The outcome for programs: the result's fields, and ``status``."""
    if isinstance(result, str):
        return {"status": "skipped", "why": result}
    kept = "stopped" if result.stop_reason else "kept"
    return {"status": "promoted" if result.promoted else kept, **result.as_json_data()}


def _model(version: int | None, metric: str, value: float | None) -> str | None:
    if version is None or value is None:
        return None
    return f"version {version}, {text_format.clean(metric)} {text_format.number(value)}"


def data_arrived(
    model: str,
    /,
    *,
    data: Annotated[list[str] | None, Parameter(name="--data")] = None,
    json_: AsJson = False,
) -> None:
    """Tell the Prefect server that a model has new data, so that a worker retrains it.

    For example, for an experiment whose `data` has a field `path`:

    `trialflow data-arrived gpt --data path=s3://bucket/2026-11-21`

    This sends the event trialflow.data.arrived to the server that PREFECT_API_URL names; if that is
    not set, to the server of a running `trialflow up`. The model is retrained if its experiment has
    `on_data_arrived: true` and was deployed with `trialflow deploy` or `trialflow up`. To retrain
    on this machine instead: `trialflow retrain`.

    Args:
        model: The model's name, as in `retraining.model`.
        data: Where the new data are, as FIELD=VALUE: sets a field of the experiment's `data` for
            this retraining only. The value is YAML. May be given several times. Default: the
            experiment's `data`.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trial_core.checkpoint.layout import checked_model
    from trial_core.models.data_templates import parse_data
    from trialflow.tasks.events import data_arrived_event, send

    checked_model(model)
    new_data = parse_data(data or [])
    event = data_arrived_event(model, new_data)
    with configured_client() as client, waiting("asking the Prefect server"):
        send(client, event)
        if problem := _automation_problem(client, model):
            console.warning(problem)
    if json_:
        sent = {"event": event.event, "model": model, "data": new_data, "problem": problem}
        print_json("data-arrived", sent)
        return
    where = f": {json.dumps(new_data, ensure_ascii=False)}" if new_data else ""
    print(text_format.clean(f"sent {event.event}: model {model} has new data{where}"))


def _automation_problem(client: SyncPrefectClient, model: str) -> str | None:
    """Return why no automation reacts to the event, or None if one does."""
    from trialflow.deployments.retraining import automation_name

    found = client.read_automations_by_name(automation_name(model))
    if not found:
        return (
            f"no automation of this server retrains {model!r} when data arrives: set "
            "`on_data_arrived: true` in the `retraining` section of its experiment, and deploy it "
            "with `trialflow deploy`"
        )
    if not found[0].enabled:
        return f"the automation {automation_name(model)!r} is paused: no run was started"
    return None
