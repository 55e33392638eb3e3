"""Handwritten digits of 8 x 8 pixels, from scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

PIXELS = 64
VALIDATION_PERIOD = 5  # every fifth picture is for validation


def load() -> tuple[TensorDataset, TensorDataset]:
    """Pictures for training and for validation: shape (pictures, 64), values from -1 to 1."""
    pictures = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    held_out = torch.arange(len(pictures)) % VALIDATION_PERIOD == 0
    return TensorDataset(pictures[~held_out]), TensorDataset(pictures[held_out])
