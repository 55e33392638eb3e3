"""The networks and the loss of both trials."""

from __future__ import annotations

import torch
from data import PIXELS
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


def generator(noise: int, width: int) -> nn.Module:
    """Noise of shape (pictures, noise) -> pictures of shape (pictures, 64)."""
    return nn.Sequential(
        nn.Linear(noise, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, PIXELS),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Module:
    """Pictures of shape (pictures, 64) -> logits of being real, of shape (pictures, 1)."""
    return nn.Sequential(
        nn.Linear(PIXELS, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(width, 1),
    )


def adversarial_loss(logits: Tensor, real: int, fake: int) -> Tensor:
    """Loss of logits whose target is 1 for the first `real` pictures, and 0 for the others."""
    target = torch.zeros_like(logits)
    # One-sided label smoothing: keeps the discriminator from overconfidence.
    target[:real] = 0.9 if fake else 1.0
    return binary_cross_entropy_with_logits(logits, target)


def measures(fake: Tensor, real: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Validation metrics of drawings, beside real pictures.

    Args:
        logits: the discriminator's, of the drawings.
    """
    return {
        "nearest_distance": torch.cdist(fake, real).min(dim=1).values.mean(),
        "spread": fake.std(dim=0).mean() / real.std(dim=0).mean(),
        "fooled": (logits > 0).float().mean(),
    }
