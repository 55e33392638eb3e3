"""Loading only the weights of a checkpoint, with another number of ranks or ZeRO stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.slots import drive, toy_config
from tests.trial_core.deepspeed.resuming import saved_again
from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.deepspeed.load_engine import load_by_parts, load_engine
from trial_core.errors import CheckpointError
from trial_core.processes.slots.slot_group import SlotGroup

Warm = Callable[[int], SlotGroup]

# Ranks and ZeRO stage of the source, then of the target.
MOVES = [((2, 3), (1, 2)), ((1, 0), (2, 3))]
MORE_MOVES = [
    *(((1, source), (1, target)) for source in (0, 2, 3) for target in (0, 2, 3)),
    ((1, 0), (4, 2)),
    ((1, 2), (4, 3)),
    ((4, 3), (2, 2)),
    ((4, 3), (2, 3)),
]


@pytest.mark.slots
@pytest.mark.parametrize(
    ("source", "target"),
    [*MOVES, *(pytest.param(*move, marks=pytest.mark.long) for move in MORE_MOVES)],
)
def test_weights_are_loaded_with_another_topology(
    warm_slots: Warm, tmp_path: Path, source: tuple[int, int], target: tuple[int, int]
) -> None:
    """The new trial's weights are those of the source, bit for bit."""
    slots = warm_slots(target[0])
    trained = drive(
        warm_slots(source[0]),
        toy_config(tmp_path, 3, hyperparameters={"zero_stage": source[1]}),
        tmp_path,
        persist=True,
    )
    uuid = trained.checkpoints[-1]
    config = toy_config(tmp_path, 3, hyperparameters={"zero_stage": target[1]})
    merged = tmp_path / "merged"
    for rank in saved_again(slots, trained, config, tmp_path, "weights"):
        shutil.copytree(rank.staging, merged, dirs_exist_ok=True)

    expected = export_weights(tmp_path / "checkpoints" / "checkpoints" / uuid)
    loaded = export_weights(merged)
    assert expected.keys() == loaded.keys()
    assert [name for name in expected if not torch.equal(expected[name], loaded[name])] == []


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (1, "missing in the checkpoint: nothing; not in the model: 1.bias, 1.weight"),
        (3, "missing in the checkpoint: 2.bias, 2.weight; not in the model: nothing"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, layers: int, message: str) -> None:
    """Frozen weights may be missing; the error names all others that differ."""

    def model(layers: int) -> torch.nn.Module:
        linear = [torch.nn.Linear(1, 1) for _ in range(layers)]
        linear[0].requires_grad_(False)
        return torch.nn.Sequential(*linear)

    saved, own = model(2).state_dict(), model(layers)
    del saved["0.weight"], saved["0.bias"]
    engine: Any = SimpleNamespace(
        module=own,
        _config=SimpleNamespace(load_universal_checkpoint=False),
        optimizer=None,
        load_checkpoint=lambda folder, tag, custom_load_fn: custom_load_fn(src=saved, dst=own),
    )
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError) as refusal:
        load_engine(engine, tmp_path, "model0")
    assert str(refusal.value) == f"the checkpoint was saved by another model; {message}"


@pytest.mark.parametrize(
    ("missing", "refusal"), [("param_groups", CheckpointError), ("momentum_buffer", KeyError)]
)
def test_only_a_state_of_another_precision_is_called_so(
    tmp_path: Path, missing: str, refusal: type[Exception]
) -> None:
    """Without ZeRO. Anything else may be missing, too, as for a trial's own optimizer."""
    engine: Any = SimpleNamespace(
        module=torch.nn.Linear(1, 1), _config=SimpleNamespace(load_universal_checkpoint=False),
        optimizer=None, zero_optimization=lambda: False,
        load_checkpoint=lambda *_, **__: {}[missing],
    )  # fmt: skip
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(refusal, match=missing):
        load_engine(engine, tmp_path, "model0")


def saved(shapes: dict[str, tuple[int, ...]]) -> dict[str, SavedWeight]:
    return {
        name: SavedWeight(torch.Size(shape), torch.float32, partial(torch.full, shape, 7.0))
        for name, shape in shapes.items()
    }


def test_weights_are_found_by_the_names_of_the_state_dict() -> None:
    """Wrappers, such as those of activation checkpointing, rename their entries with hooks."""
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False)))

    def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[name.replace("0.0.", "inner.")] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    load_by_parts(
        model,
        saved(
            {
                "inner.running_mean": (3,),
                "inner.running_var": (3,),
                "inner.num_batches_tracked": (),
            }
        ),
    )
    assert [each.flatten().unique().tolist() for each in model.buffers()] == [[7.0]] * 3


def test_weights_of_another_shape_are_refused_before_any_is_read() -> None:
    """So all ranks refuse them, and none waits for another."""
    model = torch.nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"bias have the shape \(5,\) in the .* \(3,\) in the model"
    ):
        load_by_parts(model, saved({"weight": (3, 2), "bias": (5,)}))
    assert torch.equal(model.weight, before)


def test_entries_that_a_hook_makes_are_refused() -> None:
    """They would silently not be loaded."""
    model = torch.nn.Linear(2, 3)

    def replace(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["weight"] = state["weight"] * 2

    model.register_state_dict_post_hook(replace)
    with pytest.raises(CheckpointError, match=r"not its own: weight; load .*load_weights"):
        load_by_parts(model, saved({"weight": (3, 2), "bias": (3,)}))
