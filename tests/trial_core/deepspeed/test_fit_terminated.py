"""SIGTERM to one rank of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import lines
from tests.trial_core.deepspeed.fits import every, run, store

pytestmark = pytest.mark.slots


def test_all_ranks_save_after_the_same_batch_and_return(tmp_path: Path) -> None:
    """Whichever rank is told; and the next fit goes on from there."""
    endless = run(
        tmp_path, every(10**6, 10**6), do="terminate", do_rank=1, at_batch=5,
        once=str(tmp_path / "told"),
    )  # fmt: skip
    rest = run(tmp_path, {**every(1, 6), "latest_checkpoint": "latest"})
    ended, resumed = fit_toys("torchrun", tmp_path, endless, rest)

    assert ended[0] == ended[1]
    reached = ended[0]["batches_trained"]
    assert 6 <= reached < 10**6
    assert ended[0]["stopped_early"]
    (manifest,) = store(tmp_path).list(ended[0]["trial"])
    assert (manifest.uuid, manifest.progress.batches_trained) == (
        ended[0]["checkpoint_uuid"], reached,
    )  # fmt: skip
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(reached))
    assert (resumed[0]["trial"], resumed[0]["batches_trained"]) == (ended[0]["trial"], reached)
