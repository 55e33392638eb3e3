"""Learning curves of real trainings, with the data and the ranges of `examples/digits`.

The network is fully connected: the example's convolutions would take a quarter of an hour for 81
trials. All trials of a batch size are trained at once, each with weights, images and a learning
rate that no other trial shares.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from trial_core.config import load_config
from trial_core.search.settings import SearchExperiment

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
HIDDEN = 64
BATCHES = 2
"""Of a unit: with 243 units, the smallest batches see the nine epochs of the example."""
WORST = 1e9
"""Instead of a loss that is not finite: not every pruner takes one."""


class Digits:
    """Learning curves of trainings with drawn hyperparameters: validation losses.

    Attributes:
        best: the least end of a curve.
    """

    def __init__(self, seed: int, trials: int, units: int) -> None:
        torch.set_num_threads(1)
        seeded = {"reproducibility.experiment_seed": seed}
        experiment = load_config(EXAMPLE / "search.yaml", seeded, SearchExperiment)
        drawn = [experiment.sample(trial) for trial in range(trials)]
        draw = torch.Generator().manual_seed(seed)
        self._curves: dict[int, list[float]] = {}
        for size in sorted({each["global_batch_size"] for each in drawn}):
            those = [i for i, each in enumerate(drawn) if each["global_batch_size"] == size]
            rates = [drawn[trial]["lr"] for trial in those]
            self._curves |= zip(those, trained(size, rates, units, draw), strict=True)
        self.best = min(self.end(trial) for trial in range(trials))

    def end(self, trial: int) -> float:
        """The loss after all units."""
        return self._curves[trial][-1]

    def loss(self, trial: int, batches: int) -> float:
        """The loss after so many units."""
        return self._curves[trial][batches - 1]


def trained(
    batch_size: int, rates: Sequence[float], units: int, draw: torch.Generator
) -> list[list[float]]:
    """Train a network for each learning rate. Returns its validation loss after each unit."""
    digits = runpy.run_path(str(EXAMPLE / "digits_data.py"))["digits"]
    images, labels = digits(train=True).tensors
    held_out, their_labels = (
        each.expand(len(rates), *each.shape) for each in digits(False).tensors
    )

    def weights(inputs: int, outputs: int) -> list[torch.Tensor]:
        both = [torch.empty(len(rates), rows, outputs) for rows in (inputs, 1)]
        return [
            each.uniform_(-(inputs**-0.5), inputs**-0.5, generator=draw).requires_grad_()
            for each in both
        ]

    parameters = [*weights(64, HIDDEN), *weights(HIDDEN, 10)]

    def losses(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, first_bias, last, last_bias = parameters
        hidden = torch.baddbmm(first_bias, images.flatten(2), first).relu()
        scores = torch.baddbmm(last_bias, hidden, last)
        return cross_entropy(scores.movedim(2, 1), labels, reduction="none").mean(1)

    # Adam's steps are in proportion to its rate: each trial takes its share of steps of rate 1.
    optimizer = torch.optim.Adam(parameters, lr=1)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, -(-len(labels) // batch_size), 0.8)
    share = torch.tensor(rates).view(-1, 1, 1)
    curves = []
    for _ in range(units):
        for _ in range(BATCHES):
            chosen = torch.randint(len(labels), (len(rates), batch_size), generator=draw)
            optimizer.zero_grad()
            torch.autograd.backward(losses(images[chosen], labels[chosen]).sum())
            before = [each.detach().clone() for each in parameters]
            optimizer.step()
            decay.step()
            with torch.no_grad():
                for each, old in zip(parameters, before, strict=True):
                    each.copy_(torch.lerp(old, each, share))
        with torch.no_grad():
            curves.append(losses(held_out, their_labels).nan_to_num(WORST, WORST))
    by_trial: list[list[float]] = torch.stack(curves, 1).tolist()
    return by_trial
