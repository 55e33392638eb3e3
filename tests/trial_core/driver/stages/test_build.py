"""What the log says of a trial that was built, and when settings are compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.manifests import entry, new_manifest
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import (
    _is_unchanged,
    _warn_of_another_batch_size,
    build_loaders,
)
from trial_core.errors import TrialError
from trial_core.messages import ReadyToTrain, TrialBuilt


@pytest.mark.parametrize(
    ("topology", "samples", "text"),
    [
        (
            Topology(world_size=4, data_parallel_size=2, pipeline_parallel_size=2, zero_stage=1),
            16,
            "4 ranks (2 data-parallel, 2 pipeline stages, ZeRO stage 1), 16 samples a batch",
        ),
        (
            Topology(world_size=2, data_parallel_size=2),
            1,
            "2 ranks (2 data-parallel), 1 sample a batch",
        ),
        (
            Topology(world_size=4, data_parallel_size=4, sharding="fsdp2 2x2"),
            0,
            "4 ranks (4 data-parallel, FSDP2 2x2)",
        ),
        (Topology(world_size=1, data_parallel_size=1), 0, "1 rank"),
    ],
)
def test_the_description_of_a_trial(topology: Topology, samples: int, text: str) -> None:
    """Leaves out what the trial does not use, and samples that it does not know."""
    assert msgspec.structs.replace(topology, batch_samples=samples).description == text


@pytest.mark.parametrize(
    ("hyperparameters", "warns"),
    [
        ({"global_batch_size": 49}, True),
        ({"global_batch_size": 48}, False),
        ({"global_batch_size": 32}, False),  # it may have another meaning in a DeepSpeedTrial
        ({"global_batch_size": "large"}, False),
        ({}, False),
    ],
)
def test_a_batch_size_that_ranks_cannot_share_is_warned_of(
    caplog: pytest.LogCaptureFixture, hyperparameters: dict[str, object], warns: bool
) -> None:
    """In the driver, whose warnings the terminal shows."""
    topology = Topology(world_size=2, data_parallel_size=2)
    built = TrialBuilt(hooks=[], topology=topology, batch_samples=48, versions={})
    _warn_of_another_batch_size(hyperparameters, built)
    assert ("is 49, but a batch on 2 data-parallel ranks has 48 samples" in caplog.text) == warns


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (0, "tune-batch tries micro-batches of other sizes, and the training loader does not"),
        (2, "the memory is too small for the configured micro-batches"),
    ],
)
def test_a_loader_with_a_size_of_its_own(tmp_path: Path, samples: int, why: str) -> None:
    """The error names the cause: too little memory, or tune-batch, which begins with a batch."""
    store = CheckpointStore(f"file://{tmp_path}")
    launch = Launch(
        Run(toy_config(tmp_path), "toy-0a", tmp_path, store, micro_batch_samples=samples)
    )
    launch.answers.topology = Topology(world_size=1, data_parallel_size=1, micro_batch_samples=4)
    built = ReadyToTrain(epoch=None, loads_micro_batches=False)
    launch.slots = SimpleNamespace(request=lambda *_, **__: [built])  # type: ignore[assignment]
    with pytest.raises(TrialError, match=why):
        build_loaders(launch, ResumePoint())


@pytest.mark.parametrize(
    ("saved", "now", "is_unchanged"),
    [
        ({"LR": "1"}, {"LR": "1"}, True),
        ({"LR": "1"}, {"LR": "2"}, False),
        ({}, {"LR": "2"}, False),
        ({"LR": "1"}, {}, False),
        (None, {"LR": "2"}, True),  # not recorded
    ],
)
def test_environment_variables_are_part_of_the_experiment(
    tmp_path: Path, saved: dict[str, str] | None, now: dict[str, str], is_unchanged: bool
) -> None:
    """A person may set a rate there: with other variables, settings are compared."""

    def config(variables: dict[str, str]) -> Any:
        return toy_config(tmp_path, environment={"environment_variables": variables})

    digest = "" if saved is None else config(saved).environment_digest("gpt-0123abcd")
    code = entry("code.tar")
    manifest = new_manifest(code=code, config_digest=config({}).digest(), environment_digest=digest)
    launch: Any = SimpleNamespace(
        code=SimpleNamespace(digest=code.digest), run=SimpleNamespace(config=config(now))
    )
    assert _is_unchanged(launch, ResumePoint.continuing(manifest)) == is_unchanged
