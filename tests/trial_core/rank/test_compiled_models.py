"""Checkpoints of a compiled model have the names of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, drive, toy_config
from tests.support.tensors import differing, tensors
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

LONG = pytest.mark.long
WAYS = ["before", "after", "in place", "parts", "parts after", "all"]


@pytest.mark.parametrize(
    ("way", "ranks", "sharding"),
    [
        ("all", 2, "none"),
        pytest.param("all", 2, "fsdp2", marks=LONG),
        *(pytest.param(way, 1, "none", marks=LONG) for way in WAYS),
        *(
            pytest.param(way, 2, sharding, marks=LONG)
            for way in WAYS[:-1]
            for sharding in ("none", "fsdp2")
        ),
    ],
)
def test_a_compiled_model_and_a_plain_one_resume_each_other(
    warm_slots: Warm, tmp_path: Path, way: str, ranks: int, sharding: str
) -> None:
    """Bit for bit, with the averages of its weights and an optimizer that knows their names."""
    _assert_resume_each_other(
        warm_slots(ranks), tmp_path, "compiled_trials:Compiled", way,
        optimizations={"sharding": sharding}, global_batch_size=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("way", "stage", "dtype"),
    [
        ("before", 1, "bf16"),
        pytest.param("before", 3, None, marks=LONG),
        *(pytest.param(way, 2, None, marks=LONG) for way in WAYS if way != "parts after"),
        *(pytest.param("all", stage, "bf16", marks=LONG) for stage in range(3)),
        *(pytest.param(way, 3, "bf16", marks=LONG) for way in ("before", "after", "in place")),
    ],
)
def test_a_compiled_engine_and_a_plain_one_resume_each_other(
    warm_slots: Warm, tmp_path: Path, way: str, stage: int, dtype: str | None
) -> None:
    """Bit for bit, with DeepSpeed's own lists of names."""
    ds_config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if dtype:
        ds_config[dtype] = {"enabled": True}
    _assert_resume_each_other(
        warm_slots(2), tmp_path, "compiled_trials:CompiledEngine", way, ds_config=ds_config
    )


def _assert_resume_each_other(
    slots: SlotGroup,
    folder: Path,
    entrypoint: str,
    way: str,
    optimizations: dict[str, Any] | None = None,
    **hparams: Any,
) -> None:
    """6 batches without torch.compile equal 3 with it, and 3 without it; and the reverse."""

    def run(batches: int, compiled: str, resume: Driven | None = None) -> Driven:
        config = toy_config(
            folder, batches, entrypoint=entrypoint, optimizations=optimizations or {},
            resources={"slots_per_trial": slots.world_size},
            hyperparameters={"compiled": compiled, **hparams},
        )  # fmt: skip
        return drive(slots, config, folder, resume=resume, persist=True)

    def stored(run: Driven) -> Path:
        return folder / "checkpoints" / "checkpoints" / run.checkpoints[-1]

    def state(run: Driven) -> dict[str, torch.Tensor]:  # without placeholders of shards
        return {name: each for name, each in tensors(stored(run)).items() if not each.is_meta}

    expected = state(run(6, "no"))
    assert len(expected) > 20
    for first, then in (("no", way), (way, "no")):
        half = run(3, first)
        rest = run(6, then, resume=half)
        assert differing(expected, state(rest)) == []
        files = [each for each in stored(half).rglob("*") if each.is_file()]
        assert [each for each in files if b"_orig_mod" in each.read_bytes()] == []


def test_a_model_is_compiled_as_on_ranks_that_have_compiled_nothing(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """torch stops compiling a function after some times. An earlier trial's do not count."""
    for batch in (2, 4, 8):
        config = toy_config(
            tmp_path, 2, entrypoint="compiled_trials:CompiledOnce",
            resources={"slots_per_trial": 1},
            hyperparameters={"compiled": "before", "global_batch_size": batch},
        )  # fmt: skip
        drive(warm_slots(1), config, tmp_path / str(batch))


@LONG
def test_an_engine_is_compiled_as_on_ranks_that_have_compiled_nothing(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """`engine.compile()` of an earlier trial changes what torch can trace."""
    earlier = {"backend": "eager", "truth": str(tmp_path)}
    for entrypoint, stage, hparams in [
        ("feature_trials:Compiled", 2, earlier),
        ("compiled_trials:CompiledEngine", 3, {"compiled": "before"}),
    ]:
        config = toy_config(
            tmp_path, 2, entrypoint=entrypoint, resources={"slots_per_trial": 2},
            hyperparameters={"ds_config": {"zero_optimization": {"stage": stage}}, **hparams},
        )  # fmt: skip
        drive(warm_slots(2), config, tmp_path / str(stage))
