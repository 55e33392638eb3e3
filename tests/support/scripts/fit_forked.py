"""Ranks that start fast, because they are forked from a process that has imported everything.

``fit_forked.py`` reads runs from its input, one JSON object per line: ``folder`` (for all files of
the run), ``ranks``, ``hparams``, ``storage`` (its ``checkpoint_storage``) and ``fit`` (arguments of
`Trainer.fit` in batches). For each run it prints two lines: ``{"pids": […]}`` of the ranks, and
``{"codes": […]}`` when all have ended. Like a launcher, it ends all ranks if one fails.

Each rank trains `WatchedTrial`, which writes a line per batch, and resumes from the latest
checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "toy"))

import trial_core  # noqa: F401 - first: DeepSpeed would import MLflow, which starts a thread

# isort: split
import numpy as np
import torch
from toy_trial import ToyTrial

from trial_core.deepspeed import Trainer, init
from trial_core.pytorch import Batch, PyTorchCallback

# Modules that ranks import when they first need them.
EAGER = ("s3fs", "trial_core.checkpoint.storage.local", "trial_core.trainer.trainer")


class WatchedTrial(ToyTrial):
    """Writes for every batch its index, epoch, samples and loss, and the random state after it."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        loss = self._loss(inputs, index)
        self.engine.backward(loss)
        self.engine.step()
        # Draws, so that a random state that was not restored changes the next line, too.
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        samples = index.flatten().tolist()
        line = [batch_idx, epoch_idx, samples, loss.item().hex(), drawn, random_state()]
        with self._file("batches").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return {"loss": loss}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


def random_state() -> str:
    """A digest of the states of all random generators."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    digest.update(repr(np.random.get_state()).encode())
    return digest.hexdigest()[:16]


def fit(run: dict[str, Any]) -> None:
    """Train `run` as the rank in the environment."""
    config = {
        "name": "toy", "searcher": {"metric": "loss"}, "checkpoint_storage": run["storage"],
    }  # fmt: skip
    os.chdir(run["folder"])
    with init(hparams={"record": run["folder"], **run["hparams"]}, exp_conf=config) as context:
        lengths = {name: Batch(batches) for name, batches in run["fit"].items()}
        Trainer(WatchedTrial(context), context).fit(latest_checkpoint="latest", **lengths)


def start(run: dict[str, Any]) -> list[int]:
    """Fork the ranks of a run; their pids."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [_fork(run, rank, port) for rank in range(run["ranks"])]


def _fork(run: dict[str, Any], rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run["ranks"]),
            "LOCAL_WORLD_SIZE": str(run["ranks"]), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "TRIALFLOW_HOME": f"{run['folder']}/home",
        }  # fmt: skip
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(f"{run['folder']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        fit(run)
        code = 0
    except BaseException:  # noqa: BLE001 - the process's top frame
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end(pids: list[int]) -> list[int]:
    """Wait for the ranks, and kill the others if one fails; their exit codes (-9: killed)."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main() -> None:
    """Run one run after the other."""
    for module in EAGER:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    for line in sys.stdin:
        pids = start(json.loads(line))
        print(json.dumps({"pids": pids}), flush=True)
        print(json.dumps({"codes": end(pids)}), flush=True)


if __name__ == "__main__":
    main()
