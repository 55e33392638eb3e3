"""The process that uploads for a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.manifests import entry, stage, stored_files
from tests.support.processes import descendants, wait_until_gone
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, StorageError
from trial_core.transfer.memory_files import MemoryFiles
from trial_core.transfer.persister import Persister
from trial_core.transfer.persister_process import StagedFile

FILES = {"latest": b"model0", "model0/shard.pt": b"weights" * 1000}
RANK = 3


@pytest.fixture
def persister() -> Iterator[Persister]:
    """One whose process is gone afterwards."""
    persister = Persister()
    yield persister
    persister.close()
    assert not uploaders()


def uploaders() -> list[int]:
    """The uploading processes of this one; warm ranks of other tests have theirs as well."""
    children = [child.pid for child in psutil.Process().children()]
    return [pid for pid in children if "persister" in " ".join(command(pid))]


def command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []


def staged(folder: Path, files: dict[str, bytes]) -> list[StagedFile]:
    stage(folder, files)
    return [StagedFile(name, str(folder / name), len(data)) for name, data in files.items()]


def test_what_was_staged_is_stored_and_described(tmp_path: Path, persister: Persister) -> None:
    """On disk or in memory: the manifest's entries are those of the bytes that were staged."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    files, images = staged(tmp_path / "staging", FILES), MemoryFiles(10_000)
    images.begin()
    images.write(tmp_path / "staging", "image.pt", lambda file: file.write(b"in memory"))
    images.end()
    files.append(StagedFile("image.pt", str(tmp_path / "staging" / "image.pt"), 9))
    entries = persister.upload(store.spec, checkpoint, RANK, files)
    expected = {**FILES, "image.pt": b"in memory"}
    assert {each.path: each for each in entries} == {
        name: entry(name, data, RANK) for name, data in expected.items()
    }
    assert stored_files(tmp_path / "store" / "checkpoints" / checkpoint) == expected
    images.close()


def test_what_is_stored_is_not_sent_again(tmp_path: Path, persister: Persister) -> None:
    """Once it was told, also by a process that has been killed since: a retry sends the rest."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    first, *others = files = staged(tmp_path / "staging", FILES)
    persister.upload(store.spec, checkpoint, RANK, [first])
    sent = tmp_path / "store" / "checkpoints" / checkpoint / first.path
    as_sent = sent.stat()
    for pid in uploaders():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(StorageError, match=f"SIGKILL.*{others[0].path} not stored"):
        persister.upload(store.spec, checkpoint, RANK, files)
    entries = persister.upload(store.spec, checkpoint, RANK, files)
    assert [each.path for each in entries] == [file.path for file in files]
    assert (sent.stat().st_ino, sent.stat().st_mtime_ns) == (as_sent.st_ino, as_sent.st_mtime_ns)
    persister.forget(checkpoint)
    persister.upload(store.spec, checkpoint, RANK, files)
    assert sent.stat().st_mtime_ns != as_sent.st_mtime_ns  # so a file that is sent again shows


@pytest.mark.parametrize("said", ["", '{"type":"Finished","fil'])
def test_half_a_message_is_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persister: Persister, said: str
) -> None:
    """Whatever it was about to say when it ended, the rank goes on, and tries again."""
    fake = tmp_path / "fake_process.py"
    fake.write_text(f"import os, sys\nos.write(int(sys.argv[1]), {said.encode()!r})\n")
    monkeypatch.setattr("trial_core.transfer.persister.PROCESS", "fake_process")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    store = CheckpointStore(str(tmp_path / "store"))
    with pytest.raises(StorageError, match="ended with exit code 0"):
        persister.upload(store.spec, str(uuid.uuid4()), RANK, [])


def test_a_damaged_file_is_no_failure_of_the_storage(tmp_path: Path, persister: Persister) -> None:
    """To fetch it again would not help, another checkpoint may: each error stays what it is."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    entries = persister.upload(
        store.spec, checkpoint, RANK, staged(tmp_path / "staging", {"a": b"12", "b": b"345"})
    )
    assert persister.fetch(store.spec, checkpoint, entries, tmp_path / "good") == 5
    assert stored_files(tmp_path / "good") == {"a": b"12", "b": b"345"}
    local = [tmp_path / "good"]
    assert persister.fetch(store.spec, checkpoint, entries, tmp_path / "again", local) == 0
    (tmp_path / "store" / "checkpoints" / checkpoint / "a").write_bytes(b"21")
    with pytest.raises(CheckpointDamaged, match="a, written by rank 3, has digest"):
        persister.fetch(store.spec, checkpoint, entries, tmp_path / "damaged")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="write into"):
        persister.fetch(store.spec, checkpoint, entries, tmp_path / "file")


def test_a_killed_uploader_is_the_storages_failure(tmp_path: Path, persister: Persister) -> None:
    """Its rank goes on: the error says what happened, and the next try has a new process."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    files = staged(tmp_path / "staging", FILES)
    # Long enough to be killed over: all of it is a hole, read but nowhere stored.
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(2**38)
    endless = StagedFile("endless", str(tmp_path / "endless"), 2**38)
    killer = subprocess.Popen(
        [sys.executable, "-c", KILL_THE_UPLOADER, str(os.getpid())], stdin=subprocess.DEVNULL
    )
    with pytest.raises(StorageError, match=r"process that uploads its files was ended by SIGKILL"):
        persister.upload(store.spec, checkpoint, RANK, [*files, endless])
    killer.wait()
    assert persister.upload(store.spec, checkpoint, RANK, files)


KILL_THE_UPLOADER = """
import sys, time, psutil
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    for child in psutil.Process(int(sys.argv[1])).children():
        if "trial_core.transfer.persister_process" in child.cmdline():
            child.kill()
            sys.exit()
    time.sleep(0.05)
"""


def test_an_uploader_ends_with_its_rank(tmp_path: Path) -> None:
    """However that ends: nothing goes on uploading for a rank that is dead."""
    script = tmp_path / "rank.py"
    script.write_text(RANK_THAT_UPLOADS)
    rank = subprocess.Popen(
        [sys.executable, script, tmp_path / "store"], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"uploaded\n"
    uploaders = descendants(rank.pid)
    assert uploaders
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    assert not wait_until_gone(uploaders, timeout_seconds=10)


RANK_THAT_UPLOADS = """
import sys, time, uuid
from trial_core.transfer.persister import Persister
from trial_core.transfer.persister_process import StagedFile
from trial_core.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
Persister().upload(store.spec, str(uuid.uuid4()), 0, [StagedFile("me", __file__, 1)])
print("uploaded", flush=True)
time.sleep(600)
"""


def test_credentials_are_on_no_command_line(tmp_path: Path, persister: Persister) -> None:
    """The storage's options go through the connection alone, where no other user sees them."""
    store = CheckpointStore(str(tmp_path / "store"), {"auto_mkdir": True})
    persister.upload(store.spec, str(uuid.uuid4()), RANK, staged(tmp_path / "staging", FILES))
    (pid,) = uploaders()
    assert "auto_mkdir" not in " ".join(command(pid))
    assert str(tmp_path) not in " ".join(command(pid))
