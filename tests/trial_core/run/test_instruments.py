"""A rank's folder for TensorBoard that moves, because the trial turns out to be another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.errors import TrialflowError
from trial_core.run.instruments import Instruments


def test_what_was_written_moves_along(tmp_path: Path) -> None:
    """Files, also deeper ones, join those that are there; what the trial knows leads there."""
    instruments = Instruments(tmp_path / "new")
    known = instruments.folder()
    (known / "deeper").mkdir()
    (known / "deeper" / "events").write_text("new")
    (tmp_path / "old" / "deeper").mkdir(parents=True)
    (tmp_path / "old" / "deeper" / "earlier").write_text("old")
    instruments.move_to(tmp_path / "old")
    assert instruments.folder() == tmp_path / "old"
    (known / "note").write_text("later")
    seen = {
        path.relative_to(tmp_path / "old").as_posix(): path.read_text()
        for path in (tmp_path / "old").rglob("*")
        if path.is_file()
    }
    assert seen == {"deeper/events": "new", "deeper/earlier": "old", "note": "later"}


def test_an_open_writer_goes_on_where_its_files_are(tmp_path: Path) -> None:
    """One curve from before and after, of each of the writers that `add_scalars` has made."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    instruments = Instruments(tmp_path / "new")
    for step in range(4):
        instruments.writer().add_scalars("losses", {"mine": float(step)}, step)
        if step == 1:
            instruments.move_to(tmp_path / "old")
    instruments.finish()
    events = EventAccumulator(str(tmp_path / "old" / "losses_mine")).Reload().Scalars("losses")
    assert [event.value for event in events] == [0, 1, 2, 3]


def test_nothing_is_made_for_a_trial_that_writes_nothing(tmp_path: Path) -> None:
    """Neither folder is there afterwards, and the new one counts."""
    instruments = Instruments(tmp_path / "new")
    instruments.move_to(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []
    assert instruments.folder() == tmp_path / "old"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Says from where to where, and why not."""
    instruments = Instruments(tmp_path / "new")
    (instruments.folder() / "events").write_text("new")
    (tmp_path / "old").write_text("in the way")
    with pytest.raises(TrialflowError, match=r"TensorBoard from .*new to .*old, .*exists"):
        instruments.move_to(tmp_path / "old")
