"""Real ranks find damage in a stored checkpoint before they train on."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.manifests import stored_files
from tests.support.slots import Driven, build, drive, toy_config
from trial_core.checkpoint.manifest import FileEntry
from trial_core.config import ExperimentConfig
from trial_core.messages import FetchCheckpoint, Fetched
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@dataclass
class Saved:
    """A run of 2 ranks that has stored two checkpoints."""

    slots: SlotGroup
    config: ExperimentConfig
    run: Driven
    folder: Path

    @property
    def uuid(self) -> str:
        """The newer checkpoint."""
        return self.run.checkpoints[-1]

    def stored(self, path: str, *, before: bool = False) -> Path:
        """The path of a stored file of the newer checkpoint, or of the one `before`."""
        uuid = self.run.checkpoints[-2] if before else self.uuid
        return self.folder / "checkpoints" / "checkpoints" / uuid / path

    def files(self, kind: str) -> list[FileEntry]:
        """One file of each rank whose name contains `kind`."""
        entries = self.run.files[self.uuid]
        found = sorted((e for e in entries if kind in e.path), key=lambda e: e.rank)
        assert [entry.rank for entry in found] == [0, 1]
        return found


@pytest.fixture(scope="module")
def saved(warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    config = toy_config(
        folder, 8, scheduling_unit=4, min_checkpoint_period={"batches": 4},
        hyperparameters={"record": str(folder), "ballast_mib": 1},
    )  # fmt: skip
    run = drive(warm_slots(2), config, folder / "run", persist=True)
    return Saved(warm_slots(2), config, run, folder)


@pytest.fixture(autouse=True)
def repaired(saved: Saved, tmp_path: Path) -> Iterator[None]:
    """Restores the stored files after each test."""
    files = saved.stored("")
    shutil.copytree(files, tmp_path / "intact")
    yield
    shutil.rmtree(files)
    shutil.copytree(tmp_path / "intact", files)


def flip_a_bit(saved: Saved, first: Path, second: Path) -> None:
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 4
    first.write_bytes(content)


def truncate(saved: Saved, first: Path, second: Path) -> None:
    first.write_bytes(first.read_bytes()[:-1])


def remove(saved: Saved, first: Path, second: Path) -> None:
    first.unlink()


def swap(saved: Saved, first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def replace_by_an_older_file(saved: Saved, first: Path, second: Path) -> None:
    path = first.relative_to(saved.stored("")).as_posix()
    shutil.copyfile(saved.stored(path, before=True), first)


@pytest.mark.parametrize(
    ("corrupt", "kind", "rank"),
    [
        (replace_by_an_older_file, "optim_states", 0),
        (remove, "ballast-", 1),
        pytest.param(flip_a_bit, "ballast-", 0, marks=pytest.mark.long),
        pytest.param(truncate, "optim_states", 1, marks=pytest.mark.long),
        pytest.param(swap, "ballast-", 0, marks=pytest.mark.long),
    ],
)
def test_damage_is_found_before_training_continues(
    saved: Saved, tmp_path: Path, corrupt: Callable[[Saved, Path, Path], None], kind: str, rank: int
) -> None:
    """The ranks name the file, its rank and both digests; no damaged file is fetched."""
    entry, other = saved.files(kind)[rank], saved.files(kind)[1 - rank]
    path = saved.stored(entry.path)
    corrupt(saved, path, saved.stored(other.path))
    build(saved.slots, saved.config, tmp_path)
    request = FetchCheckpoint(uuid=saved.uuid, files=saved.run.files[saved.uuid])
    fetched = saved.slots.request(request, Fetched)

    reported = [each.damage for each in fetched if each.damage]
    assert reported, "no rank reported damage"
    expected = [description(entry, path), description(other, saved.stored(other.path))]
    assert all(any(each in damage for each in expected) for damage in reported)
    assert [each.problem for each in fetched] == [None, None]
    for name, content in stored_files(tmp_path).items():
        for each in saved.run.files[saved.uuid]:
            assert not name.endswith(each.path) or digest(content) == each.digest


def description(entry: FileEntry, path: Path) -> str:
    """The expected description of a stored file as it is now."""
    start = f"{entry.path}, written by rank {entry.rank}, "
    if not path.exists():
        return f"{start}is missing (expected {entry.size_bytes} bytes, {entry.digest})"
    content = path.read_bytes()
    if len(content) != entry.size_bytes:
        return f"{start}has {len(content)} bytes, expected {entry.size_bytes}"
    return f"{start}has digest {digest(content)}, expected {entry.digest}"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_an_intact_checkpoint_is_fetched(saved: Saved, tmp_path: Path) -> None:
    """The same request reports no damage."""
    build(saved.slots, saved.config, tmp_path)
    request = FetchCheckpoint(uuid=saved.uuid, files=saved.run.files[saved.uuid])
    assert saved.slots.request(request, Fetched) == [Fetched(), Fetched()]
