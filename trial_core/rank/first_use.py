"""Imports early the modules that torch and DeepSpeed would import on first use.

They take as long as importing torch itself. A fork server imports this module, so that its ranks
build their first optimizer, and report their first metrics, without that delay.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

MODULES = (
    "torch._dynamo",  # by torch's optimizers
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by deepspeed.initialize; it imports inductor
    "deepspeed.module_inject.auto_ep_layer",  # the same
    "torch.utils.cpp_extension",  # by DeepSpeed's optimizers; it imports setuptools
    "torch.utils.tensorboard",  # by the first report; it imports boto3
)

for module in MODULES:
    with suppress(ImportError):  # another release may have it in another place
        importlib.import_module(module)
