"""Determined's `core_v2`: the Core API as a module, without a block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialError
from trial_core.experimental import core_v2

SCRIPT = """
import sys
from trial_core.experimental import core_v2

ids = {"external_experiment_id": "mnist", "external_trial_id": "42"}
config = core_v2.Config(
    hparams={"lr": 0.5}, searcher={"name": "single", "metric": "loss", "max_length": 9}, **ids
)
core_v2.init(config=config, checkpoint_storage=sys.argv[1])
assert core_v2.info.trial.hparams == {"lr": 0.5}
before = core_v2.info.latest_checkpoint
step = core_v2.checkpoint.get_metadata(before)["steps_completed"] if before else 0
core_v2.train.report_validation_metrics(step + 3, {"loss": 0.25})
with core_v2.checkpoint.store_path({"steps_completed": step + 3}):
    pass
if sys.argv[2:]:
    raise KeyError(*sys.argv[2:])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), str(folder / "stored"), *arguments],
        env={**os.environ, "TRIALFLOW_HOME": str(folder / "home")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.slots
def test_a_script_without_a_block_ends_its_run_and_is_continued(tmp_path: Path) -> None:
    """The program's end closes it, as failed after an exception; its ids name the trial."""
    first = run(tmp_path)
    assert first.returncode == 0, first.stdout
    second = run(tmp_path, "the mistake")
    assert second.returncode == 1
    stored = CheckpointStore(str(tmp_path / "stored")).list()
    assert sorted(each.progress.batches_trained for each in stored) == [3, 6], second.stdout
    assert len({each.trial for each in stored}) == 1
    assert {each.experiment for each in stored} == {"mnist-42"}
    assert [each.metrics["validation"] for each in stored] == [{"loss": 0.25}] * 2
    reports = [path.read_text() for path in tmp_path.glob("home/**/report.md")]
    assert any(re.search("KeyError.*the mistake", report) for report in reports), reports


def test_a_part_before_init_is_refused() -> None:
    """By its name, with what to do."""
    with pytest.raises(TrialError, match=r"core_v2\.train\.report_metrics is used outside a run"):
        core_v2.train.report_metrics("training", 1, {})
    with pytest.raises(TrialError, match="external_experiment_id is missing; give both"):
        core_v2.Config(external_trial_id="1").exp_conf()
