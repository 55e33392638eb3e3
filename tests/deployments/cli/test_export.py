"""`trialflow export` on checkpoints in a real local store."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from tests.support.cli import trialflow
from tests.support.json_types import check_json
from tests.support.manifests import FILES, new_manifest, upload
from tests.support.slots import drive, toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.schedule.sequencer import Progress
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
EXPERIMENT = """
name: any
entrypoint: any:Any
searcher: {name: single, metric: loss, max_length: {batches: 1}}
checkpointing: {trusted: true}
"""
BEST = {
    "config": {"searcher": {"metric": "loss"}},
    "progress": Progress(3, validated_at=3),
}
WEIGHTS = {"0.weight": (16, 2), "0.bias": (16,), "3.weight": (2, 16), "3.bias": (2,)}


@pytest.fixture(scope="module")
def folder(
    warm_slots: Callable[[int], SlotGroup], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder whose ``checkpoints`` holds one of the toy, after three batches on two ranks."""
    folder = tmp_path_factory.mktemp("export")
    config = toy_config(folder, 3, hyperparameters={"zero_stage": 2})
    run = drive(warm_slots(2), config, folder, persist=True)
    uuid = run.checkpoints[-1]
    store = CheckpointStore(config.checkpoint_storage.url)
    known = {"uuid": uuid, "trial": "toy-0000beef", "experiment": "any"}
    store.commit(new_manifest(3, files=run.files[uuid], **BEST, **known))
    return folder


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    """The manifest of that checkpoint."""
    return CheckpointStore(f"file://{folder}/checkpoints").list()[0]


def run(folder: Path, *arguments: str) -> int:
    return main(["export", *arguments, "--storage", str(folder / "checkpoints")])


def test_a_checkpoint_is_exported_to_one_file(
    folder: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """Stdout is only the JSON; the file has usual permissions and names its checkpoint."""
    arguments = ("--to", "model.safetensors", "--storage", str(folder / "checkpoints"), "--json")
    done = trialflow(tmp_path, "export", manifest.uuid[:8], *arguments)
    assert done.returncode == 0, done.stderr
    target = tmp_path / "model.safetensors"
    assert check_json(json.loads(done.stdout)) == {
        "uuid": manifest.uuid,
        "file": str(target),
        "names": 4,
        "size_bytes": target.stat().st_size,
        "dtype": "fp32",
        "engine": 0,
        "format": "safetensors",
        "missing": [],
        "pushed_to": None,
    }
    with safe_open(target, "pt") as opened:
        assert {name: opened.get_tensor(name).shape for name in opened.keys()} == WEIGHTS  # noqa: SIM118
        assert opened.metadata()["trialflow.checkpoint"] == manifest.uuid
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_newest_checkpoint_of_a_trial_as_a_state_dict(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--trial` selects it; `torch.load` reads .pt with weights_only=True."""
    target = tmp_path / "new" / "model.pt"
    monkeypatch.delattr(os, "link")  # as a disk without hard links
    assert run(folder, "--trial", "toy-0000beef", "--to", str(target)) == 0
    weights = torch.load(target, weights_only=True)
    assert {name: tensor.shape for name, tensor in weights.items()} == WEIGHTS
    said = capsys.readouterr().out
    assert f"4 names, {target.stat().st_size / 1024:.1f} KiB, in {target}" in said
    assert " (trial toy-0000beef, batch " in said


def test_an_existing_file_is_replaced_only_with_force(
    folder: Path, manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--force` it stays as it is."""
    target = tmp_path / "model.bin"
    target.write_text("precious")
    assert run(folder, manifest.uuid, "--to", str(target)) == 2
    assert "exists already; add --force to replace it" in capsys.readouterr().err
    assert target.read_text() == "precious"
    assert run(folder, manifest.uuid, "--to", str(target), "--force") == 0
    assert torch.load(target, weights_only=True).keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("0123 --to x.pt", "no checkpoint in file://"),
        (
            "--to x.pt",
            "checkpoint (best, its uuid, or champion:MODEL) or --trial, got neither",
        ),
        (
            "0123 --trial t --to x.pt",
            "checkpoint (best, its uuid, or champion:MODEL) or --trial, got both",
        ),
        ("--trial toy-0000beef --to new/sub/x.pt --engine 1", "for engine 1"),
        ("--trial toy-0000beef --to new/sub/x.pt --dtype 16bit", "was trained in fp32"),
        ("--trial toy-0000beef --to file/sub/x.pt", "cannot write"),
        ("--trial tox --to x.pt", "trial 'tox' has no checkpoint in file://"),
        ("--trial toy-0000beef --to x.onnx", "expected a name that ends in .safetensors, .pt, .bi"),
        ("--trial toy-0000beef --to file/x.pt", "cannot write"),
        ("--trial toy-0000beef --to folder.pt", "is a folder; give the name of a file"),
        (
            "--trial toy-0000beef --to x.pt --engine 1",
            "for engine 1 (model1/…model_states.pt): its",
        ),
        ("--trial toy-0000beef --to x.pt --dtype 16bit", "engine 0 was trained in fp32"),
        ("--trial toy-0000beef --to x.pt --dtype int8", 'Choose from: "fp32", "16bit"'),
        (
            "--trial toy-0000beef --to x --format universal --dtype 16bit",
            "dtype 16bit: has no effect with format universal",
        ),
        (
            "--trial toy-0000beef --to x.pt --max-shard-size 1GB",
            "max_shard_size 1GB: has no effect with format safetensors",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    """Exit code 2, the reason, and no file, not even a partial one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder.pt").mkdir()
    assert run(folder, *arguments.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pt"]


def test_a_champion_is_exported(
    folder: Path, manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its model's name, without looking up the uuid."""
    registry = Registry(CheckpointStore(str(folder / "checkpoints")))
    registry.register("toy", manifest, metric=None, smaller_is_better=True, value=None)
    registry.promote("toy", 1)
    assert run(folder, "champion:toy", "--to", str(tmp_path / "model.pt"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["uuid"] == manifest.uuid


@pytest.mark.parametrize("arguments", ["best --config any.yaml", "best --trial toy-0000beef"])
def test_the_best_checkpoint_is_exported(
    folder: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], arguments: str,
) -> None:  # fmt: skip
    """Of the newest trial of an experiment, or of a named trial."""
    monkeypatch.chdir(tmp_path)
    Path("any.yaml").write_text(EXPERIMENT)
    assert run(folder, *arguments.split(), "--to", "model.pt", "--json") == 0
    assert json.loads(capsys.readouterr().out)["uuid"] == manifest.uuid


def test_a_trial_that_overrides_save_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error gives the command that downloads its files."""
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    own = upload(store, tmp_path / "staging", FILES)
    store.commit(own)
    assert run(tmp_path, own.uuid, "--to", str(tmp_path / "x.pt")) == 2
    message = capsys.readouterr().err
    assert "the trial overrides save, so only the trial can read its files" in message
    assert f"trialflow checkpoints download {own.uuid} --to FOLDER" in message


def test_a_checkpoint_of_a_script_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trial has written it."""
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    own = upload(store, tmp_path / "staging", FILES)
    own = msgspec.structs.replace(own, entrypoint="python finetune.py")
    store.commit(own)
    assert run(tmp_path, own.uuid, "--to", str(tmp_path / "x.pt")) == 2
    message = capsys.readouterr().err
    assert "a script has written its files" in message
    assert f"trialflow checkpoints download {own.uuid} --to FOLDER" in message


def test_a_damaged_checkpoint_is_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the error names the file that differs from the manifest."""
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    damaged = upload(store, tmp_path / "staging", {"model0/mp_rank_00_model_states.pt": b"good"})
    store.commit(damaged)
    path = tmp_path / "checkpoints" / "checkpoints" / damaged.uuid / damaged.files[0].path
    path.write_bytes(b"evil")
    assert run(tmp_path, damaged.uuid, "--to", str(tmp_path / "x.pt")) == 1
    assert "mp_rank_00_model_states.pt" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_only_a_trusted_checkpoint_may_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --trusted, or if the experiment of --config trusts it. One that was found has no say."""
    marker, states = tmp_path / "it has run", io.BytesIO()
    torch.save({"module": {"weight": torch.ones(2)}, "odd": Hostile(marker)}, states)
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    files = {"model0/mp_rank_00_model_states.pt": states.getvalue()}
    hostile = upload(store, tmp_path / "staging", files)
    store.commit(hostile)
    arguments = (hostile.uuid, "--to", str(tmp_path / "x.pt"), "--force")
    assert run(tmp_path, *arguments) == 2
    assert "mp_rank_00_model_states.pt holds objects of" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not marker.exists()
    assert run(tmp_path, *arguments, "--trusted") == 0
    assert marker.exists()
    marker.unlink()
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    assert main(["export", *arguments]) == 2
    assert not marker.exists()
    assert run(tmp_path, *arguments, "--config", str(experiment)) == 0
    assert marker.exists()
