"""`trialflow evaluate`: validates a committed checkpoint in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import Stopped
from trialflow.deployments.cli.experiment_options import (
    CHECKPOINT,
    DEFAULT_EXPERIMENT,
    Engine,
    Experiment,
    Overrides,
    StorageOption,
    read_experiment,
    refuse_what_cannot_run,
    with_engine,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.run_display import display_for_stdout

if TYPE_CHECKING:
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
    set_: Overrides = None,
    storage: StorageOption = None,
    engine: Engine = None,
    quiet: bool = False,
    json_: AsJson = False,
) -> int:
    """Validate a committed checkpoint of an experiment, on this machine or on several.

    Uses as many slots as the experiment names, whatever number saved the checkpoint.

    Args:
        quiet: Print only the metrics, or the error.
    """
    experiment = read_experiment(config, with_engine(set_, engine), storage)
    refuse_what_cannot_run(experiment)

    def call(on_running: StateHook) -> EvaluateResult:
        from trialflow.flows.evaluate import EvaluateResult, evaluate as evaluate_flow

        flow = evaluate_flow.with_options(on_running=[on_running])
        result = flow(experiment, checkpoint=checkpoint)
        if not isinstance(result, EvaluateResult):
            raise Stopped(f"the run ended without a result: {result}")
        return result

    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    run: FlowRun[EvaluateResult] = FlowRun(display, experiment)
    exit_code = run.run(call)
    if run.result is not None:
        if json_:
            result = run.result
            print_json(
                "evaluate",
                {
                    "checkpoint": result.checkpoint_uuid,
                    "trial": result.trial,
                    "batches_trained": result.batches_trained,
                    "metrics": result.metrics,
                    "flow_run_id": result.flow_run_id,
                },
            )
        else:
            print("\n".join(_summary(run.result)))
    return exit_code


def _summary(result: EvaluateResult) -> list[str]:
    batches = text_format.plural(result.batches_trained, "batch")
    metrics = [
        (text_format.clean(name), text_format.one_line(text_format.number(value)))
        for name, value in result.metrics.items()
    ]
    width = max((len(name) for name, _ in metrics), default=0)
    return [
        f"checkpoint {result.checkpoint_uuid} of {result.trial}, after {batches}",
        *(f"  {name:<{width}}  {value}" for name, value in metrics),
    ]
