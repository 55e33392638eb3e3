"""What DeepSpeed 0.19 keeps for ever of every pipeline that was trained.

Warm ranks train one model after the other. `PipelineEngine.destroy` leaves two things:

- The engine and its model: hooks of the last micro-batch's tensors refer to the engine, which
  refers to these tensors. Python's garbage collector cannot see such hooks.
- The process groups of its module and its grid, at least five. Each has threads and descriptors.

`make bench NAME=rebuild` shows whether a release of DeepSpeed leaves more.
"""

from __future__ import annotations

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine


def forget_pipeline(engine: PipelineEngine) -> None:
    """Free an engine that was destroyed, and its groups. Every rank calls this, engine by engine.

    Groups that a trial has created itself stay: its modules may keep them for its next engine.
    """
    engine.pipe_buffers.clear()
    engine.loss = None
    held = [*vars(engine.module).values(), *vars(engine.grid).values()]
    held += [tied["group"] for tied in engine.module.tied_comms.values()]
    for group in dict.fromkeys(each for each in held if isinstance(each, dist.ProcessGroup)):
        if group is not dist.group.WORLD:
            deepspeed.comm.destroy_process_group(group)
    if getattr(p2p, "_grid", None) is engine.grid:
        p2p._grid = None
