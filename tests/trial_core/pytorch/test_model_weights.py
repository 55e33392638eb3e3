"""Models exported from checkpoints that the ranks of a PyTorchTrial have saved."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from tests.support.manifests import new_manifest, upload
from tests.support.slots import TOY, drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError
from trial_core.models.registry import Registry
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch.pytorch_state import MODELS, STATE_FILE, model_weights
from trial_core.pytorch.sharded_state import write_parts
from trial_core.rank.state_files.safe_load import Reader
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
TRIAL = "several_models_trials:SeveralModelsTrial"


@pytest.fixture(scope="module")
def folder(
    warm_slots: Callable[[int], SlotGroup], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder whose ``checkpoints`` holds a trial's, after three batches on two ranks.

    The trial has a model in fp32 and one in bf16; the fp32 one is champion of the model "pair".
    """
    folder = tmp_path_factory.mktemp("export")
    hparams = {"record": str(folder), "dtype": "bfloat16"}
    config = toy_config(folder, 3, entrypoint=TRIAL, hyperparameters=hparams)
    run = drive(warm_slots(2), config, folder, persist=True)
    uuid = run.checkpoints[-1]
    store = CheckpointStore(config.checkpoint_storage.url)
    manifest = new_manifest(3, uuid=uuid, trial="toy-0000beef", files=run.files[uuid])
    store.commit(manifest)
    registry = Registry(store)
    registry.register("pair", manifest, metric=None, smaller_is_better=True, value=None)
    registry.promote("pair", 1)
    return folder


def export(folder: Path, target: Path, *options: str, checkpoint: str = "champion:pair") -> int:
    storage = str(folder / "checkpoints")
    return main(["export", checkpoint, "--to", str(target), "--storage", storage, *options])


def truth(folder: Path, model: int) -> dict[str, torch.Tensor]:
    """The state that the model had in memory when it was saved."""
    states: list[dict[str, torch.Tensor]] = torch.load(folder / "truth.pt", map_location="cpu")
    return states[model]


def test_a_champion_of_a_pytorch_trial_is_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain model loads the file: tied and frozen weights and buffers, bit for bit."""
    target = tmp_path / "model.safetensors"
    assert export(folder, target) == 0
    monkeypatch.setattr(sys, "path", [str(TOY), *sys.path])
    from several_models_trials import TiedPair

    model = TiedPair()
    load_model(model, target)
    loaded, expected = model.state_dict(), truth(folder, 0)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert model.again.weight is model.outputs.weight


@pytest.mark.parametrize(("dtype", "expected"), [("16bit", "bfloat16"), ("fp32", "float32")])
def test_each_model_is_exported_in_the_asked_precision(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, expected: str
) -> None:
    """The second model is trained in bf16; its fp32 weights are the converted ones."""
    target = tmp_path / "model.pt"
    assert export(folder, target, "--engine", "1", "--dtype", dtype, "--json") == 0
    assert json.loads(capsys.readouterr().out)["names"] == 2
    weights, saved = torch.load(target, weights_only=True), truth(folder, 1)
    assert list(weights) == ["weight", "bias"]
    for name, tensor in weights.items():
        assert tensor.dtype == getattr(torch, expected)
        assert torch.equal(tensor, saved[name].to(tensor.dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "2"], "the checkpoint has no model 2: its models are 0, 1"),
        (["--dtype", "16bit"], "model 0 was trained in fp32, and has no 16-bit weights"),
    ],
)
def test_a_model_or_precision_that_does_not_exist_is_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    """Exit code 2, the reason, and no file."""
    assert export(folder, tmp_path / "model.pt", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_models_that_a_callback_has_removed_are_missed(tmp_path: Path) -> None:
    """The error says which part of the file is missing."""
    torch.save({"models_state_dict": []}, tmp_path / "state_dict.pth")
    with pytest.raises(CheckpointError, match="holds no models_state_dict: a callback may have"):
        model_weights(tmp_path, 0, "fp32", Reader())


def test_tied_weights_of_a_sharded_model_are_exported_as_one(tmp_path: Path) -> None:
    """`from_pretrained` would else get an untied model, with one weight more."""
    names = ("embed.weight", "head.weight", "other.weight")
    for rank in range(2):
        tied, other = torch.full((2, 3), 1.0 + rank), torch.full((2, 3), 1.0 + rank)
        parts = {
            (MODELS, 0, name): ((2 * rank, 0), other if name == "other.weight" else tied)
            for name in names
        }
        write_parts(parts, rank, tmp_path, MemoryFiles(0))
    placeholder = torch.empty(4, 3, device="meta")
    torch.save({MODELS: [dict.fromkeys(names, placeholder)]}, tmp_path / STATE_FILE)
    weights = model_weights(tmp_path, 0, "fp32", Reader())
    assert weights["embed.weight"] is weights["head.weight"] is not weights["other.weight"]
    assert weights["head.weight"].read()[:, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.long
def test_a_sharded_model_is_exported_whole(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """From the parts of both ranks."""
    hparams = {"record": str(tmp_path)}
    trial = TRIAL.replace("SeveralModels", "ShardedPair")
    config = toy_config(tmp_path, 3, entrypoint=trial, hyperparameters=hparams)
    run = drive(warm_slots(2), config, tmp_path, persist=True)
    uuid = run.checkpoints[-1]
    store = CheckpointStore(config.checkpoint_storage.url)
    store.commit(new_manifest(3, uuid=uuid, files=run.files[uuid]))
    target = tmp_path / "model.pt"
    assert export(tmp_path, target, checkpoint=uuid) == 0
    weights, expected = torch.load(target, weights_only=True), truth(tmp_path, 0)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_export_runs_no_code_of_a_pytorch_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it is trusted."""
    marker, state = tmp_path / "it has run", io.BytesIO()
    models = [{"weight": torch.ones(2)}]
    torch.save({"models_state_dict": models, "odd": Hostile(marker)}, state)
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    manifest = upload(store, tmp_path / "staging", {"state_dict.pth": state.getvalue()})
    store.commit(manifest)
    assert export(tmp_path, tmp_path / "x.pt", checkpoint=manifest.uuid) == 2
    assert "state_dict.pth holds objects of" in " ".join(capsys.readouterr().err.split())
    assert not marker.exists()
    assert export(tmp_path, tmp_path / "x.pt", "--trusted", checkpoint=manifest.uuid) == 0
    assert marker.exists()
