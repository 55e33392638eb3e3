"""A Core API script that says what a step holds, and reports every three steps."""

from __future__ import annotations

import trial_core
from trial_core import core

with trial_core.init(distributed=core.DistributedContext.from_torch_distributed()) as context:
    context.train.set_work_per_step(samples=4, tokens=40, flops=1e3)
    for step in range(1, 10):
        if context.distributed.rank == 0 and step % 3 == 0:
            context.train.report_training_metrics(step, {"loss": 1 / step})
        if context.distributed.rank == 0 and step == 5:
            context.train.report_validation_metrics(step, {"loss": 1 / step})
        if context.preempt.should_preempt():
            break
