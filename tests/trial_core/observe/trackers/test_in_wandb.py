"""What W&B is given."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.support.trackers import in_wandb
from trial_core.observe.trackers.in_wandb import WandbTracker
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, SENDER_LOG, JournalWriter
from trial_core.observe.trackers.records import Committed, Metrics
from trial_core.observe.trackers.sender import SenderOrder, SenderProcess
from trial_core.observe.trackers.tracker import TrackedRun


def test_a_checkpoint_that_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    """W&B refuses a link that it cannot follow: the points after it are sent."""
    send_checkpoints(tmp_path, "no-url")
    assert in_wandb([tmp_path / FOLDER / "wandb"], "loss") == [(4, 0.25), (8, 0.125)]
    assert (tmp_path / SENDER_LOG).read_text().count("artifact of a checkpoint is left out") == 1


def test_no_record_has_a_local_folder_listed(tmp_path: Path) -> None:
    """W&B is given the URL alone: who may write to the storage could name any folder."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "private-name.txt").touch()
    send_checkpoints(tmp_path, f"file://{tmp_path}/own")
    sent = b"".join(file.read_bytes() for file in (tmp_path / FOLDER / "wandb").rglob("*.wandb"))
    assert b"checkpoint.json" in sent
    assert b"private-name" not in sent
    assert "is left out" not in (tmp_path / SENDER_LOG).read_text()


def send_checkpoints(run_dir: Path, url: str) -> None:
    """Send two checkpoints with their points to W&B."""
    with closing(JournalWriter(run_dir / FOLDER / JOURNAL)) as journal:
        for batches in (4, 8):
            journal.append(Committed(
                at=1.0, batches=batches, uuid="u", url=url, size_bytes=1, digest="d"
            ))  # fmt: skip
            journal.append(Metrics(
                at=1.0, batches=batches, samples=0, attempt=1, values={"loss": 1 / batches}
            ))  # fmt: skip
    order = SenderOrder(
        trial="toy-1", experiment="toy", run_dir=str(run_dir), patience_seconds=60.0,
        trackers={"wandb": {"mode": "offline"}},
    )  # fmt: skip
    SenderProcess(order, {}, print).end(lambda has_ended: has_ended(120.0))


def test_a_run_of_another_trial_is_not_continued(tmp_path: Path) -> None:
    """The trial's storage says which run it had, and other people may write there."""
    tracker = WandbTracker({"mode": "disabled"}, TrackedRun("toy-1", "toy", tmp_path, tmp_path))
    with closing(tracker):
        assert tracker.open("toy-2") != "toy-2"  # an older wandb gives a disabled run any id


def test_sync_sends_to_the_runs_project() -> None:
    """The run names its project itself, so the variable is not remembered."""
    variables = {"WANDB_PROJECT": "other", "WANDB_ENTITY": "vision"}
    assert WandbTracker.remembered({}, variables) == {"entity": "vision"}
