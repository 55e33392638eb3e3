"""Runs a flow in this process, on the Prefect server that it finds or on an embedded one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trial_core.common import text_format
from trial_core.errors import Stopped, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import StoragePlace
from trialflow.deployments.cli.run_display import Display
from trialflow.deployments.cli.signals import Terminated, stoppable

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from trial_core.config import ExperimentConfig
    from trialflow.flows.server.embedded_server import PrefectApi

Result = TypeVar("Result")
StateHook = Callable[..., None]  # called by Prefect with flow, flow run and state
# Where `prefect server start` serves by default.
DEFAULT_UI = "http://127.0.0.1:4200"
SET_WITH_A_SERVER = ("PREFECT_", "DO_NOT_TRACK", "NO_PROXY", "no_proxy")
"""Environment variables of ranks that are known once a server runs."""


class FlowRun(Generic[Result]):
    """One flow run of this process, with its display, its errors and its exit code.

    Args:
        experiment: the experiment; an error names the line in its code folder.

    Attributes:
        result: the flow's result, or None if it did not return.
        failure: the error that ended the flow.
        stopped_by: the signal that ended the flow: ``Ctrl-C`` or ``SIGTERM``.
        flow_run_id: Prefect's id, once the flow runs.
        later_ui: the UI of the flow run's page after this process has ended.
    """

    def __init__(self, display: Display, experiment: ExperimentConfig) -> None:
        self.result: Result | None = None
        self.failure: TrialflowError | None = None
        self.stopped_by: str | None = None
        self.flow_run_id: str | None = None
        self.later_ui: str | None = None
        self._display = display
        self._experiment = experiment
        self._is_on_terminal = sys.stdout.isatty()

    def run(self, call: Callable[[StateHook], Result | State[Any]], has_server: bool = True) -> int:
        """Run the flow; report its failure on stderr; return the exit code.

        Args:
            call: imports the flow and calls it with the given ``on_running`` hook. If it returns a
                state, or None, the run has ended without a result.
            has_server: True if the flow needs a Prefect server. If not, the hook does nothing.
        """
        try:
            with stoppable(self._display.stopping):
                result = (self._run_on_server if has_server else self._run_alone)(call)
        except KeyboardInterrupt:
            return self._stopped("Ctrl-C", console.INTERRUPTED)
        except Terminated:
            return self._stopped("SIGTERM", console.TERMINATED)
        except Stopped as stop:
            self.failure = stop
            console.note(str(stop))
            return console.exit_code(stop, self._display.has_trained)
        except TrialflowError as failure:
            self.failure = failure
            console.report(failure, code_folder=self._experiment.code)
            return console.exit_code(failure, self._display.has_trained)
        self.result = result
        return 0

    def note_unsent(self, place: StoragePlace) -> None:
        """Print which trackers lack records of the trained trial, and the command that sends them.

        Args:
            place: the storage of the experiment.
        """
        from msgspec import MsgspecError

        from trial_core.observe.trackers.sender import unsent
        from trial_core.observe.trackers.tracking import trackers_of
        from trial_core.processes.machine.run_dirs import run_dir_of

        trial, trackers = self._display.trial, trackers_of(self._experiment)
        if trial is None or not trackers:
            return
        with suppress(OSError, MsgspecError):  # the run's log says so
            for name, count in unsent(run_dir_of(trial), [*trackers]).items():
                console.warning(
                    f"tracker {name} has not got {text_format.plural(count, 'record')}; the "
                    "trial's next run sends them, or: "
                    f"trialflow runs sync {trial}{place.options}"
                )

    def _run_alone(self, call: Callable[[StateHook], Any]) -> Result:
        with self._display, contextlib.redirect_stdout(sys.stderr):
            self._display.waiting_for("starting the ranks")
            result: Result = call(lambda *_: None)
            return result

    def _run_on_server(self, call: Callable[[StateHook], Result | State[Any]]) -> Result:
        # Output of libraries goes to stderr: stdout is for the display and the result.
        away = contextlib.redirect_stdout(sys.stderr)
        waiting_for = self._display.waiting_for
        with ExitStack() as until_the_end:
            until_the_end.enter_context(self._display)  # before the imports, which take seconds
            from trial_core.driver.placement import importing_ahead
            from trialflow.flows.server.embedded_server import is_unauthorized, prefect_api
            from trialflow.flows.server.prefect_server import PrefectServerError

            until_the_end.enter_context(importing_ahead(self._experiment, SET_WITH_A_SERVER))
            api = until_the_end.enter_context(prefect_api(waiting_for=waiting_for))
            until_the_end.enter_context(away)
            import httpx
            from prefect.client.schemas.objects import State
            from prefect.exceptions import Abort, CancelledRun, Pause

            from trial_core.observe.events.observers import observing

            self._display.waiting_for("starting the ranks")
            try:
                with observing(self._display):
                    result = call(self._announcing(api))
                if result is None or isinstance(result, State):
                    raise Stopped(f"the run ended without a result: {result}")
                return result
            except KeyboardInterrupt:  # also as an Abort
                raise
            except (Abort, CancelledRun, Pause) as stop:
                raise Stopped(str(stop) or "the run was stopped in Prefect") from stop
            except httpx.HTTPError as error:  # in this process only Prefect's client raises these
                if is_unauthorized(error):
                    raise PrefectServerError(
                        f"the Prefect server at {api.api_url} was started again, with another "
                        "password, while this run was on it: its page does not show how the run "
                        "ended. Checkpoints are not affected"
                    ) from error
                log = f"; its log: {api.server_log}" if api.server_log else ""
                raise PrefectServerError(
                    f"the Prefect server at {api.api_url} failed during the run "
                    f"({type(error).__name__}: {error}){log}"
                ) from error

    def _announcing(self, api: PrefectApi) -> StateHook:
        """The hook that notes the flow run's id and shows its page."""

        def announce(flow: Any, flow_run: Any, state: Any) -> None:
            from trialflow.tasks.ui_page import ui_page  # imports Prefect

            self.flow_run_id = str(flow_run.id)
            if api.is_of_up:
                self._display.say(f"on the server of `trialflow up`, {api.api_url}")
            if api.ui_url and (page := ui_page(f"runs/flow-run/{self.flow_run_id}")):
                self.later_ui = page
                if api.is_embedded:
                    later_page = page.replace(api.ui_url, DEFAULT_UI)
                    self.later_ui = f"prefect server start, then {later_page}"
                if api.login is not None and self._is_on_terminal:
                    page = api.login.link(page)  # others may read a log file
                elif api.login is not None:
                    page = f"{page} (password: in {api.login.path})"
                self._display.say(f"watch it at {page}")

        return announce

    def _stopped(self, signal_name: str, exit_code: int) -> int:
        self.stopped_by = signal_name
        batches = self._display.batches
        after = f" after {text_format.plural(batches, 'batch')}" if batches else ""
        console.note(f"stopped by {signal_name}{after}")
        return exit_code
