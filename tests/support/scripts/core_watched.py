"""A Core API script that tests watch and disturb: ``core_watched.py OPTIONS``, as fit_watched.py.

It needs no torch.distributed between steps, and stores when it is asked to stop. ``asks``: whether
it asks. ``calls``: what a single rank calls in each step, ``report`` or ``store``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trial_core

STEP_SECONDS = 0.02


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Take steps until the script is asked to stop; what was reached."""
    folder, rank, step = Path(options["folder"]), int(os.environ.get("RANK", "0")), 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    experiment = {"name": "watched", "checkpoint_storage": f"file://{folder}/checkpoints"}
    with trial_core.init(exp_conf=experiment) as context:
        while not options.get("asks", True) or not context.preempt.should_preempt():
            time.sleep(STEP_SECONDS)
            with (folder / f"batches-{rank}").open("a") as file:
                file.write(f"{step}\n")
            step += 1
            if options.get("calls") == "report":
                context.train.report_training_metrics(step, {"loss": 0.5})
            elif options.get("calls") == "store":
                with context.checkpoint.store_path({"steps_completed": step}):
                    pass
        with context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, uuid):
            (path / f"part-{rank}").touch()
    return {"batches_trained": step, "checkpoint_uuid": uuid, "stopped_early": True}


def main(options: dict[str, Any]) -> None:
    """Run, and write how that has ended."""
    ended: dict[str, Any] = {}
    try:
        ended = run(options)
    except BaseException as error:
        ended = {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        path = Path(options["folder"], f"ended-{os.environ.get('RANK', '0')}.json")
        path.write_text(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[-1]))
