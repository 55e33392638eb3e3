"""SIGKILL at random moments of a run on 2 ranks: the resumed run equals an undisturbed one.

All are long tests; `tests/flows/test_train.py` kills a rank by default.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.faults.killing import Fit, ForkedFits, forked_fits
from tests.support.faults.saving import keys_of
from tests.support.s3 import S3Server
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import download

pytestmark = [pytest.mark.slots, pytest.mark.long]

BATCHES, PERIOD = 24, 4
LENGTHS = {
    "max_length": BATCHES, "checkpoint_period": PERIOD, "reporting_period": 3,
    "validation_period": 7,
}  # fmt: skip
LONGEST_DELAY_SECONDS = 0.15
SEEDS = 20
ZERO_STAGES = (2, 1, 3)


def new_fit(folder: Path, zero_stage: int, storage: dict[str, Any] | None = None) -> Fit:
    storage = storage or {"url": f"file://{folder}-storage"}
    hparams = {"train_samples": 50, "accumulation": 1, "zero_stage": zero_stage}
    return Fit(folder, storage, hparams, LENGTHS)


def store_of(fit: Fit) -> CheckpointStore:
    return CheckpointStore(fit.storage["url"], fit.storage.get("options"))


def newest(fit: Fit) -> Manifest | None:
    """The checkpoint that the next attempt resumes from."""
    return max(store_of(fit).list(), key=lambda each: each.progress.batches_trained, default=None)


def end_of(fit: Fit, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    last = newest(fit)
    assert last is not None
    assert last.progress.batches_trained == BATCHES
    download(store_of(fit), last.uuid, folder)
    return tensors(folder)


def orphans(store: CheckpointStore) -> set[str]:
    """Files and intents that should have been swept.

    A run that is killed before its first commit is not resumed. Its leftovers are not counted: only
    a prune would sweep them.
    """
    listed = store.list()
    trials = {manifest.trial for manifest in listed}
    begun = [key.split("/")[1:] for key in store.storage.sizes("uploads")]
    of_others = {name.removesuffix(".json") for trial, name in begun if trial not in trials}
    files = {
        key for key in store.storage.sizes("checkpoints") if key.split("/")[1] not in of_others
    }
    swept_too_late = {"/".join(parts) for parts in begun if parts[0] in trials}
    return (files | swept_too_late) - keys_of(listed)


@pytest.fixture(scope="module")
def fits() -> Iterator[ForkedFits]:
    with forked_fits() as fits:
        yield fits


@pytest.fixture(scope="module")
def straight(fits: ForkedFits, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Fit]:
    """The undisturbed run of each ZeRO stage, created on first use."""
    runs: dict[int, Fit] = {}

    def run(zero_stage: int) -> Fit:
        if zero_stage not in runs:
            runs[zero_stage] = new_fit(tmp_path_factory.mktemp("straight") / "run", zero_stage)
            fits.run(runs[zero_stage])
        return runs[zero_stage]

    return run


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_killed_run_resumes_bit_for_bit(
    fits: ForkedFits, straight: Callable[[int], Fit], moto_s3: S3Server, tmp_path: Path, seed: int
) -> None:
    """All attempts train the undisturbed run's batches, with its losses and random states, to the
    same last checkpoint. Listed checkpoints are intact. Half of the runs store on S3."""
    rng = random.Random(seed)
    whole = straight(ZERO_STAGES[seed * len(ZERO_STAGES) // SEEDS])
    on_s3 = {"url": f"{moto_s3.new_bucket()}/runs", "options": moto_s3.options}
    storage = on_s3 if seed % 2 else None
    fit = new_fit(tmp_path / "killed", whole.hparams["zero_stage"], storage)
    for _ in range(rng.choice([1, 1, 2])):
        last = newest(fit)
        if last is None or last.progress.batches_trained < BATCHES:
            victims = rng.choice([(0,), (1,), (0, 1)])
            fits.kill(fit, rng.randrange(BATCHES), rng.uniform(0, LONGEST_DELAY_SECONDS), victims)
        for manifest in store_of(fit).list():
            assert store_of(fit).find_damage(manifest.uuid, manifest.all_files) == []
    before = newest(fit)
    earlier = {manifest.writer for manifest in store_of(fit).list()}
    fits.run(fit)

    last = newest(fit)
    assert last is not None
    if before is not None and before.progress.batches_trained == BATCHES:
        assert last == before  # killed after its last commit
    else:
        assert last.writer not in earlier
    assert orphans(store_of(fit)) == set()
    for rank in range(fit.ranks):
        expected = {line[0]: line for line in whole.batches(rank)}
        seen = fit.batches(rank)
        assert [line for line in seen if line != expected[line[0]]] == []
        assert {line[0] for line in seen} == set(range(BATCHES))
    assert differing(end_of(whole, tmp_path / "a"), end_of(fit, tmp_path / "b")) == []
