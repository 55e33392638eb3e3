"""A real run's logs, from the ranks to Prefect and to the storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import one_slot, train
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.slots.log_pump import MAX_LINES_PER_PERIOD

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.long]


def test_a_rank_that_prints_100_000_lines(prefect_server: PrefectServer, here: Path) -> None:
    """All are in its log file and in the storage; Prefect has some, and counts the others."""
    code = Path(__file__).with_name("toy")
    environment = {"environment_variables": {"PYTHONPATH": str(TOY)}}
    result = train(
        one_slot(
            here, 4, entrypoint="printing_trials:Printing", code=str(code), environment=environment
        )
    )
    log = (Path(result.run_dir) / "logs" / "rank-0.log").read_text()
    printed = [line for line in log.splitlines() if line.startswith("line ")]
    assert len(printed) == 100_000

    store = CheckpointStore(f"file://{here}/checkpoints")
    (key,) = [
        key for key in store.storage.sizes(f"runs/{result.trial}/logs") if key.endswith("0.log")
    ]
    assert store.storage.read(key) == log.encode()
    assert f"`{store.url}/{key.rpartition('/')[0]}`" in Path(result.report_path).read_text()

    logged = [
        line["message"]
        for offset in range(0, 1000, 200)
        for line in prefect_server.query(
            "logs/filter",
            {
                "logs": {"flow_run_id": {"any_": [result.flow_run_id]}},
                "limit": 200, "offset": offset,
            },
        )
        if "[rank 0]" in line["message"]
    ]  # fmt: skip
    shown = [line for line in logged if "[rank 0] line " in line]
    assert 1 <= len(shown) <= 2 * MAX_LINES_PER_PERIOD
    dropped = sum(int(line.split("… ")[1].split()[0]) for line in logged if "… " in line)
    assert dropped >= 100_000 - len(shown)
