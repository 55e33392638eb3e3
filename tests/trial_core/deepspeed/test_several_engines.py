"""Several engines in one trial, and engines of unusual kinds, on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import ONE_TWO_FOUR, build, drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
@pytest.mark.parametrize(
    ("trial", "zero_stage"),
    [
        ("Independent", 0),
        ("Independent", 3),
        ("Adversarial", 0),
        ("Adversarial", 2),
        ("Joint", 1),  # DeepSpeed has no loss.backward() through several engines without ZeRO
        ("Joint", 2),
        pytest.param("Joint", 3, marks=pytest.mark.long),
    ],
)
def test_two_engines_resume_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str, zero_stage: int
) -> None:
    """Each of a trial's engines is saved under a tag of its own, and restored."""
    stored = assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, f"engine_trials:{trial}", zero_stage=zero_stage
    )
    assert {folder.name for folder in stored.iterdir() if folder.name.startswith("model")} == {
        "model0",
        "model1",
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("trial", ["Independent", "Adversarial", "Joint"])
def test_a_batch_accumulates_over_all_engines(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str
) -> None:
    """3 micro-batches a batch: train_batch is called 3 times, samples are counted by the first."""
    config = toy_config(
        tmp_path, 4, entrypoint=f"engine_trials:{trial}",
        hyperparameters={"record": str(tmp_path), "accumulation": 3},
    )  # fmt: skip
    slots = warm_slots(world_size)
    assert build(slots, config, tmp_path).batch_samples == 2 * 3 * world_size
    drive(slots, config, tmp_path)
    for rank in range(world_size):
        calls = [line[0] for line in lines(tmp_path, "samples", rank) if line[0] != "validation"]
        assert calls == [batch for batch in range(4) for _ in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_accumulating_by_hand_trains_the_same_model(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """One call of train_batch with three micro-batches is three calls with one."""
    runs: list[Any] = []
    for trial in ("Independent", "ByHand"):
        config = toy_config(
            tmp_path, 5, entrypoint=f"engine_trials:{trial}", hyperparameters={"accumulation": 3}
        )
        runs.append(drive(warm_slots(world_size), config, tmp_path))
    assert runs[0].validation == runs[1].validation
    assert runs[0].training[-1]["first"] == pytest.approx(runs[1].training[-1]["first"])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_accumulating_by_hand_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """The loader goes on after whole batches of micro-batches, however they were taken."""
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:ByHand", accumulation=3
    )


def loss_after_8_batches(
    slots: SlotGroup, folder: Path, zero_stage: int, bf16: bool = False
) -> float:
    own = {"bf16": {"enabled": bf16}, "zero_optimization": {"stage": zero_stage}}
    config = toy_config(
        folder, 8, entrypoint="engine_trials:OwnConfig",
        hyperparameters={"accumulation": 3, "ds_config": own},
    )  # fmt: skip
    return float(drive(slots, config, folder).validation[-1]["loss"])


@pytest.fixture(scope="module")
def plain_loss(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], float]:
    """What stage 0 comes to in fp32, by the number of ranks."""

    @functools.cache
    def loss(world_size: int) -> float:
        return loss_after_8_batches(warm_slots(world_size), tmp_path_factory.mktemp("plain"), 0)

    return loss


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("zero_stage", "bf16", "tolerance"),
    [
        (1, False, 1e-4),
        (2, False, 1e-4),
        (3, False, 1e-4),
        (0, True, 0.5),  # without ZeRO, DeepSpeed keeps no fp32 weights beside those in bf16
        (1, True, 0.05),
        (2, True, 0.05),
        (3, True, 0.05),
    ],
)
def test_zero_stages_and_precisions_train_alike(
    warm_slots: Warm, plain_loss: Callable[[int], float], tmp_path: Path,
    world_size: int, zero_stage: int, bf16: bool, tolerance: float,
) -> None:  # fmt: skip
    """With accumulation: what stage 0 learns in fp32 on as many ranks, up to rounding."""
    seen = loss_after_8_batches(warm_slots(world_size), tmp_path, zero_stage, bf16)
    assert seen == pytest.approx(plain_loss(world_size), rel=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_an_optimizer_offloaded_to_the_cpu_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """offload_optimizer works on CPU ranks too."""
    offload = {"stage": zero_stage, "offload_optimizer": {"device": "cpu"}}
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:OwnConfig",
        ds_config={"zero_optimization": offload},
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "experts"), [(1, 2), (2, 2), (4, 2), (4, 4)])
def test_a_mixture_of_experts_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, experts: int
) -> None:
    """Experts are shared out over the ranks, two of which have the same one where there are fewer
    experts than ranks; each is saved and restored."""
    stored = assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:Experts", accumulation=3, experts=experts
    )
    assert len(list(stored.glob("model0/*_expert_*_model_states.pt"))) == experts


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_are_validated_in_step(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """A token may go to an expert of another rank, so a shorter shard must not end early."""
    config = toy_config(
        tmp_path, 1, entrypoint="engine_trials:Experts", hyperparameters={"validation_samples": 14}
    )
    assert "loss" in drive(warm_slots(world_size), config, tmp_path).validation[-1]
