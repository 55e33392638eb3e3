"""Checkpoints that begin when the last one is durable: `min_checkpoint_period: continuous`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import slots as warm
from tests.support.flow import breaking, train
from tests.support.slots import lines, toy_config
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download
from trial_core.observe.events.observers import Observer, observing
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.processes.slots.stop_barrier import Position, StopCoordinator

pytestmark = [pytest.mark.slots, pytest.mark.server]
BATCHES, KILLED_AT, AHEAD, VALIDATION = 41, 29, 5, 17


@dataclass
class Events(Observer):
    """Notes the saves and uploads of a run, and where its launches begin.

    Attributes:
        seen: ``save``, ``begin`` and ``end`` of uploads, and ``launch``, in their order.
        committed: batches of the checkpoints.
        begun_at: the first batch of each launch.
    """

    seen: list[str] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    begun_at: list[int] = field(default_factory=list)

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self.seen.append("launch")
        assert begins_at == max(self.committed, default=0)  # only later batches are lost
        self.begun_at.append(begins_at)

    def stage_started(self, stage: str, detail: str) -> None:
        self.seen += {"checkpoint-save": ["save"], "checkpoint-upload": ["begin"]}.get(stage, [])

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        self.seen.append("end")
        self.committed.append(batches)


@pytest.fixture(autouse=True)
def paused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the ranks when all have paused for a break: they wait for it in their last batch."""
    rank_paused, file = StopCoordinator.rank_paused, here / "breaks"
    file.touch()

    def note(coordinator: StopCoordinator, rank: int, at: Position) -> None:
        rank_paused(coordinator, rank, at)
        if not coordinator._is_agreeing:
            with file.open("a") as told:
                told.write("x")

    monkeypatch.setattr(StopCoordinator, "rank_paused", note)


def paced(here: Path, trial: str, ahead: int = AHEAD, **changes: Any) -> Any:
    """A run that trains some batches beyond a checkpoint before its break, and loses a rank."""
    hparams = {**breaking(here, "kill", KILLED_AT, do_rank=1), "breaks": str(here / "breaks")}
    fields: dict[str, Any] = {
        "entrypoint": f"paced_trials:{trial}", "min_checkpoint_period": "continuous",
        "min_validation_period": {"batches": VALIDATION}, "checkpoint_policy": "all",
        "scheduling_unit": 1000, "max_restarts": 1,
        "hyperparameters": {**hparams, "ahead": ahead},
    }  # fmt: skip
    return toy_config(here, BATCHES, **fields | changes)


@pytest.mark.long
@pytest.mark.parametrize(
    "trial", ["PacedTrial", pytest.param("PacedPyTorchTrial", marks=pytest.mark.long)]
)
def test_the_next_begins_when_the_last_is_durable(
    warm_slots: Callable[[int], SlotGroup], here: Path, trial: str
) -> None:
    """One at a time, while training goes on. A killed run resumes from the last one, and ends like
    an undisturbed run, bit for bit. Only the two newest and those at a validation are left."""
    config, events = paced(here, trial), Events()
    with observing(events):
        train(config)
    cycle = ["save", "begin", "end"]
    second = events.seen.index("launch", 1)
    before, after = events.seen[1:second], events.seen[second + 1 :]
    assert before == (cycle * len(before))[: len(before)]
    assert after == cycle * (len(after) // 3)
    assert before.count("end") >= 4

    resumed_at = events.begun_at[1]
    assert KILLED_AT - resumed_at <= 2 * AHEAD
    seen = [line[0] for line in lines(here, "samples", 0)]
    assert seen[KILLED_AT] in (KILLED_AT, resumed_at)  # the other rank may have trained it
    assert seen[-(BATCHES - resumed_at) :] == list(range(resumed_at, BATCHES))

    store = CheckpointStore(config.checkpoint_storage.url)
    left = [manifest.progress.batches_trained for manifest in store.list()]
    # The run's claim keeps the one that it has resumed from.
    assert {*left} - {resumed_at} == {VALIDATION, 2 * VALIDATION, *events.committed[-2:]}

    storage = f"file://{here}/whole"
    whole = paced(here, trial, BATCHES, checkpoint_storage=storage, min_checkpoint_period=None)
    undisturbed = warm.drive(warm_slots(2), whole, here / "whole-run", persist=True)
    expected = tensors(here / "whole/checkpoints" / undisturbed.checkpoints[-1])
    download(store, store.list()[-1].uuid, here / "last")
    assert len(expected) > 3
    assert differing(expected, tensors(here / "last")) == []
