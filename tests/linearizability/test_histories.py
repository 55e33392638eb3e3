"""Processes on a real gateway, with faults between: every history has an order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.linearizability.actor import SUBJECTS
from tests.linearizability.checker import NotLinearizable
from tests.linearizability.scene import Scene, scene
from tests.support.s3 import S3Server

pytestmark = pytest.mark.gateway
ROUNDS = 60
MET = ("cut request", "lose reply", "503", "slow", "killed", "unknown outcomes")
"""What every subject meets."""


@pytest.fixture
def stage(ceph_s3: S3Server, tmp_path: Path) -> Iterator[Scene]:
    """Where processes act."""
    with scene(ceph_s3, tmp_path) as made:
        yield made


@pytest.mark.long
def test_histories_are_linearizable(stage: Scene) -> None:
    """Of trials, owners, protections and the registry, with requests and replies that are lost."""
    for seed, subject in enumerate(SUBJECTS):
        stage.play(subject, seed, operations=5)
    assert stage.counts["histories"] == 5
    assert stage.counts["operations"] > 20
    assert stage.counts["cut request"] + stage.counts["lose reply"] + stage.counts["503"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_many_histories_are_linearizable(subject: str, stage: Scene) -> None:
    """With processes that are killed, and writes that arrive after their client has given up."""
    for seed in range(ROUNDS):
        stage.play(subject, seed, processes=3 + seed % 2, kills=seed % 3 == 0)
    print(subject, dict(stage.counts))
    assert stage.counts["histories"] >= ROUNDS
    # Protections have no numbered records, which alone may arrive late.
    met = MET if subject == "protections" else (*MET, "late")
    assert [each for each in met if not stage.counts[each]] == [], stage.counts


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("subject", "mistake"), [("trials", "no fence"), ("registry", "an append overwrites")]
)
def test_a_planted_mistake_is_found(subject: str, mistake: str, stage: Scene) -> None:
    """Within so many rounds of processes."""

    def play_all() -> None:
        for seed in range(ROUNDS):
            stage.play(subject, seed, mistake=mistake, share=0.05)

    with pytest.raises(NotLinearizable):
        play_all()
