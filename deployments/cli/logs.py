"""`trialflow logs`: the printed output of a rank of a trial."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError
from trialflow.deployments.cli.experiment_options import HERE, StoragePlace, TrialId, named_trial
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
    rank: int = 0,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> None:
    """Print the complete log of a rank: from the run's folder, else from the storage.

    Args:
        rank: The rank's number.
        follow: Print what is added, until the run on this machine ends.
    """
    from trial_core.processes.machine.run_dirs import holder_of

    if follow and json_:
        raise ConfigError("--json prints a whole log: leave out --follow")
    with _opened(trial, rank, place.open_store) as (found, file, folder):
        while follow and folder is not None and holder_of(folder) is not None:
            _print(file)
            time.sleep(FOLLOW_SECONDS)
        if json_:
            print_json("logs", {"trial": found, "rank": rank, "text": file.read()})
        else:
            _print(file)


def end_of_log(trial: str, rank: int, lines: int, place: StoragePlace) -> dict[str, Any]:
    """The last lines of a rank's log, for programs: of a trial that the storage knows."""
    from trial_core.checkpoint import layout

    store = place.open_store()
    saved = store.trials()

    def is_known(trial: str) -> bool:  # one that has saved nothing yet has an attempt
        return trial in saved or bool(store.storage.sizes(layout.attempts_folder(trial)))

    with _opened(trial, rank, lambda: store, is_known) as (found, file, _):
        return {"trial": found, "rank": rank, "text": "".join(deque(file, maxlen=lines))}


@contextmanager
def _opened(
    trial: str,
    rank: int,
    find_store: Callable[[], CheckpointStore],
    is_shown: Callable[[str], bool] = lambda trial: True,
) -> Iterator[tuple[str, IO[str], Path | None]]:
    """The id of a trial, its log, and its run's folder; None if this machine has fetched the log.

    Args:
        is_shown: False for trials whose logs on this machine are left out.
    """
    from trial_core.processes.machine.run_dirs import home_folder

    name = f"rank-{rank}.log"
    folders = {log.parents[1].name: log.parents[1] for log in home_folder().glob(f"*/logs/{name}")}
    here = [each for each in folders if each.startswith(trial) and is_shown(each)]
    with ExitStack() as opened:
        if (found := named_trial(trial, here)) is not None:
            log = (folders[found] / "logs" / name).open(encoding="utf-8", errors="replace")
            yield found, opened.enter_context(log), folders[found]
            return
        fetched = opened.enter_context(tempfile.TemporaryFile())
        store = find_store()
        with waiting(f"reading {store.url}"):
            found = _fetch(store, trial, name, fetched)
        fetched.seek(0)
        yield found, io.TextIOWrapper(fetched, encoding="utf-8", errors="replace"), None


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
