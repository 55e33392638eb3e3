"""Exports a model's weights from a checkpoint of a `PyTorchTrial`."""

from __future__ import annotations

from pathlib import Path

from trial_core.checkpoint.weights.weights import (
    Precision,
    SavedWeight,
    has_16bit_weights,
    saved_all,
    tensors_of,
)
from trial_core.errors import CheckpointError
from trial_core.pytorch.pytorch_state import MODELS, STATE_FILE, read_state
from trial_core.rank.state_files.safe_load import Reader


def model_weights(
    folder: Path, model: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """The weights and persistent buffers of one model, by the names of its ``state_dict``.

    Tied names map to one weight, which takes memory only when it is read. Called by one
    process; needs no other ranks.

    Args:
        folder: a checkpoint's verified files, at least ``state_dict.pth``.
        model: index of the model, in the order of wrapping.
        dtype: ``fp32``: 16-bit weights are converted. ``16bit``: the weights as they are.

    Raises:
        CheckpointError: the model does not exist, or has no 16-bit weights; or the file holds
            objects that the reader does not trust.
    """
    saved = read_state(folder, reader).get(MODELS) or []
    if not saved:
        raise CheckpointError(f"{STATE_FILE} holds no {MODELS}: a callback may have removed them")
    if not 0 <= model < len(saved):
        indexes = ", ".join(map(str, range(len(saved))))
        raise CheckpointError(f"the checkpoint has no model {model}: its models are {indexes}")
    weights = tensors_of(saved[model])
    has_16bit_weights(weights, f"model {model}", dtype)
    return saved_all(weights, dtype)
