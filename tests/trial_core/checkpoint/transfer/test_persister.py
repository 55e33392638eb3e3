from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.manifests import entry, stage, stored_files
from tests.support.processes import descendants, wait_until_gone
from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.persister import PROCESS, Persister
from trial_core.checkpoint.transfer.persister_process import UploadRequest
from trial_core.checkpoint.transfer.upload import StagedFile
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError
from trial_core.processes.machine.memory_files import MemoryFiles

FILES = {"latest": b"model0", "model0/shard.pt": b"weights" * 1000}
RANK = 3


@pytest.fixture
def persister() -> Iterator[Persister]:
    """A persister whose process must be gone after the test."""
    persister = Persister()
    yield persister
    persister.close()
    assert not persister_processes()


def persister_processes() -> list[int]:
    """The persister processes of this process, but not those of other tests' warm ranks."""
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


def test_no_process_is_forked_while_the_persister_starts(
    tmp_path: Path, persister: Persister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the pipes of `subprocess` open, and the upload would wait for its end."""
    has_forked, popen = threading.Event(), subprocess.Popen

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        has_forked.set()
        os.waitpid(child, 0)

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        forking.start()
        assert not has_forked.wait(0.2)
        return popen(*args, **options)

    forking = threading.Thread(target=fork)
    monkeypatch.setattr(subprocess, "Popen", start)
    store = CheckpointStore(str(tmp_path / "store"))
    persister.upload(store.spec, str(uuid.uuid4()), RANK, staged(tmp_path / "staging", FILES))
    forking.join()
    assert has_forked.is_set()


def test_staged_files_are_uploaded(tmp_path: Path, persister: Persister) -> None:
    """Files on disk and in memory; their entries match the staged bytes."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    files, memory = staged(tmp_path / "staging", FILES), MemoryFiles(10_000)
    memory.begin()
    memory.write(tmp_path / "staging", "memory.pt", lambda file: file.write(b"in memory"))
    memory.end()
    files.append(StagedFile("memory.pt", str(tmp_path / "staging" / "memory.pt"), 9))
    entries = persister.upload(store.spec, checkpoint, RANK, files)
    expected = {**FILES, "memory.pt": b"in memory"}
    assert {each.path: each for each in entries} == {
        name: entry(name, data, RANK) for name, data in expected.items()
    }
    assert stored_files(tmp_path / "store" / "checkpoints" / checkpoint) == expected
    memory.close()


def test_a_retry_skips_stored_files(tmp_path: Path, persister: Persister) -> None:
    """Also if the process that stored them was killed afterwards."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    first, *others = files = staged(tmp_path / "staging", FILES)
    persister.upload(store.spec, checkpoint, RANK, [first])
    uploaded = tmp_path / "store" / "checkpoints" / checkpoint / first.path
    before = uploaded.stat()
    for pid in persister_processes():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(StorageError, match=f"SIGKILL.*not stored: .*{others[0].path}"):
        persister.upload(store.spec, checkpoint, RANK, files)
    entries = persister.upload(store.spec, checkpoint, RANK, files)
    assert [each.path for each in entries] == [file.path for file in files]
    after = uploaded.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    persister.forget(checkpoint)
    persister.upload(store.spec, checkpoint, RANK, files)
    assert uploaded.stat().st_mtime_ns != before.st_mtime_ns  # a repeated upload is visible


@pytest.mark.parametrize("output", ["", '{"type":"Finished","fil'])
def test_an_incomplete_message_counts_as_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persister: Persister, output: str
) -> None:
    """The rank gets a StorageError and can retry."""
    fake = tmp_path / "fake_process.py"
    fake.write_text(f"import os, sys\nos.write(int(sys.argv[1]), {output.encode()!r})\n")
    monkeypatch.setattr("trial_core.checkpoint.transfer.persister.PROCESS", "fake_process")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    store = CheckpointStore(str(tmp_path / "store"))
    with pytest.raises(StorageError, match="ended with exit code 0"):
        persister.upload(store.spec, str(uuid.uuid4()), RANK, [])


def test_damage_and_storage_failures_differ(tmp_path: Path, persister: Persister) -> None:
    """After a failure the rank retries; after damage it needs another checkpoint. For a file that
    has changed, neither helps."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    entries = persister.upload(
        store.spec, checkpoint, RANK, staged(tmp_path / "staging", {"a": b"12", "b": b"345"})
    )
    assert persister.fetch(store.spec, checkpoint, entries, tmp_path / "good") == 5
    assert stored_files(tmp_path / "good") == {"a": b"12", "b": b"345"}
    assert persister.fetch(store.spec, checkpoint, entries, tmp_path / "good") == 0
    (tmp_path / "store" / "checkpoints" / checkpoint / "a").write_bytes(b"21")
    with pytest.raises(CheckpointDamaged, match="a, written by rank 3, has digest"):
        persister.fetch(store.spec, checkpoint, entries, tmp_path / "damaged")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="write into"):
        persister.fetch(store.spec, checkpoint, entries, tmp_path / "file")
    longer = StagedFile("a", str(tmp_path / "staging" / "a"), 3)
    with pytest.raises(CheckpointError, match="changed while it was uploaded") as changed:
        persister.upload(store.spec, checkpoint, RANK, [longer])
    assert changed.type is CheckpointError


def test_a_killed_persister_is_a_storage_error(tmp_path: Path, persister: Persister) -> None:
    """The error names the signal, and the retry starts a new process."""
    store, checkpoint = CheckpointStore(str(tmp_path / "store")), str(uuid.uuid4())
    files = staged(tmp_path / "staging", FILES)
    # The upload of this sparse file never ends before the kill.
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(2**38)
    endless = StagedFile("endless", str(tmp_path / "endless"), 2**38)
    killer = subprocess.Popen(
        [sys.executable, "-c", KILL_THE_PERSISTER, str(os.getpid())], stdin=subprocess.DEVNULL
    )
    with pytest.raises(StorageError, match=r"process that uploads its files was killed by SIGKILL"):
        persister.upload(store.spec, checkpoint, RANK, [*files, endless])
    killer.wait()
    assert persister.upload(store.spec, checkpoint, RANK, files)


KILL_THE_PERSISTER = """
import contextlib, sys, time, psutil
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    for child in psutil.Process(int(sys.argv[1])).children():
        with contextlib.suppress(psutil.Error):  # another child may just have ended
            if "trial_core.checkpoint.transfer.persister_process" in child.cmdline():
                child.kill()
                sys.exit()
    time.sleep(0.05)
"""


def test_a_persister_that_was_forked_ahead(tmp_path: Path) -> None:
    """It gets what has changed in the environment since, but not the rank's input, and a program
    that waits for its children does not see it. After its end, a new interpreter works."""
    script = tmp_path / "rank.py"
    script.write_text(FORKED_AHEAD)
    told = subprocess.run(
        [sys.executable, script, tmp_path / "store"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd(),
    )  # fmt: skip
    assert told.stdout.decode().splitlines() == ["seven", "was killed by SIGKILL", "a file"]


FORKED_AHEAD = """
import multiprocessing, os, signal, sys, uuid
from pathlib import Path
import psutil
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.checkpoint.transfer import persister, persister_process
from trial_core.checkpoint.transfer.upload import StagedFile

def handle(request, stream):
    changed = os.environb.get(b"SET_LATE"), os.environ.get("REMOVED")
    has_input = not os.path.samestat(os.fstat(0), os.stat(os.devnull))
    is_right = changed == (b"\\xff", None) and not has_input
    return persister_process.Finished(fetched_bytes=7 if is_right else 0)

handle, persister_process._handle = persister_process._handle, handle
os.environ["REMOVED"] = "y"
persister.fork_ahead(lambda: None)
persister_process._handle = handle
os.environb[b"SET_LATE"] = b"\\xff"
del os.environ["REMOVED"]

rank, store, uid = persister.Persister(), CheckpointStore(sys.argv[1]), str(uuid.uuid4())
assert multiprocessing.active_children() == []
print("seven" if rank.fetch(store.spec, uid, [], Path("nowhere")) == 7 else "another")
(child,) = psutil.Process().children()
child.send_signal(signal.SIGKILL)
files = [StagedFile("me", __file__, 1)]
try:
    rank.upload(store.spec, uid, 0, files)
except StorageError as error:
    print("was killed by SIGKILL" if "was killed by SIGKILL" in str(error) else error)
print("a file" if len(rank.upload(store.spec, uid, 0, files)) == 1 else "none")
rank.close()
"""


def test_a_persister_that_was_forked_ahead_serves_the_next_trial(tmp_path: Path) -> None:
    """It gets the environment of that time, and keeps nothing of an earlier trial. One that still
    moves files is killed. If it was killed between two trials, the next one gets another."""
    script = tmp_path / "rank.py"
    script.write_text(SEVERAL_TRIALS)
    told = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, cwd=Path.cwd())
    trials = ["1 knows []", "1 knows ['a']", "2 knows []", "2 knows ['a']"]
    assert told.stdout.decode().splitlines() == ["another", *trials, "one works", "none works"]


SEVERAL_TRIALS = """
import os, signal, threading, time
from pathlib import Path
import fsspec, psutil
from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.transfer import persister, persister_process
from trial_core.errors import CheckpointError

known, opened = persister_process._changing, None
began, begin = os.pipe()

def handle(request, stream):
    global opened
    if request.uuid == "endless":
        os.write(begin, b" ")
        time.sleep(600)
    before, opened = opened, fsspec.filesystem("file")
    assert (opened is before) == bool(known)
    assert fsspec.config.conf["file"] == {"trial": int(os.environ["TRIAL"])}
    text = f"{os.environ['TRIAL']} knows {sorted(known)}"
    known.add(request.uuid)
    return persister_process.Failed(text, "invalid")

def fetch(rank, uuid):
    try:
        rank.fetch(StorageSpec("file:///nowhere"), uuid, [], Path("nowhere"))
    except CheckpointError as error:
        print(error, flush=True)

handle, persister_process._handle = persister_process._handle, handle
persister.fork_ahead(lambda: None)
forked = persister._forked
os.kill(forked.pid, signal.SIGKILL)
os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT)
other = persister._take_process()
print("another" if other.lives() and other.pid != forked.pid else "the killed one", flush=True)
other.end()
persister.fork_ahead(lambda: None)
persister_process._handle = handle
for trial in "12":
    os.environ["TRIAL"] = os.environ["FSSPEC_FILE_TRIAL"] = trial
    rank = persister.Persister()
    fetch(rank, "a")
    fetch(rank, "b")
    rank.close()
rank = persister.Persister()
threading.excepthook = lambda error: None
threading.Thread(target=rank.fetch, args=[StorageSpec("file:///x"), "endless", [], Path()]).start()
os.read(began, 1)
print("one works" if psutil.Process().children() else "none works", flush=True)
rank.close()
print("one works" if psutil.Process().children() else "none works", flush=True)
"""


def test_a_persister_ends_with_its_rank(tmp_path: Path) -> None:
    """Also if the rank is killed, and in silence: its error is none of the run's."""
    script = tmp_path / "rank.py"
    script.write_text(RANK_THAT_UPLOADS)
    rank = subprocess.Popen(
        [sys.executable, script, tmp_path / "store"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path.cwd(),
    )  # fmt: skip
    assert rank.stdout is not None
    assert rank.stderr is not None
    assert rank.stdout.readline() == b"uploaded\n"
    persisters = descendants(rank.pid)
    assert persisters
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    assert not wait_until_gone(persisters, timeout_seconds=10)
    assert rank.stderr.read() == b""


RANK_THAT_UPLOADS = """
import sys, time, uuid
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.persister import Persister
from trial_core.checkpoint.transfer.upload import StagedFile
store = CheckpointStore(sys.argv[1])
Persister().upload(store.spec, str(uuid.uuid4()), 0, [StagedFile("me", __file__, 1)])
print("uploaded", flush=True)
time.sleep(600)
"""


def test_a_persister_leaves_ctrl_c_to_its_rank(tmp_path: Path, persister: Persister) -> None:
    """Both get it on a terminal, and the rank may still save a checkpoint."""
    store = CheckpointStore(str(tmp_path / "store"))
    files = staged(tmp_path / "staging", FILES)
    persister.upload(store.spec, str(uuid.uuid4()), RANK, files)
    (pid,) = persister_processes()
    os.kill(pid, signal.SIGINT)
    assert persister.upload(store.spec, str(uuid.uuid4()), RANK, files)
    assert persister_processes() == [pid]


def test_a_persister_that_fails_otherwise_ends(tmp_path: Path) -> None:
    """Its rank would wait for an answer."""
    store, not_a_path = CheckpointStore(str(tmp_path / "store")), StagedFile("a", "\0", 1)
    with (
        closing(Persister(stall_seconds=30)) as persister,
        pytest.raises(StorageError, match="ended with exit code 1; see this rank's log"),
    ):
        persister.upload(store.spec, str(uuid.uuid4()), RANK, [not_a_path])


def test_a_persister_whose_answer_is_not_read_ends_in_silence(tmp_path: Path) -> None:
    """Its rank was killed meanwhile."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
            )  # fmt: skip
        request = UploadRequest(
            storage=StorageSpec(f"file://{tmp_path}"), uuid=str(uuid.uuid4()), rank=RANK,
            files=[], shared=[], stored=[],
        )  # fmt: skip
        ours.sendall(msgspec.json.encode(request) + b"\n")
        assert ours.recv(1, socket.MSG_PEEK)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 0)


def test_credentials_are_not_on_the_command_line(tmp_path: Path, persister: Persister) -> None:
    """Other users can see command lines; the options go through the connection."""
    store = CheckpointStore(str(tmp_path / "store"), {"auto_mkdir": True})
    persister.upload(store.spec, str(uuid.uuid4()), RANK, staged(tmp_path / "staging", FILES))
    (pid,) = persister_processes()
    assert "auto_mkdir" not in " ".join(command(pid))
    assert str(tmp_path) not in " ".join(command(pid))
