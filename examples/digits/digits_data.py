"""scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels, in 10 classes."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

VALIDATION_IMAGES = 360


def digits(train: bool) -> TensorDataset:
    """Images (1 × 8 × 8, values from 0 to 1) and labels; always the same fifth is held out."""
    source = load_digits()
    images = torch.as_tensor(source.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(source.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[VALIDATION_IMAGES:] if train else order[:VALIDATION_IMAGES]
    return TensorDataset(images[chosen], labels[chosen])
