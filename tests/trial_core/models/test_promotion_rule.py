"""Comparing a challenger with the champion."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Manifest
from trial_core.models.promotion_rule import PromotionRule
from trial_core.schedule.sequencer import Progress

NAN, INF = float("nan"), float("inf")
finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("champion", "challenger", "margin", "is_better", "why"),
    [
        (None, 0.5, 0.0, True, "the challenger's loss 0.5, and there was no champion"),
        (
            0.7, 0.5, 0.1, True,
            "better by 0.2: the challenger's loss 0.5 against the champion's 0.7",
        ),
        (
            0.7, 0.65, 0.1, False,
            "better by 0.05, which is not more than the margin of 0.1: "
            "the challenger's loss 0.65 against the champion's 0.7",
        ),
        # In binary, 0.4 - 0.3 is more than 0.1.
        (
            0.4, 0.3, 0.1, False,
            "better by 0.1, which is not more than the margin of 0.1: "
            "the challenger's loss 0.3 against the champion's 0.4",
        ),
        (
            0.4, 0.29999, 0.1, True,
            "better by 0.10001: the challenger's loss 0.29999 against the champion's 0.4",
        ),
        (0.0, -0.0, 0.0, False, "no better: the challenger's loss -0 against the champion's 0"),
        (
            0.5, 0.7, 1.0, False,
            "worse by 0.2: the challenger's loss 0.7 against the champion's 0.5",
        ),
        (0.5, NAN, 0.0, False, "the challenger's loss is nan, not finite"),
        (0.5, -INF, 0.0, False, "the challenger's loss is -inf, not finite"),
        (None, -INF, 0.0, False, "the challenger's loss is -inf, not finite"),
        (NAN, NAN, 0.0, False, "the challenger's loss is nan, not finite"),
        (NAN, 0.5, 9.0, True, "the challenger's loss 0.5, and the champion's is nan, not finite"),
        (INF, 0.5, 9.0, True, "the challenger's loss 0.5, and the champion's is inf, not finite"),
        (-INF, 0.5, 0.0, True, "the challenger's loss 0.5, and the champion's is -inf, not finite"),
        (
            0.11505917956431706, 0.115, 0.0, True,
            "better by 0.0000591796: the challenger's loss 0.115 against the champion's 0.115059",
        ),
        (
            0.11505917956431706, 0.115059179, 0.0, True,
            "better by 5.64317e-10: the challenger's loss 0.115059179 against the champion's "
            "0.11505917956431706",
        ),
        (1, 0, 0.5, True, "better by 1: the challenger's loss 0 against the champion's 1"),
    ],
)  # fmt: skip
def test_smaller_is_better(
    champion: float | None, challenger: float, margin: float, is_better: bool, why: str
) -> None:
    """A challenger wins by more than the margin, computed in decimals; a non-finite one never."""
    verdict = PromotionRule("loss", True, margin).compare(champion, challenger)
    assert (verdict.is_better, verdict.why) == (is_better, why)


def test_larger_is_better() -> None:
    """The direction is reversed."""
    rule = PromotionRule("accuracy", smaller_is_better=False, margin=0.01)
    assert rule.compare(0.9, 0.92).why == (
        "better by 0.02: the challenger's accuracy 0.92 against the champion's 0.9"
    )
    assert not rule.compare(0.9, 0.91).is_better
    assert (
        rule.compare(0.9, 0.88).why
        == "worse by 0.02: the challenger's accuracy 0.88 against the champion's 0.9"
    )


@given(finite, finite, st.floats(0, 1e6))
def test_comparison_is_consistent(one: float, other: float, margin: float) -> None:
    """At most one of two is better than the other, in either direction; a margin only prevents
    promotions."""
    for smaller in (True, False):
        rule = PromotionRule("loss", smaller, margin)
        assert not (rule.compare(one, other).is_better and rule.compare(other, one).is_better)
    is_better = PromotionRule("loss", True, margin).compare(one, other).is_better
    assert not is_better or other < one
    assert PromotionRule("loss", True, 0.0).compare(one, other).is_better == (other < one)


def saved(batches: int, loss: Any, is_validated: bool = True) -> Manifest:
    return new_manifest(
        batches,
        progress=Progress(batches, validated_at=batches if is_validated else batches - 1),
        metrics={"validation": {"loss": loss}},
    )


def test_the_best_checkpoint() -> None:
    """Only a checkpoint's own validation and numbers count; of equal ones the later is best."""
    numbers = [saved(7, 0.5), saved(11, 0.3), saved(13, 0.3), saved(17, 0.4)]
    others = [saved(19, NAN), saved(23, 0.1, is_validated=False), saved(29, "0.1")]
    best = PromotionRule("loss", True).best_checkpoint([*others, *numbers])
    assert best is numbers[2]
    assert PromotionRule("loss", False).best_checkpoint([*others, *numbers]) is numbers[0]
    assert PromotionRule("accuracy", True).best_checkpoint(numbers) is None


@pytest.mark.parametrize(
    ("manifests", "why"),
    [
        ([], "the challenger saved no checkpoint"),
        ([saved(7, 0.5, False)], "no checkpoint of the challenger was validated"),
        (
            [saved(7, NAN), saved(11, 0.5, False)],
            "the challenger's loss is nan, not a finite number",
        ),
        ([saved(7, "low")], "the challenger's loss is low, not a finite number"),
        ([saved(7, None)], "the challenger's validation has no metric loss"),
    ],
)
def test_no_best_checkpoint(manifests: list[Manifest], why: str) -> None:
    """The reason is stated."""
    rule = PromotionRule("loss")
    assert rule.best_checkpoint(manifests) is None
    assert rule.explain_no_best(manifests) == why
