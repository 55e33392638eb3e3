"""The accelerator of a rank. DeepSpeed's view of the hardware is a fake with two accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from tests.support.gpus import fake_gpus
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.errors import LaunchError
from trial_core.rank.collectives import accelerator
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.rank_state import (
    capture_rng,
    read_rank_state,
    restore_rng,
    write_rank_state,
)
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.trial import torch_context
from trial_core.rank.trial.context import RunInfo
from trial_core.trainer import entrypoint


class FakeAccelerator:
    """Two accelerators. As with CUDA, the first is current until another is set."""

    def __init__(self) -> None:
        self.current = 0
        self.rng = "seeded"

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.current = index

    def current_device_name(self) -> str:
        return f"cuda:{self.current}"

    def get_rng_state(self) -> str:
        return self.rng

    def set_rng_state(self, state: str) -> None:
        self.rng = state


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: fake)
    monkeypatch.setattr(torch_context, "get_accelerator", lambda: fake)
    return fake


RANK_1 = DistributedContext(
    rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1
)  # fmt: skip


@pytest.mark.usefixtures("fake")
def test_a_contexts_device_is_its_ranks_accelerator() -> None:
    """Rank 1 puts its batches on the second accelerator, where its model will be."""
    accelerator.claim_accelerator(RANK_1.get_local_rank())
    info = RunInfo(trial="toy-0000beef", experiment={})
    assert str(DeepSpeedTrialContext(info, RANK_1).device) == "cuda:1"


def test_the_accelerator_is_claimed_before_torch_distributed_is_initialised(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so before the trial's module is imported, and the trial constructed."""

    class Stop(Exception):
        pass

    def stop(*arguments: str) -> type:
        raise Stop(fake.current_device_name())

    info = RunInfo(trial="toy-0000beef", experiment={"entrypoint": "a:B"})
    for step in ("load_trial_class", "init_distributed"):
        fake.current = 0
        monkeypatch.setattr(entrypoint, "load_trial_class", lambda name: object)
        monkeypatch.setattr(entrypoint, step, stop)
        with pytest.raises(Stop, match=r"^cuda:1$"):
            entrypoint.build_adapter(info, RANK_1)


def test_a_rank_without_its_accelerator_refuses(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has torch's reason, and what to do."""
    with pytest.raises(LaunchError, match=r"device 2, but only 2 .*: start at most 2 ranks"):
        accelerator.claim_accelerator(2)

    def init() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(fake, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"finds none: the driver is too old; install .*=cpu$"):
        accelerator.claim_accelerator(0)


def test_a_script_does_not_train_on_the_cpu_beside_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No driver has counted. DeepSpeed takes the CPU where torch cannot use a GPU."""
    fake_gpus(tmp_path, monkeypatch, 2)
    with pytest.raises(LaunchError, match=r"has 2 accelerators, .* none of them: .*=cpu$"):
        accelerator.claim_accelerator(0)
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("DS_ACCELERATOR", "cpu")):
        with monkeypatch.context() as chosen:
            chosen.setenv(name, value)
            accelerator.claim_accelerator(0)


def test_the_accelerators_generator_is_saved_and_restored(fake: FakeAccelerator) -> None:
    """Its state is part of a rank's state."""
    states = accelerator.accelerator_rng_state()
    fake.rng = "advanced"
    accelerator.restore_accelerator_rng(states)
    assert fake.rng == "seeded"


def test_the_generators_that_deepspeed_tracks_are_saved_and_restored(tmp_path: Path) -> None:
    """Dropout in model-parallel regions draws the same numbers after a resume."""
    tracker = get_cuda_rng_tracker()

    def draws() -> list[float]:
        drawn = []
        for name in ("model-parallel-rng", "experts", "model-parallel-rng"):
            with tracker.fork(name):
                drawn.append(torch.rand(1).item())
        return drawn

    try:
        tracker.add("model-parallel-rng", 2718)
        tracker.add("experts", 3141)
        draws()
        write_rank_state(tmp_path, 0, {"rng": capture_rng()}, Reader())
        expected = draws()
        tracker.reset()  # another process, whose trial has seeded its generators
        tracker.add("model-parallel-rng", 2718)
        restore_rng(read_rank_state(tmp_path, 0, Reader())["rng"])
        assert draws() == expected
    finally:
        tracker.reset()
    assert "tracked" not in capture_rng()
