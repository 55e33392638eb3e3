"""Saves and restores on ranks that act as if each were on separate machines.

Environment: CASES, a JSON list of ``{"experiment": …, "restore": …}``; FOLDER, which contains one
folder for each machine. Every rank prints a JSON list with an object for each case: the metrics of
the run that continues after saving (``uninterrupted``), and of the restored run (``restored``): of
a validation, and of two more batches if everything is restored. Also the checkpoint's ``files``,
``{path: [size, rank]}``, and the files ``fetched`` to this machine, ``{path: size}``.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from trial_core.checkpoint.store import CheckpointStore
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

RANKS = DistributedContext.from_environment()
FOLDER = Path(os.environ["FOLDER"])
CONTROLLER = Controller(build_adapter, emit=lambda _: None, distributed=RANKS)


def carry_out(request: Any) -> Any:
    return CONTROLLER.carry_out(request)


def build(experiment: dict[str, Any], run_dir: Path) -> Any:
    storage = CheckpointStore(experiment["checkpoint_storage"]["url"]).spec
    request = BuildTrial(
        trial="toy-0000beef", experiment=experiment, run_dir=str(run_dir), storage=storage
    )
    return carry_out(request)


def metrics(restore: str) -> list[dict[str, Any]]:
    """The metrics of a validation, and of two more batches."""
    found = [carry_out(RunValidation()).metrics]
    if restore == "everything":
        found.append(carry_out(TrainBatches(until=5)).metrics)
    return found


def run_case(name: str, experiment: dict[str, Any], restore: Any) -> dict[str, Any]:
    """The outcome of one case."""
    machine = FOLDER / f"machine-{RANKS.get_rank()}" / name
    checkpoint = str(uuid.uuid5(uuid.NAMESPACE_OID, name))
    saved_by = build(experiment, machine / "saves").topology
    carry_out(BuildLoadersAndRestore(batches_trained=0, checkpoint=None))
    carry_out(TrainBatches(until=3))
    carry_out(SaveCheckpoint(uuid=checkpoint))
    files_by_rank = RANKS.allgather(carry_out(PersistCheckpoint(uuid=checkpoint)).files)
    files = [entry for rank in files_by_rank for entry in rank]
    uninterrupted = metrics(restore)

    build(experiment, machine / "restores")
    fetched = carry_out(
        FetchCheckpoint(uuid=checkpoint, files=files, saved_by=saved_by, restore=restore)
    )
    assert RANKS.allgather((fetched.damage, fetched.problem)) == [(None, None)] * RANKS.get_size()
    carry_out(
        BuildLoadersAndRestore(
            batches_trained=3 if restore == "everything" else 0,
            checkpoint=checkpoint,
            restore=restore,
            saved_by=saved_by,
        )
    )
    folder = machine / "restores" / "restored" / checkpoint
    return {
        "uninterrupted": uninterrupted,
        "restored": metrics(restore),
        "files": {entry.path: [entry.size_bytes, entry.rank] for entry in files},
        "fetched": {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file()
        },
    }


def main() -> None:
    """Run all cases in turn."""
    cases = json.loads(os.environ["CASES"])
    os.chdir(cases[0]["experiment"]["code"])
    outcomes = [run_case(str(i), **case) for i, case in enumerate(cases)]
    CONTROLLER.close()
    print(json.dumps(outcomes), flush=True)
    sys.stderr.flush()
    os._exit(0)  # skips the shutdown of torch.distributed


main()
