"""What is loaded or exported is what the model had when it was saved, or is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.fingerprints import write_fingerprint
from tests.support.manifests import new_manifest
from tests.support.slots import Driven, build, drive
from tests.support.tensors import differing
from tests.trial_core.deepspeed.reshard.resharding import config, files, resharded, restore
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.deepspeed.export.deepspeed_folder import write_universal
from trial_core.deepspeed.fingerprints import (
    FILE_PREFIX,
    bit_sum,
    check_exported,
    fingerprints_of,
)
from trial_core.deepspeed.reshard.parameter_state import parameters_from_partitions
from trial_core.errors import CheckpointError, RankFailed
from trial_core.export.export_checkpoint import ExportRequest, export_checkpoint
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.safe_load import Reader

Warm = Callable[[int], SlotGroup]
READER = Reader(trusted=True)
SWAPPED = {"norm.weight", "norm.bias"}
"""They have the same shape, so only their content tells them apart."""


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def own_trial(folder: Path, stage: int, trial: str, **hparams: Any) -> ExperimentConfig:
    """An experiment of another trial of the topology toys."""
    changes = {"entrypoint": f"topology_trials:{trial}"}
    return config(folder, 3, stage, **hparams).model_copy(update=changes)


def saved_module(stored: Path) -> dict[str, torch.Tensor]:
    """The weights of the live module, which ZeRO 1 and 2 save by name."""
    state = READER.load(stored / "model0" / "mp_rank_00_model_states.pt")
    module: dict[str, torch.Tensor] = state["module"]
    return module


def moments(stored: Path) -> dict[str, torch.Tensor]:
    """Adam's moments by name."""
    shards = sorted((stored / "model0").glob("*_optim_states.pt"))
    optimizers = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in shards]
    model = READER.load(next((stored / "model0").glob("*model_states.pt")))
    parameters, _ = parameters_from_partitions(model["param_shapes"], optimizers)
    return {
        f"{name}/{key}": each.full_tensor(key)
        for name, each in parameters.items()
        for key in ("exp_avg", "exp_avg_sq")
    }


def universal(stored: Path, into: Path) -> dict[str, torch.Tensor]:
    """The weights and moments of the export for DeepSpeed, by name."""
    copied = shutil.copytree(stored, into / "copied")
    write_universal(copied, 0, into / "universal", "tag", READER)
    folders = into / "universal" / "tag" / "zero"
    return {
        file.relative_to(folders).with_suffix("").as_posix(): torch.load(file)["param"]
        for file in folders.glob("*/*.pt")
        if file.stem != "step"
    }


def recorded(stored: Path) -> set[str]:
    """The names that have a fingerprint."""
    return set(fingerprints_of(stored, 0))


@pytest.mark.slots
@pytest.mark.parametrize(
    ("ranks", "is_on", "other_ranks", "other_is_on", "stage"),
    [
        (2, True, 2, False, 2),
        (2, True, 1, True, 1),
        long(1, True, 2, True, 2),
        long(2, False, 2, True, 1),
        long(4, True, 2, True, 2),
        long(2, True, 1, False, 1),
    ],
)
def test_round_robin_gradients_mix_up_no_names(
    warm_slots: Warm, tmp_path: Path, ranks: int, is_on: bool, other_ranks: int, other_is_on: bool,
    stage: int,
) -> None:  # fmt: skip
    """DeepSpeed then orders its flat buffers otherwise, by the number of ranks: weights and moments
    are still each parameter's own, in exports and if the setting changes on the same ranks."""

    def settings(is_on: bool, **hparams: Any) -> ExperimentConfig:
        zero = {"round_robin_gradients": is_on}
        return config(tmp_path, 3, stage, zero=zero, micro_batch_size=1, **hparams)

    first = drive(warm_slots(ranks), settings(is_on), tmp_path, persist=True)
    stored = files(tmp_path, first.checkpoints[-1])
    expected = saved_module(stored)
    assert differing(expected, export_weights(stored)) == []
    by_name = {f"{name}/fp32": tensor for name, tensor in expected.items()} | moments(stored)
    converted = universal(stored, tmp_path)
    assert differing({name: by_name[name] for name in converted}, converted) == []
    assert converted.keys() >= moments(stored).keys()
    away = resharded(warm_slots(other_ranks), settings(other_is_on, seed=9), tmp_path / "o", first)
    after = files(tmp_path, away.checkpoints[-1])
    assert differing(expected, saved_module(after)) == []
    assert differing(expected, export_weights(after)) == []
    assert differing(moments(stored), moments(after)) == []


def without_fingerprints(run: Driven) -> Driven:
    """A run by a version that did not record them."""
    uuid = run.checkpoints[-1]
    kept = [file for file in run.files[uuid] if not file.path.startswith(FILE_PREFIX)]
    return replace(run, files={uuid: kept})


@pytest.mark.slots
@pytest.mark.parametrize(
    ("ranks", "stage", "other_stage"), [(1, 1, 1), long(2, 1, 1), long(1, 1, 3), long(1, 3, 2)]
)
def test_names_that_do_not_fit_the_saved_state_are_refused(
    warm_slots: Warm, tmp_path: Path, ranks: int, stage: int, other_stage: int
) -> None:
    """The error of a restore and of an export names the exchanged tensors, on every rank."""
    wrong = own_trial(tmp_path, stage, "Misnames")
    first = drive(warm_slots(2), wrong, tmp_path, persist=True)
    slots = warm_slots(ranks)
    build(slots, config(tmp_path, 3, other_stage, seed=9), tmp_path / "old")
    restore(slots, without_fingerprints(first))  # of an earlier version: not checked

    build(slots, config(tmp_path, 3, other_stage, seed=9), tmp_path / "new")
    with pytest.raises(RankFailed, match="of the loaded tensors are not those") as refused:
        restore(slots, first)
    assert all(f"model0: {name}" in str(refused.value) for name in SWAPPED)
    uuid = first.checkpoints[-1]
    with pytest.raises(CheckpointError, match=r"2 of the exported tensors .*: norm\.weight, norm"):
        export_weights(files(tmp_path, uuid))
    saved = new_manifest(3, uuid=uuid, files=first.files[uuid], topology=first.topology)
    store, target = CheckpointStore(f"file://{tmp_path}/checkpoints"), tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"1 of the exported tensors .*: norm\.\w+;"):
        export_checkpoint(store, ExportRequest(saved), target)
    assert not target.exists()


@pytest.mark.slots
@pytest.mark.parametrize(
    ("stage", "bf16", "ranks"),
    [(1, True, 1), long(3, False, 2), long(1, False, 2), long(2, True, 2), long(3, True, 1)],
)
def test_a_weight_that_the_trial_changed_itself_is_not_compared(
    warm_slots: Warm, tmp_path: Path, stage: int, bf16: bool, ranks: int
) -> None:
    """ZeRO's next step takes the optimizer's own weights: the run resumes; all others are
    compared."""
    changing = own_trial(tmp_path, stage, "ChangesWeights", bf16=bf16)
    first = drive(warm_slots(2), changing, tmp_path, persist=True)
    stored = files(tmp_path, first.checkpoints[-1])
    weights = export_weights(stored)
    assert weights.keys() - recorded(stored) == {"inputs.weight"}
    there = resharded(warm_slots(ranks), changing, tmp_path / "there", first)
    after = files(tmp_path, there.checkpoints[-1])
    assert differing(export_weights(after), weights) == []


def numbers(elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    return (torch.randn(elements, generator=generator) * 50).to(dtype)


TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_sum_is_of_weighted_words(dtype: torch.dtype) -> None:
    """As described; and the parts of a tensor add up to it, wherever they are cut."""
    for elements in (0, 1, 7, 4097, 300_001):
        tensor = numbers(elements, dtype)
        content = tensor.view(torch.uint8).numpy().tobytes()
        words = [content[i : i + 8] for i in range(0, len(content), 8)]
        expected = 0
        for i, word in enumerate(words):
            expected += int.from_bytes(word, "little") * (2 * i + 1)
        assert int(bit_sum(tensor)) % 2**64 == expected % 2**64
        for cut in (1, elements // 3, elements - 1):
            parts = int(bit_sum(tensor[:cut])) + int(bit_sum(tensor[cut:], max(cut, 0)))
            assert cut < 0 or parts % 2**64 == expected % 2**64


def test_the_sum_sees_an_exchange_of_elements() -> None:
    """Neighbours, distant elements, rows and columns."""
    tensor = numbers(40_000, torch.bfloat16)
    seen = {int(bit_sum(tensor))}
    for first, second in ((0, 1), (0, 4), (3, 16_387), (16_384, 32_768)):
        other = tensor.clone()
        other[[first, second]] = tensor[[second, first]]
        seen.add(int(bit_sum(other)))
    seen |= {int(bit_sum(tensor.view(200, 200).T)), int(bit_sum(tensor.flip(0)))}
    assert len(seen) == 7


def test_an_export_is_compared_in_the_type_of_the_model(tmp_path: Path) -> None:
    """fp32 weights are cast; other types and sizes, and weights with a NaN, are not compared."""
    master = numbers(500_000, torch.float32)
    assert int(bit_sum(master, dtype=torch.float16)) == int(bit_sum(master.half()))
    write_fingerprint(tmp_path, "weight", master.half())
    other = master.clone()
    for weight in (master, master.half(), master.double(), master[1:], other * float("nan")):
        check_exported(fingerprints_of(tmp_path, 0), {"weight": weight, "unknown": weight})
    check_exported(fingerprints_of(tmp_path, 1), {"weight": other + 1})  # another engine
    with pytest.raises(CheckpointError, match=r"1 of the exported tensors .* saved: weight;"):
        check_exported(fingerprints_of(tmp_path, 0), {"weight": other + 1})
