"""`trialflow suspend`, `resume` and `cancel`: end a trial's run, and let it continue.

As the buttons of Prefect's UI do. A run that no server knows, as that of a script, is cancelled by
SIGTERM to its process on this machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client
from trialflow.deployments.cli.experiment_options import TrialId, named_trial
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun, State

FLOWS = ("train", "retrain", "evaluate", "search")
"""The flows whose runs belong to trials or searches: other runs on the server are left alone."""

RETRAINING = "retrain "
"""The first word of a retraining's flow run name; the id of its challenger's trial follows."""


def suspend(trial: TrialId, /) -> None:
    """Have a trial's run save, end and free its slots, until `trialflow resume`.

    For runs of a deployment, which a worker starts again. Other runs: `trialflow cancel`.
    """
    with _run_of(trial) as run:
        from prefect.states import Suspended

        run.ask(Suspended(), "PAUSED")
        print(f"{run.trial} saves and ends; `trialflow resume {run.trial}` continues it")


def resume(trial: TrialId, /) -> None:
    """Have a worker continue the suspended run of a trial."""
    with _run_of(trial) as run:
        run.ask(None, "SCHEDULED")
        print(f"{run.trial} is scheduled: a worker continues it from its last checkpoint")


def cancel(trial: TrialId, /) -> None:
    """Have a trial's run save and end. `trialflow train --resume` continues the trial."""
    with _run_of(trial) as run:
        if run.flow_run is None:
            os.kill(_process_here(run), signal.SIGTERM)
        else:
            from prefect.states import Cancelling

            run.ask(Cancelling(), "CANCELLING", "CANCELLED")
        print(f"{run.trial} ends, and saves first what it has trained; {run.later}")


class _Run(NamedTuple):
    """A trial's run that is not over: the server's, or a process (``process 7 on node-1``)."""

    trial: str
    client: SyncPrefectClient | None
    flow_run: FlowRun | None
    holder: str

    @property
    def later(self) -> str:
        given = self.flow_run.parameters if self.flow_run is not None else {}
        if given.get("part") is not None:
            return "the search that it belongs to trains it no further"
        if "search" in given:
            return f"`trialflow search FILE --resume --search {self.trial}` continues the search"
        return f"`trialflow train --resume --trial {self.trial}` continues the trial"

    def ask(self, state: State[Any] | None, *expected: str) -> None:
        """Set the flow run's state, or resume it if `state` is None.

        Raises:
            ConfigError: the server refuses, and its state does not have an expected type.
        """
        result, reason, now = None, "no Prefect server knows it", "alive"
        if self.client is not None and self.flow_run is not None:
            run_id, now = self.flow_run.id, self.flow_run.state_name or ""
            resume, change = self.client.resume_flow_run, self.client.set_flow_run_state
            with waiting("asking the Prefect server"):
                answer = resume(run_id) if state is None else change(run_id, state)
            result, reason = answer.state, getattr(answer.details, "reason", "")
        if result is None or result.type.value not in expected:
            raise ConfigError(
                f"not done: the run of trial {self.trial} is {now}, and {reason}. "
                f"`trialflow cancel {self.trial}` saves, too; after the end of a run {self.later}"
            )


@contextmanager
def _run_of(named: str) -> Iterator[_Run]:
    """Yield the run of the trial with this id, or with the only id that begins so.

    Raises:
        ConfigError: no trial, or several; or none of them has a run that is not over.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.settings import get_current_settings

    from trial_core.processes.machine.run_dirs import LOCK, holder_of, home_folder
    from trialflow.flows.server.embedded_server import using_server_of_up

    folders = [path.parent for path in home_folder().glob(f"*/{LOCK}")]
    folders = [each for each in folders if each.name.startswith(named)]
    here = {each.name: holder for each in folders if (holder := holder_of(each))}
    with using_server_of_up(console.note):
        url = get_current_settings().api.url
        with configured_client() if url else nullcontext() as client:
            with waiting("asking the Prefect server"):
                runs = _flow_runs(client, named) if client else {}
            trial = named_trial(named, [*runs, *here])
            if trial is None:
                raise ConfigError(
                    f"no run of a trial {named} is waiting, running or suspended: none at "
                    f"{url or 'a Prefect server (PREFECT_API_URL is not set)'}, and none of this "
                    f"machine in {home_folder()} (TRIALFLOW_HOME)"
                )
            yield _Run(trial, client, runs.get(trial), here.get(trial, ""))


def _flow_runs(client: SyncPrefectClient, named: str) -> dict[str, FlowRun]:
    """Return the flow runs that are not over, by trial; of each trial the last started one."""
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.client.schemas.objects import TERMINAL_STATES
    from prefect.client.schemas.sorting import FlowRunSort

    is_over = {"state": {"type": {"not_any_": list(TERMINAL_STATES)}}}
    wanted = FlowRunFilter.model_validate({"name": {"like_": named}, **is_over})
    of_trials = FlowFilter.model_validate({"name": {"any_": [*FLOWS]}})
    found = client.read_flow_runs(
        flow_filter=of_trials, flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC
    )
    return {each.name.removeprefix(RETRAINING): each for each in found}


def _process_here(run: _Run) -> int:
    """Return the process that holds the lock of the run's folder.

    Raises:
        ConfigError: it is on another machine or another user's, or a worker would start it again.
    """
    import psutil

    from trial_core.processes.machine.run_dirs import LOCK, run_dir_of

    lock = os.path.realpath(run_dir_of(run.trial) / LOCK)
    process, files, variables = None, [], {}
    with suppress(psutil.Error, ValueError, IndexError):
        process = psutil.Process(int(run.holder.split()[1]))
        files, variables = process.open_files(), process.environ()
    if process is None or lock not in (os.path.realpath(each.path) for each in files):
        raise ConfigError(
            f"trial {run.trial} is trained by {run.holder}, which cannot be asked from here: give "
            "this command there, as the same user"
        )
    if "PREFECT__FLOW_RUN_ID" in variables:
        raise ConfigError(
            f"trial {run.trial} is a run of a Prefect server, which would start it again after a "
            "signal: set PREFECT_API_URL to that server"
        )
    return process.pid
