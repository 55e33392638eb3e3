"""Checkpoints of a trial that trains an adapter over a frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fitting import Launcher, fit_toys
from tests.support.tensors import differing, tensors
from tests.trial_core.trainer.fits import every, run, store
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.transfer.fetch import download

pytestmark = pytest.mark.slots

PYTORCH: dict[str, Any] = {
    "trial": "adapter_trials:PyTorchAdapter",
    "package": "trial_core.pytorch",
}
DEEPSPEED: dict[str, Any] = {"trial": "adapter_trials:DeepSpeedAdapter"}
TRIALS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "pytorch": (PYTORCH, {}),
    "zero 2": (DEEPSPEED, {"zero_stage": 2}),
    "zero 0": (DEEPSPEED, {"zero_stage": 0}),
    "zero 1": (DEEPSPEED, {"zero_stage": 1}),
    "zero 3": (DEEPSPEED, {"zero_stage": 3}),
}
FROZEN_BYTES = 4 * 2**20
SAVED_AFTER = [4, 8, 11, 12, 15]  # 11 ends the first process


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "ranks", "names"),
    [
        ("python", 1, ["pytorch", "zero 2"]),
        pytest.param("torchrun", 2, ["pytorch", "zero 3"], marks=pytest.mark.long),
        pytest.param("torchrun", 2, ["zero 0", "zero 1"], marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_an_adapter_stores_little(
    tmp_path: Path, launcher: Launcher, ranks: int, names: list[str]
) -> None:
    """Each but the first two uploads at most 1/20 of its bytes, also after a restart; and restores.

    11 + 4 batches in two processes end as 15 in one do.
    """

    def runs(batches: int, part: str, resume: bool) -> list[dict[str, Any]]:
        fit = {**every(4, batches), "checkpoint_period": {"batches": 4}, "checkpoint_policy": "all"}
        if resume:
            fit["latest_checkpoint"] = "latest"
        return [
            {**TRIALS[name][0], **run(tmp_path / part / name, fit, **TRIALS[name][1])}
            for name in names
        ]

    both = [*runs(11, "parts", False), *runs(15, "straight", False)]
    outcomes = fit_toys(launcher, tmp_path / "first", *both, ranks=ranks)
    outcomes += fit_toys(launcher, tmp_path / "second", *runs(15, "parts", True), ranks=ranks)
    assert [rank for each in outcomes for rank in each if "error" in rank] == []
    for name in names:
        saved = store(tmp_path / "parts" / name).list()
        assert [each.progress.batches_trained for each in saved] == SAVED_AFTER, name
        first, second, *others = [each.own_bytes for each in saved]
        assert first > FROZEN_BYTES
        print(f"{ranks} rank(s), {name}: {first}, {second}, then {others} bytes")
        assert [each for each in others if each * 20 > first] == [], name
        last = store(tmp_path / "straight" / name).list()[-1]
        assert_equal_states(tmp_path, name, last, saved[-1])


def assert_equal_states(folder: Path, name: str, expected: Manifest, seen: Manifest) -> None:
    """Both checkpoints of a trial hold the same tensors."""
    fetched = [folder / part / name / "fetched" for part in ("straight", "parts")]
    for target, manifest in zip(fetched, (expected, seen), strict=True):
        download(store(target.parent), manifest.uuid, target)
    assert differing(*map(tensors, fetched)) == []
