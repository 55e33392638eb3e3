"""`trialflow retrain`: run the flow `retrain` in this process and print the outcome."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import Stopped
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    Experiment,
    Overrides,
    StorageOption,
    open_store_of,
    read_experiment,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.tables import AsJson, print_json

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trialflow.flows.retraining.outcome import RetrainResult


def retrain(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    set_: Overrides = None,
    data: Annotated[
        list[str] | None,
        Parameter(
            name="--data",
            negative=(),
            help="Set a field of the experiment's data for this run: --data path=s3://bucket/new. "
            "The value is YAML, and is not rendered. May be given several times. Default: the "
            "experiment's data.",
        ),
    ] = None,
    storage: StorageOption = None,
    quiet: Annotated[bool, Parameter(help="Print only the outcome or the error.")] = False,
    json_: AsJson = False,
) -> int:
    """Train a challenger on this machine, and promote it if it is better than the champion.

    The champion is first validated on the same data. Templates in the experiment's data are
    rendered for the present time.
    """
    from trial_core.models.data_templates import parse_data, render_data

    experiment = read_experiment(config, set_ or [], storage)
    run_data = parse_data(data or [])
    render_data(experiment.data, datetime.now(timezone.utc))  # report errors before the start
    refuse_what_cannot_run(experiment, open_store_of(experiment))
    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    run = _RetrainRun(experiment, run_data)
    flow_run = FlowRun[None](display, experiment)
    exit_code = flow_run.run(run.run)
    if exit_code == 0:
        if json_:
            print_json(run.as_data())
        else:
            print("\n".join(run.summary_lines(flow_run.later_ui)))
    return exit_code


class _RetrainRun:
    """A run of the flow, and its result once it has ended."""

    def __init__(self, experiment: ExperimentConfig, data: dict[str, Any]) -> None:
        self._experiment = experiment
        self._data = data
        self._result: RetrainResult | None = None
        self._skip_message: str | None = None

    def run(self, on_running: StateHook) -> None:
        """Run the flow. Raises Stopped if it ended without a result."""
        from trialflow.flows.retrain import SKIPPED, retrain as retrain_flow
        from trialflow.flows.retraining.outcome import RetrainResult

        def on_completion(flow: Any, flow_run: Any, state: Any) -> None:
            if state.name == SKIPPED:
                self._skip_message = state.message

        flow = retrain_flow.with_options(on_running=[on_running], on_completion=[on_completion])
        result = flow(self._experiment, data=self._data or None)
        if isinstance(result, RetrainResult):
            self._result = result
        elif self._skip_message is None:
            raise Stopped(f"the run ended without a result: {result}")

    def summary_lines(self, later_ui: str | None) -> list[str]:
        """The outcome for people.

        Args:
            later_ui: where the run's page is from now on.
        """
        result = self._result
        if result is None:
            return [str(self._skip_message)]
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
        width = max(len(name) for name, _ in facts)
        lines = [f"  {name:<{width}}  {text_format.one_line(fact)}" for name, fact in facts if fact]
        return [headline, *lines]

    def as_data(self) -> dict[str, Any]:
        """The outcome for programs: the result's fields, and ``status``.

        The status is ``promoted``, ``kept``, ``stopped`` or ``skipped``.
        """
        result = self._result
        if result is None:
            return {"status": "skipped", "why": self._skip_message}
        kept = "stopped" if result.stop_reason else "kept"
        return {"status": "promoted" if result.promoted else kept, **result.as_json_data()}


def _model(version: int | None, metric: str, value: float | None) -> str | None:
    if version is None or value is None:
        return None
    return f"version {version}, {text_format.clean(metric)} {text_format.number(value)}"
