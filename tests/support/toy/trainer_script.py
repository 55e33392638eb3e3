"""A script with `init` and `Trainer`, as trials of Determined 0.38: ``trainer_script.py LENGTH…``.

What it gives `init` is wrong on purpose: where an experiment file names the script, that decides.
"""

from __future__ import annotations

import sys

from toy_trial import ToyTrial

import trial_core
from trial_core.deepspeed import Trainer, init
from trial_core.pytorch import Batch


def main() -> None:
    """Fit the toy trial for each LENGTH batches, 0: as long as the experiment says."""
    for length in map(int, sys.argv[1:]):
        fit(length)


def fit(length: int) -> None:
    """Fit a new toy trial, in a block of its own."""
    wrong = {"name": "another", "searcher": {"metric": "no such metric"}}
    with init(hparams={"seed_of_data": 99}, exp_conf=wrong) as context:
        result = Trainer(ToyTrial(context), context).fit(
            max_length=Batch(length) if length else None,
            validation_period=Batch([3, 8]),
            checkpoint_period=Batch(4),
            reporting_period=Batch(4),
            checkpoint_policy="none",
            latest_checkpoint=trial_core.get_cluster_info().latest_checkpoint,
        )
        rank = context.distributed.rank
        print(f"rank {rank} fitted until batch {result.batches_trained}", flush=True)


if __name__ == "__main__":
    main()
