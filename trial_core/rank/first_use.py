"""Imports early the modules that torch and DeepSpeed would import on first use.

They take as long as importing torch itself. A fork server imports this module, so that its ranks
build their first optimizer, and report their first metrics, without that delay.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

MODULES = (
    "torch._dynamo",  # by torch's optimizers
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by deepspeed.initialize
    "deepspeed.module_inject.auto_ep_layer",  # the same
    "setuptools",  # by cpp_extension, which itself would note CUDA_HOME before the rank sets it
    "torch.utils.tensorboard",  # by the first report; it imports boto3
)

for module in MODULES:
    with suppress(Exception):  # it may be elsewhere, or broken: the rank tells, if it needs it
        importlib.import_module(module)
