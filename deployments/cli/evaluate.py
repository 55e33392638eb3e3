"""`trialflow evaluate`: validates a committed checkpoint in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError
from trialflow.deployments.cli.experiment_options import (
    CHECKPOINT,
    DEFAULT_EXPERIMENT,
    UNCHANGED_RUN,
    Experiment,
    RunChanges,
    read_any_experiment,
    refuse_what_cannot_run,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout
from trialflow.deployments.cli.tables import fact_lines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from trialflow.flows.evaluate import EvaluateResult


def evaluate(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    checkpoint: Annotated[
        str | None,
        Parameter(
            help=f"{CHECKPOINT} Default: the newest checkpoint of the experiment's newest trial."
        ),
    ] = None,
    changes: RunChanges = UNCHANGED_RUN,
    quiet: bool = False,
    json_: AsJson = False,
) -> int:
    """Validate a committed checkpoint of an experiment, on this machine or on several.

    Uses as many slots as the experiment names, whatever number saved the checkpoint. The
    experiment's hyperparameters count; of one that searches, the checkpoint's.

    Args:
        quiet: Print only the metrics, or the error.
    """
    from trial_core.search.settings import SearchExperiment

    experiment = read_any_experiment(config, changes)
    is_search = isinstance(experiment, SearchExperiment)
    if is_search and any(each.startswith("hyperparameters") for each in changes.overrides):
        raise ConfigError(
            f"--set hyperparameters…: {config} searches, so a checkpoint is validated with its own "
            "hyperparameters; to choose them, write a file with values in place of the ranges and "
            "searcher.name: single"
        )
    refuse_what_cannot_run(experiment)

    def call(on_running: StateHook) -> EvaluateResult | State[Any]:
        from trialflow.flows.evaluate import evaluate as flow

        return flow.with_options(on_running=[on_running])(experiment, checkpoint=checkpoint)

    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    run: FlowRun[EvaluateResult] = FlowRun(display, experiment)
    exit_code = run.run(call)
    if (result := run.result) is None:
        return exit_code
    if json_:
        names = ("trial", "batches_trained", "metrics", "changes", "flow_run_id")
        shown = {"checkpoint": result.checkpoint_uuid, **{n: getattr(result, n) for n in names}}
        print_json("evaluate", shown)
    else:
        batches = text_format.plural(result.batches_trained, "batch")
        headline = f"checkpoint {result.checkpoint_uuid} of {result.trial}, after {batches}"
        metrics = (
            (text_format.clean(name), text_format.one_line(text_format.number(value)))
            for name, value in result.metrics.items()
        )
        print("\n".join([headline, *fact_lines(metrics)]))
    return exit_code
