"""Which frozen parameters a checkpoint may leave out: those that the trial builds again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from trial_core.common.text_format import first_few
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.state_files.bit_sum import bit_sum
from trial_core.rank.state_files.state_guard import own_part

_logger = logging.getLogger(__name__)


class FrozenAsBuilt:
    """The frozen parameters of models that were just built, to compare them later."""

    def __init__(self, modules: Sequence[nn.Module], distributed: DistributedContext) -> None:
        self._modules = modules
        self._distributed = distributed
        self._built = [_bits_of_frozen(each) for each in modules]
        self._told: set[str] = set()

    def changed(self) -> list[set[str]]:
        """Of each model, the parameters that are or were frozen, and are not as built.

        They were trained before they were frozen, or are trained now, or the trial has given them
        other values. Collective: every rank calls this; a change on any of them counts.
        """
        own = []
        for module, built in zip(self._modules, self._built, strict=True):
            now = _bits_of_frozen(module)
            own.append({x for x in built.keys() | now.keys() if built.get(x) != now.get(x)})
        every = self._distributed.allgather(own)
        changed = [set[str]().union(*of_ranks) for of_ranks in zip(*every, strict=True)]
        new = sorted(set[str]().union(*changed) - self._told)
        if new and self._distributed.get_rank() == 0:
            _logger.warning(
                "checkpoints hold frozen parameters in spite of "
                "checkpointing.exclude_frozen_parameters: the trial has changed them since it was "
                "built (%s)",
                first_few(new),
            )
        self._told.update(new)
        return changed


def _bits_of_frozen(module: nn.Module) -> dict[str, int]:
    """A number for the bits of each frozen parameter, or of this rank's part, by all its names."""
    frozen = {
        name: each
        for name, each in module.named_parameters(remove_duplicate=False)
        if not each.requires_grad
    }
    if not frozen:
        return {}
    once = {id(each): each for each in frozen.values()}
    sums = torch.stack([bit_sum(own_part(each)).cpu() for each in once.values()]).tolist()
    bits = dict(zip(once, sums, strict=True))
    return {name: bits[id(each)] for name, each in frozen.items()}
