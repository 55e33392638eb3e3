"""``train_here.py CONFIG`` calls the flow; CONFIG is the experiment as JSON."""

from __future__ import annotations

import sys

from trial_core.config import ExperimentConfig
from trialflow.flows.train import train

if __name__ == "__main__":
    train(ExperimentConfig.model_validate_json(sys.argv[1]))
