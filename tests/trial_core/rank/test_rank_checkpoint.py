"""A rank's snapshots: staged, persisted, released, fetched and restored."""

from __future__ import annotations

import logging
import os
import socket
import uuid as uuids
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_accelerator import fake_accelerator
from tests.support.slots import Driven, drive, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import CheckpointError, StorageError
from trial_core.messages import PersistCheckpoint, Persisted, SaveCheckpoint, Saved
from trial_core.processes.machine.memory_files import GIB, Copy, MemoryFiles, is_memory_file
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank import rank_checkpoint
from trial_core.rank.checkpoint_files import CheckpointFiles
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.rank_checkpoint import Snapshots
from trial_core.rank.rank_state import STATE_FOLDER, write_rank_state
from trial_core.rank.state_files.built_settings import BuiltSettings
from trial_core.rank.state_files.late_copies import collecting, finish_copies
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.settings_parts import OptimizerPart, SchedulePart
from trial_core.rank.state_files.storage_bytes import copy_by_threads
from trial_core.rank.state_files.tensor_files import write_tensors
from trial_core.rank.trial.context import RunInfo

Warm = Callable[[int], SlotGroup]

with_ranks = pytest.mark.slots


class Odd:
    """Only a trusted checkpoint may hold it."""


def trained(slots: SlotGroup, folder: Path, **changes: Any) -> Driven:
    config = toy_config(
        folder, 6, resources={"slots_per_trial": slots.world_size}, scheduling_unit=3, **changes
    )
    return drive(slots, config, folder / "run", persist=True)


@with_ranks
def test_shards_are_staged_as_memory_files(warm_slots: Warm, tmp_path: Path) -> None:
    """They are readable as files in the staging folder."""
    slots = warm_slots(2)
    trained(slots, tmp_path)
    saved = slots.request(SaveCheckpoint(uuid="one-more"), Saved)
    shards = [path for rank in saved for path in Path(rank.staging).rglob("model0/*.pt")]
    assert shards
    assert all(is_memory_file(path) and path.read_bytes()[:2] == b"PK" for path in shards)


@with_ranks
def test_a_retried_upload_does_not_send_stored_files_again(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """A retry after another rank's failure."""
    slots, request = warm_slots(2), PersistCheckpoint(uuid="00000000-0000-4000-8000-000000000001")
    trained(slots, tmp_path)
    slots.request(SaveCheckpoint(uuid=request.uuid), Saved)
    first = slots.request(request, Persisted)
    stored = list((tmp_path / "checkpoints" / "checkpoints" / request.uuid).rglob("*.pt"))
    for path in stored:
        path.write_bytes(b"\0" * path.stat().st_size)  # sending a file again would restore it
    again = slots.request(request, Persisted)
    assert [rank.files for rank in again] == [rank.files for rank in first]
    assert stored
    assert not any(path.read_bytes().strip(b"\0") for path in stored)


@with_ranks
@pytest.mark.parametrize("memory_gib", [None, 0], ids=["memory", "disk"])
def test_a_restart_fetches_only_missing_files(
    warm_slots: Warm, tmp_path: Path, memory_gib: float | None
) -> None:
    """Files staged on disk are still there, and the fork server keeps memory files."""
    slots = warm_slots(2)
    first = trained(slots, tmp_path, checkpointing={"memory_gib_per_rank": memory_gib})
    shards = list((tmp_path / "checkpoints").rglob("model0/*.pt"))
    for path in shards:
        path.write_bytes(b"\0" * path.stat().st_size)  # reading the storage would detect this
    config = toy_config(tmp_path, 8)
    assert drive(slots, config, tmp_path / "run", resume=first).stages[0] == "train [6→8]"


@with_ranks
def test_only_the_newest_checkpoint_is_kept_on_disk(warm_slots: Warm, tmp_path: Path) -> None:
    """Staging needs disk space for one committed checkpoint and the one in progress."""
    slots = warm_slots(2)
    run = trained(
        slots, tmp_path, min_checkpoint_period={"batches": 3},
        checkpointing={"memory_gib_per_rank": 0},
    )  # fmt: skip
    assert len(run.checkpoints) == 2
    kept = [path.name for path in (tmp_path / "run" / "kept").iterdir()]
    assert kept == run.checkpoints[-1:]
    assert not any((tmp_path / "run" / "staging").rglob("*.pt"))


def test_the_ranks_of_a_machine_leave_the_same_memory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what its first rank has measured: a later rank would see less. A limit needs none.
    A rank with several threads copies by all of them."""
    made: list[tuple[int | None, int, Copy | None]] = []

    def memory_files(
        limit_bytes: int | None, reserve_bytes: int = 0, copy: Copy | None = None
    ) -> None:
        made.append((limit_bytes, reserve_bytes, copy))

    monkeypatch.setattr(rank_checkpoint, "MemoryFiles", memory_files)
    monkeypatch.setattr(rank_checkpoint, "free_bytes", lambda: 1000)
    monkeypatch.setattr(DistributedContext, "broadcast_local", lambda self, measured: measured + 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    snapshots(tmp_path, 1, 2)._memory_files()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    snapshots(tmp_path, 1, 2, memory_gib_per_rank=2)._memory_files()
    assert made == [(None, 503, None), (2 * GIB, 0, copy_by_threads)]


def one_of(rank: int, ranks: int) -> DistributedContext:
    """One rank of a machine."""
    return DistributedContext(
        rank=rank, size=ranks, local_rank=rank, local_size=ranks, cross_rank=0, cross_size=1
    )


def files_of(folder: Path, rank: int = 0, ranks: int = 1, **settings: Any) -> CheckpointFiles:
    store = CheckpointStore(str(folder / "store"))
    info = RunInfo("toy-1", {"checkpointing": settings})
    return CheckpointFiles(folder, store, one_of(rank, ranks), info)


def snapshots(folder: Path, rank: int = 0, ranks: int = 1, **settings: Any) -> Snapshots:
    adapter: Any = SimpleNamespace(checkpoint_classes=())
    files = files_of(folder, rank, ranks, **settings)
    found = Snapshots(adapter, files, one_of(rank, ranks), CheckpointingConfig(**settings))
    found.built = BuiltSettings(())
    return found


@pytest.mark.parametrize("built", [torch.optim.SGD, torch.optim.AdamW])
def test_settings_from_elsewhere_are_told(tmp_path: Path, built: Any) -> None:
    """Although neither experiment nor code has changed. Nothing is refused: a trial may draw them,
    or choose by its machine."""
    ours, weights = snapshots(tmp_path), [torch.nn.Parameter(torch.zeros(2))]
    ours._adapter.load = lambda *_, **__: None
    ours._adapter.read_hook_state = lambda *_: {}
    ours._adapter.callbacks, ours._adapter.entries_of_parts = {}, {}
    settings = [
        BuiltSettings([OptimizerPart(each(weights, lr=rate), [])])
        for each, rate in ((torch.optim.SGD, 0.1), (built, 0.2))
    ]
    folder = tmp_path / "restored" / "u" / STATE_FOLDER
    folder.mkdir(parents=True)
    settings[0].write(folder, {"samples": 40})
    ours.built, ours.data_settings = settings[1], {"samples": 30}
    told = ours.restore("u", {}, compares=False)
    assert told.new == ["training data: samples 40 -> 30, also for the rest of this epoch"]
    if built is torch.optim.SGD:
        assert "lr stays 0.1 (not 0.2), because neither the experiment nor" in told.kept[0]
    else:
        assert "was of SGD when the checkpoint was saved" in told.not_kept[0]
        with pytest.raises(CheckpointError, match="was of SGD when the checkpoint was saved"):
            ours.restore("u", {})


@pytest.mark.parametrize("left", [None, 1, 2])
@pytest.mark.parametrize("compares", [True, False])
def test_a_callback_may_remove_the_states_of_parts(
    tmp_path: Path, left: int | None, compares: bool
) -> None:
    """Of two schedulers, when the trial has built one: all of them, one, or none. Then it says how
    many there are to be, or that the settings are not compared."""
    ours, optimizer = snapshots(tmp_path), torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]

    def remove(state: dict[str, Any]) -> None:
        del state["of schedulers"][left or 0 :]
        if left is None:
            del state["of schedulers"]

    loaded: list[Any] = []
    ours._adapter.load = lambda *given, **_: loaded.append(given[2])
    ours._adapter.read_hook_state = lambda *_: {"of schedulers": [{}, {}]}
    ours._adapter.entries_of_parts = {"scheduler": "of schedulers"}
    callback = SimpleNamespace(on_checkpoint_load_start=remove, load_state_dict=lambda _: None)
    ours._adapter.callbacks = {"callback": callback}
    folder = tmp_path / "restored" / "u" / STATE_FOLDER
    folder.mkdir(parents=True)
    BuiltSettings(SchedulePart(each, schedules) for each in schedules).write(folder, {})
    ours.built = BuiltSettings([SchedulePart(schedules[0], schedules[:1])])
    state: dict[str, Any] = {"callbacks": {"callback": {}}}
    if left == 2 and compares:
        with pytest.raises(CheckpointError, match="saved with 2 schedulers, and the trial has bui"):
            ours.restore("u", state)
        return
    told = ours.restore("u", state, compares=compares)
    assert loaded == [{} if left is None else {"of schedulers": [{}] * left}]
    assert len(told.not_kept) == (left == 2)


def test_an_upload_waits_for_late_copies(tmp_path: Path) -> None:
    """Of weights that were changed before they were all copied, nothing is stored. The same ranks
    copy the next snapshot at once, and it is stored."""
    settings: Any = {"snapshot": "lazy", "verify_first": False}
    files = files_of(tmp_path, **settings)
    model = torch.nn.Linear(3, 2)

    def save(folder: Path, memory: MemoryFiles, *others: Any) -> None:
        memory.write(folder, "shard", lambda file: write_tensors(model.state_dict(), file))
        if (late := collecting()) is not None:
            late.later(lambda: model.weight.data.mul_(2), [])

    adapter: Any = SimpleNamespace(
        checkpoint_classes=(), save=save, hook_state=dict, callbacks={}, saves_plainly=True,
        optimizers=[torch.optim.SGD(model.parameters())], modules=[model],
    )  # fmt: skip
    ours = Snapshots(adapter, files, one_of(0, 1), CheckpointingConfig(**settings))
    for uuid in ("new", "newer"):
        ours.stage(uuid, 1, None)
        result = files.try_persist(uuid, ())
        assert result.has_changed == (uuid == "new")
    assert result.mistake is None
    assert [path.parts[-2:] for path in tmp_path.glob("store/**/shard*")] == [("newer", "shard")]
    ours.close()
    files.close()


def test_a_hook_that_follows_each_save_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: no save is compared with its source, so all are copied before training continues."""
    settings: Any = {"verify_first": False}
    files, model = files_of(tmp_path, **settings), torch.nn.Linear(3, 2)
    adapter: Any = SimpleNamespace(
        checkpoint_classes=(), save=lambda *_: None, hook_state=dict, callbacks={},
        optimizers=[torch.optim.SGD(model.parameters())], modules=[model], saves_plainly=True,
    )  # fmt: skip
    ours = Snapshots(adapter, files, one_of(0, 1), CheckpointingConfig(**settings))
    with caplog.at_level(logging.INFO):
        for uuid in ("a", "b", "c"):
            ours.stage(uuid, 1, None)
            finish_copies("on_checkpoint_write_end")
    assert caplog.messages == [
        "snapshots are copied before training continues: on_checkpoint_write_end came between the "
        "last save and the next batch"
    ]
    ours.close()


@pytest.mark.parametrize("snapshot", [None, "lazy"])
def test_an_accelerators_snapshots_are_copied_late_only_if_that_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: str | None
) -> None:
    """By default they are not, and the log says once what to set."""
    settings: Any = {"verify_first": False, "snapshot": snapshot}
    files, model, late = files_of(tmp_path, **settings), torch.nn.Linear(3, 2), []
    adapter: Any = SimpleNamespace(
        checkpoint_classes=(), save=lambda *_: late.append(collecting() is not None),
        hook_state=dict, callbacks={}, optimizers=[torch.optim.SGD(model.parameters())],
        modules=[model], saves_plainly=True,
    )  # fmt: skip
    ours = Snapshots(adapter, files, one_of(0, 1), CheckpointingConfig(**settings))
    with caplog.at_level(logging.INFO), fake_accelerator():
        for uuid in ("a", "b"):
            ours.stage(uuid, 1, None)
        ours.close()
    assert late == [snapshot == "lazy"] * 2
    told = (
        "snapshots are copied before training continues: the ranks compute on accelerators, and "
        "checkpointing.snapshot is not set to lazy"
    )
    assert caplog.messages == ([] if snapshot else [told])


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_snapshot_is_rehearsed_once(tmp_path: Path, rehearses: bool) -> None:
    """The first real one writes into the same memory, and nothing is left in the staging folder."""
    ours, links = snapshots(tmp_path, verify_first=False), []

    def save(folder: Path, memory: MemoryFiles, *others: Any) -> None:
        memory.write(folder, "shard", lambda file: file.write(b"x" * 100))
        links.append(os.readlink(folder / "shard"))

    ours._adapter = SimpleNamespace(
        rehearses_save=rehearses, save=save, hook_state=dict, callbacks={}, optimizers=[],
        modules=[], saves_plainly=True,
    )  # type: ignore[assignment]  # fmt: skip
    for _ in range(2):
        ours.rehearse()
    assert len(links) == rehearses
    assert not list(tmp_path.glob("staging/*"))
    ours.stage("new", 1, None)
    assert len(set(links)) == 1
    ours.close()


def staged(folder: Path, uuid: str, rank: int) -> Path:
    path = folder / "staging" / uuid / f"rank-{rank}" / "shard"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(("rank", "left"), [(0, {"new/rank-0"}), (1, {"new/rank-1", "old/rank-7"})])
def test_rank_0_also_deletes_kept_files_of_ranks_that_are_gone(
    tmp_path: Path, rank: int, left: set[str]
) -> None:
    """The trial may have resumed with fewer ranks. Other ranks delete their own files."""
    for number in (1, 7) if rank == 1 else (0, 7):
        (tmp_path / "kept" / "old" / f"rank-{number}").mkdir(parents=True)
    staged(tmp_path, "new", rank)
    files_of(tmp_path, rank, 2).release("new")
    assert {str(path.relative_to(tmp_path / "kept")) for path in tmp_path.glob("kept/*/*")} == left


@pytest.mark.parametrize("trusted", [True, False])
def test_only_a_trusted_checkpoint_may_hold_other_classes(tmp_path: Path, trusted: bool) -> None:
    """The experiment's `checkpointing.trusted` decides for a rank's own state."""
    ours = snapshots(tmp_path, trusted=trusted)
    state = {"callbacks": {"odd": {"state": Odd()}}}
    write_rank_state(files_of(tmp_path).restored("a"), 0, state, Reader(trusted=True))
    if trusted:
        restored = ours.read_state("a", "everything")
        assert restored is not None
        assert isinstance(restored["callbacks"]["odd"]["state"], Odd)
    else:
        with pytest.raises(CheckpointError, match=r"Odd.*checkpointing\.trusted"):
            ours.read_state("a", "everything")


def test_a_process_local_storage_needs_no_persister(tmp_path: Path) -> None:
    """Only this process sees memory://, so it moves the files itself."""
    ours, uuid = files_of(tmp_path), str(uuids.uuid4())
    ours.store = CheckpointStore(f"memory://{uuid}")
    staged(tmp_path, uuid, 0)
    entries = ours.persist(uuid)
    ours.fetch(uuid, entries)
    assert [each.path for each in entries] == ["shard"]
    assert (ours.restored(uuid) / "shard").read_bytes() == b"x"


def test_a_transfer_has_the_experiments_stall_timeout(tmp_path: Path) -> None:
    """`checkpointing.stall_timeout_seconds` ends an upload to a storage that does not answer."""
    ours, uuid = files_of(tmp_path, stall_timeout_seconds=0.5), str(uuids.uuid4())
    staged(tmp_path, uuid, 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": url, "key": "k", "secret": "s"}
        ours.store = CheckpointStore("s3://bucket/folder", options)
        with pytest.raises(StorageError, match=r"moved nothing for 0\.5 s"):
            ours.persist(uuid)
    ours.close()
