"""Trials with several engines, and engines of unusual kinds, on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import build, drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


TWO_OR_MORE = [2, long(1), long(4)]


@pytest.mark.long
@pytest.mark.parametrize("world_size", TWO_OR_MORE)
@pytest.mark.parametrize(
    ("trial", "zero_stage"),
    [
        ("Independent", 3),
        long("Adversarial", 2),
        long("Joint", 1),  # not 0: DeepSpeed has no backward through several engines without ZeRO
        long("Independent", 0),
        long("Adversarial", 0),
        long("Joint", 2),
        long("Joint", 3),
    ],
)
def test_two_engines_resume_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str, zero_stage: int
) -> None:
    """Each engine is saved under its own tag, and restored."""
    stored = assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, f"engine_trials:{trial}", zero_stage=zero_stage
    )
    assert {folder.name for folder in stored.iterdir() if folder.name.startswith("model")} == {
        "model0",
        "model1",
    }


@pytest.mark.parametrize("world_size", TWO_OR_MORE)
@pytest.mark.parametrize("trial", ["Adversarial", long("Independent"), long("Joint")])
def test_a_batch_accumulates_over_all_engines(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str
) -> None:
    """With 3 micro-batches a batch, train_batch is called 3 times a batch."""
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


@pytest.mark.parametrize("world_size", TWO_OR_MORE)
def test_accumulating_by_hand_trains_the_same_model(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """One call of train_batch with three micro-batches equals three calls with one."""
    runs: list[Any] = []
    for trial in ("Independent", "ByHand"):
        config = toy_config(
            tmp_path, 5, entrypoint=f"engine_trials:{trial}", hyperparameters={"accumulation": 3}
        )
        runs.append(drive(warm_slots(world_size), config, tmp_path))
    assert runs[0].validation == runs[1].validation
    assert runs[0].training[-1]["first"] == pytest.approx(runs[1].training[-1]["first"])


@pytest.mark.long
@pytest.mark.parametrize("world_size", TWO_OR_MORE)
def test_accumulating_by_hand_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """The loader continues after the last whole batch."""
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
    """The loss of stage 0 in fp32, by the number of ranks."""

    @functools.cache
    def loss(world_size: int) -> float:
        return loss_after_8_batches(warm_slots(world_size), tmp_path_factory.mktemp("plain"), 0)

    return loss


@pytest.mark.parametrize("world_size", TWO_OR_MORE)
@pytest.mark.parametrize(
    ("zero_stage", "bf16", "tolerance"),
    [
        (3, False, 1e-4),
        (1, True, 0.05),
        long(1, False, 1e-4),
        long(2, False, 1e-4),
        long(0, True, 0.5),  # without ZeRO, DeepSpeed keeps no fp32 weights beside those in bf16
        long(2, True, 0.05),
        long(3, True, 0.05),
    ],
)
def test_zero_stages_and_precisions_train_alike(
    warm_slots: Warm, plain_loss: Callable[[int], float], tmp_path: Path,
    world_size: int, zero_stage: int, bf16: bool, tolerance: float,
) -> None:  # fmt: skip
    """With accumulation, the loss equals that of stage 0 in fp32, up to rounding."""
    seen = loss_after_8_batches(warm_slots(world_size), tmp_path, zero_stage, bf16)
    assert seen == pytest.approx(plain_loss(world_size), rel=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("world_size", TWO_OR_MORE)
@pytest.mark.parametrize("zero_stage", [2, long(3)])
def test_an_optimizer_offloaded_to_the_cpu_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """The offloaded optimizer state is saved and restored."""
    offload = {"stage": zero_stage, "offload_optimizer": {"device": "cpu"}}
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:OwnConfig",
        ds_config={"zero_optimization": offload},
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "experts"), [(2, 2), long(1, 2), long(4, 2), long(4, 4)])
def test_a_mixture_of_experts_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, world_size: int, experts: int
) -> None:
    """Experts are distributed over the ranks, or replicated if there are fewer; each is saved."""
    stored = assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:Experts", accumulation=3, experts=experts
    )
    assert len(list(stored.glob("model0/*_expert_*_model_states.pt"))) == experts


@pytest.mark.parametrize("world_size", [2, long(4)])
def test_experts_are_validated_in_lockstep(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """A token may need an expert of another rank, so a rank with a shorter shard continues."""
    config = toy_config(
        tmp_path, 1, entrypoint="engine_trials:Experts", hyperparameters={"validation_samples": 14}
    )
    assert "loss" in drive(warm_slots(world_size), config, tmp_path).validation[-1]
