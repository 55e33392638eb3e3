"""`Trainer.fit` on two ranks under torchrun, in one start: every kind of engine, and SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import lines
from tests.trial_core.trainer.fits import assert_same_end, every, run, store

pytestmark = pytest.mark.slots

TRIALS = ("parallel_trials:PipelineTrial", "engine_trials:Adversarial")
HPARAMS = {"accumulation": 3, "train_samples": 50}
ON = {"latest_checkpoint": "latest"}


def in_parts(folder: Path, trial: str) -> dict[str, Any]:
    """Of a trial 9 batches straight, and 4 + 5."""

    def part(name: str, **fit: Any) -> dict[str, Any]:
        # Validations may draw random numbers, so both runs have them at the same places.
        fit["validation_period"] = {"batches": 4}
        return {"trial": trial, **run(folder / trial / name, fit, **HPARAMS)}

    return {
        f"{trial} straight": part("straight", **every(3, 9)),
        f"{trial} first": part("parts", **every(3, 4)),
        f"{trial} rest": part("parts", **every(3, 9), **ON),
    }


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each, by rank."""
    folder = tmp_path_factory.mktemp("fits")
    loading = {"trial": "loader_trials:Epochs"}
    endless = run(
        folder / "ended", every(10**6, 10**6), do="terminate", do_rank=1, at_batch=5,
        once=str(folder / "told"), workers=1,
    )  # fmt: skip
    runs = {
        "endless": {**loading, **endless},
        "resumed": {**loading, **run(folder / "ended", {**every(1, 6), **ON}, workers=1)},
    }
    for trial in TRIALS:
        runs |= in_parts(folder, trial)
    outcomes = fit_toys("torchrun", folder / "launch", *runs.values())
    return {"folder": folder, **dict(zip(runs, outcomes, strict=True))}


@pytest.mark.parametrize("trial", TRIALS)
def test_every_kind_of_engine_goes_on_bit_for_bit(fits: dict[str, Any], trial: str) -> None:
    """4 + 5 batches are 9: the same trial, micro-batches, weights, optimizer and random state."""
    folder: Path = fits["folder"] / trial
    whole, first, rest = (fits[f"{trial} {part}"] for part in ("straight", "first", "rest"))
    assert (first[0]["batches_trained"], rest[0]["batches_trained"]) == (4, 9)
    assert rest[0]["trial"] == first[0]["trial"]
    assert_same_end(folder / "straight", folder / "parts", whole, rest)


def test_on_sigterm_all_ranks_save_after_the_same_batch_and_return(fits: dict[str, Any]) -> None:
    """Whichever rank is told, and its loader's workers with it; and the next fit goes on."""
    folder, ended, resumed = fits["folder"] / "ended", fits["endless"], fits["resumed"]
    assert ended[0] == ended[1]
    reached = ended[0]["batches_trained"]
    assert 6 <= reached < 10**6
    assert ended[0]["stopped_early"]
    saved = {manifest.uuid: manifest.progress for manifest in store(folder).list()}
    assert saved[ended[0]["checkpoint_uuid"]].batches_trained == reached
    # The next fit had nothing left but to validate, which the checkpoint did not know of.
    assert saved[resumed[0]["checkpoint_uuid"]].validated_at == reached
    assert len(saved) == 2
    for rank in (0, 1):
        assert [line[0] for line in lines(folder, "samples", rank)] == list(range(reached))
    assert (resumed[0]["trial"], resumed[0]["batches_trained"]) == (ended[0]["trial"], reached)
