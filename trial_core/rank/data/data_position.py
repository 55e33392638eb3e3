"""Where in the data a rank continues, counted in samples over all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from trial_core.schedule.units import EpochLength

logger = logging.getLogger(__name__)


def micro_batches_drawn(
    saved: Mapping[str, Any],
    per_batch: int,
    ranks: int,
    epoch: EpochLength | None,
    warns: bool = True,
) -> int:
    """How many micro-batches of the present size each rank has drawn.

    The size of a batch stays the same, but a resumed run may divide it into other micro-batches.
    An epoch then has the same samples, but not always a proportional number of micro-batches:
    its last micro-batch may be smaller.

    Args:
        saved: `Loaders.state_dict` of any rank.
        per_batch: micro-batches of one rank in a batch, in this run.
        ranks: number of data-parallel ranks in this run.
        epoch: length of an epoch in this run; None if unknown.
        warns: warn of repeated samples. Only one rank should.
    """
    ranks_then = int(saved["ranks"])
    # How many of the present micro-batches one earlier micro-batch makes.
    ratio = Fraction(per_batch * ranks, int(saved["per_batch"]) * ranks_then)
    drawn_then = int(saved["drawn"]) * ranks_then
    pass_then = saved["pass"]
    if ratio == 1 or pass_then is None or epoch is None:
        position = drawn_then * ratio
    else:
        passes, within = divmod(drawn_then, int(pass_then))
        position = passes * epoch.micro_batches + within * ratio
    drawn = math.floor(position / ranks)
    repeated = position - drawn * ranks
    if repeated and warns:
        logger.warning(
            "training repeats the samples of %.3g micro-batch(es): the micro-batch size has "
            "changed, and a round of micro-batches on %d ranks does not begin where the last "
            "batch ended",
            repeated,
            ranks,
        )
    return drawn
