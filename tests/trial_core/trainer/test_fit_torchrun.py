"""`Trainer.fit` on two ranks under torchrun: a pipeline, and SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import lines
from tests.trial_core.trainer.fits import assert_same_end, every, run, store

pytestmark = pytest.mark.slots

PIPELINE = "parallel_trials:PipelineTrial"
HPARAMS = {"accumulation": 3, "train_samples": 50}
RESUME = {"latest_checkpoint": "latest"}


def in_parts(folder: Path, trial: str) -> dict[str, Any]:
    """9 batches of a trial in one run, and in 4 + 5."""

    def part(name: str, **fit: Any) -> dict[str, Any]:
        # Validations may draw random numbers, so both runs validate after the same batches.
        fit["validation_period"] = {"batches": 4}
        return {"trial": trial, **run(folder / trial / name, fit, **HPARAMS)}

    return {
        f"{trial} straight": part("straight", **every(3, 9)),
        f"{trial} first": part("parts", **every(3, 4)),
        f"{trial} rest": part("parts", **every(3, 9), **RESUME),
    }


def fits(folder: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """The results of each run, by rank. All share one start."""
    return dict(zip(runs, fit_toys("torchrun", folder / "launch", *runs.values()), strict=True))


@pytest.mark.long
def test_a_pipeline_resumes_bit_for_bit(tmp_path: Path) -> None:
    """4 + 5 batches equal 9."""
    outcomes = fits(tmp_path, in_parts(tmp_path, PIPELINE))
    folder = tmp_path / PIPELINE
    whole, first, rest = (outcomes[f"{PIPELINE} {part}"] for part in ("straight", "first", "rest"))
    assert (first[0]["batches_trained"], rest[0]["batches_trained"]) == (4, 9)
    assert rest[0]["trial"] == first[0]["trial"]
    assert_same_end(folder / "straight", folder / "parts", whole, rest)


@pytest.mark.long
def test_on_sigterm_all_ranks_save_after_the_same_batch_and_return(tmp_path: Path) -> None:
    """One rank and its loader workers get the signal. The next fit resumes."""
    folder = tmp_path / "ended"
    loading = {"trial": "loader_trials:Epochs"}
    endless = run(
        folder, every(10**6, 10**6), do="terminate", do_rank=1, at_batch=5,
        once=str(tmp_path / "terminated"), workers=1,
    )  # fmt: skip
    outcomes = fits(
        tmp_path,
        {
            "endless": {**loading, **endless},
            "resumed": {**loading, **run(folder, {**every(1, 6), **RESUME}, workers=1)},
        },
    )
    ended, resumed = outcomes["endless"], outcomes["resumed"]
    assert ended[0] == ended[1]
    reached = ended[0]["batches_trained"]
    assert 6 <= reached < 10**6
    assert ended[0]["stopped_early"]
    saved = {manifest.uuid: manifest.progress for manifest in store(folder).list()}
    assert saved[ended[0]["checkpoint_uuid"]].batches_trained == reached
    # The next fit only had to validate.
    assert saved[resumed[0]["checkpoint_uuid"]].validated_at == reached
    assert len(saved) == 2
    for rank in (0, 1):
        assert [line[0] for line in lines(folder, "samples", rank)] == list(range(reached))
    assert (resumed[0]["trial"], resumed[0]["batches_trained"]) == (ended[0]["trial"], reached)
