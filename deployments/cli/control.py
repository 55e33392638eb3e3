"""`trialflow start`, `suspend`, `resume` and `cancel`: begin a run, end it, let it continue.

As the buttons of Prefect's UI do. A run that no server knows, as that of a script, is cancelled by
SIGTERM to its process on this machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    UNCHANGED,
    Changes,
    Experiment,
    TrialId,
    named_trial,
    read_any_experiment,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import FlowRun, State

FLOWS = ("train", "retrain", "evaluate", "search")
"""The flows whose runs belong to trials or searches: other runs on the server are left alone."""

_TASKS = {
    "search": "search ", "evaluate": "an evaluation", "retrain": "a retraining",
    "script": "a script",
}  # fmt: skip
"""How the tasks begin that `locked_run_dir` notes for them."""

_LATER = {
    "train": "`trialflow train FILE … --resume --trial {}`, with the run's other options, "
    "continues the trial",
    "search": "`trialflow search FILE … --resume --search {}`, with the run's other options, "
    "continues the search",
    "evaluate": "an evaluation stores nothing: to repeat it, start it again",
    "retrain": "a Retry of its run in Prefect continues it, if a deployment has started it; else "
    "`trialflow retrain` begins a new one",
    "script": "the script continues the trial if it is run again with latest_checkpoint",
}

RETRAINING = "retrain "
"""The first word of a retraining's flow run name; the id of its challenger's trial follows."""


def start(
    config: Experiment = DEFAULT_EXPERIMENT,
    /,
    *,
    changes: Changes = UNCHANGED,
    json_: AsJson = False,
) -> None:
    """Have a worker of the Prefect server run an experiment, and return at once.

    The server is that of PREFECT_API_URL, else of a running `trialflow up`. Its deployment
    train/train runs the experiment, or search/search if it searches.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.exceptions import ObjectNotFound

    from trial_core.processes.machine.run_dirs import trial_id
    from trial_core.search.settings import SearchExperiment

    experiment = read_any_experiment(config, changes)
    flow, name = "train", experiment.name
    if isinstance(experiment, SearchExperiment):
        flow, name = "search", f"{name} search"
    parameters = {"config": experiment.model_dump(mode="json")}
    with configured_client() as client:
        with waiting("asking the Prefect server"):
            try:
                deployment = client.read_deployment_by_name(f"{flow}/{flow}")
            except ObjectNotFound:
                raise ConfigError(
                    f"the Prefect server has no deployment {flow}/{flow}: create it with "
                    "`trialflow deploy`"
                ) from None
            run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            trial = trial_id(name, str(run.id))
            client.update_flow_run(run.id, name=trial)  # `cancel` finds it before it begins
        what = f"is scheduled: a worker of {deployment.work_pool_name} starts it"
        _Run(trial, client, run).tell("start", what, json_)


def suspend(trial: TrialId, /, *, json_: AsJson = False) -> None:
    """Have a trial's run save, end and free its slots, until `trialflow resume`.

    For runs of a deployment, which a worker starts again. Other runs: `trialflow cancel`.
    """
    with _run_of(trial) as run:
        from prefect.states import Suspended

        run.ask(Suspended(), "PAUSED")
        run.tell("suspend", f"saves and ends; `trialflow resume {run.trial}` continues it", json_)


def resume(trial: TrialId, /, *, json_: AsJson = False) -> None:
    """Have a worker continue the suspended run of a trial."""
    with _run_of(trial) as run:
        run.ask(None, "SCHEDULED")
        run.tell("resume", "is scheduled: a worker continues it from its last checkpoint", json_)


def cancel(trial: TrialId, /, *, json_: AsJson = False) -> None:
    """Have the run of a trial or a search save and end. `--resume` continues it."""
    with _run_of(trial) as run:
        if run.flow_run is None:
            os.kill(_process_here(run), signal.SIGTERM)
        else:
            from prefect.states import Cancelling

            run.ask(Cancelling(), "CANCELLING", "CANCELLED")
        saves = "" if run.kind == "evaluate" else ", and saves first what it has trained"
        run.tell("cancel", f"ends{saves}; {run.later}", json_)


class _Run(NamedTuple):
    """A run that is not over, of a trial or a search: the server's, or a process.

    Attributes:
        trial: the id of the trial or search.
        holder: the process (``process 7 on node-1``), which has locked `folder`; or empty.
    """

    trial: str
    client: SyncPrefectClient | None
    flow_run: FlowRun | None
    holder: str = ""
    folder: Path = Path()

    @property
    def kind(self) -> str:
        """The name of its flow; or ``script``."""
        if self.flow_run is not None and self.client is not None:
            return self.client.read_flow(self.flow_run.flow_id).name
        from trial_core.processes.machine.run_dirs import task_of

        task = task_of(self.holder)
        return next((kind for kind in _TASKS if task.startswith(_TASKS[kind])), "train")

    @property
    def later(self) -> str:
        """How to continue it after its end."""
        if self.flow_run is not None and self.flow_run.parameters.get("part") is not None:
            return "the search that it belongs to trains it no further"
        return _LATER[self.kind].format(self.trial)

    def tell(self, command: str, what: str, as_json: bool) -> None:
        """Print what becomes of the run."""
        if as_json:
            run_id = None if self.flow_run is None else str(self.flow_run.id)
            print_json(command, {"trial": self.trial, "flow_run_id": run_id, "message": what})
        else:
            print(f"{self.trial} {what}")

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
    """Yield the run of the trial or search with this id, or with the only id that begins so.

    Raises:
        ConfigError: no trial, or several; or none of them has a run that is not over; or its
            process trains other trials of a search, too.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.settings import get_current_settings

    from trial_core.processes.machine.run_dirs import home_folder
    from trialflow.flows.server.embedded_server import using_server_of_up

    here = _held_here(named)
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
            run = _Run(trial, client, runs.get(trial), *here.get(trial, ()))
            if run.flow_run is None and run.kind == "search" and run.folder.name == trial:
                search = _search_of(run.holder)
                raise ConfigError(
                    f"trial {trial} is trained by {run.holder}, and a signal would end the whole "
                    f"search: `trialflow cancel {search}` does that, and its trials save first. To "
                    "end this trial alone, repeat the command with PREFECT_API_URL and "
                    "PREFECT_API_AUTH_STRING of the search's server, which it named at its start"
                )
            yield run


def _held_here(named: str) -> dict[str, tuple[str, Path]]:
    """Return the processes of this machine that have trials or searches whose ids begin so.

    Each with a folder that it has locked; that of a search is the folder of one of its trials.
    """
    from trial_core.processes.machine.run_dirs import LOCK, holder_of, home_folder

    found: dict[str, tuple[str, Path]] = {}
    for lock in home_folder().glob(f"*/{LOCK}"):
        with suppress(FileNotFoundError):  # just deleted
            ids = lock.parent.name, _search_of(lock.read_text(errors="replace"))
            wanted = [each for each in ids if each and each.startswith(named)]
            if wanted and (holder := holder_of(lock.parent)):
                found |= dict.fromkeys(wanted, (holder, lock.parent))
    return found


def _search_of(holder: str) -> str:
    """Return the search in a text of `holder_of`, or empty."""
    from trial_core.processes.machine.run_dirs import task_of

    return task_of(holder).partition(_TASKS["search"])[2]


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

    from trial_core.processes.machine.run_dirs import LOCK

    lock = os.path.realpath(run.folder / LOCK)
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
