"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.slots import ONE_TWO_FOUR, drive, lines, toy_config
from tests.support.tensors import differing
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical, saved_again
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
OWN_FORMAT = "own_format_trials:OwnFormat"
WITHOUT_ZERO = {"zero_optimization": {"stage": 0}}


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
@pytest.mark.parametrize(
    "zero_stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3]
)
def test_resuming_is_bit_identical(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """The same micro-batches, random state, weights and optimizer state.

    With accumulation 3 (three calls of train_batch per batch), shuffling, dropout, and losses
    weighted by random numbers from Python's and numpy's generators.
    """
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:OwnConfig", accumulation=3,
        saves_between=True, ds_config={"zero_optimization": {"stage": zero_stage}},
    )  # fmt: skip
    for rank in range(world_size):
        calls = [line[0] for line in lines(tmp_path / "parts", "samples", rank)]
        assert calls == [batch for batch in range(9) for _ in range(3)]


@pytest.mark.parametrize(
    ("trial", "stage"),
    [
        ("Unrestored", 3),
        *(
            pytest.param(trial, stage, marks=pytest.mark.long)
            for trial, stages in (
                ("RankBuffers", (0, 2, 3)),
                ("FrozenLater", (1, 3)),
                ("OddStates", (0, 1, 3)),
            )
            for stage in stages
        ),
    ],
)
def test_what_deepspeed_does_not_restore_by_itself(
    warm_slots: Warm, tmp_path: Path, trial: str, stage: int
) -> None:
    """Buffers that differ between ranks, a layer that was frozen while it was trained, and an
    optimizer's states of other types than the weights are as in the uninterrupted run."""
    assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, f"engine_trials:{trial}", accumulation=1,
        ds_config={"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True},
    )  # fmt: skip


def test_a_config_and_a_state_of_other_mappings_and_sequences_resume(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """DeepSpeed's config is an AttrDict, the callback's state holds a deque and a named tuple."""
    assert_resuming_is_bit_identical(warm_slots(2), tmp_path, "state_trials:AttrDictConfig")


def test_a_custom_checkpoint_format_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """A trial that overrides save and load finds its files as it wrote them.

    DeepSpeed writes none.
    """
    stored = assert_resuming_is_bit_identical(
        warm_slots(2), tmp_path, OWN_FORMAT, accumulation=3, ds_config=WITHOUT_ZERO
    )
    assert sorted(path.name for path in stored.glob("*")) == [
        "own-0.pt", "own-1.pt", "trialflow"
    ]  # fmt: skip


def test_weights_of_a_custom_checkpoint_format(warm_slots: Warm, tmp_path: Path) -> None:
    """A trial that overrides load_weights begins with another trial's weights and nothing else."""
    slots = warm_slots(2)
    config = toy_config(
        tmp_path, 3, entrypoint=OWN_FORMAT, hyperparameters={"ds_config": WITHOUT_ZERO}
    )
    source = drive(slots, config, tmp_path, persist=True)
    uuid = source.checkpoints[-1]
    saved = saved_again(slots, source, config, tmp_path, "weights")
    for rank in (0, 1):
        expected, seen = (
            torch.load(folder / f"own-{rank}.pt")
            for folder in (tmp_path / "checkpoints/checkpoints" / uuid, Path(saved[rank].staging))
        )
        assert differing(expected["module"], seen["module"]) == []
        assert (len(expected["optimizer"]["state"]), len(seen["optimizer"]["state"])) == (4, 0)
        assert (expected["steps"][1], seen["steps"][1]) == (3, 0)


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_callbacks_get_their_state_back(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """On every rank, a callback that counts epochs continues its count."""
    hparams = {"train_samples": 4 * world_size, "record": str(tmp_path)}
    slots = warm_slots(world_size)
    first = drive(slots, toy_config(tmp_path, 4, hyperparameters=hparams), tmp_path, persist=True)
    drive(slots, toy_config(tmp_path, 8, hyperparameters=hparams), tmp_path, resume=first)
    for rank in range(world_size):
        counted = [line["seen"] for line in lines(tmp_path, "hooks", rank) if "seen" in line]
        assert counted == [1, 2, 3, 4]
