"""A run begins with the checkpoint of another program."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from pydantic import ValidationError
from safetensors.torch import save_file

from tests.support.consolidated import consolidated, export_weights
from tests.support.manifests import keys_of, stored_keys
from tests.support.slots import Driven, drive, toy_config
from tests.support.snippets import ROOT
from tests.trial_core.deepspeed.resuming import saved_again
from trial_core.checkpoint.manifest import Manifest, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.storage.local_files import sha256_of
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.import_checkpoint import import_checkpoint
from trial_core.config import ExperimentConfig
from trial_core.driver.choose_resume_point import resume_points
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
)
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.read_imported_weights import imported_weights
from trial_core.rank.state_files.safe_load import Reader
from trial_core.schedule.sequencer import Progress

WarmSlots = Callable[[int], SlotGroup]
TAG = "global_step4"


class Unknown:
    """An object that is neither a tensor nor plain data."""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/checkpoints")


def toy(folder: Path, **hparams: Any) -> ExperimentConfig:
    return toy_config(folder, 4, hyperparameters={"batch_size": 8, **hparams})


def plain_folder(slots: SlotGroup, folder: Path, **hparams: Any) -> Path:
    """What `engine.save_checkpoint(folder, tag="global_step4")` of two ranks writes."""
    config = toy(folder / "source", **hparams)
    run = drive(slots, config, folder / "source", persist=True)
    stored = folder / "source" / "checkpoints" / "checkpoints" / run.checkpoints[-1] / "model0"
    shutil.copytree(stored, folder / "plain" / TAG)
    (folder / "plain" / "latest").write_text(TAG)
    return folder / "plain"


def begin(
    slots: SlotGroup, manifest: Manifest, config: ExperimentConfig, folder: Path, restore: Restore
) -> Path:
    """The folder of what the ranks save at batch 0."""
    imported = Driven(Progress(), manifest.topology, checkpoints=[manifest.uuid])
    imported.files[manifest.uuid] = manifest.files
    saved_again(slots, imported, config, folder, restore)
    joined = folder / "again"
    for rank in sorted((folder / "staging" / "again").iterdir()):
        shutil.copytree(rank, joined, dirs_exist_ok=True)
    return joined


@pytest.mark.slots
@pytest.mark.parametrize(
    ("stage", "ranks", "now"),
    [
        (2, 1, 2),
        pytest.param(1, 2, 1, marks=pytest.mark.long),
        pytest.param(3, 1, 3, marks=pytest.mark.long),
        pytest.param(3, 2, 2, marks=pytest.mark.long),
        pytest.param(0, 1, 0, marks=pytest.mark.long),
    ],
)
def test_a_deepspeed_folder_restores_weights_and_optimizer(
    warm_slots: WarmSlots, store: CheckpointStore, tmp_path: Path, stage: int, ranks: int, now: int
) -> None:
    """On other ranks, or with another stage: DeepSpeed's own converter sees no difference."""
    plain = plain_folder(warm_slots(2), tmp_path, zero_stage=stage)
    manifest = import_checkpoint(store, str(plain))
    assert manifest.progress.batches_trained == 4
    slots, config = warm_slots(ranks), toy(tmp_path, zero_stage=now)
    again = begin(slots, manifest, config, tmp_path / "run", "state")
    if stage == 0:  # DeepSpeed converts no checkpoint without ZeRO
        shutil.copytree(plain / TAG, tmp_path / "expected" / "model0")
        expected, seen = export_weights(tmp_path / "expected"), export_weights(again)
    else:
        expected = consolidated(plain / TAG, tmp_path / "expected")
        seen = consolidated(again / "model0", tmp_path / "seen")
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize("stage", [1, 3])
def test_bare_deepspeeds_checkpoint_is_continued(
    warm_slots: WarmSlots, store: CheckpointStore, tmp_path: Path, stage: int
) -> None:
    """It was saved by two ranks of a program that knows nothing of trialflow."""
    program = [str(ROOT / "tests" / "support" / "scripts" / "plain_deepspeed.py"), str(stage)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run([*command, program[0], str(tmp_path / "plain"), program[1]], check=True)
    manifest = import_checkpoint(store, str(tmp_path / "plain"))
    config = toy(tmp_path, zero_stage=1)
    again = begin(warm_slots(1), manifest, config, tmp_path / "run", "state")
    expected = consolidated(tmp_path / "plain" / TAG, tmp_path / "expected")
    seen = consolidated(again / "model0", tmp_path / "seen")
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor), name


def safetensors_file(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(weights, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def hugging_face_folder(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Two files, listed in an index. Names lack the prefix of the model."""
    names = sorted(weights)
    halves = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def state_dict_file(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(weights, folder / "weights.pt")
    return folder / "weights.pt"


def lightning_file(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    content = {"epoch": 3, "state_dict": {f"net.{name}": each for name, each in weights.items()}}
    torch.save(content, folder / "epoch=3.ckpt")
    return folder / "epoch=3.ckpt"


def accelerate_folder(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """As of `accelerator.save_state`: the weights lie beside the optimizer's state."""
    save_file(weights, folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.bin")
    (folder / "random_states_0.pkl").write_bytes(b"not read")
    return folder


@pytest.mark.slots
@pytest.mark.parametrize(
    "write",
    [
        hugging_face_folder,
        lightning_file,
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (safetensors_file, state_dict_file, accelerate_folder)
        ),
    ],
)
def test_weights_of_others_are_loaded_by_name(
    warm_slots: WarmSlots,
    store: CheckpointStore,
    tmp_path: Path,
    write: Callable[[dict[str, torch.Tensor], Path], Path],
) -> None:
    """Under ZeRO-3, whose ranks have parts. Nothing else is restored."""
    shapes = {"0.weight": (16, 2), "0.bias": (16,), "3.weight": (2, 16), "3.bias": (2,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "theirs").mkdir()
    manifest = import_checkpoint(store, str(write(weights, tmp_path / "theirs")))
    config = toy(tmp_path, zero_stage=3)
    again = begin(warm_slots(2), manifest, config, tmp_path / "run", "weights")
    seen = export_weights(again)
    assert seen.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(seen[name], tensor), name


@pytest.mark.long
@pytest.mark.slots
def test_a_universal_checkpoint_gives_its_weights(
    warm_slots: WarmSlots, store: CheckpointStore, tmp_path: Path
) -> None:
    """What DeepSpeed's converter has written."""
    plain = plain_folder(warm_slots(2), tmp_path, zero_stage=1)
    expected = consolidated(plain / TAG, tmp_path / "universal")
    manifest = import_checkpoint(store, str(tmp_path / "universal"))
    again = begin(warm_slots(2), manifest, toy(tmp_path), tmp_path / "run", "weights")
    for name, tensor in export_weights(again).items():
        assert torch.equal(tensor.flatten(), expected[f"{name}/fp32"]), name


@pytest.mark.slots
def test_a_pytorch_trial_takes_weights_too(
    warm_slots: WarmSlots, store: CheckpointStore, tmp_path: Path
) -> None:
    """Those of its only model."""
    shapes = {"0.weight": (8, 3), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,)}
    weights = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    manifest = import_checkpoint(store, str(safetensors_file(weights, tmp_path)))
    config = toy_config(tmp_path, 4, entrypoint="pytorch_trials:Small")
    again = begin(warm_slots(2), manifest, config, tmp_path / "run", "weights")
    saved = torch.load(again / "state_dict.pth")["models_state_dict"][0]
    assert {name: each.tolist() for name, each in saved.items()} == {
        name: each.tolist() for name, each in weights.items()
    }


def test_files_are_imported_once(store: CheckpointStore, tmp_path: Path) -> None:
    """The same files are one checkpoint; changed ones are another."""
    file = state_dict_file({"a": torch.zeros(2)}, tmp_path)
    first = import_checkpoint(store, str(file))
    assert import_checkpoint(store, str(file)) == first
    assert len(store.list()) == 1
    torch.save({"a": torch.zeros(3)}, file)
    assert import_checkpoint(store, str(file)).uuid != first.uuid
    store.verify(first.uuid)


def test_runs_that_import_at_once_do_not_disturb_each_other(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's commit does not end the upload of the other, which takes its checkpoint."""
    file = state_dict_file({"a": torch.ones(2)}, tmp_path)
    others: list[Manifest] = []

    def read(*arguments: Any) -> str:
        monkeypatch.setattr("trial_core.checkpoint.storage.local.sha256_of", sha256_of)
        others.append(import_checkpoint(store, str(file)))
        return sha256_of(*arguments)

    monkeypatch.setattr("trial_core.checkpoint.storage.local.sha256_of", read)
    assert [import_checkpoint(store, str(file))] == others
    store.verify(others[0].uuid)
    assert stored_keys(store) == keys_of(others)


def test_files_come_from_any_storage_of_fsspec(store: CheckpointStore, tmp_path: Path) -> None:
    """A copy is made only for the time of its upload."""
    file = state_dict_file({"a": torch.ones(2)}, tmp_path)
    fsspec.filesystem("memory").pipe("/theirs/weights.pt", file.read_bytes())
    manifest = import_checkpoint(store, "memory://theirs/weights.pt")
    assert [entry.path for entry in manifest.files] == ["imported/weights.pt"]
    store.verify(manifest.uuid)


def test_an_experiment_names_it(store: CheckpointStore, tmp_path: Path) -> None:
    """A new trial begins with weights alone where there is nothing else."""
    file = state_dict_file({"a": torch.zeros(2)}, tmp_path)
    searcher = {"metric": "loss", "max_length": {"batches": 4}, "source_checkpoint": str(file)}
    (point,) = resume_points(store, toy_config(tmp_path, searcher=searcher), None)
    assert point.restore == "weights"
    assert point.checkpoint == store.list()[0]


def test_a_source_that_changes_is_refused(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of two saves would be mixed. What was copied is deleted."""
    file = state_dict_file({"a": torch.ones(2)}, tmp_path)
    stored = store.storage.upload

    def upload(*arguments: Any) -> tuple[int, str]:
        done = stored(*arguments)
        torch.save({"a": torch.ones(99)}, file)
        return done

    monkeypatch.setattr(store.storage, "upload", upload)
    with pytest.raises(CheckpointDamaged, match="changed while it was copied"):
        import_checkpoint(store, str(file))
    assert stored_keys(store) == set()


def test_a_source_of_which_a_file_goes_is_refused(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its program deletes an old checkpoint. What was copied is deleted."""
    folder = hugging_face_folder({name: torch.ones(2) for name in "abcd"}, tmp_path)
    stored, copies = store.storage.upload, []

    def upload(*arguments: Any) -> tuple[int, str]:
        copies.append(stored(*arguments))
        if len(copies) == 2:
            (folder / "model-1.safetensors").unlink(missing_ok=True)
        return copies[-1]

    monkeypatch.setattr(store.storage, "upload", upload)
    with pytest.raises(CheckpointDamaged, match="changed while it was copied"):
        import_checkpoint(store, str(folder))
    assert stored_keys(store) == set()


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_names_tell_which_rank_wrote_a_deepspeed_file(
    store: CheckpointStore, tmp_path: Path, is_pipeline: bool
) -> None:
    """In DeepSpeed's order: stages of a pipeline first, model-parallel ranks last."""
    ranks = {
        f"zero_pp_rank_{data}_mp_rank_0{part}_optim_states.pt": (
            part * 3 + data if is_pipeline else data * 2 + part
        )
        for data in range(3)
        for part in range(2)
    }
    others = [f"mp_rank_0{part}_model_states.pt" for part in range(2)]
    others += ["layer_00-model_states.pt"] if is_pipeline else []
    (tmp_path / "global_step7").mkdir()
    for name in [*ranks, *others]:
        torch.save({}, tmp_path / "global_step7" / name)
    (tmp_path / "global_step7" / "notes.txt").touch()
    for name, content in {"latest": "global_step7", "notes.pt": "not of this tag"}.items():
        (tmp_path / name).write_text(content)
    manifest = import_checkpoint(store, str(tmp_path))
    written = {entry.path.removeprefix("model0/"): entry.rank for entry in manifest.files}
    assert written.keys() == {*ranks, *others}
    assert {name: written[name] for name in ranks} == ranks
    parts = {"pipeline_parallel_size" if is_pipeline else "model_parallel_size": 2}
    assert manifest.topology == Topology(world_size=6, data_parallel_size=3, zero_stage=1, **parts)
    assert manifest.progress.batches_trained == 7


def test_a_universal_folder_also_gives_buffers(tmp_path: Path) -> None:
    """And frozen weights, of DeepSpeed's model states. The folder zero/ has precedence."""
    root = tmp_path / "imported"
    (root / "zero" / "a").mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, root / "zero" / "a" / "fp32.pt")
    module = {"a": torch.zeros(2), "seen": torch.full((1,), 7), "empty": torch.zeros(0)}
    torch.save({"module": module}, root / "mp_rank_00_model_states.pt")
    weights = imported_weights(tmp_path, ["a", "seen"], Reader()) or {}
    assert {name: each.tolist() for name, each in weights.items()} == {"a": [1, 1], "seen": [7]}


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/step", "https://host/w.safetensors?X-Amz-Signature=abc"]
)
def test_a_url_with_credentials_is_refused(tmp_path: Path, url: str) -> None:
    """It would be stored with the experiment. The error does not repeat them."""
    searcher = {"metric": "loss", "max_length": {"batches": 4}, "source_checkpoint": url}
    with pytest.raises(ValidationError, match="must have no password and no signature") as refusal:
        toy_config(tmp_path, searcher=searcher)
    assert "secret" not in str(refusal.value)
    assert "Signature=" not in str(refusal.value)


def remove_shard(folder: Path) -> None:
    (folder / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()


def keep_half(folder: Path) -> None:
    """As of one node of two: under ZeRO-3 the model states tell."""
    for kind, rank in (("optim", 0), ("optim", 1), ("model", 1)):
        name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
        torch.save({}, folder / TAG / name)
    (folder / TAG / "mp_rank_00_model_states.pt").unlink()


def flip_bit(folder: Path) -> None:
    file = folder / TAG / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def flip_flag(folder: Path) -> None:
    """A file in the archive seems to be encrypted."""
    file = folder / TAG / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] ^= 1
    file.write_bytes(content)


def several_weights(folder: Path) -> None:
    """Without an index: which of them belong together is not known."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("first.pt", "second.pt"):
        torch.save({"a": torch.zeros(2)}, folder / name)


def only_readme(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "README.md").write_text("nothing")


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (remove_shard, CheckpointDamaged, "has 1 .*expected 2.*copy those of all nodes"),
        (keep_half, CheckpointDamaged, "copy those of all nodes"),
        (flip_bit, CheckpointDamaged, "mp_rank_00_model_states.pt is damaged"),
        (flip_flag, CheckpointDamaged, "mp_rank_00_model_states.pt is damaged"),
        (
            several_weights,
            CheckpointNotFound,
            "its files are first.pt, second.pt; expected a folder",
        ),
        (only_readme, CheckpointNotFound, "its files are README.md; expected a folder"),
        (shutil.rmtree, CheckpointNotFound, "there is no checkpoint at"),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    store: CheckpointStore,
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[CheckpointError],
    text: str,
) -> None:
    """With what was seen. Nothing is stored under a name that counts."""
    plain = tmp_path / "plain"
    (plain / TAG).mkdir(parents=True)
    (plain / "latest").write_text(TAG)
    torch.save({"module": {"a": torch.zeros(9999)}}, plain / TAG / "mp_rank_00_model_states.pt")
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": {}}, plain / TAG / name)
    damage(plain)
    with pytest.raises(error, match=text):
        import_checkpoint(store, str(plain))
    assert store.list() == []


def test_two_prefixes_are_ambiguous(tmp_path: Path) -> None:
    """The same error on every rank, whatever the order of names in its process."""
    (tmp_path / "imported").mkdir()
    save_file({"x.weight": torch.zeros(2)}, tmp_path / "imported" / "theirs.safetensors")
    own = ["query.x.weight", "key.x.weight", "head.weight"]
    with pytest.raises(CheckpointError, match=r"several prefixes .*: key\., query\.;"):
        imported_weights(tmp_path, own, Reader())
    weights = imported_weights(tmp_path, own[1:], Reader())
    assert list(weights or {}) == ["key.x.weight"]


def test_files_beside_the_checkpoint_do_not_count(store: CheckpointStore, tmp_path: Path) -> None:
    """A log that grows beside it makes no other checkpoint of it."""
    file = safetensors_file({"a": torch.zeros(2)}, tmp_path)
    (tmp_path / "theirs").mkdir()
    shutil.move(file, tmp_path / "theirs" / "model.safetensors")
    first = import_checkpoint(store, str(tmp_path / "theirs"))
    (tmp_path / "theirs" / "train.log").write_text("a line")
    assert import_checkpoint(store, str(tmp_path / "theirs")) == first


def test_pickles_of_strangers_are_not_read(tmp_path: Path) -> None:
    """Unless the experiment trusts the checkpoint."""
    (tmp_path / "imported").mkdir()
    content = {"state_dict": {"a": torch.zeros(2)}, "callbacks": Unknown()}
    torch.save(content, tmp_path / "imported" / "theirs.ckpt")
    with pytest.raises(CheckpointError, match="Unknown"):
        imported_weights(tmp_path, ["a"], Reader())
    weights = imported_weights(tmp_path, ["model.a"], Reader(trusted=True))
    assert weights is not None
    assert list(weights) == ["model.a"]


def huge_rank(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").touch()
    (folder / "zero_pp_rank_999999_mp_rank_00_optim_states.pt").touch()


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pytorch_model.bin")


def link_to_credentials(folder: Path) -> None:
    secret = folder.parent / "credentials"
    secret.write_text("aws_secret_access_key = abc\n")
    (folder / "pytorch_model.bin").symlink_to(secret)


def link_named_safetensors(folder: Path) -> None:
    link_to_credentials(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")


def link_to_a_pickle(folder: Path) -> None:
    """As programs keep tokens."""
    (folder.parent / "token.pickle").write_bytes(pickle.dumps({"token": "abc"}))
    (folder / "pytorch_model.bin").symlink_to(folder.parent / "token.pickle")


def link_to_an_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder.parent / "salaries.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "abc")
    (folder / "pytorch_model.bin").symlink_to(folder.parent / "salaries.xlsx")


def link_to_json(folder: Path) -> None:
    """Its ninth byte is that of safetensors."""
    (folder.parent / "config.json").write_text('{"auth":{"registry": "abc"}}')
    (folder / "model.safetensors").symlink_to(folder.parent / "config.json")


def deep_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)


def long_index(folder: Path) -> None:
    with (folder / "model.safetensors.index.json").open("wb") as file:
        file.truncate(2**30)


def incomplete_index(folder: Path) -> None:
    index = {"weight_map": {"a": "missing.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def odd_name(folder: Path) -> None:
    """No manifest lists it."""
    save_file({"a": torch.ones(2)}, folder / "a\\b.safetensors")


def link_to_memory(folder: Path) -> None:
    """A regular file, whose beginning cannot be read."""
    (folder / "pytorch_model.bin").symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("fill", "text"),
    [
        (link_to_memory, "pytorch_model.bin cannot be read: "),
        (odd_name, "is not a plain relative path"),
        (incomplete_index, "index.json lists missing.safetensors, which is not there"),
        (huge_rank, "has 1 of the files .*expected 1000000"),
        (pipe, "pytorch_model.bin is no regular file"),
        (link_to_credentials, "pytorch_model.bin is no file of torch.save"),
        (link_named_safetensors, "model.safetensors is no file of safetensors"),
        (link_to_a_pickle, "pytorch_model.bin is no file of torch.save"),
        (link_to_an_archive, "pytorch_model.bin is damaged: it is an archive without data.pkl"),
        (link_to_json, "model.safetensors is no file of safetensors"),
        (deep_index, "index.json is no index of weights"),
        (long_index, "index.json has more than"),
    ],
)
def test_a_strangers_folder_can_do_no_harm(
    store: CheckpointStore, tmp_path: Path, fill: Callable[[Path], None], text: str
) -> None:
    """It neither hangs nor takes all memory, and no other file of this machine is copied."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    fill(folder)
    with pytest.raises(CheckpointError, match=text):
        import_checkpoint(store, str(folder))
    assert stored_keys(store) == set()


class _TellsNoSize(BaseHTTPRequestHandler):
    """Serves a folder with a long list of files. An answer ends with its connection."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        is_list = self.path.endswith(".json")
        with suppress(ConnectionError):  # the client has read enough
            for _ in range(64 if is_list else 1):
                page = b'<a href="model.safetensors.index.json">weights</a>'
                self.wfile.write(b" " * 2**20 if is_list else page)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_list_of_files_of_a_server_that_tells_no_size(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read up to the limit."""
    monkeypatch.setattr("trial_core.checkpoint.transfer.import_checkpoint._MAX_TEXT", 2**16)
    with ThreadingHTTPServer(("127.0.0.1", 0), _TellsNoSize) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(CheckpointDamaged, match=r"index\.json has more than 65,536"):
                import_checkpoint(store, f"http://127.0.0.1:{server.server_port}/theirs/")
        finally:
            server.shutdown()
    assert stored_keys(store) == set()


def test_names_that_lead_out_of_a_source_are_refused(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object storage may have such keys; no path of a checkpoint is made of them."""
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "store", {"/theirs/../../model.pt": MemoryFile(data=b"x")})
    with pytest.raises(CheckpointDamaged, match=r"'\.\./\.\./model\.pt', which leads out of it"):
        import_checkpoint(store, "memory://theirs")


def test_a_step_that_no_run_reaches_is_none(store: CheckpointStore, tmp_path: Path) -> None:
    """A tag says how many batches were trained, within reason."""
    tag = tmp_path / "theirs" / f"global_step{'9' * 30}"
    tag.mkdir(parents=True)
    torch.save({"module": {}}, tag / "mp_rank_00_model_states.pt")
    (tag.parent / "latest").write_text(tag.name)
    assert import_checkpoint(store, str(tag.parent)).progress.batches_trained == 0


def test_a_links_target_that_is_written_again_is_imported(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """Links stay as they are, as that of the latest model."""
    file, latest = state_dict_file({"a": torch.zeros(2)}, tmp_path), tmp_path / "latest"
    latest.mkdir()
    (latest / "pytorch_model.bin").symlink_to(file)
    first = import_checkpoint(store, str(latest))
    assert import_checkpoint(store, str(latest)) == first
    torch.save({"a": torch.ones(2)}, file)
    os.utime(file, ns=(1, 1))
    again = import_checkpoint(store, str(latest))
    assert again.files[0].digest != first.files[0].digest


def test_a_file_is_known_by_its_digest_where_nothing_else_tells(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """As in memory, or of a web server without times."""
    place = fsspec.filesystem("memory")
    digests = []
    for value in (0.0, 1.0, 1.0):
        file = state_dict_file({"a": torch.full((2,), value)}, tmp_path)
        place.pipe("/digests/weights.pt", file.read_bytes())
        digests.append(import_checkpoint(store, "memory://digests/weights.pt").files[0].digest)
    assert digests[0] != digests[1] == digests[2]
    assert len(store.list()) == 2
