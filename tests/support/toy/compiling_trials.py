"""A toy trial that compiles an operator of DeepSpeed's."""

from __future__ import annotations

from deepspeed.ops.op_builder import CPUAdamBuilder
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class Compiling(ToyTrial):
    """Loads the optimizer that ZeRO-Offload uses."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        CPUAdamBuilder().load()
        super().__init__(context)
