from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil
import pytest

from trial_core.checkpoint.transfer.upload import staged_files
from trial_core.processes.machine import memory_files
from trial_core.processes.machine.memory_files import (
    GROWTH_BYTES,
    MemoryFiles,
    free_bytes,
    is_memory_file,
    oom_kills,
)

LIMIT_BYTES = 1000


def writer_of(content: bytes) -> Callable[[IO[bytes]], None]:
    """A function that writes `content` to its file in two pieces."""

    def write(file: IO[bytes]) -> None:
        file.write(content[:3])
        file.write(memoryview(content)[3:])

    return write


def snapshot(memory: MemoryFiles, folder: Path, files: dict[str, bytes]) -> None:
    memory.begin()
    for name, content in files.items():
        memory.write(folder, name, writer_of(content))
    memory.end()


@pytest.mark.parametrize("second", [b"longer than before", b"short", b"as long"])
def test_a_memory_file_holds_the_last_snapshot_only(tmp_path: Path, second: bytes) -> None:
    """Its memory is reused, and no byte of an earlier snapshot remains."""
    memory = MemoryFiles(LIMIT_BYTES)
    snapshot(memory, tmp_path / "a", {"model/shard.pt": b"as long"})
    snapshot(memory, tmp_path / "b", {"model/shard.pt": second})
    path = tmp_path / "b" / "model" / "shard.pt"
    assert is_memory_file(path)
    assert path.read_bytes() == second
    memory.close()


def test_a_memory_file_grows(tmp_path: Path) -> None:
    """A file that outgrows its capacity keeps its content."""
    content = os.urandom(1 << 20) * (GROWTH_BYTES // (1 << 20) + 2)
    memory = MemoryFiles(2 * len(content))
    snapshot(memory, tmp_path, {"shard.pt": content})
    assert (tmp_path / "shard.pt").read_bytes() == content
    memory.close()


def test_another_process_can_read_a_memory_file(tmp_path: Path) -> None:
    """The persister opens it by its path in the staging folder, without a copy."""
    memory = MemoryFiles(LIMIT_BYTES)
    snapshot(memory, tmp_path, {"shard.pt": b"seen from afar"})
    read = "import sys; print(open(sys.argv[1]).read())"
    seen = subprocess.check_output([sys.executable, "-c", read, tmp_path / "shard.pt"], text=True)
    assert seen == "seen from afar\n"
    memory.close()


def test_memory_files_are_staged_files(tmp_path: Path) -> None:
    """Links to memory files are followed; other links out of the staging folder are not."""
    memory = MemoryFiles(LIMIT_BYTES)
    snapshot(memory, tmp_path, {"model/shard.pt": b"weights"})
    (tmp_path / "elsewhere").symlink_to("/etc/hostname")
    assert [file.path for file in staged_files(tmp_path, rank=0)] == ["model/shard.pt"]
    memory.close()


@pytest.mark.parametrize("room", [0, 2, 100], ids=["none", "for its first bytes", "for some"])
def test_a_file_that_does_not_fit_is_written_to_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """The limit is for all files together; the content is complete and a warning is logged."""
    memory, fits = MemoryFiles(LIMIT_BYTES), os.urandom(LIMIT_BYTES - room)
    snapshot(memory, tmp_path, {"fits": fits, "over": b"over" * 250})
    assert is_memory_file(tmp_path / "fits")
    assert not (tmp_path / "over").is_symlink()
    assert (tmp_path / "fits").read_bytes() == fits
    assert (tmp_path / "over").read_bytes() == b"over" * 250
    assert "checkpointing.memory_gib_per_rank" in caplog.text
    memory.close()


def test_no_write_is_repeated_when_a_file_moves_to_disk(tmp_path: Path) -> None:
    """Each write may be a copy from an accelerator, which blocks training."""
    memory, written = MemoryFiles(LIMIT_BYTES), []

    def write(file: IO[bytes]) -> None:
        written.append(file.write(b"x" * LIMIT_BYTES))
        written.append(file.write(b"y"))

    memory.begin()
    memory.write(tmp_path, "over", write)
    assert written == [LIMIT_BYTES, 1]
    memory.close()


def test_a_limit_of_0_writes_all_files_to_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user asked for it, so no warning is logged."""
    snapshot(memory := MemoryFiles(0), tmp_path, {"a": b"12"})
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"12"
    assert caplog.text == ""
    memory.close()


@pytest.mark.parametrize("limit_bytes", [LIMIT_BYTES, 0])
def test_a_rehearsal_keeps_memory_and_writes_nothing_to_disk(
    tmp_path: Path, limit_bytes: int
) -> None:
    """The next snapshot finds the memory that it needs; a file that does not fit costs no disk."""
    memory, files = MemoryFiles(limit_bytes), {"fits": b"x" * 600, "over": b"y" * LIMIT_BYTES}
    memory.begin(is_rehearsal=True)
    for name, content in files.items():
        memory.write(tmp_path / "rehearsal", name, writer_of(content))
    memory.end()
    rehearsed = [path.name for path in (tmp_path / "rehearsal").iterdir() if not path.is_symlink()]
    snapshot(memory, tmp_path / "first", files)
    assert rehearsed == []
    assert (tmp_path / "first" / "over").read_bytes() == files["over"]
    links = [tmp_path / folder / "fits" for folder in ("rehearsal", "first")]
    if limit_bytes:
        assert os.readlink(links[0]) == os.readlink(links[1])
    memory.close()


@pytest.mark.parametrize("size", [LIMIT_BYTES, LIMIT_BYTES + 1], ids=["in memory", "on disk"])
def test_snapshots_leak_no_file_descriptors(tmp_path: Path, size: int) -> None:
    """A run saves many checkpoints, and a process may open only so many files."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    memory = MemoryFiles(LIMIT_BYTES)
    snapshot(memory, tmp_path / "first", {"shard.pt": b"x" * size})
    after_one = descriptors()
    for number in range(5):
        snapshot(memory, tmp_path / str(number), {"shard.pt": b"x" * size})
    assert descriptors() == after_one
    memory.close()


def test_the_memory_of_files_that_are_no_longer_saved_is_freed(tmp_path: Path) -> None:
    """A snapshot with other files does not add to the memory of earlier ones."""
    memory = MemoryFiles(LIMIT_BYTES)
    snapshot(memory, tmp_path / "a", {"one": b"x" * 600})
    snapshot(memory, tmp_path / "b", {"two": b"y" * 300})
    snapshot(memory, tmp_path / "c", {"two": b"y" * 300, "three": b"z" * 600})
    assert is_memory_file(tmp_path / "c" / "three")
    memory.close()


def test_ranks_take_what_they_need_of_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of a machine that must leave 500 of 1000 bytes free. What one takes is not free for
    the other, and a snapshot's memory is taken once, also if other processes then take the rest."""
    ranks = [MemoryFiles(None, reserve_bytes=500) for _ in range(2)]
    others = 0

    def free() -> int:
        return 1000 - others - sum(f.kept_bytes for rank in ranks for f in rank._files.values())

    monkeypatch.setattr(memory_files, "free_bytes", free)
    snapshot(ranks[0], tmp_path / "0", {"model": b"m" * 400})
    snapshot(ranks[1], tmp_path / "1", {"small": b"s" * 100, "large": b"l" * 101})
    assert [path.name for path in sorted(tmp_path.rglob("*")) if is_memory_file(path)] == [
        "model", "small"
    ]  # fmt: skip
    assert "large does not fit into the machine's free memory" in caplog.text
    assert "checkpointing.memory_gib_per_rank" in caplog.text
    others = 500
    snapshot(ranks[0], tmp_path / "2", {"model": b"n" * 400})
    assert (tmp_path / "2" / "model").read_bytes() == b"n" * 400
    assert is_memory_file(tmp_path / "2" / "model")
    for rank in ranks:
        rank.close()


def test_no_free_memory_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user did not ask for snapshots on disk."""
    monkeypatch.setattr(memory_files, "free_bytes", lambda: 0)
    snapshot(memory := MemoryFiles(None), tmp_path, {"a": b"12"})
    assert (tmp_path / "a").read_bytes() == b"12"
    assert "a does not fit into the machine's free memory (0.0 GiB" in caplog.text
    memory.close()


V2 = ("memory.max", "memory.current", "memory.stat", "")
V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_",
)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_page_cache_of_a_container_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[str, str, str, str]
) -> None:
    """The cache of files on disk. Snapshots in memory, which `file` also counts, are not."""
    monkeypatch.setattr(memory_files, "CGROUPS", tmp_path)
    (tmp_path / "memory").mkdir()
    limit, usage, statistics, prefix = version
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / usage).write_text("990\n")
    (tmp_path / statistics).write_text(
        f"anon 90\nfile 900\n{prefix}inactive_file 300\n{prefix}active_file 400\n"
    )
    assert free_bytes() == 710


def test_kills_for_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts them. Systems that do not are not an error."""
    monkeypatch.setattr(memory_files, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\ndrop_pagecache 1\n")
    assert oom_kills() == 3


def test_without_a_container_the_machines_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cgroup has a limit, or there is none."""
    available = psutil.virtual_memory()._replace(available=12345)
    monkeypatch.setattr(memory_files.psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(memory_files, "CGROUPS", tmp_path)
    assert free_bytes() == 12345
    for name, text in zip(V2, ("max", "7", "inactive_file 1\n"), strict=False):
        (tmp_path / name).write_text(text)
    assert free_bytes() == 12345
