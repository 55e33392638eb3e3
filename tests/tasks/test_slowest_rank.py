"""The slowest rank of a real run, in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import train
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY, toy_config

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.long]


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        ("SlowData", "slowest rank: 1, which waits for its data"),
        ("SlowCompute", "slowest computing: rank 1, whose forward pass takes"),
    ],
)
def test_the_slow_rank_is_named(
    prefect_server: PrefectServer, here: Path, trial: str, told: str
) -> None:
    """Although all ranks train in step, and so take the same time."""
    config = toy_config(
        here, 8, scheduling_unit=4, entrypoint=f"slow_trials:{trial}",
        code=str(Path(__file__).with_name("toy")),
        environment={"environment_variables": {"PYTHONPATH": str(TOY)}},
    )  # fmt: skip
    report = Path(train(config).report_path).read_text()
    assert told in report
