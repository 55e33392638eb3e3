"""Weights exported from checkpoints that real ranks have saved."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model

from tests.support.consolidated import consolidated, export_weights
from tests.support.fingerprints import write_fingerprint
from tests.support.manifests import new_manifest
from tests.support.slots import TOY, Driven, drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.weights.weights import write_weights
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.engine_weights import checked_weights
from trial_core.errors import CheckpointError
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.safe_load import Reader
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
Weights = dict[str, torch.Tensor]
KINDS = ("weight", "bias")
EXPORT = "export_trials:ExportTrial"


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def trained(slots: SlotGroup, folder: Path, trial: str = EXPORT, **hparams: Any) -> Driven:
    """A run of three batches that saves at its end."""
    hparams["record"] = str(folder)
    # DeepSpeed cannot load a pipeline in bf16 without ZeRO, but it can be exported.
    config = toy_config(
        folder, 3, entrypoint=trial, hyperparameters=hparams, checkpointing={"verify_first": False}
    )
    return drive(slots, config, folder, persist=True)


def truth(folder: Path, dtype: str) -> Weights:
    """The weights that the engine had in memory when it saved."""
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
        return self.folder / "checkpoints" / "checkpoints" / self.uuid


@pytest.fixture(scope="module")
def run_on(warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """One run for each number of ranks, trial and hyperparameters."""

    @functools.cache
    def run(world_size: int = 2, trial: str = EXPORT, **hparams: Any) -> Run:
        folder = tmp_path_factory.mktemp("run")
        driven = trained(warm_slots(world_size), folder, trial, **hparams)
        uuid = driven.checkpoints[-1]
        store = CheckpointStore(f"file://{folder}/checkpoints")
        store.commit(new_manifest(3, uuid=uuid, files=driven.files[uuid]))
        return Run(folder, uuid)

    return run


def fabricated(folder: Path, **files: dict[str, Any]) -> Path:
    """A checkpoint with these files of engine 0."""
    (folder / "model0").mkdir()
    for name, content in files.items():
        torch.save(content, folder / "model0" / f"{name}.pt")
    return folder


@pytest.mark.parametrize(
    ("world_size", "zero_stage", "bf16"),
    [
        (2, 1, False),
        (2, 3, True),
        *(long(ranks, s, bf16) for ranks in (1, 2, 4) for s in range(4) for bf16 in (False, True)),
    ],
)
def test_fp32_is_what_the_optimizer_steps_on(
    run_on: Callable[..., Run], world_size: int, zero_stage: int, bf16: bool
) -> None:
    """Bit for bit, from all ranks' shards: tied and frozen weights and buffers too."""
    run = run_on(world_size, zero_stage=zero_stage, bf16=bf16)
    weights = export_weights(run.files)
    assert_equal(weights, truth(run.folder, "fp32"))
    is_converted = torch.equal(
        weights["inputs.weight"], weights["inputs.weight"].bfloat16().float()
    )
    assert is_converted == (bf16 and zero_stage == 0)
    assert weights["decoder.head.weight"] is weights["outputs.weight"]
    # Not views of ZeRO's groups: torch.save would write the whole group for each.
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in weights.values())


@pytest.mark.parametrize(
    ("world_size", "zero_stage"),
    [(2, 3), *(long(ranks, stage) for ranks in (1, 2, 4) for stage in range(4))],
)
def test_16bit_is_what_save_16bit_model_writes(
    run_on: Callable[..., Run], tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """The engine's own types; `trialflow export` writes the names, bits and ties of DeepSpeed."""
    run, target = run_on(world_size, zero_stage=zero_stage, bf16=True), tmp_path / "model.pt"
    weights = export_weights(run.files, dtype="16bit")
    assert weights["frozen.weight"].dtype == torch.bfloat16
    assert_equal(weights, truth(run.folder, "16bit"))

    storage = str(run.folder / "checkpoints")
    arguments = [run.uuid, "--to", str(target), "--dtype", "16bit", "--storage", storage]
    assert main(["export", *arguments]) == 0
    exported = torch.load(target, weights_only=True)
    expected = torch.load(run.folder / "deepspeed.bin", weights_only=True)
    assert exported.keys() == expected.keys()
    assert_equal(exported, {name: expected[name] for name in exported})
    for written in (exported, expected):
        tied = [written[name].data_ptr() for name in ("outputs.weight", "decoder.head.weight")]
        assert tied[0] == tied[1]


def test_a_model_trained_in_fp32_has_no_16bit_weights(run_on: Callable[..., Run]) -> None:
    """Export refuses, and does not convert silently."""
    with pytest.raises(CheckpointError, match="engine 0 was trained in fp32, and has no 16-bit"):
        export_weights(run_on(2, zero_stage=1, bf16=False).files, dtype="16bit")


@pytest.mark.parametrize("zero_stage", [1, long(0), long(2)])
def test_a_module_under_two_names_is_exported_under_both(
    run_on: Callable[..., Run], zero_stage: int
) -> None:
    """DeepSpeed's own consolidation omits the second name."""
    run = run_on(zero_stage=zero_stage, twice=True)
    weights = export_weights(run.files)
    assert_equal(weights, truth(run.folder, "fp32"))
    assert weights["again.weight"] is weights["back.weight"]


def test_a_module_under_two_names_is_refused_under_zero_3(run_on: Callable[..., Run]) -> None:
    """DeepSpeed does not save its second name, so export refuses to omit it."""
    with pytest.raises(CheckpointError, match=r"ZeRO-3 checkpoint does not hold 'again\.weight'"):
        export_weights(run_on(zero_stage=3, twice=True).files)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_model_that_loads_the_file_has_the_ties_again(
    run_on: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It has the same weights, and shares those that were shared."""
    run, file = run_on(zero_stage=1, twice=True), tmp_path / name
    write_weights(export_weights(run.files), file, {"made by": "a test"})
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
    assert_equal(model.state_dict(), truth(run.folder, "fp32"))
    assert model.decoder["head"].weight is model.outputs.weight


def test_each_engine_is_exported_on_its_own(run_on: Callable[..., Run]) -> None:
    """A generator with two outputs, and a critic with one."""
    files = run_on(trial="engine_trials:Adversarial").files
    shapes = [export_weights(files, engine)["3.weight"].shape for engine in (0, 1)]
    assert shapes == [(2, 16), (1, 16)]


def test_a_pipeline_is_exported_as_its_layers(
    warm_slots: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model of the same layers loads the weights of both stages, and has the same loss."""
    monkeypatch.setattr(sys, "path", [str(TOY), *sys.path])
    from toy_trial import samples

    run = trained(warm_slots(2), tmp_path, "parallel_trials:PipelineTrial")
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    model = torch.nn.Sequential(
        linear(2, 16), torch.nn.Dropout(0.2), linear(16, 16), tanh(), linear(16, 16), tanh(),
        linear(16, 8), linear(8, 2),
    ).eval()  # fmt: skip
    model.load_state_dict(export_weights(Run(tmp_path, run.checkpoints[-1]).files))
    inputs, index = samples(32).tensors
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(inputs).sum(1, keepdim=True), index / 64)
    assert loss.item() == pytest.approx(run.validation[-1]["loss"])


def truth_of_ranks(folder: Path, dtype: str) -> Weights:
    """The weights that all ranks of a divided model had in memory when they saved."""
    truth: Weights = {}
    for file in folder.glob("truth-*.pt"):
        truth |= {name: each[dtype] for name, each in torch.load(file).items()}
    return truth


@pytest.mark.parametrize(
    ("bf16", "zero_stage"), [(True, 1), long(True, 0), long(False, 0), long(False, 1)]
)
def test_a_pipeline_has_the_names_of_its_tied_layers(
    run_on: Callable[..., Run], bf16: bool, zero_stage: int
) -> None:
    """fp32 weights are those of each stage's optimizer; a layer without a file is not missing."""
    run = run_on(trial="divided_trials:TiedPipeline", bf16=bf16, zero_stage=zero_stage)
    for dtype in ("fp32", "16bit") if bf16 else ("fp32",):
        weights = export_weights(run.files, dtype=dtype)
        assert list(weights) == [f"{layer}.{each}" for layer in (0, 1, 3, 4) for each in KINDS]
        expected = truth_of_ranks(run.folder, dtype)
        assert_equal({name: weights[name] for name in expected}, expected)
        assert weights["4.weight"] is weights["0.weight"]
    assert len(list(run.files.glob("model0/layer_*"))) == 3


@pytest.mark.parametrize(
    ("experts", "bf16", "zero_stage"),
    [
        (4, True, 1),
        *(long(count, *each) for count in (1, 4) for each in ((True, 2), (False, 1), (False, 0))),
    ],
)
def test_experts_have_their_global_names(
    run_on: Callable[..., Run], experts: int, bf16: bool, zero_stage: int
) -> None:
    """Those of all ranks are exported, fp32 from the shards of the ranks that hold them."""
    hparams = {"experts": experts, "bf16": bf16, "zero_stage": zero_stage}
    run = run_on(trial="divided_trials:HalfExperts", **hparams)
    for dtype in ("fp32", "16bit") if bf16 else ("fp32",):
        weights, expected = (
            export_weights(run.files, dtype=dtype),
            truth_of_ranks(run.folder, dtype),
        )
        assert weights.keys() == expected.keys()
        assert_equal({name: weights[name] for name in expected}, expected)
    assert f"experts.deepspeed_moe.experts.deepspeed_experts.{experts - 1}.weight" in weights


@pytest.mark.parametrize(("bf16", "zero_stage"), [(True, 1), long(False, 2), long(True, 3)])
def test_the_parts_of_tensor_parallel_ranks_are_joined(
    run_on: Callable[..., Run], tmp_path: Path, bf16: bool, zero_stage: int
) -> None:
    """As DeepSpeed's own ds_to_universal joins them: AutoTP saves how it has divided."""
    run = run_on(trial="divided_trials:AutoTensorParallel", bf16=bf16, zero_stage=zero_stage)
    weights, expected = export_weights(run.files), consolidated(run.files / "model0", tmp_path)
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (16, 16)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    for name in weights.keys() - {"lm_head.weight"}:
        assert torch.equal(weights[name].flatten(), expected[f"{name}/fp32"]), name
    if bf16:
        half = export_weights(run.files, dtype="16bit")
        assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)


def test_a_pipeline_without_shards_is_converted_from_16_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; layer 10 follows layer 9."""
    states = {
        f"layer_{layer:02d}-model_states": {"weight": torch.full((2,), layer, dtype=torch.bfloat16)}
        for layer in (10, 9)
    }
    folder = fabricated(tmp_path, **states)
    weights = export_weights(folder, dtype="16bit")
    assert [(name, tensor.tolist()) for name, tensor in weights.items()] == [
        ("9.weight", [9.0, 9.0]),
        ("10.weight", [10.0, 10.0]),
    ]
    assert export_weights(folder)["9.weight"].dtype == torch.float32
    assert "has no fp32 weights: the exported fp32 weights are converted" in caplog.text
    assert "does not record which layers of engine 0 are tied" in caplog.text


def test_converted_weights_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without ZeRO a 16-bit engine may have no fp32 weights."""
    module = {"weight": torch.ones(2, dtype=torch.bfloat16)}
    folder = fabricated(tmp_path, mp_rank_00_model_states={"module": module})
    assert export_weights(folder)["weight"].dtype == torch.float32
    assert "the exported fp32 weights are converted from 16 bits" in caplog.text


def test_other_weights_than_those_of_the_model_are_refused(tmp_path: Path) -> None:
    """When they are read, under any of their names."""
    weight = torch.arange(4.0)
    folder = fabricated(tmp_path, mp_rank_00_model_states={"module": {"a": weight, "b": weight}})
    write_fingerprint(folder, "a", weight.flip(0))
    weights = checked_weights(folder, 0, "fp32", Reader(classes=CHECKPOINT_CLASSES))
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match=r"1 of the exported tensors .* saved: a;"):
            weights[name].read()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["mp_rank_00_model_states", "mp_rank_01_model_states"],
            "engine 0 is split over 2 model-parallel ranks; export cannot join its parts",
        ),
        ([], r"no DeepSpeed weights of engine 0 \(model0/\*_model_states\.pt\)"),
    ],
)
def test_weights_that_cannot_be_joined_are_refused(
    tmp_path: Path, files: list[str], message: str
) -> None:
    """Export never writes a part of a model."""
    folder = fabricated(tmp_path, **{name: {"module": {}} for name in files})
    with pytest.raises(CheckpointError, match=message):
        export_weights(folder)


def test_a_missing_shard_is_refused(run_on: Callable[..., Run], tmp_path: Path) -> None:
    """The error tells how many shards there are, and how many were saved."""
    shutil.copytree(run_on(2, zero_stage=1, bf16=False).files, tmp_path / "copy")
    next(tmp_path.glob("copy/model0/*rank_1*optim*")).unlink()
    with pytest.raises(CheckpointError, match="of 1 data-parallel ranks, but 2 ranks saved"):
        export_weights(tmp_path / "copy")


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("shard", ["model", "optim", "layer"])
def test_export_runs_no_code_of_a_checkpoint(
    run_on: Callable[..., Run], tmp_path: Path, shard: str
) -> None:
    """In any of its files; unless the checkpoint is trusted."""
    marker, folder = tmp_path / "it has run", tmp_path / "copy"
    if shard == "layer":
        folder.mkdir()
        fabricated(folder, **{"layer_00-model_states": {"weight": torch.ones(2)}})
        target = folder / "model0" / "layer_00-model_states.pt"
    else:
        shutil.copytree(run_on(2, zero_stage=3, bf16=True).files, folder)
        target = next(folder.glob(f"model0/*rank_1_*{shard}_states.pt"))
    state = torch.load(target, weights_only=False)
    torch.save({**state, "odd": Hostile(marker)}, target)
    with pytest.raises(CheckpointError, match=rf"{target.name} holds objects of .*pathlib"):
        export_weights(folder)
    assert not marker.exists()
    export_weights(folder, reader=Reader(trusted=True))
    assert marker.exists()
