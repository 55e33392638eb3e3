"""Limits on log lines for Prefect, and the upload of the complete logs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.report.rank_logs import (
    BURST_LINES,
    LINES_PER_SECOND,
    SMALL_BYTES,
    LogLimit,
    LogLimits,
    StoredLogs,
)

TRIAL = "toy-0000beef"


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store on disk."""
    return CheckpointStore(f"file://{tmp_path}/storage")


def logs_of(store: CheckpointStore, run_dir: Path, **logs: str) -> StoredLogs:
    """A run's folder with these logs and a report."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        (run_dir / "logs" / f"{name}.log").write_text(text)
    (run_dir / "report.md").write_text("# report")
    return StoredLogs(store, TRIAL, run_dir, ("report.md",))


def stored(store: CheckpointStore) -> dict[str, int]:
    """The stored files of the run, with their sizes."""
    sizes = store.storage.sizes(f"runs/{TRIAL}")
    return {key.removeprefix(f"runs/{TRIAL}/"): size for key, size in sizes.items()}


def test_a_burst_of_lines_passes_then_a_few_per_second() -> None:
    """The dropped lines are counted."""
    clock = Clock()
    cap = LogLimit(clock)
    assert sum(cap.allows() for _ in range(100_000)) == BURST_LINES
    assert cap.dropped() == 100_000 - BURST_LINES
    clock.now += 2
    assert sum(cap.allows() for _ in range(100)) == 2 * LINES_PER_SECOND
    clock.now += 10_000
    assert sum(cap.allows() for _ in range(10_000)) == BURST_LINES


@pytest.mark.parametrize("are_warnings", [False, True])
def test_rank_0_does_not_crowd_out_other_ranks_warnings(are_warnings: bool) -> None:
    """It prints 20 lines or warnings per second; each warning of another rank passes."""
    clock = Clock()
    caps = LogLimits(clock)
    shown = 0
    for second in range(600):
        clock.now += 1
        for _ in range(20):
            caps.allows(0, are_warnings)
        if second % 7 == 0:
            shown += caps.allows(3, True)
    assert shown == 86
    assert caps.dropped() == 600 * 20 - BURST_LINES - 599 * LINES_PER_SECOND


def test_rank_0s_output_does_not_crowd_out_its_warnings() -> None:
    """A warning passes after the output has used up its limit."""
    caps = LogLimits(Clock())
    while caps.allows(0, False):
        pass
    assert caps.allows(0, True)


def test_logs_and_report_are_stored(store: CheckpointStore, tmp_path: Path) -> None:
    """Every rank's log is stored where the report says, and the report beside it."""
    logs = logs_of(store, tmp_path / "run", **{"rank-0": "one\n", "rank-1": "two, three\n"})
    logs.store()
    place = logs.locations("Report", "report.md")["Logs"].removeprefix(f"{store.url}/runs/{TRIAL}/")
    assert stored(store) == {f"{place}/rank-0.log": 4, f"{place}/rank-1.log": 11, "report.md": 8}
    assert logs.stored("report.md") == b"# report"
    assert logs.stored("report.json") is None


def test_a_large_log_is_not_uploaded_after_every_checkpoint(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """It is uploaded after it has grown by half; and at the end, after any change."""
    run_dir = tmp_path / "run"
    logs = logs_of(store, run_dir, **{"rank-0": "x" * 2 * SMALL_BYTES})

    def grow(count: int) -> int:
        with (run_dir / "logs" / "rank-0.log").open("a") as log:
            log.write("x" * count)
        logs.store()
        return next(size for key, size in stored(store).items() if key.endswith("rank-0.log"))

    assert grow(0) == 2 * SMALL_BYTES
    assert grow(SMALL_BYTES // 2) == 2 * SMALL_BYTES
    assert grow(SMALL_BYTES // 2) == 3 * SMALL_BYTES
    assert grow(10) == 3 * SMALL_BYTES
    logs.store(is_final=True)
    assert grow(0) == 3 * SMALL_BYTES + 10


def test_machines_do_not_overwrite_each_others_logs(store: CheckpointStore, tmp_path: Path) -> None:
    """The logs of a trial that moved to another machine are both stored."""
    logs_of(store, tmp_path / "here", **{"rank-0": "here\n"}).store()
    place = (tmp_path / "here" / "logs-place").read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "logs-place").write_text(f"{place}-elsewhere")
    logs_of(store, elsewhere, **{"rank-0": "elsewhere\n"}).store()
    sizes = {size for key, size in stored(store).items() if key.startswith("logs/")}
    assert sizes == {5, 10}


def test_successive_runs_on_a_machine_share_a_stored_log(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """The log of one folder is one object, whichever run wrote it."""
    logs_of(store, tmp_path / "run", **{"rank-0": "one\n"}).store()
    logs_of(store, tmp_path / "run", **{"rank-0": "one\ntwo\n"}).store()
    (log,) = [size for key, size in stored(store).items() if key.startswith("logs/")]
    assert log == 8


def test_a_disk_that_was_full_does_not_hide_the_logs(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """The file with the name of their folder may be empty then."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs-place").touch()
    logs_of(store, tmp_path / "run", **{"rank-0": "one\n"}).store()
    (log,) = [key for key in stored(store) if key.startswith("logs/")]
    assert log == f"{(tmp_path / 'run' / 'logs-place').read_text()}/rank-0.log"


def test_the_final_upload_can_be_cut_short(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopping run does not wait for its logs: no error, no partial file. The report is first."""
    logs = logs_of(store, tmp_path / "run", **{"rank-0": "x" * 2**20})
    copy = shutil.copyfile

    def copy_until_the_deadline(source: Path, to: Path) -> Path:
        if source.name == "rank-0.log":
            logs.cut_short()
        return copy(source, to)

    monkeypatch.setattr(shutil, "copyfile", copy_until_the_deadline)
    logs.store(is_final=True)
    assert stored(store) == {"report.md": 8}


def test_a_memory_storage_receives_no_logs(tmp_path: Path) -> None:
    """It ends with this process. The report names the local folder."""
    store = CheckpointStore("memory://logs-of-a-test")
    logs = logs_of(store, tmp_path / "run", **{"rank-0": "one\n"})
    logs.store(is_final=True)
    assert stored(store) == {}
    run = tmp_path / "run"
    places = logs.locations("Report", "report.md").values()
    assert list(places) == [str(run / "report.md"), str(run / "logs")]


def test_tensorboard_needs_stored_files(store: CheckpointStore, tmp_path: Path) -> None:
    """There is no location for a trial that writes none, or whose files are not stored yet."""
    logs = logs_of(store, tmp_path / "run")
    store.storage.write(f"runs/{TRIAL}/tensorboarding", b"somebody else's")
    assert logs.tensorboard() is None
    (tmp_path / "run" / "tensorboard").mkdir()
    assert logs.tensorboard() is None
    store.storage.write(f"runs/{TRIAL}/tensorboard/rank-0/events", b"event")
    assert logs.tensorboard() == f"{store.url}/runs/{TRIAL}/tensorboard"
