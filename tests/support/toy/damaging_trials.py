"""A toy that damages its newest checkpoint, and records what its run claims."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from toy_trial import ToyTrial

from trial_core.checkpoint.retention.claims import claims
from trial_core.checkpoint.store import CheckpointStore
from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.rank.state_files.late_copies import collecting


class FindsDamage(ToyTrial):
    """Flips a bit in the newest checkpoint before the fit begins.

    In every batch it records which checkpoints are claimed, as ``claims.json``.

    Hyperparameters, besides the toy's: storage (the checkpoints' folder).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.store = CheckpointStore(f"file://{self.hparams['storage']}")
        newest = self.store.list()[-1]
        # A file without a kept copy on this machine's disk.
        entry = next(file for file in newest.files if file.path.endswith("_optim_states.pt"))
        path = Path(self.hparams["storage"], "checkpoints", newest.uuid, entry.path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        needed = [uuid for claim in claims(self.store) for uuid in claim.needs]
        Path(self.record, "claims.json").write_text(json.dumps(needed))
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class ChangesWhileCopying(ToyTrial):
    """Rank 0's weights are changed while its second save copies them late, as by a thread. The next
    batch changes them back."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.engine.module.register_state_dict_pre_hook(self.change)
        self.changed: threading.Event | None = None

    def change(self, module: Any, *_: Any) -> None:
        if (late := collecting()) is not None and self.engine.global_steps == 2:
            self.changed = threading.Event()
            late.later(partial(self.scale, 2.0, self.changed), [])

    def scale(self, factor: float, done: threading.Event) -> None:
        with torch.no_grad():
            self.engine.module[0].weight.mul_(factor)
        done.set()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if self.changed is not None:
            self.changed.wait()
            self.scale(0.5, self.changed)
            self.changed = None
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
