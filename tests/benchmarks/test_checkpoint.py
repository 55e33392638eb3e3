"""That the checkpoint benchmark runs and ends as promised; what it measures, no test says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.checkpoint import PEERS, TARGETS, by_rank
from tests.benchmarks.outcome import outcome_of
from trial_core.errors import StorageError
from trial_core.messages import Persisted


def run(*arguments: str) -> dict[str, Any]:
    """A small run; its last line."""
    return outcome_of(" ".join(["checkpoint --turns 1", *arguments]))


@pytest.mark.long
def test_it_ends_with_one_line_of_json() -> None:
    """One file of 24 MiB up and down, by s3fs and by ours: figures, targets, whether they hold."""
    outcome = run("--parts", "transfers", "--server", "moto", "--file-mib", "24")
    names = {f"{way}_{what}_ratio" for way in ("upload", "restore") for what in WHAT}
    assert names <= outcome["figures"].keys()
    assert outcome["targets"].keys() == names & TARGETS.keys()
    missed = [name for name, most in outcome["targets"].items() if outcome["figures"][name] > most]
    assert outcome["holds"] is not bool(missed)


def test_what_is_not_stored_is_not_measured() -> None:
    """A store that fails would be the cheapest of all."""
    fine = Persisted(files=[], seconds=1.0)
    assert by_rank([fine, fine]) == {0: [], 1: []}
    with pytest.raises(StorageError, match=r"rank 1 stored no files: .*HTTP 503"):
        by_rank([fine, Persisted(files=[], seconds=1.0, problem="HTTP 503")])


WHAT = ("processor", "memory", "time")


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.gateway
@pytest.mark.timeout(1800)
def test_all_of_it() -> None:
    """Every part, on real ranks and a real gateway, with a figure for every target and peer."""
    outcome = run("--state-mib", "64", "--file-mib", "24", "--pairs", "1")
    assert outcome["targets"] == TARGETS
    assert {f"blocked_s_{peer}" for peer in PEERS} <= outcome["figures"].keys()
