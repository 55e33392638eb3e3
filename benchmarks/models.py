"""The models that benchmarks train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

SAMPLES = 4096


class Tiny(nn.Module):
    """A perceptron with negligible cost, to measure everything but the model."""

    micro_batch_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a (samples, 2) batch."""
        outputs: Tensor = self.layers(batch)
        return outputs.square().mean()

    @staticmethod
    def dataset() -> Dataset[tuple[Tensor, ...]]:
        """Return random points, each of shape (2,)."""
        return TensorDataset(torch.rand(SAMPLES, 2))


class Small(nn.Module):
    """A byte-level transformer of 137 000 parameters: about 10 ms a batch on one core."""

    micro_batch_size = 8
    window, width, layers = 64, 64, 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, self.width)
        self.positions = nn.Parameter(torch.zeros(self.window, self.width))
        block = nn.TransformerEncoderLayer(
            self.width, nhead=4, dim_feedforward=4 * self.width,
            dropout=0.0, batch_first=True, norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(block, self.layers, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(self.window)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a (samples, window + 1) batch of bytes as int64."""
        features = self.embedding(batch[:, :-1]) + self.positions
        features = self.blocks(features, mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(features).flatten(0, 1), batch[:, 1:].flatten())

    @classmethod
    def dataset(cls) -> Dataset[tuple[Tensor, ...]]:
        """Return random bytes, each item of shape (window + 1,) as int64."""
        return TensorDataset(torch.randint(256, (SAMPLES, cls.window + 1)))


class Medium(Small):
    """`Small` with 3.3 million parameters: about 0.3 s a batch on one core."""

    window, width, layers = 128, 256, 4


class Long(Medium):
    """`Medium` with more samples: well over half a second a batch on one core."""

    micro_batch_size = 20


MODELS: dict[str, type[Tiny] | type[Small]] = {
    "tiny": Tiny,
    "small": Small,
    "medium": Medium,
    "long": Long,
}
