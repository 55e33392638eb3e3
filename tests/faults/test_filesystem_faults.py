"""A save on 2 ranks over a file system that is neither local nor S3: any operation fails."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.support.faults.filesystem import planned
from tests.support.faults.plan import Fault, Plan
from tests.support.faults.saving import CLIENTS, TRIAL, keys_of, save, stage_ranks, within
from tests.support.manifests import stored_files
from trial_core.checkpoint.layout import MARK
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.storage.base import PROBES
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, StorageError

DEADLINE_SECONDS = 120.0
Kind = Literal["500", "503", "cut request", "lose reply"]

long = pytest.mark.long


@dataclass
class Place:
    """A folder behind a file system that fails on purpose, and the files to save."""

    folder: Path
    staged: Mapping[int, Path]

    @contextmanager
    def store(self, *faults: Fault) -> Iterator[tuple[CheckpointStore, Plan]]:
        """The folder's store, with these faults."""
        name = uuids.uuid4().hex
        with planned(name, Plan(*faults)) as plan:
            yield CheckpointStore(f"faulty://{name}{self.folder}"), plan

    def save(self, uuid: str, *faults: Fault) -> tuple[Manifest | StorageError, Plan]:
        """Save on 2 ranks with these faults; the manifest or the error."""
        with self.store(*faults) as (store, plan):
            stores = dict.fromkeys(CLIENTS, store)
            return within(DEADLINE_SECONDS, lambda: save(stores, self.staged, uuid)), plan

    def check(self, uuid: str, outcome: Manifest | StorageError) -> None:
        """Check the storage after a save with this outcome, sweep, and check again."""
        with self.store() as (store, _):
            listed = store.list()
            assert listed == [outcome] or isinstance(outcome, StorageError)
            for manifest in listed:
                assert store.find_damage(manifest.uuid, manifest.all_files) == []
            if not listed:
                with pytest.raises((CheckpointNotFound, CheckpointDamaged)):
                    store.open(uuid)
            store.sweep(TRIAL)
            assert store.list() == listed
        # As in `saving.check`: the save probes its storage, and may fail meanwhile.
        ignored = ("attempts/", f"{PROBES}/", MARK)
        stored = {key for key in stored_files(self.folder) if not key.startswith(ignored)}
        assert stored == keys_of(listed)


@pytest.fixture
def staged(tmp_path: Path) -> Mapping[int, Path]:
    return stage_ranks(tmp_path / "staged", 2**12)


@pytest.fixture
def operations(tmp_path: Path, staged: Mapping[int, Path]) -> int:
    """Number of operations of a save without faults."""
    place, uuid = Place(tmp_path / "clean", staged), str(uuids.uuid4())
    outcome, plan = place.save(uuid)
    assert isinstance(outcome, Manifest), outcome
    place.check(uuid, outcome)
    return len(plan.seen)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("cut request", 1),
        ("lose reply", None),
        *(
            pytest.param(kind, times, marks=long)
            for kind in ("500", "503", "cut request", "lose reply")
            for times in (1, None)
            if (kind, times) not in (("cut request", 1), ("lose reply", None))
        ),
    ],
)
def test_any_operation_of_a_save_fails(
    tmp_path: Path, staged: Mapping[int, Path], operations: int, kind: Kind, times: int | None
) -> None:
    """Once, or from then on. The save succeeds or raises in time, listed checkpoints are intact,
    and a sweep leaves nothing else."""
    assert operations > 10
    for index in range(operations):
        place, uuid = Place(tmp_path / f"{index}", staged), str(uuids.uuid4())
        outcome, plan = place.save(uuid, Fault(kind, first=index, times=times, byte=50))
        assert plan.has_struck, str(plan)
        place.check(uuid, outcome)


@pytest.mark.parametrize(
    "kind", ["cut reply", *(pytest.param(kind, marks=long) for kind in ("500", "503"))]
)
def test_any_operation_of_a_fetch_fails(
    tmp_path: Path, staged: Mapping[int, Path], kind: Kind
) -> None:
    """The fetch returns the stored files or raises, also after a short read without an error. No
    damaged file is left under its name."""
    place = Place(tmp_path / "store", staged)
    manifest, _ = place.save(str(uuids.uuid4()))
    assert isinstance(manifest, Manifest)
    expected = {
        path: data for folder in staged.values() for path, data in stored_files(folder).items()
    }
    index, struck = 0, True
    while struck:
        target = tmp_path / f"target-{index}"
        with place.store(Fault(kind, first=index, byte=50)) as (store, plan):
            try:
                fetch_files(store, manifest.uuid, manifest.files, target)
                failed = False
            except (StorageError, CheckpointDamaged):
                failed = True
        found = stored_files(target)
        assert found.items() <= expected.items()
        assert failed or found == expected
        index, struck = index + 1, plan.has_struck
    assert index > len(expected)
