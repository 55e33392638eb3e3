"""Saves, and restores on ranks that are each on a machine of their own, from what that fetches.

In the environment: CASES, a JSON list of ``{"experiment": …, "restore": …}``; FOLDER, in which
every machine has a folder of its own. Prints on every rank, for each case, a JSON object: the
metrics of a run that goes on after it has saved, and those of the one that is restored (the
validation's, and, where it is restored whole, those of two more batches); the checkpoint's files,
``{path: [size, rank]}``; and which of them are on this machine.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from trial_core.checkpoint.store import CheckpointStore
from trial_core.controller.controller import Controller
from trial_core.distributed import DistributedContext
from trial_core.entrypoint import build_engine
from trial_core.messages import (
    BuildLoaders,
    BuildTrial,
    FetchCheckpoint,
    PersistCheckpoint,
    RunValidation,
    SaveCheckpoint,
    TrainBatches,
)

RANKS = DistributedContext.from_environment()
FOLDER = Path(os.environ["FOLDER"])
CONTROLLER = Controller(build_engine, emit=lambda _: None, distributed=RANKS)


def carry_out(request: Any) -> Any:
    return CONTROLLER.carry_out(request)


def build(experiment: dict[str, Any], run_dir: Path) -> Any:
    storage = CheckpointStore(experiment["checkpoint_storage"]["url"]).spec
    request = BuildTrial(
        trial="toy-0000beef", experiment=experiment, run_dir=str(run_dir), storage=storage
    )
    return carry_out(request)


def metrics(restore: str) -> list[dict[str, Any]]:
    """What comes of the ranks as they are."""
    found = [carry_out(RunValidation()).metrics]
    if restore == "everything":
        found.append(carry_out(TrainBatches(until=5)).metrics)
    return found


def restored(name: str, experiment: dict[str, Any], restore: Any) -> dict[str, Any]:
    """What came of one case."""
    machine = FOLDER / f"machine-{RANKS.get_rank()}" / name
    checkpoint = str(uuid.uuid5(uuid.NAMESPACE_OID, name))
    saved_by = build(experiment, machine / "saves").topology
    carry_out(BuildLoaders(batches_trained=0, checkpoint=None))
    carry_out(TrainBatches(until=3))
    carry_out(SaveCheckpoint(uuid=checkpoint))
    everybody = RANKS.allgather(carry_out(PersistCheckpoint(uuid=checkpoint)).files)
    files = [entry for rank in everybody for entry in rank]
    went_on = metrics(restore)

    build(experiment, machine / "restores")
    fetched = carry_out(
        FetchCheckpoint(uuid=checkpoint, files=files, saved_by=saved_by, restore=restore)
    )
    assert RANKS.allgather((fetched.damage, fetched.problem)) == [(None, None)] * RANKS.get_size()
    begin = 3 if restore == "everything" else 0
    carry_out(
        BuildLoaders(
            batches_trained=begin, checkpoint=checkpoint, restore=restore, saved_by=saved_by
        )
    )
    here = machine / "restores" / "restored" / checkpoint
    return {
        "went on": went_on,
        "restored": metrics(restore),
        "files": {entry.path: [entry.size_bytes, entry.rank] for entry in files},
        "here": {
            path.relative_to(here).as_posix(): path.stat().st_size
            for path in here.rglob("*")
            if path.is_file()
        },
    }


def main() -> None:
    """Carry out one case after the other."""
    cases = json.loads(os.environ["CASES"])
    os.chdir(cases[0]["experiment"]["code"])
    said = [restored(str(i), **case) for i, case in enumerate(cases)]
    CONTROLLER.close()
    print(json.dumps(said), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without the farewells of torch.distributed


main()
