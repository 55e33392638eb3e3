"""Training continues on other ranks and with another ZeRO stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.slots import Driven, build, drive, lines
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.reshard.resharding import (
    config,
    contents,
    files,
    load,
    resharded,
    restore,
    save,
)
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import RankFailed
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

BF16_OPTIMIZER: dict[str, Any] = {
    "bf16": True, "config": {"data_types": {"grad_accum_dtype": "fp32"}}
}  # fmt: skip
"""With ZeRO-1, DeepSpeed takes another optimizer then."""


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("ranks", "stage", "other_ranks", "other_stage", "hparams"),
    [
        (2, 1, 1, 3, {}),
        long(1, 3, 2, 2, {}),
        long(2, 1, 1, 2, {"bf16": True}),
        long(2, 2, 1, 3, {"bf16": True}),
        long(2, 2, 1, 1, {"zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
        long(1, 0, 2, 1, {}),
        long(2, 0, 1, 0, {}),
    ],
)
def test_there_and_back_changes_nothing(
    warm_slots: Warm, tmp_path: Path, ranks: int, stage: int, other_ranks: int, other_stage: int,
    hparams: dict[str, Any],
) -> None:  # fmt: skip
    """7 batches in one run equal 3 + 4 batches with a detour over other ranks, bit for bit."""
    slots, settings = warm_slots(ranks), config(tmp_path, 7, stage, **hparams)
    whole = drive(slots, settings, tmp_path, persist=True)
    first = drive(slots, config(tmp_path, 3, stage, **hparams), tmp_path, persist=True)
    # Another seed shows what is not restored.
    other = config(tmp_path, 3, other_stage, seed=9, bf16=hparams.get("bf16", False))
    away = resharded(warm_slots(other_ranks), other, tmp_path / "away", first)
    rest = drive(slots, settings, tmp_path, resume=away, persist=True)

    expected, seen = (
        tensors(files(tmp_path, run.checkpoints[-1]) / "model0") for run in (whole, rest)
    )
    assert len(expected) > 10
    assert differing(expected, seen) == []
    assert rest.validation[-1] == whole.validation[-1]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (1, True), (2, True), (3, False)])
def test_bf16_is_switched_on_the_same_ranks(
    warm_slots: Warm, tmp_path: Path, stage: int, bf16: bool
) -> None:
    """The fp32 weights and moments are the checkpoint's, and training continues."""
    first = drive(warm_slots(2), config(tmp_path, 3, stage, bf16=bf16), tmp_path, persist=True)
    other = config(tmp_path, 5, stage, seed=9, bf16=not bf16)
    there = resharded(warm_slots(2), other, tmp_path / "there", first)
    (expected, _), (seen, _) = (
        contents(files(tmp_path, run.checkpoints[-1]), tmp_path / name)
        for name, run in (("then", first), ("now", there))
    )
    assert differing(expected, seen) == []
    drive(warm_slots(2), other, tmp_path / "rest", resume=first)


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True])
def test_bf16_without_zero_is_not_switched(warm_slots: Warm, tmp_path: Path, bf16: bool) -> None:
    """DeepSpeed keeps another state then."""
    first = drive(warm_slots(1), config(tmp_path, 2, 0, bf16=bf16), tmp_path, persist=True)
    build(warm_slots(1), config(tmp_path, 2, 0, bf16=not bf16), tmp_path / "other")
    with pytest.raises(RankFailed, match=r"precision \(bf16, fp16 or fp32\) that saved"):
        restore(warm_slots(1), first)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "other_stage"), [(0, 0), (1, 1), (3, 3), (0, 1), (0, 3)])
def test_parameters_in_another_order_keep_their_moments(
    warm_slots: Warm, tmp_path: Path, stage: int, other_stage: int
) -> None:
    """Some of them have the same shape, so that DeepSpeed would not notice."""
    slots, settings = warm_slots(2), config(tmp_path, 7, other_stage)
    first = drive(slots, config(tmp_path, 3, stage), tmp_path, persist=True)
    whole = drive(slots, settings, tmp_path / "whole", resume=first, persist=True)
    turned = config(tmp_path, 7, other_stage, reverse=True)
    rest = drive(slots, turned, tmp_path / "rest", resume=first, persist=True)
    expected, seen = (export_weights(files(tmp_path, run.checkpoints[-1])) for run in (whole, rest))
    assert differing(expected, seen) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "before", "now"),
    [
        (1, BF16_OPTIMIZER, {**BF16_OPTIMIZER, "reverse": True}),
        (3, {}, {"zero": {"sub_group_size": 1000}}),
    ],
)
def test_flat_buffers_are_divided_otherwise(
    warm_slots: Warm, tmp_path: Path, stage: int, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """The weights and moments are loaded by name, bit for bit."""
    first = drive(warm_slots(2), config(tmp_path, 3, stage, **before), tmp_path, persist=True)
    other = config(tmp_path, 3, stage, seed=9, **now)
    there = resharded(warm_slots(2), other, tmp_path / "there", first)
    expected, seen = (
        contents(files(tmp_path, run.checkpoints[-1]), tmp_path / name)
        for name, run in (("then", first), ("now", there))
    )
    assert [differing(*each) for each in zip(expected, seen, strict=True)] == [[], []]


@pytest.mark.long
def test_parameters_in_another_order_are_refused_in_16_bits(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Without ZeRO, DeepSpeed's fp32 weights go by their places. In the same order they load."""
    first = drive(warm_slots(1), config(tmp_path, 2, 0, bf16=True), tmp_path, persist=True)
    drive(warm_slots(1), config(tmp_path, 3, 0, bf16=True), tmp_path / "rest", resume=first)
    build(warm_slots(1), config(tmp_path, 3, 0, bf16=True, reverse=True), tmp_path / "other")
    with pytest.raises(RankFailed, match="in another order than when the checkpoint was saved"):
        restore(warm_slots(1), first)


def seen_by_all(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What all ranks together recorded of each batch."""
    batches: dict[int, list[dict[str, Any]]] = {}
    for rank in range(ranks):
        for line in lines(folder, "samples", rank):
            batches.setdefault(line["batch"], []).append(line)
    return [
        {
            "epoch": parts[0]["epoch"],
            "lr": parts[-1]["lr"],  # after the step
            "samples": sorted(sample for part in parts for sample in part["samples"]),
            "loss": sum(part["loss"] for part in parts) / len(parts),
        }
        for _, parts in sorted(batches.items())
    ]


Train = Callable[..., Driven]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of the runs below, and a folder for the records of each."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def train(warm_slots: Warm, storage: Path) -> Train:
    """Trains a number of batches with another topology; each part once."""
    done: dict[str, Driven] = {}

    def run(
        part: str, ranks: int, batches: int, stage: int, resume: Driven | None = None, **more: Any
    ) -> Driven:
        if part not in done:
            shutil.rmtree(folder := storage / part, ignore_errors=True)  # of one that has failed
            folder.mkdir()
            settings = config(storage, batches, stage, record=str(folder), **more)
            done[part] = drive(warm_slots(ranks), settings, folder, resume=resume, persist=True)
        return done[part]

    return run


def whole_on_two_ranks(train: Train) -> Driven:
    """16 batches. An epoch has 6, and the learning rate rises for 10."""
    return train("whole", 2, 16, 1, train_samples=48)


def begin_on_two_ranks(train: Train) -> Driven:
    """The first 4 of them."""
    return train("begin", 2, 4, 1, train_samples=48)


def begin_on_one_rank(train: Train) -> Driven:
    """3 batches, each an epoch."""
    return train("one", 1, 3, 1, train_samples=8)


def then_on_two_ranks(train: Train) -> Driven:
    """Two more batches, on two ranks."""
    return train("one, two", 2, 5, 1, resume=begin_on_one_rank(train), train_samples=8)


def draws(storage: Path, part: str, ranks: int) -> list[list[float]]:
    """The random numbers that each rank has drawn, one a micro-batch."""
    return [
        [line["draw"] for line in lines(storage / part, "samples", rank)] for rank in range(ranks)
    ]


def test_data_and_schedules_continue(train: Train, storage: Path) -> None:
    """16 batches on 2 ranks equal 4 on 2 ranks, 5 on 4 and 7 on 1: the same samples and learning
    rates in each batch, and losses that differ only by rounding."""
    whole_on_two_ranks(train)
    begin = begin_on_two_ranks(train)
    second = train("second", 4, 9, 3, resume=begin, seed=8, train_samples=48)
    train("third", 1, 16, 2, resume=second, seed=9, micro_batch_size=4, train_samples=48)

    expected = seen_by_all(storage / "whole", 2)
    parts = [
        batch
        for part, ranks in (("begin", 2), ("second", 4), ("third", 1))
        for batch in seen_by_all(storage / part, ranks)
    ]
    assert len(expected) == len(parts) == 16
    losses = [[batch.pop("loss") for batch in batches] for batches in (expected, parts)]
    assert parts == expected
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_random_generators_are_restored_with_another_zero_stage(
    train: Train, storage: Path
) -> None:
    """With the same number of ranks, each rank draws what it would have drawn. This toy's
    validation, which precedes each checkpoint, draws nothing."""
    whole_on_two_ranks(train)
    train("stage 2", 2, 6, 2, resume=begin_on_two_ranks(train), train_samples=48)
    rest = draws(storage, "stage 2", 2)
    assert [len(rank) for rank in rest] == [4, 4]
    assert rest == [rank[8:12] for rank in draws(storage, "whole", 2)]


def test_each_sub_group_of_zero_3_counts_steps(train: Train, storage: Path) -> None:
    """One group of ZeRO-1 with one count of steps becomes several of ZeRO-3, each with a count."""
    rest = train("stage 3", 1, 5, 3, resume=begin_on_one_rank(train), train_samples=8)
    steps = [
        step for name, step in tensors(files(storage, rest.checkpoints[-1])).items()
        if name.endswith("/step")
    ]  # fmt: skip
    assert steps == [5] * 4


def test_the_loss_scale_is_restored(
    warm_slots: Warm, train: Train, storage: Path, tmp_path: Path
) -> None:
    """The state that only fp16 needs is resharded too."""
    first = begin_on_one_rank(train)
    uuid = first.checkpoints[-1]
    shutil.copytree(files(storage, uuid), fetched := tmp_path / "restored" / uuid)
    (shard,) = (fetched / "model0").glob("*_optim_states.pt")
    state = torch.load(shard, weights_only=False)
    state["optimizer_state_dict"]["loss_scaler"].cur_scale = 64.0
    torch.save(state, shard)
    build(warm_slots(1), config(tmp_path, 3, 3), tmp_path)
    load(warm_slots(1), first)
    after = save(warm_slots(1), first).checkpoints[-1]
    (shard,) = (files(tmp_path, after) / "model0").glob("*_optim_states.pt")
    loaded = torch.load(shard, weights_only=False)["optimizer_state_dict"]
    assert loaded["loss_scaler"].cur_scale == 64.0


def test_random_generators_are_reseeded_on_other_ranks(train: Train, storage: Path) -> None:
    """Seeds depend on rank and batch: two resumed runs draw the same, and two ranks differ."""
    first = begin_on_one_rank(train)
    then_on_two_ranks(train)
    train("again", 2, 5, 1, resume=first, train_samples=8)
    second = train("one more", 1, 4, 1, resume=first, train_samples=8)
    train("later", 2, 5, 1, resume=second, train_samples=8)
    once, again, later = (draws(storage, part, 2) for part in ("one, two", "again", "later"))
    assert once == again
    assert len({draw for rank in once for draw in rank}) == 2 * 2 * 2
    assert not {draw for rank in later for draw in rank} & {draw for rank in once for draw in rank}


def test_callbacks_of_new_ranks_restore_the_state_of_rank_0(train: Train, storage: Path) -> None:
    """A callback that counts epochs continues to count on a rank that did not exist."""
    then_on_two_ranks(train)
    counted = [line["seen"] for line in lines(storage / "one, two", "hooks", 1) if "seen" in line]
    assert counted == [4, 5]


@pytest.mark.parametrize(
    ("stage", "other_stage"), [(1, 3), long(1, 1), long(2, 2), long(3, 1), long(3, 3)]
)
def test_excluded_frozen_parameters_stay_as_initialised(
    warm_slots: Warm, tmp_path: Path, stage: int, other_stage: int
) -> None:
    """They are in no file; all other weights are restored, on the same and on other ranks."""
    excluding = {"checkpointing": CheckpointingConfig(exclude_frozen_parameters=True)}
    settings = config(tmp_path, 2, stage, frozen_seed=5).model_copy(update=excluding)
    first = drive(warm_slots(1), settings, tmp_path, persist=True)
    stored = files(tmp_path, first.checkpoints[-1])
    expected = export_weights(stored)
    assert not any("frozen" in name for name in tensors(stored))

    elsewhere = config(tmp_path, 2, other_stage, seed=9, frozen_seed=6)
    built = drive(warm_slots(1), elsewhere, tmp_path / "built", persist=True)
    frozen = export_weights(files(tmp_path, built.checkpoints[-1]))
    for ranks in (1, 2):
        there = resharded(warm_slots(ranks), elsewhere, tmp_path / str(ranks), first)
        weights = export_weights(files(tmp_path, there.checkpoints[-1]))
        for name, weight in weights.items():
            assert torch.equal(weight, (frozen if "frozen" in name else expected)[name])
