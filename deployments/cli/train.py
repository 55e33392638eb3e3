"""`trialflow train`: trains an experiment's trial in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import CheckpointError, ConfigError, Stopped
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    Engine,
    Experiment,
    Overrides,
    Storage,
    open_store_of,
    read_experiment,
    with_engine,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.run_display import Display, PlainLines, display_for_stdout
from trialflow.deployments.cli.tables import SHORT_UUID

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trialflow.flows.train import TrialResult


def train(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    set_: Overrides = None,
    storage: Storage = None,
    engine: Engine = None,
    resume: Annotated[
        bool,
        Parameter(help="Continue a trial from its last checkpoint: the experiment's newest."),
    ] = False,
    trial: Annotated[
        str | None,
        Parameter(
            help="With --resume: the trial to continue, as `trialflow checkpoints list` names it. "
            "Default: the experiment's newest."
        ),
    ] = None,
    take_over: Annotated[
        bool,
        Parameter(
            negative=(),
            help="With --resume: continue the trial even if another run may be training it, for "
            "example on a machine that was lost. A run that still lives ends.",
        ),
    ] = False,
    quiet: Annotated[
        bool,
        Parameter(
            help="Print only the summary, or the error; with --resume also which trial continues."
        ),
    ] = False,
    json_: Annotated[
        bool,
        Parameter(
            name="--json",
            negative=(),
            help="Print the result to stdout as one line of JSON, everything else to stderr.",
        ),
    ] = False,
) -> int:
    """Train an experiment's trial, on this machine or on several.

    Uses the Prefect server at PREFECT_API_URL; if that is not set, the one of a running `trialflow
    up`; else starts one for this run.
    """
    began = time.monotonic()
    if not resume and (take_over or trial is not None):
        option = "--take-over" if take_over else "--trial"
        raise ConfigError(f"{option} continues a trial: give --resume as well")
    with JsonResult(is_printed=json_) as outcome:
        experiment = read_experiment(config, with_engine(set_, engine), storage)
        store = outcome.store = open_store_of(experiment)
        display = _display(quiet, json_, (experiment.searcher.metric, "loss"))
        outcome.run_status = display
        say = console.note if quiet else display.say
        continued: str | None = None  # the trial that --resume has found
        earlier: int | None = None  # when the trial's earlier run wrote its report

        def call(on_running: StateHook) -> TrialResult:
            from trial_core.run.run_dirs import trial_id
            from trialflow.flows.train import TrialResult
            from trialflow.flows.train import train as train_flow

            nonlocal continued, earlier
            if resume:
                continued = _trial_to_resume(store, experiment.name, trial, say)
            earlier = None if continued is None else _page_written_at(continued)

            def note_ids(flow: Any, flow_run: Any, state: Any) -> None:
                outcome.flow_run_id = str(flow_run.id)
                outcome.trial = continued or trial_id(experiment.name, outcome.flow_run_id)

            flow = train_flow.with_options(on_running=[note_ids, on_running])
            result = flow(experiment, trial=continued, take_over=take_over)
            if not isinstance(result, TrialResult):
                raise Stopped(f"the run ended without a result: {result}")
            return result

        run: FlowRun[TrialResult] = FlowRun(display, experiment.code)
        exit_code = run.run(call)
        # --resume alone continues the newest trial, which need not be the one that was named.
        resume_option = "--resume" if trial is None else f"--resume --trial {trial}"
        if run.result is not None:
            outcome.completed(run.result)
            summary = _summary(
                run.result, time.monotonic() - began, run.later_ui, resume_option,
                best=_other_best(store, run.result),
                end=None if display.had_batches_left else display.total_batches,
            )  # fmt: skip
            print("\n".join(summary), file=outcome.stream, flush=True)
            return exit_code
        if run.failure is not None:
            outcome.failed(run.failure, exit_code)
        elif run.stopped_by is not None:
            outcome.stopped(run.stopped_by)
        if outcome.trial is not None and _page_written_at(outcome.trial) != earlier:
            console.note(f"HTML report: {_report_page(outcome.trial)}")
        if display.committed_at is not None:
            console.note(
                f"the last checkpoint of trial {outcome.trial} is at batch {display.committed_at}; "
                f"to continue from it, repeat the command with {resume_option}"
            )
        elif run.stopped_by is not None and continued is not None:
            console.note(f"to continue trial {continued}, repeat the command with {resume_option}")
        elif run.stopped_by is not None and outcome.trial is not None:
            console.note(
                f"trial {outcome.trial} has no checkpoint yet, so --resume does not continue it"
            )
        return exit_code


def _display(is_quiet: bool, as_json: bool, preferred: tuple[str, ...]) -> Display:
    if as_json and not is_quiet:  # stdout is for the JSON line alone
        return PlainLines(sys.stderr, preferred=preferred)
    return display_for_stdout(is_quiet, preferred)


def _trial_to_resume(
    store: CheckpointStore, experiment: str, named: str | None, say: Callable[[str], None]
) -> str | None:
    """The trial to continue, which is said: `named`, else the experiment's newest, if any.

    Raises:
        ConfigError: the trial `named` has no checkpoint.
    """
    if named is not None and store.newest(named) is None:
        raise ConfigError(
            f"--trial {named}: no checkpoint of this trial is in {store.url}; `trialflow "
            "checkpoints list` shows trials that have some"
        )
    trial = named or store.newest_trial(experiment)
    if trial is None:
        say(
            f"nothing to resume: no checkpoint of experiment {experiment} in {store.url}; "
            "starting a new trial"
        )
        return None
    from trial_core.retention.trial_owner import describe_last_run

    say(f"continuing trial {trial}, {describe_last_run(store, trial)}")
    return trial


def _report_page(trial: str) -> Path:
    """Where the trial's HTML report is on this machine, once there is one."""
    from trial_core.run.run_dirs import run_dir_of

    return run_dir_of(trial) / "report.html"


def _page_written_at(trial: str) -> int | None:
    """When the trial's HTML report was written; None if there is none."""
    page = _report_page(trial)
    return page.stat().st_mtime_ns if page.exists() else None


def _other_best(store: CheckpointStore, result: TrialResult) -> Manifest | None:
    """The trial's best checkpoint, if it is another one than the last."""
    from trial_core.retention.policy import best_of_trial

    try:
        best = best_of_trial(store.list(result.trial))
    except CheckpointError as error:  # the run has ended well: its summary must appear
        console.warning(f"the best checkpoint is not known: {error}")
        return None
    return None if best is None or best.uuid == result.checkpoint_uuid else best


def _summary(
    result: TrialResult,
    seconds: float,
    later_ui: str | None,
    resume_option: str,
    best: Manifest | None = None,
    end: int | None = None,
) -> list[str]:
    """The lines that end a run's output.

    Args:
        best: the trial's best checkpoint, if it is another one than the last.
        end: the maximum length in batches, if the trial had reached it before.
    """
    trained = result.batches_trained
    if end is not None:
        ending = f"is already at {trained} of {text_format.plural(end, 'batch')}"
        longer = f"{resume_option} --set searcher.max_length.batches={2 * trained}, for example"
        continue_with: str | None = f"{longer}; without --resume a new trial begins"
    else:
        why = result.stop_reason or "as the trial asked"
        how = f"stopped early, {why}," if result.stopped_early else "completed"
        ending = f"{how} after {text_format.plural(trained, 'batch')}"
        continue_with = resume_option if result.stop_reason else None
    at = result.validated_at
    when = "" if at in (None, trained) else f" (validated at batch {at})"
    facts = [  # pairs, not a dict: a metric may be called "report"
        *(
            (text_format.clean(name), text_format.one_line(text_format.number(value)) + when)
            for name, value in result.validation_metrics.items()
        ),
        ("checkpoint", result.checkpoint_url),
        ("best", best and _described(best)),
        ("continue with", continue_with),
        ("report", result.report_path),
        ("HTML report", str(page) if (page := _report_page(result.trial)).exists() else None),
        ("logs", result.run_dir and _logs(Path(result.run_dir))),
        ("UI", later_ui),
    ]
    shown = [(name, fact) for name, fact in facts if fact is not None]
    width = max(len(name) for name, _ in shown)
    return [
        f"{result.trial} {ending} ({text_format.duration(seconds)})",
        *(f"  {name:<{width}}  {fact}" for name, fact in shown),
    ]


def _described(checkpoint: Manifest) -> str:
    """A checkpoint in one line: its uuid, its batch and its metrics."""
    metrics = text_format.metrics_line(checkpoint.metrics["validation"])
    at = checkpoint.progress.batches_trained
    return f"{checkpoint.uuid[:SHORT_UUID]}, at batch {at}: {metrics}"


def _logs(run_dir: Path) -> str | None:
    """The folder of the ranks' logs; None if no rank has written anything."""
    folder = run_dir / "logs"
    return str(folder) if any(file.stat().st_size for file in folder.glob("*.log")) else None
