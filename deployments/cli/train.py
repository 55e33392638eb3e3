"""`trialflow train`: trains an experiment's trial in this process."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from logging import CRITICAL, Logger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import CheckpointError, ConfigError, RankFailed, TrialError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED_RUN,
    Experiment,
    RunChanges,
    open_store_of,
    read_experiment,
    refuse_what_cannot_run,
    with_block,
)
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.run_display import Display, PlainLines, display_for_stdout
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig
    from trial_core.driver.states import Ended
    from trial_core.observe.events.observers import Observer
    from trialflow.flows.train import TrialResult


@Parameter(name="*")
@dataclass(frozen=True)
class Continuation:
    """Which trial to continue.

    Attributes:
        resume: Continue a trial from its last checkpoint; by default the experiment's newest trial.
        trial: With --resume: the trial to continue, or the first characters of its id. Default:
            the experiment's newest.
        take_over: With --resume: continue the trial even if another run may be training it, for
            example on a machine that was lost. A run that still lives ends.
        keep: With --resume: settings that stay as in the checkpoint, although the experiment has
            other values now: optimizer, scheduler, scaler, engine, or one of its settings, as
            optimizer.lr. May be repeated. Default: none.
        dry_run: With --resume: restore the checkpoint, print what has changed since it was saved
            and which values would count, and end. Trains and keeps nothing, needs no Prefect
            server, and does not disturb a run that has the trial.
    """

    resume: bool = False
    trial: str | None = None
    take_over: bool = False
    keep: list[str] | None = None
    dry_run: bool = False

    def check(self) -> None:
        """Refuse options that need ``--resume`` if it is missing.

        Raises:
            ConfigError: one is given without it.
        """
        given = {
            "--take-over": self.take_over, "--trial": self.trial, "--keep": self.keep,
            "--dry-run": self.dry_run,
        }  # fmt: skip
        if not self.resume and (option := next((each for each in given if given[each]), None)):
            raise ConfigError(f"{option} continues a trial: give --resume as well")

    @property
    def option(self) -> str:
        """Return the options that continue the same trial later.

        --resume alone continues the newest trial, which need not be the one that was named.
        """
        return "--resume" if self.trial is None else f"--resume --trial {self.trial}"


def train(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: RunChanges = UNCHANGED_RUN,
    start_from: str | None = None,
    continuation: Continuation | None = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    test: bool = False,
    quiet: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Train an experiment's trial, on this machine or on several.

    Uses the Prefect server at PREFECT_API_URL; if that is not set, the one of a running `trialflow
    up`; else starts one for this run.

    Args:
        start_from: Begin with the checkpoint of another program: the path or URL of a folder of
            DeepSpeed's save_checkpoint or Hugging Face's save_pretrained, or of a state_dict
            (searcher.source_checkpoint). Default: none.
        follow: Print what rank 0 prints, and warnings of other ranks: up to 20 lines a second.
        test: Try the trial, without a Prefect server: train one batch, validate one, save, restore
            that and train one more. Keeps nothing. A script with its own loop is told to save and
            end when it first reports metrics, and once more after the restore.
        quiet: Print only the summary, or the error; with --resume also which trial continues.
        json_: Print the result to stdout as one line of JSON, everything else to stderr.
    """
    began = time.monotonic()
    continuation = continuation or Continuation()
    with JsonResult(is_printed=json_) as outcome:
        continuation.check()
        if follow and quiet:
            raise ConfigError("--follow prints what --quiet would leave out: give one of them")
        if test and continuation.resume:
            raise ConfigError("--test tries a new trial: leave out --resume")
        if start_from is not None:
            start = f"searcher.source_checkpoint={json.dumps(start_from)}"
            changes = replace(changes, set_=[*(changes.set_ or []), start])
        experiment = read_experiment(config, changes)
        store = outcome.store = open_store_of(experiment)
        place = changes.place(config, store.url)
        refuse_what_cannot_run(experiment, store)
        display = outcome.run_status = _display(quiet, json_, (experiment.searcher.metric, "loss"))
        display.follows_ranks = follow
        say = console.note if quiet else display.say
        trial_run = _TrialRun(experiment, continuation, store, outcome, say, display)
        run: FlowRun[TrialResult] = FlowRun(display, experiment)
        dry = continuation.dry_run
        call = trial_run.compare if dry else trial_run.test if test else trial_run.run
        exit_code = run.run(call, has_server=not test and not dry)
        if run.result is not None:
            outcome.completed(run.result)
            if dry or test:
                took = text_format.duration(time.monotonic() - began)
                said = _compared(run.result) if dry else f"{_tested(run.result)} ({took})"
                print(said, file=outcome.stream, flush=True)
                return exit_code
            from trial_core.driver.summary import next_step

            best = _best(store, run.result)
            summary = _summary(
                run.result, time.monotonic() - began, run.later_ui, continuation.option,
                best=best,
                end=None if display.had_batches_left else display.total_batches,
                next_step=None if store.is_process_local
                else next_step(run.result, best, place.options, experiment.is_script),
            )  # fmt: skip
            print("\n".join(summary), file=outcome.stream, flush=True)
            run.note_unsent(place)
            return exit_code
        if run.failure is not None:
            outcome.failed(run.failure, exit_code)
        elif run.stopped_by is not None:
            outcome.stopped(run.stopped_by)
        if not test and not dry:
            trial_run.note_what_is_left(run)
            run.note_unsent(place)
        return exit_code


@dataclass
class _TrialRun:
    """The flow's run, and the trial that it continues."""

    experiment: ExperimentConfig
    continuation: Continuation
    store: CheckpointStore
    outcome: JsonResult
    say: Callable[[str], None]
    display: Display
    continued: str | None = None
    earlier_page: int | None = None
    """The time when the continued trial's earlier run wrote its page."""

    def run(self, on_running: StateHook) -> TrialResult | State[Any]:
        """Find the trial to continue, and run the flow.

        Raises:
            ConfigError: the trial that was named has no checkpoint.
        """
        from trialflow.flows.train import train as train_flow

        wanted, name = self.continuation, self.experiment.name
        if wanted.resume:
            self.continued = _trial_to_resume(self.store, name, wanted.trial, self.say)
        if self.continued is not None:
            _, self.earlier_page = _report_page(self.continued)
        flow = train_flow.with_options(on_running=[self._note_ids, on_running])
        return flow(
            self.experiment, trial=self.continued, take_over=wanted.take_over, keep=wanted.keep
        )

    def test(self, on_running: StateHook) -> TrialResult:
        """Try the trial; delete the written files if nothing failed. Raises as `try_trial`."""
        return replace(tried(self.experiment, self.display).result, checkpoint_url=None)

    def compare(self, on_running: StateHook) -> TrialResult:
        """Restore the checkpoint to tell what has changed. Raises as `run` and `try_trial`."""
        if self.experiment.is_script:
            raise ConfigError(
                "--dry-run builds the trial and restores its checkpoint, and a script does that "
                "itself: resume it without --dry-run; it says what has changed before it trains"
            )
        wanted, name = self.continuation, self.experiment.name
        continued = _trial_to_resume(self.store, name, wanted.trial, lambda text: None)
        if continued is None:
            raise ConfigError(
                f"--dry-run: there is nothing to resume: no checkpoint of experiment {name} is in "
                f"{self.store.url}"
            )
        ended = tried(self.experiment, self.display, continued=continued, keep=wanted.keep)
        return replace(ended.result, trial=continued, checkpoint_at=ended.result.batches_trained)

    def note_what_is_left(self, run: FlowRun[TrialResult]) -> None:
        """After a run without a result, print where its page is, and the effect of --resume."""
        trial, option = self.outcome.trial, self.continuation.option
        committed_at, was_interrupted = self.display.committed_at, run.stopped_by is not None
        # The user's trial is the cause: a repeated run would fail again.
        is_mistake = isinstance(run.failure, TrialError) or (
            isinstance(run.failure, RankFailed) and run.failure.is_trial_mistake
        )
        if trial is not None:
            page, written_at = _report_page(trial)
            if written_at != self.earlier_page:
                console.note(f"HTML report: {page}")
        if committed_at is not None:
            console.note(
                f"the last checkpoint of trial {trial} is at batch {committed_at}; "
                f"to continue from it, {'correct this first, and ' if is_mistake else ''}"
                f"repeat the command with {option}"
            )
        elif was_interrupted and self.continued is not None:
            console.note(f"to continue trial {self.continued}, repeat the command with {option}")
        elif was_interrupted and trial is not None:
            console.note(f"trial {trial} has no checkpoint yet, so --resume does not continue it")

    def _note_ids(self, flow: Any, flow_run: Any, state: Any) -> None:
        from trial_core.processes.machine.run_dirs import trial_id

        flow_run_id = self.outcome.flow_run_id = str(flow_run.id)
        self.outcome.trial = self.continued or trial_id(self.experiment.name, flow_run_id)


def tried(
    experiment: ExperimentConfig,
    observer: Observer,
    micro_batch_samples: int | None = None,
    continued: str | None = None,
    keep: Sequence[str] | None = None,
) -> Ended:
    """Try a trial; delete the files that this wrote if nothing failed. Raises as `try_trial`.

    Args:
        continued: the trial that is only restored, and compared; None to train a new one.
        keep: as of the flow `train`.
    """
    from trial_core.driver.changed_settings import check_keep
    from trial_core.driver.choose_resume_point import resume_points
    from trial_core.driver.drive import try_trial
    from trial_core.driver.run import Given
    from trial_core.processes.machine.run_dirs import run_dir_of, trial_id

    trial = trial_id(f"{experiment.name} test", uuid4().hex)
    logger = Logger(__name__, CRITICAL)  # display and error say it already
    config = with_block(experiment)
    given = Given(
        find_logger=lambda: logger,
        observer=observer,
        micro_batch_samples=micro_batch_samples,
        keep=keep or (),
    )
    if continued is not None:
        check_keep(given.keep)
        given.choose_resume_points = lambda store, _: resume_points(store, config, continued)
    ended = try_trial(config, trial, given, test_mode="compare" if continued else None)
    shutil.rmtree(run_dir_of(trial), ignore_errors=True)
    return ended


def _compared(result: TrialResult) -> str:
    at = f"checkpoint {result.checkpoint_uuid} (batch {result.batches_trained})"
    return "\n".join(result.changes) or f"{at}: nothing has changed since it was saved"


def _tested(result: TrialResult) -> str:
    metrics = text_format.metrics_line(result.validation_metrics or result.training_metrics)
    trained = text_format.plural(result.batches_trained, "batch")
    saved = "a checkpoint saved, restored and deleted"
    if result.checkpoint_uuid is None:
        saved = "no checkpoint saved, so none restored"
    return f"the test has passed: {trained} trained ({metrics or 'no metrics'}), {saved}"


def _display(is_quiet: bool, as_json: bool, preferred: tuple[str, ...]) -> Display:
    if as_json and not is_quiet:  # stdout is for the JSON line alone
        return PlainLines(sys.stderr, preferred=preferred)
    return display_for_stdout(is_quiet, preferred)


def _trial_to_resume(
    store: CheckpointStore, experiment: str, named: str | None, say: Callable[[str], None]
) -> str | None:
    """Return the trial to continue, and print it: `named`, else the experiment's newest, if any.

    Raises:
        ConfigError: the trial `named` has no checkpoint.
        StorageError: no trial is in a storage that has been replaced, or is not mounted.
    """
    if named is None:
        trial = store.newest_trial(experiment)
    elif store.newest(trial := store.trial(named)) is None:
        raise ConfigError(
            f"--trial {named}: no checkpoint of this trial is in {store.url}; `trialflow "
            "checkpoints list` shows trials that have some"
        )
    if trial is None:
        from trial_core.checkpoint.retention.known_storages import refuse_other_storage

        refuse_other_storage(store)
        say(
            f"nothing to resume: no checkpoint of experiment {experiment} in {store.url}; "
            "starting a new trial"
        )
        return None
    from trial_core.checkpoint.retention.trial_owner import describe_last_run

    say(f"continuing trial {trial}, {describe_last_run(store, trial)}")
    return trial


def _report_page(trial: str) -> tuple[Path, int | None]:
    """The trial's HTML report on this machine, and when it was written; None if it was not."""
    from trial_core.processes.machine.run_dirs import run_dir_of

    page = run_dir_of(trial) / "report.html"
    return page, page.stat().st_mtime_ns if page.exists() else None


def _best(store: CheckpointStore, result: TrialResult) -> Manifest | None:
    """Return the trial's best checkpoint, if it is known."""
    from trial_core.driver.summary import best_checkpoint

    try:
        with waiting(f"looking for the best checkpoint in {store.url}"):
            return best_checkpoint(store, result.trial)
    except CheckpointError as error:  # the run has ended well: its summary must appear
        console.warning(f"the best checkpoint is not known: {error}")
        return None


def _summary(
    result: TrialResult,
    seconds: float,
    later_ui: str | None,
    resume_option: str,
    best: Manifest | None = None,
    end: int | None = None,
    next_step: str | None = None,
) -> list[str]:
    """The lines that end a run's output.

    Args:
        best: the trial's best checkpoint.
        next_step: a command that uses the result, for a run that has completed.
        end: the maximum length in batches, if the trial had reached it before.
    """
    from trial_core.driver.result import how_early

    trained = result.batches_trained
    if end is not None:
        ending = f"is already at {trained} of {text_format.plural(end, 'batch')}"
        longer = f"{resume_option} --set searcher.max_length.batches={2 * trained}, for example"
        continue_with: str | None = f"{longer}; without --resume a new trial begins"
    else:
        how = f"{how_early(result)}," if result.stopped_early else "completed"
        ending = f"{how} after {text_format.plural(trained, 'batch')}"
        continue_with = resume_option if result.stop_reason else None
    from trial_core.driver.summary import summary_lines

    return summary_lines(
        f"{result.trial} {ending} ({text_format.duration(seconds)})", result, best,
        continue_with=continue_with, ui=later_ui,
        next_step=None if continue_with else next_step,
    )  # fmt: skip
