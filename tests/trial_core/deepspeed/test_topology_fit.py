"""A script's fit goes on with another topology, as a flow does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import lines
from tests.trial_core.deepspeed.fits import every, run

pytestmark = pytest.mark.slots


def test_a_fit_goes_on_with_another_zero_stage(tmp_path: Path) -> None:
    """4 batches of ZeRO-1, 5 more of ZeRO-3, in one order."""
    latest = {"latest_checkpoint": "latest"}
    ((first,), (rest,)) = fit_toys(
        "python", tmp_path / "launch",
        run(tmp_path, every(4, 4), zero_stage=1),
        run(tmp_path, {**every(5, 9), **latest}, zero_stage=3),
        ranks=1,
    )  # fmt: skip
    assert rest["trial"] == first["trial"]
    assert rest["batches_trained"] == 9
    seen = lines(tmp_path, "samples", 0)
    assert [line[0] for line in seen] == [*range(9)]
    assert len({sample for line in seen for sample in line[2:]}) == 18
