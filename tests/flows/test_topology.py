"""A trial resumes with another number of slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.manifests import new_manifest
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.config import ExperimentConfig
from trial_core.driver.fetch_resume_point import require_convertible
from trial_core.driver.run import RankAnswers
from trial_core.errors import CheckpointError


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
def test_a_trial_of_two_slots_resumes_on_one(here: Path) -> None:
    """6 batches on two slots and 6 on one: the epoch of these 12 has each sample once.

    The log says what has changed.
    """

    def config(slots: int, batches: int) -> ExperimentConfig:
        return toy_config(
            here, batches, resources={"slots_per_trial": slots},
            hyperparameters={
                "record": str(here), "train_samples": 48, "accumulation": 2 // slots,
                "zero_stage": slots,
            },
        )  # fmt: skip

    first = train(config(2, 6))
    rest = train(config(1, 12), first.trial)
    assert rest.batches_trained == 12
    seen = [line for rank in range(2) for line in lines(here, "samples", rank)]
    assert sorted(sample for line in seen for sample in line[2:]) == [*map(float, range(48))]
    assert {line[0] for line in lines(here, "samples", 1)} == set(range(6))
    log = (here / "home" / first.trial / "logs" / "rank-0.log").read_text()
    assert (
        "the checkpoint of 2 ranks (ZeRO stage 2) is resharded to 1 (ZeRO stage 1); random "
        "generators are seeded again"
    ) in log


def test_another_batch_size_is_an_error_before_anything_is_fetched() -> None:
    """The driver reads the saved batch size from the manifest."""
    saved = Topology(world_size=1, data_parallel_size=1, batch_samples=2)
    manifest = new_manifest(topology=saved)
    two = Topology(world_size=2, data_parallel_size=2, batch_samples=4)
    launch: Any = SimpleNamespace(answers=RankAnswers(topology=two))
    with pytest.raises(CheckpointError, match="saved by 1 slots in batches of 2 samples"):
        require_convertible(launch, ResumePoint.continuing(manifest))
