"""The validation loop.

One validation, with every hook that runs inside it::

    on_validation_start()
    on_validation_epoch_start()
    for each batch of this rank's shard:
        trial.evaluate_batch(...)
    on_validation_epoch_end(outputs)            this rank's metrics, one mapping a batch
    reduce the metrics over all ranks           once
    (on_validation_end(metrics) is the stage that follows)
"""

from __future__ import annotations

from typing import Any

import torch

from trial_core.controller.engine import TrialEngine
from trial_core.controller.loaders import Loaders
from trial_core.controller.reduction import reduce_metrics
from trial_core.distributed import DistributedContext
from trial_core.pytorch.reducer import BatchMetrics


def validate(
    engine: TrialEngine, loaders: Loaders, distributed: DistributedContext
) -> dict[str, Any]:
    """Validate on the whole set; metrics reduced over all ranks. Collective: every rank calls this.

    Where a forward pass needs all ranks, a rank whose shard is shorter than another's goes on with
    its first batch, whose metrics then do not count.
    """
    for callback in engine.callbacks.values():
        callback.on_validation_start()
    for callback in engine.callbacks.values():
        callback.on_validation_epoch_start()
    metrics = BatchMetrics("evaluate_batch")
    engine.reducers.reset(for_validation=True)
    engine.set_training(False)
    batches = loaders.validation_batches()
    with torch.no_grad():
        for batch_idx in range(max(loaders.validation_steps, loaders.lockstep_steps)):
            outcome = engine.evaluate_batch(batches, batch_idx)
            if engine.reports_metrics and batch_idx < loaders.validation_steps:
                metrics.add_batch([outcome])
    engine.set_training(True)
    outputs = metrics.per_batch()
    for callback in engine.callbacks.values():
        callback.on_validation_epoch_end(outputs)
    return reduce_metrics("validation", metrics, engine, distributed, engine.evaluation_reducer())
