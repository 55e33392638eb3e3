from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from tests.support.manifests import entry, stage
from tests.trial_core.checkpoint.transfer.test_persister import persister_processes
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import persister
from trial_core.checkpoint.transfer.persister import (
    MIN_PROGRESS_BYTES,
    POLLS_PER_TIMEOUT,
    Persister,
    StallWatch,
)
from trial_core.checkpoint.transfer.upload import StagedFile
from trial_core.errors import StorageError

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

TIMEOUT_SECONDS = 0.5


@pytest.fixture
def impatient() -> Iterator[Persister]:
    """A persister with a stall timeout of half a second."""
    persister = Persister(TIMEOUT_SECONDS)
    yield persister
    persister.close()
    assert not persister_processes()


@pytest.fixture
def silent_store() -> Iterator[CheckpointStore]:
    """A storage that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        yield CheckpointStore("s3://a/b", {"endpoint_url": url, "key": "k", "secret": "s"})


def test_a_hung_upload_is_killed(
    tmp_path: Path, impatient: Persister, silent_store: CheckpointStore
) -> None:
    """The error names the missing files, and the retry starts a new process."""
    stage(tmp_path / "staging", {"a.pt": b"12"})
    files = [StagedFile("a.pt", str(tmp_path / "staging" / "a.pt"), 2)]
    with pytest.raises(StorageError, match=r"moved nothing for 0.5 s.*; not stored: a.pt"):
        impatient.upload(silent_store.spec, str(uuid.uuid4()), 0, files)
    assert not persister_processes()
    impatient._stall_seconds = None  # on a busy machine, processes start slowly
    store = CheckpointStore(str(tmp_path / "store"))
    assert impatient.upload(store.spec, str(uuid.uuid4()), 0, files) == [entry("a.pt", b"12")]


def test_a_hung_fetch_is_killed(
    tmp_path: Path, impatient: Persister, silent_store: CheckpointStore
) -> None:
    """No rank waits for ever before training."""
    with pytest.raises(StorageError, match=r"moved nothing for 0.5 s.*; files to fetch: a.pt"):
        impatient.fetch(silent_store.spec, str(uuid.uuid4()), [entry("a.pt")], tmp_path)
    assert not persister_processes()


@pytest.mark.parametrize(
    ("step_bytes", "step_seconds", "timeout_seconds", "stalls"),
    [
        # On a busy machine a process may stand still for a second.
        pytest.param(MIN_PROGRESS_BYTES + 1, 0.5, 6.0, False, marks=pytest.mark.long),
        (100, 0.05, TIMEOUT_SECONDS, True),
    ],
)
def test_a_slow_process_is_not_killed(
    step_bytes: int, step_seconds: float, timeout_seconds: float, stalls: bool
) -> None:
    """It may take longer than the timeout as long as it moves bytes."""
    stalled = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", MOVER, str(step_bytes), str(step_seconds)])
    with StallWatch(process.pid, timeout_seconds, stalled.set) as watch:
        if not stalls:
            assert process.wait(60) == 0
        assert stalled.wait(60 if stalls else 0) == stalls
    process.kill()
    process.wait()
    assert watch.has_stalled == stalls


MOVER = """
import sys, time
with open("/dev/zero", "rb", buffering=0) as file:
    for _ in range(20):
        file.read(int(sys.argv[1]))
        time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("extra_bytes", "stalls"), [(-1, True), (1, False)])
def test_a_few_bytes_are_no_progress(
    monkeypatch: pytest.MonkeyPatch, extra_bytes: int, stalls: bool
) -> None:
    """A process that waits for the storage still writes to its log."""
    step_bytes = MIN_PROGRESS_BYTES // POLLS_PER_TIMEOUT + extra_bytes
    is_over, polls = threading.Event(), 3 * POLLS_PER_TIMEOUT
    seen = chain((step_bytes * poll for poll in range(polls)), repeat(None))

    def moved_bytes(watch: StallWatch) -> int | None:
        if (moved := next(seen)) is None:
            is_over.set()
        return moved

    monkeypatch.setattr(StallWatch, "_moved_bytes", moved_bytes)
    with StallWatch(0, 0.01 * POLLS_PER_TIMEOUT, is_over.set) as watch:
        assert is_over.wait(20)
    assert watch.has_stalled == stalls


def test_small_files_that_are_stored_slowly_are_progress(
    tmp_path: Path, impatient: Persister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts when it is stored, though none of them moves enough bytes."""
    pipes = [tmp_path / f"{number:02}" for number in range(2 * POLLS_PER_TIMEOUT)]
    for pipe in pipes:
        os.mkfifo(pipe)  # it is read when it is opened here
    unread, has_noted, note_report = iter(pipes), threading.Semaphore(), StallWatch.note_report

    def note(watch: StallWatch) -> None:
        note_report(watch)
        has_noted.release()

    def moved_bytes(watch: StallWatch) -> int:
        if has_noted.acquire(timeout=2) and (pipe := next(unread, None)) is not None:
            pipe.open("wb").close()
        return 0

    monkeypatch.setattr(StallWatch, "note_report", note)
    monkeypatch.setattr(StallWatch, "_moved_bytes", moved_bytes)
    files = [StagedFile(pipe.name, str(pipe), 0) for pipe in pipes]
    store = CheckpointStore(str(tmp_path / "store"))
    entries = impatient.upload(store.spec, str(uuid.uuid4()), 0, files)
    assert [each.path for each in entries] == [pipe.name for pipe in pipes]


def test_a_long_transfer_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank logs nothing else meanwhile, and would count as hung."""
    monkeypatch.setattr(persister, "PROGRESS_LOG_SECONDS", 0.0)
    moved, is_over = iter([0, 3 * 2**30]), threading.Event()

    def moved_bytes(watch: StallWatch) -> int | None:
        if (now := next(moved, None)) is None:
            is_over.set()
        return now

    monkeypatch.setattr(StallWatch, "_moved_bytes", moved_bytes)
    with caplog.at_level("INFO"), StallWatch(0, 0.1, is_over.set):
        assert is_over.wait(20)
    assert "3.0 GiB" in caplog.text
