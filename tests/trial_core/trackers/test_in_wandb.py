"""What W&B is given."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.support.trackers import in_wandb
from trial_core.trackers.in_wandb import WandbTracker
from trial_core.trackers.journal import FOLDER, JOURNAL, SENDER_LOG, JournalWriter
from trial_core.trackers.records import Committed, Metrics
from trial_core.trackers.sender import SenderOrder
from trial_core.trackers.sender_process import SenderProcess


def test_a_checkpoint_that_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    """W&B refuses a link to files that were pruned: the points after it are sent."""
    url = f"file://{tmp_path}/pruned"
    with closing(JournalWriter(tmp_path / FOLDER / JOURNAL)) as journal:
        for batches in (4, 8):
            journal.append(Committed(
                at=1.0, batches=batches, uuid="u", url=url, size_bytes=1, digest="d"
            ))  # fmt: skip
            journal.append(Metrics(
                at=1.0, batches=batches, samples=0, attempt=1, values={"loss": 1 / batches}
            ))  # fmt: skip
    order = SenderOrder(
        trial="toy-1", experiment="toy", run_dir=str(tmp_path), patience_seconds=60.0,
        trackers={"wandb": {"mode": "offline"}},
    )  # fmt: skip
    SenderProcess(order, {}, print).end(lambda has_ended: has_ended(120.0))
    assert in_wandb([tmp_path / FOLDER / "wandb"], "loss") == [(4, 0.25), (8, 0.125)]
    assert (tmp_path / SENDER_LOG).read_text().count("artifact of a checkpoint is left out") == 1


def test_sync_sends_to_the_runs_project() -> None:
    """The run names its project itself, so the variable is not remembered."""
    variables = {"WANDB_PROJECT": "other", "WANDB_ENTITY": "vision"}
    assert WandbTracker.remembered({}, variables) == {"entity": "vision"}
