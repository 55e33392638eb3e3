"""What DeepSpeed 0.19 keeps for ever of every model that was trained under ZeRO-3.

Warm ranks train one model after the other, so they would keep the parameters of all of them.
`DeepSpeedEngine.destroy` frees the buffers, but two references stay: a module-level list of modules
in their forward pass, and a cache of a method. Both are private; a release of DeepSpeed without
them is served as well, and `make bench NAME=rebuild` shows whether one has others.
"""

from __future__ import annotations

import inspect

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
