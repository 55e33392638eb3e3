"""Histories in a simulation: what is promised holds.

``SEED=7 pytest tests/linearizability/test_simulation.py -k lifetimes`` plays one history again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest

from tests.linearizability.actor import MISTAKES, SUBJECTS
from tests.linearizability.checker import NotLinearizable
from tests.linearizability.play import play
from tests.linearizability.reach import few
from tests.support.cli import ROOT

ALL = (*SUBJECTS, "lifetimes")
MISTAKE_SEEDS = 1000
SEED = os.environ.get("SEED")
LONG = pytest.mark.long
MANY = [range(first, first + 497) for first in range(12, 2000, 497)]
FAULTS = ("cut request", "lose reply", "late", "twice", "slow", "kill before", "kill after")
FOUND = {"an intent keeps its base for ever": 83}
"""Seeds that find a defect that the product had, now planted. They find it at once, unless the
product's requests or the actions have changed since."""


@pytest.mark.parametrize(
    "seeds",
    [range(3), *(pytest.param(each, marks=LONG) for each in (range(3, 12), *MANY))]
    if SEED is None
    else [range(int(SEED), int(SEED) + 1)],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", ALL)
def test_what_is_promised_holds(subject: str, seeds: range) -> None:
    """Whatever happens to requests, and in whatever order they arrive."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += play(subject, seed)
    print(subject, dict(counts))
    assert SEED is not None or counts["requests"] > 50 * len(seeds)
    if subject == "lifetimes" and len(seeds) > 400:
        assert [each for each in FAULTS if not counts[each]] == []


def _reach(*arguments: str) -> tuple[int, str]:
    """`make simulate`: its exit status, and what it prints."""
    command = (sys.executable, "-m", "tests.linearizability.reach", *arguments)
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


@LONG
@pytest.mark.timeout(3600)
def test_every_branch_is_reached_or_listed() -> None:
    """Stored seeds reach all branches of commit, fencing, sweep and prune but those listed."""
    status, printed = _reach()
    print(printed)
    assert status == 0


@pytest.mark.long
def test_a_branch_that_is_not_reached_is_named() -> None:
    """Two histories reach some branches, and are told which they do not."""
    status, printed = _reach("2", "--alone")
    assert status == 1
    assert " of 2: commit.commit: fence is not None: true\n" in printed
    assert "neither reached nor listed: intents._prevent_commit: except FileExistsError" in printed


def test_few_seeds_reach_the_same() -> None:
    """A seed that adds nothing to the others is left out."""
    played = {7: {1, 2}, 11: {2, 3, 5}, 13: {3, 5}, 17: {1}}
    assert few({seed: frozenset(seen) for seed, seen in played.items()}) == [7, 11]


@pytest.mark.long
@pytest.mark.parametrize(
    "subject", [*(pytest.param(each, marks=LONG) for each in SUBJECTS), "lifetimes"]
)
def test_a_seed_gives_one_history(subject: str) -> None:
    """Also in another process, where Python's hashes differ."""
    code = (
        "from tests.linearizability.play import play\n"
        f"for seed in range(4): play({subject!r}, seed, print)"
    )
    digests = {
        hashlib.sha256(
            subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hashes},
            ).stdout
        ).hexdigest()
        for hashes in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("subject", "mistake"),
    [
        ("trials", "no fence"),
        ("owners", "no fence"),
        pytest.param("trials", "a sweep and no tombstone", marks=LONG),
        ("protections", "a pin does not look for deletions"),
        ("protections", "a prune does not look again"),
        ("registry", "an append overwrites"),
        ("lifetimes", "no fence"),
        pytest.param("lifetimes", "a sweep and no tombstone", marks=LONG),
        ("lifetimes", "a commit does not look for swept files"),
        ("lifetimes", "an intent keeps its base for ever"),
    ],
)
def test_a_planted_mistake_is_found(subject: str, mistake: str) -> None:
    """Within so many histories, mostly the first few."""

    def play_all() -> None:
        for seed in chain([FOUND.get(mistake, 0)], range(MISTAKE_SEEDS)):
            play(subject, seed)

    with MISTAKES[mistake](), pytest.raises((NotLinearizable, AssertionError)) as caught:
        play_all()
    assert "To repeat it: SEED=" in caught.value.__notes__[0]
