"""Weights exported from checkpoints that real ranks have saved."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from trial_core.deepspeed.export.weights_file import export_weights, write_weights

from tests.support.manifests import new_manifest
from tests.support.slots import TOY, Driven, drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.controller.safe_load import Reader
from trial_core.errors import CheckpointError
from trial_core.slots.group import SlotGroup
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
Weights = dict[str, torch.Tensor]
EXPORT = "export_trials:ExportTrial"


def ranks_and_stages(test: Any) -> Any:
    """Run a test on 1, 2 and 4 ranks, with every ZeRO stage."""
    on_ranks = pytest.mark.parametrize("world_size", [1, 2, 4])
    return on_ranks(pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])(test))


def trained(slots: SlotGroup, folder: Path, trial: str = EXPORT, **hparams: Any) -> Driven:
    """A run of three batches, saved at its end."""
    hparams["record"] = str(folder)
    config = toy_config(folder, 3, entrypoint=trial, hyperparameters=hparams)
    return drive(slots, config, folder, persist=True)


def saved(slots: SlotGroup, folder: Path, trial: str = EXPORT, **hparams: Any) -> Path:
    """The files of the checkpoint of such a run."""
    return files(folder, trained(slots, folder, trial, **hparams).checkpoints[-1])


def files(folder: Path, uuid: str) -> Path:
    return folder / "checkpoints" / "checkpoints" / uuid


def truth(folder: Path, dtype: str) -> Weights:
    """What the engine had in memory when it saved."""
    weights: Weights = torch.load(folder / "truth.pt")[dtype]
    return weights


def assert_equal(seen: Weights, expected: Weights) -> None:
    assert list(seen) == list(expected)
    for name, tensor in expected.items():
        assert seen[name].dtype == tensor.dtype, name
        assert torch.equal(seen[name], tensor), name


@dataclass
class Run:
    """A run whose checkpoint is committed."""

    folder: Path
    uuid: str

    @property
    def files(self) -> Path:
        return files(self.folder, self.uuid)


@pytest.fixture(scope="module")
def run_on(warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """One run for each number of ranks, ZeRO stage and precision."""

    @functools.cache
    def run(world_size: int, zero_stage: int, bf16: bool) -> Run:
        folder = tmp_path_factory.mktemp("run")
        driven = trained(warm_slots(world_size), folder, zero_stage=zero_stage, bf16=bf16)
        uuid = driven.checkpoints[-1]
        store = CheckpointStore(f"file://{folder}/checkpoints")
        store.commit(new_manifest(3, uuid=uuid, files=driven.files[uuid]))
        return Run(folder, uuid)

    return run


@ranks_and_stages
@pytest.mark.parametrize("bf16", [False, True])
def test_fp32_is_what_the_optimizer_steps_on(
    run_on: Callable[..., Run], world_size: int, zero_stage: int, bf16: bool
) -> None:
    """Bit for bit, tied and frozen weights and buffers included, from all ranks' shards."""
    run = run_on(world_size, zero_stage, bf16=bf16)
    weights = export_weights(run.files)
    assert_equal(weights, truth(run.folder, "fp32"))
    is_widened = torch.equal(weights["inputs.weight"], weights["inputs.weight"].bfloat16().float())
    assert is_widened == (bf16 and zero_stage == 0)
    assert weights["decoder.head.weight"] is weights["outputs.weight"]


@ranks_and_stages
def test_16bit_is_what_the_model_computes_with(
    run_on: Callable[..., Run], world_size: int, zero_stage: int
) -> None:
    """Each tensor has the type that it has in the engine."""
    run = run_on(world_size, zero_stage, bf16=True)
    weights = export_weights(run.files, dtype="16bit")
    assert weights["frozen.weight"].dtype == torch.bfloat16
    assert_equal(weights, truth(run.folder, "16bit"))


@ranks_and_stages
def test_16bit_is_what_save_16bit_model_gives(
    run_on: Callable[..., Run], tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """`trialflow export` writes DeepSpeed's names, types and bits, frozen weights too, and ties
    what is tied there."""
    run, target = run_on(world_size, zero_stage, bf16=True), tmp_path / "model.pt"
    storage = str(run.folder / "checkpoints")
    arguments = [run.uuid, "--to", str(target), "--dtype", "16bit", "--storage", storage]
    assert main(["export", *arguments]) == 0
    exported = torch.load(target, weights_only=True)
    given = torch.load(run.folder / "deepspeed.bin", weights_only=True)
    assert exported.keys() == given.keys()
    assert_equal(exported, {name: given[name] for name in exported})
    for weights in (exported, given):
        tied = [weights[name].data_ptr() for name in ("outputs.weight", "decoder.head.weight")]
        assert tied[0] == tied[1]


def test_a_model_trained_in_fp32_has_no_16bit_weights(warm_slots: Warm, tmp_path: Path) -> None:
    """It is refused: fp32 under that name would be a surprise."""
    folder = saved(warm_slots(1), tmp_path)
    with pytest.raises(CheckpointError, match="engine 0 was trained in fp32, and has no 16-bit"):
        export_weights(folder, dtype="16bit")


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_module_under_two_names(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """It is exported under both; DeepSpeed's consolidation leaves the second out."""
    weights = export_weights(saved(warm_slots(2), tmp_path, zero_stage=zero_stage, twice=True))
    assert_equal(weights, truth(tmp_path, "fp32"))
    assert weights["again.weight"] is weights["back.weight"]


def test_a_module_under_two_names_in_zero_3(warm_slots: Warm, tmp_path: Path) -> None:
    """DeepSpeed does not save what it is: refused by name, rather than left out."""
    folder = saved(warm_slots(2), tmp_path, zero_stage=3, twice=True)
    with pytest.raises(CheckpointError, match=r"ZeRO-3 checkpoint does not hold 'again\.weight'"):
        export_weights(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_loading_back_restores_the_tie(
    warm_slots: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A fresh model has the same weights, and still shares those that were shared."""
    folder = saved(warm_slots(2), tmp_path, zero_stage=1, twice=True)
    file = tmp_path / name
    write_weights(export_weights(folder), file, {"made by": "a test"})
    monkeypatch.setattr(sys, "path", [str(TOY), *sys.path])
    from export_trials import Tied

    model = Tied(twice=True)
    if file.suffix == ".safetensors":
        load_model(model, file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {
                "made by": "a test",
                "format": "pt",
                "decoder.head.weight": "outputs.weight",
                "again.weight": "back.weight",
                "again.bias": "back.bias",
            }
    else:
        stored = torch.load(file, weights_only=True)
        assert stored["again.bias"].data_ptr() == stored["back.bias"].data_ptr()
        model.load_state_dict(stored)
    assert_equal(model.state_dict(), truth(tmp_path, "fp32"))
    assert model.decoder["head"].weight is model.outputs.weight


def test_a_file_holds_no_more_than_the_weights(warm_slots: Warm, tmp_path: Path) -> None:
    """Tensors are views of ZeRO's groups; torch.save would write the whole group for each."""
    weights = export_weights(saved(warm_slots(2), tmp_path, zero_stage=2))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in weights.values())


def test_several_engines(warm_slots: Warm, tmp_path: Path) -> None:
    """Each engine's weights are its own: a generator with two outputs, a critic with one."""
    folder = saved(warm_slots(2), tmp_path, "engine_trials:Adversarial")
    shapes = [export_weights(folder, engine)["3.weight"].shape for engine in (0, 1)]
    assert shapes == [(2, 16), (1, 16)]


def test_a_pipeline_is_exported_as_its_layers(
    warm_slots: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model of the same layers takes the weights of both stages, and validates alike."""
    monkeypatch.setattr(sys, "path", [str(TOY), *sys.path])
    from toy_trial import samples

    run = trained(warm_slots(2), tmp_path, "parallel_trials:PipelineTrial")
    folder = files(tmp_path, run.checkpoints[-1])
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    model = torch.nn.Sequential(
        linear(2, 16), torch.nn.Dropout(0.2), linear(16, 16), tanh(), linear(16, 16), tanh(),
        linear(16, 8), linear(8, 2),
    ).eval()  # fmt: skip
    model.load_state_dict(export_weights(folder))
    inputs, index = samples(32).tensors
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs).sum(1, keepdim=True), index / 64)
    assert loss.item() == pytest.approx(run.validation[-1]["loss"])


def test_a_pipeline_in_16_bits(tmp_path: Path) -> None:
    """Its files hold 16-bit weights alone, so only those are exported; layer 10 is after 9."""
    (tmp_path / "model0").mkdir()
    for layer in (10, 9):
        state = {"weight": torch.full((2,), float(layer), dtype=torch.bfloat16)}
        torch.save(state, tmp_path / "model0" / f"layer_{layer:02d}-model_states.pt")
    weights = export_weights(tmp_path, dtype="16bit")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        "9.weight": [9.0, 9.0],
        "10.weight": [10.0, 10.0],
    }
    assert list(weights) == ["9.weight", "10.weight"]
    with pytest.raises(CheckpointError, match="Export with --dtype 16bit"):
        export_weights(tmp_path)


def test_widened_weights_are_warned_of(
    warm_slots: Warm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without ZeRO there may be no fp32 weights: who asks for them is told what they get."""
    export_weights(saved(warm_slots(1), tmp_path, zero_stage=0, bf16=True))
    assert "the exported fp32 ones are those, widened" in caplog.text


def test_a_mixture_of_experts_is_refused(warm_slots: Warm, tmp_path: Path) -> None:
    """With the reason; nothing is exported by halves."""
    folder = saved(warm_slots(2), tmp_path, "engine_trials:Experts")
    with pytest.raises(CheckpointError, match="engine 0 has a mixture of experts"):
        export_weights(folder)


def test_a_model_split_over_ranks_is_refused(warm_slots: Warm, tmp_path: Path) -> None:
    """Only the trial knows along which dimension its parts belong together."""
    folder = saved(warm_slots(2), tmp_path, "parallel_trials:TensorParallelTrial")
    with pytest.raises(CheckpointError, match="engine 0 is split over 2 model-parallel ranks"):
        export_weights(folder)


def test_a_lost_shard_is_refused(warm_slots: Warm, tmp_path: Path) -> None:
    """Weights would be missing, or zero."""
    folder = saved(warm_slots(2), tmp_path, zero_stage=2)
    next(folder.glob("model0/*rank_1*optim*")).unlink()
    with pytest.raises(CheckpointError, match="of 1 data-parallel ranks, and 2 saved it"):
        export_weights(folder)


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("shard", ["model", "optim", "layer"])
def test_nothing_runs_that_a_file_holds(warm_slots: Warm, tmp_path: Path, shard: str) -> None:
    """In whichever of a checkpoint's files it is hidden; unless the checkpoint is trusted."""
    marker = tmp_path / "it has run"
    if shard == "layer":
        (tmp_path / "model0").mkdir()
        folder, target = tmp_path, tmp_path / "model0" / "layer_00-model_states.pt"
        state: dict[str, Any] = {"weight": torch.ones(2)}
    else:
        folder = saved(warm_slots(2), tmp_path, zero_stage=3)
        target = next(folder.glob(f"model0/*rank_1_*{shard}_states.pt"))
        state = torch.load(target, weights_only=False)
    torch.save({**state, "odd": Hostile(marker)}, target)
    with pytest.raises(CheckpointError, match=rf"{target.name} holds objects of .*pathlib"):
        export_weights(folder)
    assert not marker.exists()
    export_weights(folder, reader=Reader(trusted=True))
    assert marker.exists()


def test_no_weights_of_an_engine(tmp_path: Path) -> None:
    """What was looked for is said."""
    with pytest.raises(CheckpointError, match=r"engine 3 \(model3/\*_model_states\.pt\)"):
        export_weights(tmp_path, 3)
