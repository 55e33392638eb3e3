"""Tries trials that break a rule, all in one start of the ranks; prints their errors as JSON.

In the environment, TRIALS: a JSON list of ``[request, until]``. `request` is a `BuildTrial` as a
mapping; `until` says how far to go with the trial: "build", "load", "train", "validate"; or
"everything" and "weights", which restore what the trial itself has saved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from trial_core.errors import CheckpointUnrestorable, TrialError
from trial_core.messages import (
    BuildLoadersAndRestore,
    BuildTrial,
    FetchCheckpoint,
    PersistCheckpoint,
    RunValidation,
    SaveCheckpoint,
    TrainBatches,
)
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import Controller
from trial_core.trainer.entrypoint import build_adapter

TOY = Path(os.environ["PYTHONPATH"]) / "tests" / "support" / "toy"


RANKS = DistributedContext.from_environment()


def drive(controller: Controller, build: BuildTrial, until: Any) -> None:
    """Send the requests that a driver would send."""
    begin = BuildLoadersAndRestore(batches_trained=0, checkpoint=None)
    controller.carry_out(build)
    if until == "build":
        return
    controller.carry_out(begin)
    if until == "load":
        return
    if until == "validate":
        controller.carry_out(RunValidation())
        return
    controller.carry_out(TrainBatches(until=2))
    if until == "train":
        return
    controller.carry_out(SaveCheckpoint(uuid="saved"))
    if until == "save":
        return
    persisted: Any = controller.carry_out(PersistCheckpoint(uuid="saved"))
    all_files = RANKS.allgather(persisted.files)
    controller.carry_out(build)
    files = [entry for rank in all_files for entry in rank]
    controller.carry_out(FetchCheckpoint(uuid="saved", files=files))
    RANKS.allgather("fetched")
    controller.carry_out(
        BuildLoadersAndRestore(batches_trained=0, checkpoint="saved", restore=until)
    )


def main() -> None:
    """Try one trial after the other."""
    os.chdir(TOY)
    controller, messages = Controller(build_adapter, emit=lambda _: None, distributed=RANKS), []
    for request, until in json.loads(os.environ["TRIALS"]):
        try:
            drive(controller, msgspec.convert(request, BuildTrial), until)
            messages.append("not refused")
        except (TrialError, CheckpointUnrestorable) as error:
            messages.append(str(error))
    RANKS.allgather("tried")  # the store of torch.distributed ends with rank 0
    print(json.dumps(messages), flush=True)
    sys.stderr.flush()
    os._exit(0)  # some engines are half built


main()
