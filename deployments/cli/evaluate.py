"""`trialflow evaluate`: run the flow `evaluate` in this process, and print the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import Stopped, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import Overrides, Storage, read_experiment
from trialflow.deployments.cli.flow_run import run_flow
from trialflow.deployments.cli.run_display import Display, display_for_stdout
from trialflow.deployments.cli.signals import Terminated, stoppable
from trialflow.deployments.cli.tables import AsJson

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trialflow.flows.evaluate import EvaluateResult


def evaluate(
    config: Path,
    /,
    *,
    checkpoint: Annotated[
        str | None,
        Parameter(
            help="Uuid of the checkpoint, or how it begins. Default: the newest one of the "
            "experiment's newest trial."
        ),
    ] = None,
    set_: Overrides = None,
    storage: Storage = None,
    quiet: Annotated[bool, Parameter(help="Print only the metrics, or what went wrong.")] = False,
    json_: AsJson = False,
) -> int:
    """Validate a committed checkpoint of an experiment on this machine.

    On as many slots as the experiment asks for now, however many have saved it.

    Parameters
    ----------
    config
        The experiment file (YAML).
    """
    experiment = read_experiment(config, set_ or [], storage)
    display = display_for_stdout(quiet or json_, (experiment.searcher.metric, "loss"))
    try:
        with stoppable(display.stopping):
            result = _run(experiment, checkpoint, display)
    except KeyboardInterrupt:
        console.error("stopped by Ctrl-C")
        return console.INTERRUPTED
    except Terminated:
        console.error("stopped by SIGTERM")
        return console.TERMINATED
    except TrialflowError as failure:
        console.report(failure, code_folder=experiment.code)
        return console.exit_code(failure)
    print(_as_json(result) if json_ else "\n".join(_summary(result)), flush=True)
    return 0


def _run(experiment: ExperimentConfig, checkpoint: str | None, display: Display) -> EvaluateResult:
    """Run the flow on the configured Prefect server, or on one of its own.

    Raises:
        TrialflowError: whatever made it fail.
    """

    def call() -> EvaluateResult:
        from trialflow.flows.evaluate import EvaluateResult
        from trialflow.flows.evaluate import evaluate as evaluate_flow

        result = evaluate_flow(experiment, checkpoint=checkpoint)
        if not isinstance(result, EvaluateResult):
            raise Stopped(f"the run ended without a result: {result}")
        return result

    return run_flow(display, call)


def _summary(result: EvaluateResult) -> list[str]:
    batches = text_format.plural(result.batches_trained, "batch")
    width = max((len(text_format.clean(name)) for name in result.metrics), default=0)
    return [
        f"checkpoint {result.checkpoint_uuid} of {result.trial}, after {batches}",
        *(
            f"  {text_format.clean(name):<{width}}  {text_format.one_line(text_format.number(value))}"
            for name, value in result.metrics.items()
        ),
    ]


def _as_json(result: EvaluateResult) -> str:
    import msgspec

    shown = {
        "checkpoint": result.checkpoint_uuid,
        "trial": result.trial,
        "batches_trained": result.batches_trained,
        "metrics": result.metrics,
        "flow_run_id": result.flow_run_id,
    }
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()  # NaN is null
