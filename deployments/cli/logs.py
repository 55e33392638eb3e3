"""`trialflow logs`: the printed output of a rank of a trial."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError
from trialflow.deployments.cli.experiment_options import (
    ConfigFile,
    StorageOption,
    TrialId,
    named_trial,
    open_store,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore

FOLLOW_SECONDS = 0.5
PIECE_BYTES = 4 * 2**20


def logs(
    trial: TrialId,
    /,
    *,
    rank: Annotated[int, Parameter(help="The rank's number.")] = 0,
    follow: Annotated[
        bool,
        Parameter(
            name=["--follow", "-f"], help="Print what is added, until the run on this machine ends."
        ),
    ] = False,
    config: ConfigFile = None,
    storage: StorageOption = None,
    json_: AsJson = False,
) -> None:
    """Print the complete log of a rank: from the run's folder, else from the storage."""
    from trial_core.processes.machine.run_dirs import holder_of, home_folder

    if follow and json_:
        raise ConfigError("--json prints a whole log: leave out --follow")
    name = f"rank-{rank}.log"
    here = {path.parents[1].name: path for path in home_folder().glob(f"*/logs/{name}")}
    found = named_trial(trial, here)
    with ExitStack() as opened:
        if found is None:
            fetched = opened.enter_context(tempfile.TemporaryFile())
            store = open_store(config, storage)
            with waiting(f"reading {store.url}"):
                found = _fetch(store, trial, name, fetched)
            fetched.seek(0)
            file: IO[str] = io.TextIOWrapper(fetched, encoding="utf-8", errors="replace")
        else:
            file = opened.enter_context(here[found].open(encoding="utf-8", errors="replace"))
            while follow and holder_of(here[found].parents[1]) is not None:
                _print(file)
                time.sleep(FOLLOW_SECONDS)
        if json_:
            print_json("logs", {"trial": found, "rank": rank, "text": file.read()})
        else:
            _print(file)


def _print(file: IO[str]) -> None:
    """Print the rest of a file. A progress bar's carriage returns are ends of lines."""
    for line in file:
        sys.stdout.write(text_format.clean(line))
    sys.stdout.flush()


def _fetch(store: CheckpointStore, named: str, name: str, file: IO[bytes]) -> str:
    """Fetch a log from its newest folder, whose name begins with its time; return the trial.

    Raises:
        ConfigError: there is none.
    """
    from trial_core.checkpoint import layout
    from trial_core.checkpoint.storage.parallel import CancelSignal

    trial = store.trial(named)
    stored = store.storage.sizes(f"{layout.run_folder(trial)}/logs")
    key = max((key for key in stored if key.endswith(f"/{name}")), default=None)
    if not stored and trial not in (known := store.trials()):
        there = text_format.first_few(known) or "none"
        raise ConfigError(
            f"no trial {named} has run on this machine, or has saved or stored a log in "
            f"{store.url}; trials there: {there}"
        )
    if key is None:
        others = ", ".join(sorted({key.rpartition("/")[2] for key in stored}))
        raise ConfigError(
            f"trial {named} has no {name} on this machine or in {store.url}, which has: "
            f"{others or 'no log of it'}. A script that you start prints where its launcher says"
        )
    for start in range(0, stored[key], PIECE_BYTES):
        view = memoryview(bytearray(min(PIECE_BYTES, stored[key] - start)))
        read = store.storage.read_into(key, start, view, CancelSignal())
        file.write(view[: read.size_bytes])
    return trial
