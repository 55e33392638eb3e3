"""Frees the objects of destroyed engines that DeepSpeed 0.19 keeps for ever.

Warm ranks train one model after the other, so they would keep all of them.

- Of ZeRO-3, `DeepSpeedEngine.destroy` frees the buffers, but two references stay: a module-level
  list of modules in their forward pass, and a cache of a method. Both are private; a release of
  DeepSpeed without them is served as well.
- `PipelineEngine.destroy` leaves the engine and its model: hooks of the last micro-batch's tensors
  refer to the engine, which refers to these tensors. Python's garbage collector cannot see such
  hooks. It also leaves the process groups of its module and its grid, at least five. Each has
  threads and descriptors.

`make bench NAME=rebuild` shows whether a release of DeepSpeed keeps more.
"""

from __future__ import annotations

import inspect

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

CACHED_METHOD = "_PartitionedParameterCoordinator__params_to_release"


def forget_zero_3_models() -> None:
    """Free the models of engines that were destroyed. No other engine may be in use."""
    getattr(parameter_offload, "FWD_MODULE_STACK", []).clear()
    method = getattr(PartitionedParameterCoordinator, CACHED_METHOD, None)
    if inspect.isfunction(method):
        # The cache is inside a decorator that does not show it.
        for inner in inspect.getclosurevars(method).nonlocals.values():
            if hasattr(inner, "cache_clear"):
                inner.cache_clear()


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
