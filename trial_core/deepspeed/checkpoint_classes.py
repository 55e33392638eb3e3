"""Classes of DeepSpeed that its shards contain. Constructing them runs no code of a checkpoint."""

from __future__ import annotations

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

CHECKPOINT_CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
