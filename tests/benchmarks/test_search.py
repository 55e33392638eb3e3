"""Curves and names of figures of the benchmark of searches."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from benchmarks.search import ON_DIGITS, TARGETS, Family, decisions

pytestmark = pytest.mark.xdist_group("searches")  # one process imports what they need


def test_each_trial_of_the_digits_learns_at_a_rate_that_is_its_alone() -> None:
    """At rate 0 the loss stays; at a usual one it falls far below that of a guess, ln(10)."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    from benchmarks.search_digits import trained

    still, learning = trained(64, [0.0, 0.03], 27, torch.Generator().manual_seed(0))
    assert len(learning) == len(still) == 27
    assert still == pytest.approx([still[0]] * 27)
    assert learning[-1] < 0.5 < 1 < learning[0]


def test_a_family_of_digits_is_that_of_its_seed() -> None:
    """All searchers, and all runs of the benchmark, get the same curves."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    from benchmarks.search_digits import Digits

    def curves(seed: int) -> list[list[float]]:
        family = Digits(seed, trials=5, units=4)
        assert family.best == min(family.end(trial) for trial in range(5))
        return [[family.loss(trial, unit) for unit in range(1, 5)] for trial in range(5)]

    first = curves(3)
    assert curves(3) == first
    assert curves(4) != first
    assert len({fmean(curve) for curve in first}) == 5


def test_the_benchmark_has_the_figures_of_its_targets_for_both_kinds_of_curves() -> None:
    """Those of the synthetic curves have plain names, those of the digits a suffix."""
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    plain, digits = (decisions([Family(0, 6)], 6, suffix) for suffix in ("", ON_DIGITS))
    assert digits.keys() == {f"{name}_digits" for name in plain}
    judged = {name for name in TARGETS if not name.startswith("beside_training")}
    assert judged <= plain.keys() | digits.keys()
