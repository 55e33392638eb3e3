"""Trains the same trial in a script, without Prefect: ``torchrun --nproc-per-node 2 fit.py``.

Also ``deepspeed fit.py``, or ``python fit.py`` for a single rank. ``--batches 20`` makes a short
run, ``--resume`` continues the newest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trial import GPTTrial

from trial_core.config import load_config
from trial_core.deepspeed import Trainer, init
from trial_core.pytorch import Batch


def main() -> None:
    """Train as experiment.yaml says."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--batches", type=int, default=800)
    arguments.add_argument("--resume", action="store_true")
    arguments.add_argument("--local_rank", type=int, help="passed by deepspeed; ignored")
    given = arguments.parse_args()

    config = load_config(
        Path(__file__).with_name("experiment.yaml"),
        [
            f"searcher.max_length={{batches: {given.batches}}}"
        ],  # also the length of the learning rate schedule
    )
    with init(exp_conf=config.model_dump(mode="json")) as context:
        trial = GPTTrial(context)
        result = Trainer(trial, context).fit(
            max_length=config.searcher.max_length,
            reporting_period=Batch(50),
            validation_period=config.min_validation_period,
            checkpoint_period=config.min_checkpoint_period,
            latest_checkpoint="latest" if given.resume else None,
        )
        if context.distributed.rank == 0:
            print(f"{result.validation_metrics} · {result.checkpoint_url}")


if __name__ == "__main__":
    main()
