"""Random orders of requests in memory: every history has an order, unless a mistake is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.linearizability.actor import MISTAKES, SUBJECTS
from tests.linearizability.checker import NotLinearizable
from tests.linearizability.interleaved import play_interleaved
from tests.trial_core.models.helpers import memory_store

MISTAKE_SEEDS = 1000


def play(subject: str, seed: int, folder: Path) -> int:
    (own := folder / f"{seed}").mkdir()
    with memory_store() as store:
        return play_interleaved(subject, seed, store, own)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 1000), marks=pytest.mark.long)], ids=len
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_histories_are_linearizable(subject: str, seeds: range, tmp_path: Path) -> None:
    """In whatever order the requests of four actors arrive."""
    assert sum(play(subject, seed, tmp_path) for seed in seeds) >= len(seeds)


@pytest.mark.parametrize(
    ("subject", "mistake"),
    [
        ("trials", "no fence"),
        ("owners", "no fence"),
        pytest.param("trials", "a sweep and no tombstone", marks=pytest.mark.long),
        ("protections", "a pin does not look for deletions"),
        ("protections", "a prune does not look again"),
        ("registry", "an append overwrites"),
    ],
)
def test_a_planted_mistake_is_found(subject: str, mistake: str, tmp_path: Path) -> None:
    """Within so many histories, mostly the first few."""

    def play_all() -> None:
        for seed in range(MISTAKE_SEEDS):
            play(subject, seed, tmp_path)

    with MISTAKES[mistake](), pytest.raises(NotLinearizable):
        play_all()
