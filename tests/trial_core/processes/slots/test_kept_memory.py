"""The memory files that a fork server keeps for the ranks of the next launch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import wait_until_gone
from tests.support.slots import TOY, Driven, OwnSlots, drive, toy_config
from tests.support.waiting import until
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import launch_locally
from trial_core.processes.slots.rank_main import TRIAL_MODULES
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = [pytest.mark.slots, pytest.mark.long]

DEADLINE_SECONDS = 20
SNAPSHOT_FILES = 3
"""So many of the eight files of a checkpoint are in memory, and kept."""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(TRIAL_MODULES) as server:
        yield server


@contextmanager
def ranks(server: ForkServer) -> Iterator[tuple[SlotGroup, psutil.Process]]:
    """Two ranks, and the process of their fork server. The ranks are killed in the end."""
    with OwnSlots(2, working_dir=TOY, launcher=partial(launch_locally, server)) as slots:
        parent = psutil.Process(slots.pids[0]).parent()
        assert parent is not None
        yield slots, parent
        for pid in slots.pids:
            os.kill(pid, signal.SIGKILL)


def train(slots: SlotGroup, folder: Path, batches: int, **arguments: Any) -> Driven:
    """Train with a checkpoint every three batches."""
    config = toy_config(folder, batches, scheduling_unit=3, min_checkpoint_period={"batches": 3})
    return drive(slots, config, folder / "run", persist=True, **arguments)


def kept(process: psutil.Process) -> list[Path]:
    """The links to the memory files that a process has open."""
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return [each for each in links if os.readlink(each).startswith("/memfd:trialflow")]


def until_kept(process: psutil.Process) -> list[Path]:
    """Wait until it keeps one snapshot; the ranks say so when the checkpoint is committed."""
    until(lambda: len(kept(process)) == SNAPSHOT_FILES, "one snapshot is kept")
    return kept(process)


def overwrite(paths: list[Path]) -> None:
    """Damage files, in a way that their sizes do not show."""
    assert paths
    for path in paths:
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)


def test_new_ranks_restore_from_the_memory_of_those_that_were_killed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """They read no shard from the storage. One snapshot is kept, and freed for the next one."""
    with ranks(fork_server) as (slots, server):
        first = train(slots, tmp_path, 3)
        until_kept(server)
        first = train(slots, tmp_path, 6, resume=first)
        until_kept(server)
    assert len(kept(server)) == SNAPSHOT_FILES
    overwrite(list((tmp_path / "checkpoints").rglob("model0/*.pt")))
    with ranks(fork_server) as (slots, again):
        assert again == server
        assert not any(kept(psutil.Process(rank)) for rank in slots.pids)
        assert train(slots, tmp_path, 9, resume=first).stages[0] == "train [6→9]"
        until_kept(server)


@pytest.mark.parametrize("is_stored", [True, False])
def test_damaged_memory_is_fetched_from_the_storage(
    fork_server: ForkServer, tmp_path: Path, is_stored: bool
) -> None:
    """Memory is verified like any file; the checkpoint is damaged if the storage's copy is, too."""
    with ranks(fork_server) as (slots, server):
        first = train(slots, tmp_path, 3)
    overwrite(until_kept(server))
    if not is_stored:
        overwrite(list((tmp_path / "checkpoints").rglob("model0/*.pt")))
    with ranks(fork_server) as (slots, _):
        if is_stored:
            assert train(slots, tmp_path, 6, resume=first).stages[0] == "train [3→6]"
        else:
            with pytest.raises(AssertionError, match="damaged"):
                train(slots, tmp_path, 6, resume=first)


def test_the_memory_is_freed_before_new_ranks_take_some(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Their first snapshot, and what they set aside for it, does not come on top."""
    with ranks(fork_server) as (slots, server):
        first = train(slots, tmp_path, 3)
    until_kept(server)
    with ranks(fork_server) as (slots, _):
        drive(slots, toy_config(tmp_path, 4), tmp_path / "run", resume=first)  # persists nothing
        assert kept(server) == []


def test_nothing_is_kept_after_the_end(tmp_path: Path) -> None:
    """The memory ends with the fork server, and its links do not survive it for the next run."""
    with ForkServer(TRIAL_MODULES) as own:
        with ranks(own) as (slots, server):
            train(slots, tmp_path, 3)
        links = [path for path in (tmp_path / "run" / "kept").rglob("*.pt") if path.is_symlink()]
        assert all(path.exists() for path in links)
    assert wait_until_gone([server.pid], DEADLINE_SECONDS) == []
    assert links
    assert not any(path.exists() for path in links)
