"""Concurrent promotions, by threads and by processes.

As a program this module is one of the processes: it reads promotions, one line each, and prints
their outcomes (``python -m tests.trial_core.models.promotion_race '{"url": …, "options": {…}}'``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

from tests.trial_core.models.helpers import MODEL, aliases, check_log, held_versions
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import PromotionConflict
from trial_core.models.registry import Registry

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 120.0

Outcome = tuple[bool, str]
"""Whether the promotion succeeded, and the conflict if not."""
PromoteAll = Callable[[Sequence[int], int | None], list[Outcome]]
"""Promotes all these versions at once, each expecting that champion."""


def race(store: CheckpointStore, promote_all: PromoteAll, racers: int, rounds: int) -> None:
    """Promote several versions at once, in several rounds.

    In each round one succeeds, and the others name it. The log has exactly the successful moves.
    """
    registry = Registry(store)
    numbers = [version.number for version in registry.versions(MODEL)]
    champion: int | None = None
    winners: list[int] = []
    for _ in range(rounds):
        racing = [number for number in numbers if number != champion][:racers]
        outcomes = promote_all(racing, champion)
        won = [number for number, (is_won, _) in zip(racing, outcomes, strict=True) if is_won]
        assert len(won) == 1, outcomes
        assert aliases(registry) == (won[0], champion)
        for is_won, message in outcomes:
            assert is_won or f"promoted version {won[0]}" in message, outcomes
        winners.append(won[0])
        champion = won[0]
        numbers.sort(key=champion.__eq__)  # the winner goes last
    moves = registry.moves(MODEL)
    check_log(moves)
    assert [move.champion for move in moves] == winners
    assert held_versions(registry) == {each for each in aliases(registry) if each is not None}


@contextmanager
def threads(stores: Sequence[CheckpointStore]) -> Iterator[PromoteAll]:
    """One thread per store."""
    with ThreadPoolExecutor(len(stores)) as pool:

        def promote_all(racing: Sequence[int], champion: int | None) -> list[Outcome]:
            barrier = Barrier(len(racing))

            def one(store: CheckpointStore, number: int) -> Outcome:
                barrier.wait(LIMIT_SECONDS)
                return promote(store, number, champion)

            return list(pool.map(one, stores, racing, timeout=LIMIT_SECONDS))

        yield promote_all


@contextmanager
def processes(url: str, options: dict[str, Any], count: int) -> Iterator[PromoteAll]:
    """That many processes."""
    spec = json.dumps({"url": url, "options": options})
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, spec],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(count)
    ]  # fmt: skip

    def promote_all(racing: Sequence[int], champion: int | None) -> list[Outcome]:
        for process, number in zip(started, racing, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps([number, champion]) + "\n")
            process.stdin.flush()
        return [_read_outcome(process) for process in started]

    try:
        yield promote_all
    finally:
        for process in started:
            process.communicate()


def promote(store: CheckpointStore, number: int, champion: int | None) -> Outcome:
    """Promote a version that expects this champion."""
    try:
        Registry(store).promote(MODEL, number, expected_champion=champion)
    except PromotionConflict as error:
        return False, str(error)
    return True, ""


def _read_outcome(process: subprocess.Popen[str]) -> Outcome:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a promoting process ended with {process.wait()}"
    is_won, message = json.loads(line)
    return is_won, message


def main(spec: str) -> None:
    """Promote what stdin names."""
    store = CheckpointStore(**json.loads(spec))
    for line in sys.stdin:
        print(json.dumps(promote(store, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
