"""`trialflow evaluate`: run the flow `evaluate` in this process, and print the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from deployments.cli import messages
from deployments.cli.experiment import Overrides, Storage, read_experiment
from deployments.cli.flow_run import run_flow
from deployments.cli.signals import Terminated, stoppable
from deployments.cli.tables import AsJson
from deployments.cli.terminal import Display, display_for_stdout
from trial_core import words
from trial_core.errors import Stopped, TrialflowError

if TYPE_CHECKING:
    from flows.evaluate import EvaluateResult
    from trial_core.config import ExperimentConfig


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
        messages.error("stopped by Ctrl-C")
        return messages.INTERRUPTED
    except Terminated:
        messages.error("stopped by SIGTERM")
        return messages.TERMINATED
    except TrialflowError as failure:
        messages.report(failure, code_folder=experiment.code)
        return messages.exit_code(failure)
    print(_as_json(result) if json_ else "\n".join(_summary(result)), flush=True)
    return 0


def _run(experiment: ExperimentConfig, checkpoint: str | None, display: Display) -> EvaluateResult:
    """Run the flow on the configured Prefect server, or on one of its own.

    Raises:
        TrialflowError: whatever made it fail.
    """

    def call() -> EvaluateResult:
        from flows.evaluate import EvaluateResult
        from flows.evaluate import evaluate as evaluate_flow

        result = evaluate_flow(experiment, checkpoint=checkpoint)
        if not isinstance(result, EvaluateResult):
            raise Stopped(f"the run ended without a result: {result}")
        return result

    return run_flow(display, call)


def _summary(result: EvaluateResult) -> list[str]:
    batches = words.plural(result.batches_trained, "batch")
    width = max((len(words.clean(name)) for name in result.metrics), default=0)
    return [
        f"checkpoint {result.checkpoint_uuid} of {result.trial}, after {batches}",
        *(
            f"  {words.clean(name):<{width}}  {words.one_line(words.number(value))}"
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
