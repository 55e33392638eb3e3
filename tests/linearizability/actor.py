"""A process of a history: does random operations on a storage, a round for each line of its input.

Run as ``python -m tests.linearizability.actor HISTORY NAME``; see `scene`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from s3fs import S3FileSystem

from tests.linearizability import owners, protections, registry, trials
from tests.linearizability.history import Recorder
from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.intents import intents
from trial_core.checkpoint.numbered_log import NumberedLog
from trial_core.checkpoint.retention import claims, deletion_markers, pruning
from trial_core.checkpoint.store import CheckpointStore

SUBJECTS: Mapping[str, ModuleType] = {
    "trials": trials, "owners": owners, "protections": protections, "registry": registry
}  # fmt: skip
"""What histories are about: a module each, with the model and the actor."""


def _overwrite(log: Any, entry: Any) -> None:
    with mock.patch.object(log._storage, "create", log._storage.write):
        _append(log, entry)


_append = NumberedLog.append
MISTAKES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "an append overwrites": lambda: mock.patch.object(NumberedLog, "append", _overwrite),
    "no fence": lambda: mock.patch.object(Fence, "check"),
    "a sweep and no tombstone": lambda: mock.patch(
        "trial_core.checkpoint.intents._prevent_commit", return_value=True
    ),
    "a pin does not look for deletions": lambda: mock.patch.object(deletion_markers, "check_stays"),
    "a prune does not look again": lambda: mock.patch(
        "trial_core.checkpoint.retention.pruning._why_needed_now", return_value=None
    ),
    "an intent keeps its base for ever": lambda: mock.patch.object(
        pruning, "uploads", lambda storage, trial: intents(storage, trial)
    ),
    "a commit does not look for swept files": lambda: mock.patch.object(
        Fence, "is_newest", return_value=True
    ),
}
"""Mistakes that may be planted in the product: each is a race that its tests must find."""


def main(history: str, name: str) -> None:
    """Act in each round that the input describes, and answer with a line at its end."""
    recorder = Recorder(Path(history), name)
    for line in sys.stdin:
        play = json.loads(line)
        claims.DELETION_WAIT_SECONDS = 0
        # Otherwise s3fs hides most failures, and each takes seconds.
        S3FileSystem.retries = play["retries"]
        MISTAKES[play["mistake"]]().__enter__()
        store = CheckpointStore(play["url"], play["options"])
        choose = random.Random(play["seed"])
        actor = SUBJECTS[play["subject"]].Actor(store, recorder, choose, play["process"])
        for _ in range(play["operations"]):
            actor.act(play["keys"])
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
