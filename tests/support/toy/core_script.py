"""A Core API script that counts steps, with hyperparameters for what a test needs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trial_core
from trial_core import core
from trial_core.errors import CheckpointRefused


def note(folder: Path, rank: int, **what: Any) -> None:
    """Write a line to this rank's file."""
    with (folder / f"script-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def break_once(hparams: dict[str, Any], rank: int, step: int) -> None:
    """Do what the hyperparameters name, at their step, on rank 1, once."""
    if step != hparams.get("at_step") or rank != 1 or Path(hparams["once"]).exists():
        return
    Path(hparams["once"]).touch()
    if hparams["do"] == "raise":
        raise ValueError(f"the script broke at step {step}")
    if hparams["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(hparams["do"]))


def refused(
    context: core.Context, step: int, folder: Path, rank: int, hparams: dict[str, Any]
) -> None:
    """Store different files under one name, and note the error."""
    waits = hparams["waits"]
    try:
        metadata = {"steps_completed": step}
        with context.checkpoint.store_path(metadata, shard=True, wait=waits) as (path, _):
            (path / "same").write_text(str(rank))
        if not waits:  # the next one waits, and has the error
            with context.checkpoint.store_path(metadata, shard=True):
                pass
    except CheckpointRefused as error:
        note(folder, rank, refused=str(error))
        if not hparams.get("catches", True):
            raise


def slow_down(context: core.Context, seconds: float) -> None:
    """Let what this rank sends arrive late."""
    send = context.host._emit
    context.host._emit = lambda message: threading.Timer(seconds, send, [message]).start()


def main(context: core.Context, hparams: dict[str, Any], steps: int) -> None:
    rank, folder = context.distributed.rank, Path(hparams["record"])
    total = torch.zeros(1)
    first, reports = 0, rank == hparams.get("reporter", 0)
    if rank != 0 and "slow_seconds" in hparams:
        slow_down(context, hparams["slow_seconds"])
    latest = context.info.latest_checkpoint
    if latest is not None:
        with context.checkpoint.restore_path(latest) as path:
            state = torch.load(path / "state.pt")
            parts = sorted(each.name for each in path.glob("part-*"))
        total, first = state["total"], state["step"]
        metadata = context.checkpoint.get_metadata(latest)
        note(folder, rank, resumed=first, parts=parts, metadata=metadata)
    for step in range(first + 1, steps + 1):
        dist.all_reduce(mine := torch.tensor([float(step * (rank + 1))]))
        total += mine
        note(folder, rank, step=step, total=total.item())
        if reports:
            nan = {"loss": float("nan")} if step >= hparams.get("nan_at", step + 1) else {}
            context.train.report_training_metrics(step, {"total": total, **nan})
        if step % hparams["store_every"] == 0:
            if reports:
                context.train.report_validation_metrics(step, {"loss": 1 / step})
            shard = hparams.get("shard", False)
            if shard or rank == 0:
                metadata = {"steps_completed": step, "note": "kept"}
                with context.checkpoint.store_path(metadata, shard=shard) as (path, _):
                    (path / f"part-{rank}").write_text(str(step))
                    if rank == 0:
                        torch.save({"total": total, "step": step}, path / "state.pt")
        if step == hparams.get("refused_at"):
            refused(context, step, folder, rank, hparams)
        break_once(hparams, rank, step)
        if context.preempt.should_preempt():
            note(folder, rank, preempted=step)
            return


if __name__ == "__main__":
    info = trial_core.get_cluster_info()
    assert info is not None
    rank = int(os.environ["RANK"])
    note(Path(info.trial.hparams["record"]), rank, argv=sys.argv, cwd=os.getcwd())
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with trial_core.init(distributed=core.DistributedContext.from_torch_distributed()) as context:
        main(context, info.trial.hparams, int(sys.argv[1]))
