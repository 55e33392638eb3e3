"""`trialflow export --format deepspeed | universal`: read by bare DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.manifests import new_manifest
from tests.support.slots import drive, toy_config
from tests.support.snippets import ROOT
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.slots.slot_group import SlotGroup
from trialflow.deployments.cli.main import main

pytestmark = pytest.mark.slots
SCRIPT = ROOT / "tests" / "support" / "scripts" / "load_plain_deepspeed.py"
Committed = tuple[Path, str]


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.long)])
def stage(request: pytest.FixtureRequest) -> int:
    """The ZeRO stage."""
    return int(request.param)


@pytest.fixture(scope="module")
def committed(
    warm_slots: Callable[[int], SlotGroup],
    tmp_path_factory: pytest.TempPathFactory,
    stage: int,
) -> Committed:
    """A storage, and a checkpoint of two ranks after three batches."""
    folder = tmp_path_factory.mktemp("export")
    config = toy_config(folder, 3, hyperparameters={"zero_stage": stage})
    run = drive(warm_slots(2), config, folder, persist=True)
    uuid = run.checkpoints[-1]
    manifest = new_manifest(3, files=run.files[uuid], uuid=uuid, trial="toy-0000beef")
    CheckpointStore(config.checkpoint_storage.url).commit(manifest)
    return folder / "checkpoints", uuid


def export(committed: Committed, *options: str) -> int:
    storage, uuid = committed
    return main(["export", uuid, "--storage", str(storage), *options])


def loaded(folder: Path, stage: int, is_universal: bool, ranks: int) -> dict[str, Any]:
    """What bare DeepSpeed has after it has loaded an exported folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(folder), str(stage), str(int(is_universal))],
        text=True, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.timeout(1200)  # bare DeepSpeed compiles operators of its own
@pytest.mark.parametrize(("format_", "ranks"), [("deepspeed", 2), ("universal", 1)])
def test_bare_deepspeed_continues(
    committed: Committed, tmp_path: Path, stage: int, format_: str, ranks: int
) -> None:
    """With the weights, the schedule and the steps; a universal one on another number of ranks."""
    target = tmp_path / "exported"
    assert export(committed, "--format", format_, "--to", str(target)) == 0
    found = loaded(target, stage, format_ == "universal", ranks)
    storage, uuid = committed
    expected = export_weights(storage / "checkpoints" / uuid)
    assert found["weights"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.tensor(found["weights"][name]), tensor), name
    assert found["steps"] == 3
    if stage < 3:  # DeepSpeed gives ZeRO-3's engine the rate when it steps next
        assert found["lr"] != [0.01]


def test_what_is_exported_can_be_imported(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And replaced, but nothing else is."""
    target = tmp_path / "exported"
    assert export(committed, "--format", "deepspeed", "--to", str(target), "--json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "deepspeed"
    assert (target / "latest").read_text() == "global_step3"
    assert export(committed, "--format", "deepspeed", "--to", str(target)) == 2
    assert export(committed, "--format", "deepspeed", "--to", str(target), "--force") == 0
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "latest"):  # which exports of some formats have, too
        (own / name).touch()
        assert export(committed, "--format", "deepspeed", "--to", str(own), "--force") == 2
        assert "is not an exported folder" in capsys.readouterr().err
    assert sorted(each.name for each in own.iterdir()) == ["config.json", "latest"]


@pytest.mark.parametrize("added", ["notes.txt", "global_step3/notes.txt", ".git/HEAD", "link"])
def test_a_file_that_a_person_has_added_to_an_export_stays(
    committed: Committed, tmp_path: Path, capsys: pytest.CaptureFixture[str], added: str
) -> None:
    """The export is not replaced, and the error names it. Without it, it is."""
    target = tmp_path / "exported"
    replace = ("--format", "universal", "--to", str(target), "--force")
    assert export(committed, "--format", "deepspeed", "--to", str(target)) == 0
    own = target / added
    own.parent.mkdir(exist_ok=True)
    own.symlink_to(tmp_path) if added == "link" else own.touch()
    assert export(committed, *replace) == 2
    assert f"would delete it: {added}" in "".join(capsys.readouterr().err.split("\n"))
    assert own.exists()
    own.unlink()
    if added != ".git/HEAD":  # it costs a conversion
        return
    assert export(committed, *replace) == 0
    assert (target / "latest_universal").exists()
    assert not (target / "latest").exists()
