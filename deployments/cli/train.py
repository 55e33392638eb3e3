"""`trialflow train`: run the flow in this process, and show how it goes."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import Stopped, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import Overrides, Storage, read_experiment
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.run_display import Display, PlainLines, display_for_stdout
from trialflow.deployments.cli.signals import Terminated, stoppable

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig
    from trialflow.flows.server.embedded import PrefectApi
    from trialflow.flows.train import TrialResult

# Where `prefect server start` serves by default.
DEFAULT_UI = "http://127.0.0.1:4200"


def train(
    config: Path,
    /,
    *,
    set_: Overrides = None,
    storage: Storage = None,
    resume: Annotated[
        bool,
        Parameter(help="Go on with the newest trial of this experiment, from its last checkpoint."),
    ] = False,
    quiet: Annotated[bool, Parameter(help="Print only the summary, or what went wrong.")] = False,
    json_: Annotated[
        bool,
        Parameter(
            name="--json",
            negative=(),
            help="Print the result to stdout, as one line of JSON; all else to stderr.",
        ),
    ] = False,
) -> int:
    """Train an experiment's trial on this machine.

    Uses the Prefect server that PREFECT_API_URL names, else one that lives for the run alone.

    Parameters
    ----------
    config
        The experiment file (YAML).
    """
    with JsonResult(is_printed=json_) as outcome:
        experiment = read_experiment(config, set_ or [], storage)
        preferred = (experiment.searcher.metric, "loss")
        command = _Command(experiment, _display(quiet, json_, preferred), outcome)
        return command.run_to_the_end(resume)


def _display(quiet: bool, as_json: bool, preferred: tuple[str, ...]) -> Display:
    if as_json and not quiet:  # for programs: stdout is theirs
        return PlainLines(sys.stderr, preferred=preferred)
    return display_for_stdout(quiet, preferred)


class _Command:
    """One `trialflow train`."""

    def __init__(self, experiment: ExperimentConfig, display: Display, outcome: JsonResult) -> None:
        self._experiment = experiment
        self._display = display
        self._outcome = outcome
        self._began = time.monotonic()
        outcome.progress = display

    def run_to_the_end(self, resume: bool) -> int:
        """Train, and say how it ended; the exit code."""
        try:
            with stoppable(self._display.stopping):
                self._run(resume)
        except KeyboardInterrupt:
            return self._stopped("Ctrl-C", console.INTERRUPTED)
        except Terminated:
            return self._stopped("SIGTERM", console.TERMINATED)
        except TrialflowError as failure:
            return self._failed(failure)
        return 0

    def _run(self, resume: bool) -> None:
        from trial_core.checkpoint.store import CheckpointStore

        place = self._experiment.checkpoint_storage
        store = self._outcome.store = CheckpointStore(place.url, place.options)
        # Again in the flow; here a storage that is of no use is known before a server starts.
        store.check_writable()
        trial = self._trial_to_resume(store) if resume else None
        self._display.waiting_for("starting Prefect")
        with self._display, _prefect_api() as api:
            self._display.waiting_for("starting the ranks")
            result = self._run_flow(api, trial)
        self._outcome.completed(result)
        summary = "\n".join(self._summary(result, api))
        print(summary, file=self._outcome.stream, flush=True)

    def _trial_to_resume(self, store: CheckpointStore) -> str | None:
        trial = store.newest_trial(self._experiment.name)
        if trial is None:
            self._display.say(
                f"nothing to resume: no checkpoint of experiment {self._experiment.name} in "
                f"{store.url}; starting anew"
            )
        return trial

    def _run_flow(self, api: PrefectApi, trial: str | None) -> TrialResult:
        import httpx
        from prefect.exceptions import Abort, CancelledRun, Pause

        from trial_core.run.observer import observing
        from trial_core.run.run_dirs import trial_id
        from trialflow.flows.server.prefect_server import PrefectServerError
        from trialflow.flows.train import TrialResult
        from trialflow.flows.train import train as train_flow

        def announce(flow: Any, flow_run: Any, state: Any) -> None:
            flow_run_id = self._outcome.flow_run_id = str(flow_run.id)
            self._outcome.trial = trial or trial_id(self._experiment.name, flow_run_id)
            if api.ui_url:
                ui_url = _newer_ui(api.ui_url) if api.is_embedded else api.ui_url
                self._display.say(f"watch it at {_page(ui_url, flow_run_id)}")

        flow = train_flow.with_options(on_running=[announce])
        try:
            with observing(self._display):
                result = flow(self._experiment, trial=trial)
        except (Abort, CancelledRun, Pause) as stop:
            raise Stopped("the run was stopped in Prefect") from stop
        except httpx.HTTPError as error:  # only Prefect's client raises these in this process
            log = f"; its log: {api.server_log}" if api.server_log else ""
            raise PrefectServerError(
                f"the Prefect server at {api.api_url} failed during the run "
                f"({type(error).__name__}: {error}){log}"
            ) from error
        if not isinstance(result, TrialResult):
            raise Stopped(f"the run ended without a result: {result}")
        return result

    def _summary(self, result: TrialResult, api: PrefectApi) -> list[str]:
        why = result.stop_reason or "as the trial asked"
        how = f"stopped early, {why}," if result.stopped_early else "completed"
        seconds = text_format.duration(time.monotonic() - self._began)
        batches = text_format.plural(result.batches_trained, "batch")
        # Pairs: a metric may be called "report".
        facts = [
            *(
                (text_format.clean(name), text_format.one_line(text_format.number(value)))
                for name, value in result.validation_metrics.items()
            ),
            ("checkpoint", result.checkpoint_url),
            ("to go on", "--resume" if result.stop_reason else None),
            ("report", result.report_path),
            ("logs", result.run_dir and str(Path(result.run_dir, "logs"))),
            ("UI", self._where_in_ui(api)),
        ]
        width = max(len(name) for name, _ in facts)
        return [
            f"{result.trial} {how} after {batches} ({seconds})",
            *(f"  {name:<{width}}  {fact}" for name, fact in facts if fact is not None),
        ]

    def _where_in_ui(self, api: PrefectApi) -> str | None:
        flow_run_id = self._outcome.flow_run_id
        if flow_run_id is None:
            return None
        if not api.is_embedded:
            return _page(api.ui_url, flow_run_id) if api.ui_url else None
        return f"prefect server start, then {_page(_newer_ui(DEFAULT_UI), flow_run_id)}"

    def _failed(self, failure: TrialflowError) -> int:
        """Say why the run failed; the exit code."""
        console.report(failure, code_folder=self._experiment.code)
        self._say_how_to_go_on()
        code = console.exit_code(failure, self._display.has_trained)
        self._outcome.failed(failure, code)
        return code

    def _stopped(self, by: str, code: int) -> int:
        """Say that the run was stopped; the exit code."""
        batches = self._display.batches
        when = (
            f"after {text_format.plural(batches, 'batch')}" if batches else "before the first batch"
        )
        console.error(f"stopped by {by} {when}")
        self._say_how_to_go_on()
        self._outcome.stopped(by)
        return code

    def _say_how_to_go_on(self) -> None:
        committed_at = self._display.committed_at
        if committed_at is not None:
            console.note(
                f"the last checkpoint is that of batch {committed_at}; to go on from it, give "
                "--resume"
            )


def _prefect_api() -> AbstractContextManager[PrefectApi]:
    from trialflow.flows.server.embedded import prefect_api

    return prefect_api()


def _page(ui_url: str, flow_run_id: str) -> str:
    return f"{ui_url.rstrip('/')}/runs/flow-run/{flow_run_id}"


def _newer_ui(ui_url: str) -> str:
    """The UI of this very installation that draws a report's curves, where Prefect has it."""
    import prefect

    return f"{ui_url.rstrip('/')}/v2" if hasattr(prefect, "__ui_v2_static_path__") else ui_url
