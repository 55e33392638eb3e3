"""Several who promote at the same moment: threads, and processes of their own.

As a program it is one of the processes: it reads what to promote, a line a round, and says how that
went (``python -m tests.trial_core.models.racing '{"url": …, "options": {…}}'``).
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
"""Whether it won, and what the conflict says if not."""
Promote = Callable[[Sequence[int], int | None], list[Outcome]]
"""Promotes all these versions at once, each found better than that champion."""


def race(store: CheckpointStore, promote: Promote, racers: int, rounds: int) -> None:
    """Have so many versions race for the alias, round after round.

    In each round one wins, and the others name it. In the end all moves are those of the winners.
    """
    registry = Registry(store)
    numbers = [version.number for version in registry.versions(MODEL)]
    champion: int | None = None
    winners: list[int] = []
    for _ in range(rounds):
        wanted = [number for number in numbers if number != champion][:racers]
        outcomes = promote(wanted, champion)
        won = [number for number, (is_won, _) in zip(wanted, outcomes, strict=True) if is_won]
        assert len(won) == 1, outcomes
        assert aliases(registry) == (won[0], champion)
        for is_won, message in outcomes:
            assert is_won or f"promoted version {won[0]}" in message, outcomes
        winners.append(won[0])
        champion = won[0]
        numbers.sort(key=champion.__eq__)  # others' turn
    moves = registry.moves(MODEL)
    check_log(moves)
    assert [move.champion for move in moves] == winners
    assert held_versions(registry) == {each for each in aliases(registry) if each is not None}


@contextmanager
def threads(stores: Sequence[CheckpointStore]) -> Iterator[Promote]:
    """A thread for each store."""
    with ThreadPoolExecutor(len(stores)) as pool:

        def promote(wanted: Sequence[int], instead_of: int | None) -> list[Outcome]:
            barrier = Barrier(len(wanted))

            def one(store: CheckpointStore, number: int) -> Outcome:
                barrier.wait(LIMIT_SECONDS)
                return attempt(store, number, instead_of)

            return list(pool.map(one, stores, wanted, timeout=LIMIT_SECONDS))

        yield promote


@contextmanager
def processes(url: str, options: dict[str, Any], count: int) -> Iterator[Promote]:
    """So many processes."""
    spec = json.dumps({"url": url, "options": options})
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, spec],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(count)
    ]  # fmt: skip

    def promote(wanted: Sequence[int], instead_of: int | None) -> list[Outcome]:
        for process, number in zip(started, wanted, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps([number, instead_of]) + "\n")
            process.stdin.flush()
        return [_answer(process) for process in started]

    try:
        yield promote
    finally:
        for process in started:
            process.communicate()


def attempt(store: CheckpointStore, number: int, instead_of: int | None) -> Outcome:
    """Promote a version."""
    try:
        Registry(store).promote(MODEL, number, instead_of=instead_of)
    except PromotionConflict as error:
        return False, str(error)
    return True, ""


def _answer(process: subprocess.Popen[str]) -> Outcome:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a process that promotes ended with {process.wait()}"
    is_won, message = json.loads(line)
    return is_won, message


def main(spec: str) -> None:
    """Promote what stdin says."""
    store = CheckpointStore(**json.loads(spec))
    for line in sys.stdin:
        print(json.dumps(attempt(store, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
