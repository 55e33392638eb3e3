"""A trial is loaded from a checkpoint in plain Python, without the folder of its code."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.consolidated import export_weights
from tests.support.manifests import new_manifest
from tests.support.ranks import run_ranks
from tests.support.slots import TOY, drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.code_folder import pack_code
from trial_core.checkpoint.transfer.fetch import check_downloaded, download
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, TrialError
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.pytorch import load_trial_from_checkpoint_path
from trial_core.trainer.load_trial import import_from_path

Warm = Callable[[int], SlotGroup]

MODEL_DEF = """
import os
from pathlib import Path

from parts.names import AUTHOR
from toy_trial import ToyTrial

os.environ["CODE_WAS_EXECUTED"] = "yes"
NOTE = Path("note.txt").read_text()


class Mine(ToyTrial):
    def __init__(self, context, extra=None):
        super().__init__(context)
        self.facts = [NOTE, AUTHOR, extra, context.get_data_config(), context.get_hparam("x")]

    def later(self):
        import imported_later

        return imported_later.VALUE
"""
FILES = {
    "model_def.py": MODEL_DEF,
    "parts/names.py": "AUTHOR = 'Ada'",
    "note.txt": "relative",
    "imported_later.py": "VALUE = 7",
}

LOADING = f"""
import json, os, sys, types
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name)
mine = sys.modules["model_def"] = types.ModuleType("model_def")
before = os.getcwd()
from trial_core.deepspeed import load_trial_from_checkpoint_path as load

def weights(trial):
    return {{name: each.tolist() for name, each in trial.engine.module.state_dict().items()}}

sys.path.append({str(TOY)!r})
from toy_trial import ToyTrial
toys = sys.modules["toy_trial"]
url, folder = json.loads(os.environ["CHECKPOINT"])
given = load(folder, ToyTrial, torch_load_kwargs={{"map_location": "cpu"}})
executed = "CODE_WAS_EXECUTED" in os.environ
own = load(url, trial_kwargs={{"extra": 3}})
again = load(folder)
print(json.dumps({{
    "weights": [weights(given), weights(own), weights(again)], "executed": executed,
    "facts": own.facts, "later": own.later(), "is_given": type(given) is ToyTrial,
    "is_same_class": type(own) is type(again),
    "restored": [sys.modules["model_def"] is mine, sys.modules["toy_trial"] is toys],
    "is_here": os.getcwd() == before, "open": type(own).__name__,
}}))
"""


def commit(
    slots: SlotGroup, tmp_path: Path, zero_stage: int, **fields: Any
) -> tuple[CheckpointStore, str]:
    """Train on these slots and commit the last checkpoint, with the code of `FILES`."""
    hparams = {"zero_stage": zero_stage}
    driven = drive(slots, toy_config(tmp_path, 3, hyperparameters=hparams), tmp_path, persist=True)
    store, uuid = CheckpointStore(f"file://{tmp_path}/checkpoints"), driven.checkpoints[-1]
    folder = tmp_path / "code"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(TOY / "toy_trial.py", folder)
    archive = pack_code(folder).data
    shutil.rmtree(folder)
    code = upload_code(store, uuid, archive)
    manifest = new_manifest(
        3, uuid=uuid, files=driven.files[uuid], topology=driven.topology, code=code,
        entrypoint="model_def:Mine", hyperparameters={**hparams, "x": 5},
        config={"data": {"path": "/d"}}, **fields,
    )  # fmt: skip
    store.commit(manifest)
    return store, uuid


@pytest.mark.slots
@pytest.mark.parametrize(
    ("slots", "zero_stage"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.long)]
)
def test_a_trial_is_loaded_from_a_folder_and_from_a_url(
    warm_slots: Warm, tmp_path: Path, slots: int, zero_stage: int
) -> None:
    """With a class of the caller's nothing of the checkpoint is executed; without, its code is.

    Saved by several ranks, loaded by one process that has other modules of the same names.
    """
    store, uuid = commit(warm_slots(slots), tmp_path, zero_stage)
    download(store, uuid, tmp_path / "downloaded")
    places = [store.files_url(uuid), str(tmp_path / "downloaded")]
    (result,) = run_ranks(LOADING, 1, CHECKPOINT=json.dumps(places))
    saved = export_weights(tmp_path / "downloaded")
    expected = {name: each.tolist() for name, each in saved.items()}
    assert result.pop("weights") == [expected] * 3
    assert result == {
        "executed": False, "facts": ["relative", "Ada", 3, {"path": "/d"}, 5], "later": 7,
        "is_given": True, "is_same_class": False, "restored": [True, True], "is_here": True,
        "open": "Mine",
    }  # fmt: skip


def test_what_is_no_checkpoint(tmp_path: Path, local_store: CheckpointStore) -> None:
    """The errors say what was given and what is expected."""
    with pytest.raises(CheckpointNotFound, match=r"/gone is no checkpoint: expected a folder with"):
        load_trial_from_checkpoint_path(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"is no checkpoint: .* checkpoints download UUID"):
        load_trial_from_checkpoint_path(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"s3://bucket/folder/checkpoints/UUID"):
        load_trial_from_checkpoint_path("memory://somewhere/else")
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint in .* begins with 'abc'"):
        load_trial_from_checkpoint_path(local_store.files_url("abc"))
    with pytest.raises(TrialError, match="expected a class of trials, got <class 'int'>"):
        load_trial_from_checkpoint_path(tmp_path, int)


def test_a_checkpoint_without_code(tmp_path: Path, local_store: CheckpointStore) -> None:
    """The entrypoint's name is not imported from anywhere else."""
    manifest = new_manifest(entrypoint="json:JSONDecoder")
    local_store.commit(manifest)
    with pytest.raises(CheckpointError, match="has no code of json:JSONDecoder"):
        load_trial_from_checkpoint_path(local_store.files_url(manifest.uuid))
    download(local_store, manifest.uuid, tmp_path / "downloaded")
    with pytest.raises(CheckpointError, match="has no code of json:JSONDecoder"):
        load_trial_from_checkpoint_path(tmp_path / "downloaded")


def test_a_checkpoint_of_a_script_needs_the_class(local_store: CheckpointStore) -> None:
    """Its entrypoint is a command; a trial in it may be of any class."""
    manifest = new_manifest(entrypoint="python train.py --lr ...")
    local_store.commit(manifest)
    with pytest.raises(TrialError, match=r"\(python train.py --lr ...\).* give it as trial_class"):
        load_trial_from_checkpoint_path(local_store.files_url(manifest.uuid))


def test_a_downloaded_checkpoint_that_was_altered(
    tmp_path: Path, local_store: CheckpointStore
) -> None:
    """Its code and its files are compared with the manifest before they are used."""
    from tests.support.manifests import commit_with_code
    from trial_core.checkpoint import layout

    manifest = commit_with_code(local_store)
    folder = tmp_path / "downloaded"
    download(local_store, manifest.uuid, folder)
    check_downloaded(folder, manifest.uuid, manifest.all_files)
    archive = folder / layout.CODE_NAME
    archive.write_bytes(b"edoc")
    with pytest.raises(CheckpointDamaged, match=r"trial-code\.tar is missing or differs"):
        load_trial_from_checkpoint_path(folder)
    archive.unlink()
    with pytest.raises(CheckpointDamaged, match=r"trial-code\.tar is missing or differs"):
        load_trial_from_checkpoint_path(folder)
    altered = manifest.files[0].path
    (folder / altered).write_bytes(b"altered")
    with pytest.raises(CheckpointDamaged, match=f"{altered} is missing or differs"):
        check_downloaded(folder, manifest.uuid, manifest.files)


def test_an_older_version_of_a_module_is_imported_beside_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With import_from_path, as in Determined; nothing is left behind, and nothing is written."""
    folders = [tmp_path / name for name in ("now", "old", "older")]
    for folder in folders:
        folder.mkdir()
        (folder / "some_model.py").write_text(f"NAME = {folder.name!r}")
    monkeypatch.syspath_prepend(folders[0])
    now = importlib.import_module("some_model")
    seen, path = [], list(sys.path)
    for folder in folders[1:]:
        with import_from_path(folder):
            seen.append(importlib.import_module("some_model").NAME)
        assert list(folder.iterdir()) == [folder / "some_model.py"]
    assert (seen, now.NAME, sys.path) == (["old", "older"], "now", path)
    assert sys.modules.pop("some_model") is now
    with pytest.raises(TrialError, match=r"expected a folder with modules, got .*some_model.py"):
        import_from_path(folders[1] / "some_model.py").__enter__()
