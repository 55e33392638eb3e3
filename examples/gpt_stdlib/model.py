"""A small byte-level GPT in plain PyTorch: 256 tokens, no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # the values of a byte


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape.

    Attributes:
        layers: transformer blocks.
        heads: attention heads of each block; must divide `width`.
        width: features of each position.
        window: the longest context, in bytes.
    """

    layers: int
    heads: int
    width: int
    window: int

    @classmethod
    def from_hparams(cls, hparams: Mapping[str, Any]) -> GPTConfig:
        """The shape in an experiment's hyperparameters of the same names."""
        return cls(**{field.name: hparams[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads; choose another width"
            )


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each with a norm of its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width, bias=False)
        self.mix = nn.Linear(config.width, config.width, bias=False)
        self.feed_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width, bias=False)
        self.narrow = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(sequences, positions, width) -> the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        widened = functional.gelu(self.widen(self.feed_norm(hidden)), approximate="tanh")
        return hidden + cast(Tensor, self.narrow(widened))

    def _attend(self, hidden: Tensor) -> Tensor:
        split = self.queries_keys_values(hidden).unflatten(2, (3, self.heads, -1))
        # Each (sequences, heads, positions, width / heads).
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return cast(Tensor, self.mix(mixed.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    """Takes bytes; returns the logits of the next byte for each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.window, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        # As GPT-2: small weights, and smaller ones where blocks add to the residual stream. So the
        # untrained model finds all bytes about equally likely at any depth.
        if isinstance(module, Block):
            for layer in (module.mix, module.narrow):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.config.layers))
            for layer in (module.queries_keys_values, module.widen):
                nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """(sequences, positions) bytes as int64 -> logits (sequences, positions, 256)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        # The head shares the weights of the byte embedding.
        return functional.linear(self.norm(hidden), self.byte_embedding.weight)

    def training_flops(self) -> int:
        """Operations of the forward and backward pass on a window of bytes.

        Six for each byte and weight that multiplies (PaLM, appendix B), and those of attention.
        """
        config = self.config
        weights = sum(each.numel() for each in self.parameters())
        weights -= self.position_embedding.weight.numel()  # only added
        attention = 2 * config.layers * config.width * config.window
        return 6 * config.window * (weights + attention)

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length_bytes: int, temperature: float, generator: torch.Generator
    ) -> bytes:
        """`length_bytes` bytes that follow `prompt`, sampled one by one.

        Args:
            temperature: below 1 prefers likely bytes, above 1 unlikely bytes.
        """
        text = torch.tensor([list(prompt)])
        for _ in range(length_bytes):
            logits = self(text[:, -self.config.window :])[0, -1]
            likely = functional.softmax(logits.float() / temperature, dim=-1)
            drawn = torch.multinomial(likely, 1, generator=generator)
            text = torch.cat((text, drawn[None]), dim=1)
        return bytes(text[0, len(prompt) :].tolist())


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; `targets` are the inputs shifted by one position."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
