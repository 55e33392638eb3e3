"""Plays histories in one process: threads whose requests to a storage in memory take turns.

The order of requests is drawn from a seed. It needs no server, so there can be thousands of them;
nothing fails meanwhile. `scene` has the real gateway.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

from tests.linearizability.actor import SUBJECTS
from tests.linearizability.history import Recorder
from tests.linearizability.scene import check_histories, histories, prepare
from tests.support.interleaving import interleave_all
from trial_core.checkpoint.retention import claims
from trial_core.checkpoint.store import CheckpointStore

TURNS = (0.5, 0.2, 0.1, 0.05, 0.03)
"""How likely it is that another actor has the next request: one of them for a whole history."""


def play_interleaved(
    subject: str, seed: int, store: CheckpointStore, folder: Path, actors: int = 4
) -> int:
    """Play one round and check its histories; return their number.

    Args:
        store: empty, in memory.
        folder: empty, for the histories.

    Raises:
        NotLinearizable: a history has no order; shows it.
    """
    choose = random.Random(seed)
    keys = prepare(subject, store, f"round-{seed}")
    with ExitStack() as recorders:

        def act(number: int, store: CheckpointStore) -> None:
            recorder = Recorder(folder / f"{number}.jsonl", f"{number}")
            recorders.callback(recorder.close)
            own = random.Random(f"{seed} {number}")
            actor = SUBJECTS[subject].Actor(store, recorder, own, number)
            for _ in range(8):
                actor.act(keys)

        acts = [partial(act, number) for number in range(actors)]
        with mock.patch.object(claims, "DELETION_WAIT_SECONDS", 0):
            outcomes = interleave_all(store.url, acts, _turns(choose, actors))
    assert outcomes == [None] * actors, outcomes
    events = histories(folder, keys)
    check_histories(subject, events)
    return len(events)


def _turns(choose: random.Random, actors: int) -> Iterator[int]:
    turn, chance = 0, choose.choice(TURNS)
    while True:
        if choose.random() < chance:
            turn = choose.randrange(actors)
        yield turn
