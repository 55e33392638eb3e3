"""The limit by progress on uploads and fetches: processes that hang, and processes that do not."""

from __future__ import annotations

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
from tests.trial_core.transfer.test_persister import uploaders
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import StorageError
from trial_core.transfer import stall_watch
from trial_core.transfer.persister import Persister
from trial_core.transfer.persister_process import StagedFile
from trial_core.transfer.stall_watch import LEAST_BYTES, LOOKS, StallWatch

LIMIT_SECONDS = 1.0


@pytest.fixture
def hasty() -> Iterator[Persister]:
    """One whose process must move something every second."""
    persister = Persister(LIMIT_SECONDS)
    yield persister
    persister.close()
    assert not uploaders()


@pytest.fixture
def silent_store() -> Iterator[CheckpointStore]:
    """A storage that takes connections and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        yield CheckpointStore("s3://a/b", {"endpoint_url": url, "key": "k", "secret": "s"})


def test_an_upload_that_hangs_is_ended(
    tmp_path: Path, hasty: Persister, silent_store: CheckpointStore
) -> None:
    """What is missing is said, and the next try has a new process."""
    stage(tmp_path / "staging", {"a.pt": b"12"})
    files = [StagedFile("a.pt", str(tmp_path / "staging" / "a.pt"), 2)]
    with pytest.raises(StorageError, match=r"moved nothing for 1 s.*stall_timeout.*; a.pt not st"):
        hasty.upload(silent_store.spec, str(uuid.uuid4()), 0, files)
    assert not uploaders()
    store = CheckpointStore(str(tmp_path / "store"))
    assert hasty.upload(store.spec, str(uuid.uuid4()), 0, files) == [entry("a.pt", b"12")]


def test_a_fetch_that_hangs_is_ended(
    tmp_path: Path, hasty: Persister, silent_store: CheckpointStore
) -> None:
    """As an upload: no rank waits for ever before it begins to train."""
    with pytest.raises(StorageError, match=r"fetches its files has moved nothing for 1 s.*a.pt"):
        hasty.fetch(silent_store.spec, str(uuid.uuid4()), [entry("a.pt")], tmp_path)
    assert not uploaders()


@pytest.mark.parametrize(("step_bytes", "stalls"), [(LEAST_BYTES + 1, False), (100, True)])
def test_a_process_that_gets_on_may_take_long(step_bytes: int, stalls: bool) -> None:
    """Longer than the limit, at any pace but that of somebody who waits."""
    ended = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", MOVER, str(step_bytes)])
    with StallWatch(process.pid, LIMIT_SECONDS, ended.set) as watch:
        if not stalls:
            assert process.wait(60) == 0
        assert ended.wait(60 if stalls else 0) == stalls
    process.kill()
    process.wait()
    assert watch.has_stalled == stalls


MOVER = """
import sys, time
with open("/dev/zero", "rb", buffering=0) as file:
    for _ in range(20):
        file.read(int(sys.argv[1]))
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("step_bytes", "stalls"), [(LEAST_BYTES // LOOKS - 1, True), (LEAST_BYTES // LOOKS + 1, False)]
)
def test_what_logs_write_is_no_progress(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int, stalls: bool
) -> None:
    """A process that waits for a storage writes about it now and then, and moves nothing."""
    looked, looks = threading.Event(), 3 * LOOKS
    seen = chain((step_bytes * look for look in range(looks)), repeat(None))

    def moved_bytes(watch: StallWatch) -> int | None:
        if (moved := next(seen)) is None:
            looked.set()
        return moved

    monkeypatch.setattr(StallWatch, "_moved_bytes", moved_bytes)
    with StallWatch(0, 0.01 * LOOKS, looked.set) as watch:
        assert looked.wait(20)
    assert watch.has_stalled == stalls


def test_a_long_transfer_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rank does nothing else meanwhile, and is not to be taken for one that hangs."""
    monkeypatch.setattr(stall_watch, "NEWS_SECONDS", 0.0)
    moved, looked = iter([0, 3 * 2**30]), threading.Event()

    def moved_bytes(watch: StallWatch) -> int | None:
        if (now := next(moved, None)) is None:
            looked.set()
        return now

    monkeypatch.setattr(StallWatch, "_moved_bytes", moved_bytes)
    with caplog.at_level("INFO"), StallWatch(0, 0.1, looked.set):
        assert looked.wait(20)
    assert "3.0 GiB" in caplog.text
