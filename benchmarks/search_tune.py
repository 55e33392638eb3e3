"""The trial of Ray Tune in `benchmarks.search`: the same model and optimizer, and a checkpoint."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train the model `tiny` for ``config["batches"]`` batches, and report once."""
    import torch
    from ray import tune
    from torch.utils.data import DataLoader

    from benchmarks.models import MODELS
    from benchmarks.peer_loops import adam

    torch.set_num_threads(1)
    shape = MODELS["tiny"]
    model = shape()
    optimizer = adam(model.parameters())
    loader = DataLoader(shape.dataset(), batch_size=shape.micro_batch_size)
    began = time.perf_counter()
    for (batch,) in itertools.islice(loader, config["batches"]):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    trained = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder, "state.pt"))
        tune.report(
            {"ended": time.time(), "trained": trained},
            checkpoint=tune.Checkpoint.from_directory(folder),
        )
