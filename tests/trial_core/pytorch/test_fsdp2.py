"""Models sharded with FSDP2 train as replicas do, and their checkpoints fit any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, build, drive, lines, toy_config
from tests.support.whole_state import whole_state
from tests.trial_core.deepspeed.reshard.resharding import files, resharded, save
from trial_core.config import ExperimentConfig
from trial_core.messages import BuildLoadersAndRestore, FetchCheckpoint, Fetched, ReadyToTrain
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch.sharded_model import CPU_RANKS_ADD_UP

pytestmark = pytest.mark.slots
BY_HAND = (
    pytest.mark.long,
    pytest.mark.skipif(CPU_RANKS_ADD_UP, reason="torch before 2.9, on CPU ranks: refused"),
)
Warm = Callable[[int], SlotGroup]


def config(
    storage: Path, batches: int, sharding: str = "fsdp2", trial: str = "Sharded",
    optimizations: dict[str, Any] | None = None, **hparams: Any,
) -> ExperimentConfig:  # fmt: skip
    return toy_config(
        storage, batches, entrypoint=f"sharded_trials:{trial}", scheduling_unit=3,
        min_validation_period={"batches": 3},
        optimizations={"sharding": sharding, **(optimizations or {})},
        hyperparameters={"global_batch_size": 8, **hparams},
    )  # fmt: skip


def assert_same(expected: dict[str, Any], seen: dict[str, Any], tolerance: float = 0) -> None:
    assert expected.keys() == seen.keys()
    assert sum(isinstance(value, torch.Tensor) for value in expected.values()) > 20
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                seen[name], value, rtol=tolerance, atol=tolerance / 100, msg=name
            )
        else:
            assert seen[name] == value, name


@pytest.mark.parametrize(
    ("ranks", "trial", "optimizations"),
    [
        (2, "Sharded", {}),
        pytest.param(4, "Sharded", {}, marks=pytest.mark.long),
        pytest.param(2, "Sharded", {"aggregation_frequency": 3}, marks=pytest.mark.long),
        pytest.param(2, "Sharded", {"gradient_compression": True}, marks=pytest.mark.long),
        pytest.param(2, "TwoModels", {}, marks=pytest.mark.long),
        pytest.param(2, "Scaled", {}, marks=pytest.mark.long),
    ],
)
def test_sharded_models_train_as_replicas_do(
    warm_slots: Warm, tmp_path: Path, ranks: int, trial: str, optimizations: dict[str, Any]
) -> None:
    """With shards of different lengths in validation; clipped gradients; and ranks that have
    initialised their models differently: rank 0's weights count."""
    runs = {}
    for sharding in ("none", "fsdp2"):
        settings = config(  # BatchNorm of two samples would turn gradients into rounding
            tmp_path, 6, sharding, trial, optimizations, dropout=0.0, global_batch_size=4 * ranks
        )
        runs[sharding] = drive(warm_slots(ranks), settings, tmp_path, persist=True)
    expected, seen = (whole_state(files(tmp_path, run.checkpoints[-1])) for run in runs.values())
    tolerance = 2e-2 if "gradient_compression" in optimizations else 1e-4
    assert_same(expected, seen, tolerance)
    for stage in ("training", "validation"):
        ddp, fsdp2 = getattr(runs["none"], stage), getattr(runs["fsdp2"], stage)
        assert len(ddp) == len(fsdp2) > 1
        for one, other in zip(ddp, fsdp2, strict=True):
            assert one == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize(
    ("ranks", "trial"),
    [
        (2, "Sharded"),
        pytest.param(4, "Sharded", marks=pytest.mark.long),
        pytest.param(2, "Scaled", marks=pytest.mark.long),
        pytest.param(2, "WithHooks", marks=pytest.mark.long),
        pytest.param(2, "ShardedByHand", marks=BY_HAND),
        pytest.param(4, "ShardedByHand", marks=BY_HAND),
    ],
)
def test_resuming_is_bit_identical(
    warm_slots: Warm, tmp_path: Path, ranks: int, trial: str
) -> None:
    """9 batches equal 4 + 5, of which 3 make one optimizer step: a checkpoint between two steps
    holds gradients."""

    def run(part: str, batches: int, resume: Driven | None = None) -> Driven:
        (tmp_path / part).mkdir(exist_ok=True)
        settings = config(
            tmp_path / part, batches, trial=trial, optimizations={"aggregation_frequency": 3},
            record=str(tmp_path / part),
        )  # fmt: skip
        return drive(warm_slots(ranks), settings, tmp_path / part, resume=resume, persist=True)

    whole, first = run("straight", 8), run("parts", 4)
    stored = files(tmp_path / "parts", first.checkpoints[-1])
    assert len(list(stored.glob("shards/gradients/*.pt"))) == ranks
    rest = run("parts", 8, first)
    for rank in range(ranks):
        assert lines(tmp_path / "straight", "samples", rank) == lines(
            tmp_path / "parts", "samples", rank
        )
    assert_same(
        whole_state(files(tmp_path / "straight", whole.checkpoints[-1])),
        whole_state(files(tmp_path / "parts", rest.checkpoints[-1])),
    )
    assert rest.validation[-1] == whole.validation[-1]


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_parts_in_another_order_keep_their_moments(
    warm_slots: Warm, tmp_path: Path, sharding: str
) -> None:
    """Up to the rounding of a norm of all gradients, which adds up in another order."""
    slots, settings = warm_slots(2), config(tmp_path, 6, sharding)
    whole = drive(slots, settings, tmp_path, persist=True)
    first = drive(slots, config(tmp_path, 3, sharding), tmp_path, persist=True)
    turned = config(tmp_path, 6, sharding, reverse=True)
    rest = drive(slots, turned, tmp_path, resume=first, persist=True)
    expected, seen = (
        {
            name: each
            for name, each in whole_state(files(tmp_path, run.checkpoints[-1])).items()
            if "models" in name
        }
        for run in (whole, rest)
    )
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, "fsdp2"), (2, "none")),
        *(
            pytest.param(source, target, marks=pytest.mark.long)
            for source, target in (
                ((2, "none"), (2, "fsdp2")),
                ((2, "fsdp2"), (4, "fsdp2")),
                ((4, "fsdp2"), (2, "fsdp2")),
                ((2, "fsdp2"), (1, "fsdp2")),
                ((1, "fsdp2"), (4, "fsdp2")),
                ((4, "none"), (2, "fsdp2")),
                ((4, "fsdp2"), (2, "none")),
            )
        ),
    ],
)
def test_every_weight_moment_and_gradient_is_the_same_on_other_ranks(
    warm_slots: Warm, tmp_path: Path, source: tuple[int, str], target: tuple[int, str]
) -> None:
    """Other numbers of ranks, and models that are sharded only before or after. Then training
    continues."""
    optimizations = {"aggregation_frequency": 3}
    settings = [
        config(tmp_path, 4, sharding, optimizations=optimizations, seed=seed)
        for seed, (_, sharding) in enumerate((source, target))
    ]
    first = drive(warm_slots(source[0]), settings[0], tmp_path, persist=True)
    slots = warm_slots(target[0])
    restored = resharded(slots, settings[1], tmp_path, first)
    stored = [files(tmp_path, run.checkpoints[-1]) for run in (first, restored)]
    assert_same(*map(whole_state, stored))
    assert_same_gradients(*stored)
    further = config(tmp_path, 6, target[1], optimizations=optimizations, seed=1)
    assert drive(slots, further, tmp_path, resume=first).progress.batches_trained == 6


def assert_same_gradients(source: Path, restored: Path) -> None:
    expected, seen = map(gradients, (source, restored))
    assert expected.keys() == seen.keys()
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, msg=name)


def gradients(stored: Path) -> dict[str, torch.Tensor]:
    """The mean gradients of a checkpoint, of whichever form."""
    found: dict[str, list[torch.Tensor]] = {}
    for path in stored.glob("gradients/*.pt"):
        for name, value in torch.load(path)["models"][0].items():
            found.setdefault(name, []).append(value)
    if found:
        return {name: torch.stack(values).mean(0) for name, values in found.items()}
    rows: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in stored.glob("shards/gradients/*.pt"):
        for (_, _, name), (offset, values) in torch.load(path).items():
            rows.setdefault(name, []).append((offset[0], values))
    return {
        name: torch.cat([values for _, values in sorted(parts, key=lambda part: part[0])])
        for name, parts in rows.items()
    }


@pytest.mark.parametrize("restore", [pytest.param("state", marks=pytest.mark.long), "weights"])
def test_a_new_trial_starts_with_anothers_state_or_weights(
    warm_slots: Warm, tmp_path: Path, restore: str
) -> None:
    """At batch 0. For weights alone, no optimizer shard is fetched."""
    slots = warm_slots(2)
    source = drive(slots, config(tmp_path, 3, seed=1), tmp_path, persist=True)
    uuid = source.checkpoints[-1]
    build(slots, config(tmp_path, 3, seed=2), tmp_path)
    request = FetchCheckpoint(
        uuid=uuid, files=source.files[uuid], saved_by=source.topology, restore=restore
    )
    slots.request(request, Fetched)
    fetched = {path.parent.name for path in (tmp_path / "restored" / uuid).glob("shards/*/*.pt")}
    assert ("optimizers_state_dict" in fetched) == (restore == "state")
    slots.request(
        BuildLoadersAndRestore(
            batches_trained=0, checkpoint=uuid, saved_by=source.topology, restore=restore
        ),
        ReadyToTrain,
    )  # fmt: skip
    after = whole_state(files(tmp_path, save(slots, source).checkpoints[-1]))
    expected = whole_state(files(tmp_path, uuid))
    moments = {name for name in expected if name.endswith("exp_avg")}
    assert len(moments) == 12
    assert (moments <= after.keys()) == (restore == "state")
    for name, value in expected.items():
        if name.startswith("models") or name in moments & after.keys():
            assert torch.equal(after[name], value), name
