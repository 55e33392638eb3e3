"""`trialflow retrain`: run the flow `retrain` in this process, and say what became of the model."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import Stopped
from trialflow.deployments.cli.experiment_options import Overrides, Storage, read_experiment
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.tables import AsJson

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trialflow.flows.retraining.outcome import RetrainResult


def retrain(
    config: Path,
    /,
    *,
    set_: Overrides = None,
    data: Annotated[
        list[str] | None,
        Parameter(
            name="--data",
            metavar="KEY=VALUE",
            negative=(),
            help="Set a field of the experiment's data for this run: --data path=s3://bucket/new. "
            "The value is YAML, and taken as it is. May be given several times.",
        ),
    ] = None,
    storage: Storage = None,
    quiet: Annotated[bool, Parameter(help="Print only the outcome, or what went wrong.")] = False,
    json_: AsJson = False,
) -> int:
    """Train a challenger on this machine; it becomes champion if it is better.

    The champion is validated on the same data first. Templates in the experiment's data are of now.

    Parameters
    ----------
    config
        The experiment file (YAML).
    """
    experiment = read_experiment(config, set_ or [], storage)
    given = _given(data or [])
    _check_templates(experiment)
    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    run = _Run(experiment, given)
    exit_code = FlowRun[None](display, experiment.code).run(run.call)
    if exit_code == 0:
        print(run.as_json() if json_ else "\n".join(run.summary()), flush=True)
    return exit_code


class _Run:
    """One run of the flow, and what came of it."""

    def __init__(self, experiment: ExperimentConfig, data: dict[str, Any]) -> None:
        self._experiment = experiment
        self._data = data
        self._result: RetrainResult | None = None
        self._skipped: str | None = None

    def call(self, on_running: StateHook) -> None:
        """Run the flow.

        Raises:
            Stopped: it ended without a result.
        """
        from trialflow.flows.retrain import SKIPPED
        from trialflow.flows.retrain import retrain as retrain_flow
        from trialflow.flows.retraining.outcome import RetrainResult

        def note(flow: Any, flow_run: Any, state: Any) -> None:
            if state.name == SKIPPED:
                self._skipped = state.message

        flow = retrain_flow.with_options(on_running=[on_running], on_completion=[note])
        result = flow(self._experiment, data=self._data or None)
        if isinstance(result, RetrainResult):
            self._result = result
        elif self._skipped is None:
            raise Stopped(f"the run ended without a result: {result}")

    def summary(self) -> list[str]:
        """What became of it, for people."""
        result = self._result
        if result is None:
            return [str(self._skipped)]
        if result.stop_reason:
            headline = f"model {result.model}: nothing was decided"
        elif result.promoted:
            headline = f"model {result.model}: version {result.challenger} promoted"
        else:
            kept = "no champion" if result.champion is None else f"version {result.champion} kept"
            headline = f"model {result.model}: {kept}"
        facts = [
            ("why", result.why),
            ("champion", _value(result.metric, result.champion_value)),
            ("challenger", _value(result.metric, result.challenger_value)),
            ("checkpoint", result.checkpoint_uuid),
            ("report", result.report_path),
        ]
        width = max(len(name) for name, _ in facts)
        lines = [f"  {name:<{width}}  {text_format.one_line(fact)}" for name, fact in facts if fact]
        return [headline, *lines]

    def as_json(self) -> str:
        """What became of it, for programs: the result's fields, and ``status``: ``promoted``,
        ``kept``, ``stopped`` or ``skipped``."""
        import msgspec

        result = self._result
        if result is None:
            said: dict[str, Any] = {"status": "skipped", "why": self._skipped}
        else:
            ended = "stopped" if result.stop_reason else "kept"
            said = {"status": "promoted" if result.promoted else ended, **result.as_outcome()}
        return msgspec.json.format(msgspec.json.encode(said), indent=2).decode()


def _given(assignments: list[str]) -> dict[str, Any]:
    """What `--data` gives.

    Raises:
        ConfigError: an assignment cannot be understood, or gives what JSON lacks.
    """
    from trial_core.config.parsing import override
    from trial_core.models.data_templates import checked

    return checked(override({}, assignments, "--data"))


def _check_templates(experiment: ExperimentConfig) -> None:
    """Refuse templates that cannot be rendered before anything is started.

    Raises:
        ConfigError: which, and why.
    """
    from trial_core.models.data_templates import rendered

    rendered(experiment.data, datetime.now(timezone.utc))


def _value(metric: str, value: float | None) -> str | None:
    return None if value is None else f"{text_format.clean(metric)} {text_format.number(value)}"
