"""What a test of a trial says of weights, each of which some ranks have."""

from __future__ import annotations

import pytest

from trial_core.driver.stages.train_workload import _untrained
from trial_core.messages import WeightsSeen

TRAINED = WeightsSeen(["a"], [], has_changed=True)
PADDING = WeightsSeen(["a"], [], has_changed=False)
STAGE = WeightsSeen([], [], has_changed=False)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], []),
        ([TRAINED, PADDING, STAGE], []),
        ([PADDING, PADDING], ["no weight has changed"]),
        ([STAGE, STAGE], ["the test has trained nothing"]),
        ([WeightsSeen([], ["a"], has_changed=True), TRAINED], []),
        ([WeightsSeen(["b"], ["a"], has_changed=True), PADDING], []),
        ([WeightsSeen(["b"], ["a"], has_changed=True)] * 2, ["1 parameter got no gradient"]),
    ],
)
def test_what_one_rank_trains_is_trained(ranks: list[WeightsSeen], said: list[str]) -> None:
    """ZeRO 3 leaves some ranks no part of a weight, and a pipeline's stage may have none."""
    found = _untrained(ranks)
    assert len(found) == len(said)
    assert all(warning.startswith(text) for warning, text in zip(found, said, strict=True))
