"""A Core API script of several ranks: ``core_ranks.py FOLDER``, under torchrun.

It stores in parts, is ended by SIGTERM to its last rank, and writes what it saw. When it is started
again, it continues.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trial_core
from trial_core import core

MODE = core.PreemptMode(os.environ.get("PREEMPT_MODE", "WORKERS_ASK_CHIEF"))
REPORTER = int(os.environ.get("REPORTER", "0"))


def should_end(context: core.Context) -> bool:
    """Whether to end: asked on every rank, or on rank 0 alone."""
    if MODE is not core.PreemptMode.ChiefOnly:
        return context.preempt.should_preempt()
    is_chief = context.distributed.rank == 0
    told: bool = context.distributed.broadcast(is_chief and context.preempt.should_preempt())
    return told


def train(context: core.Context, folder: Path) -> dict[str, Any]:
    """Train until the ranks are asked to stop; what this rank saw."""
    rank, size = context.distributed.rank, context.distributed.size
    seen: dict[str, Any] = {"resumed": context.info.latest_checkpoint, "parts": {}, "step": 0}
    seen["trial"] = context.info.trial.trial_id
    if context.info.latest_checkpoint is not None:
        shared = folder / "shared"
        context.checkpoint.download(context.info.latest_checkpoint, shared)
        seen["parts"] = {path.name: path.read_text() for path in shared.glob("part-*")}
        own = folder / f"own-{rank}"
        mine = f"part-{rank}"
        context.checkpoint.download(
            context.info.latest_checkpoint, own, selector=lambda path: path == mine
        )
        seen["own"] = [path.name for path in own.iterdir()]
        seen["step"] = json.loads((shared / "metadata.json").read_text())["steps_completed"]
    while not should_end(context):
        dist.all_reduce(torch.ones(1))
        seen["step"] += 1
        if seen["step"] % 5 == 0 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    if rank == REPORTER:
        context.train.report_validation_metrics(seen["step"], {"loss": 0.5})
    metadata = {"steps_completed": seen["step"]} if rank == 0 else {"rank": rank}
    with context.checkpoint.store_path(metadata, shard=True) as (path, seen["stored"]):
        (path / f"part-{rank}").write_text(f"{rank} at {seen['step']}")
    return seen


def main(folder: Path) -> None:
    """Run on this rank."""
    dist.init_process_group("gloo")
    experiment = {"name": "ranks", "checkpoint_storage": str(folder / "stored")}
    with trial_core.init(
        exp_conf=experiment, latest_checkpoint="latest", preempt_mode=MODE
    ) as context:
        seen = train(context, folder)
    with (folder / f"seen-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
