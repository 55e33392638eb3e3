"""Drives a run without Prefect: `drive_tracked.py CONFIG.json`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tests.support.driving import drive
from trial_core.config import ExperimentConfig
from trial_core.observe.trackers import tracking
from trial_core.schedule import ending

if __name__ == "__main__":
    # Its trackers get all points: importing MLflow and W&B takes time on a slow machine.
    tracking.PATIENCE_SECONDS = ending.TOTAL_SECONDS = 240.0
    logging.basicConfig(level=logging.INFO)
    config = ExperimentConfig.model_validate_json(Path(sys.argv[1]).read_text())
    drive(config, takeover_wait_seconds=30.0, take_over=True)
