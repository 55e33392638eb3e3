"""Where in the data a rank goes on: counted in samples, whoever saw those before it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from trial_core.units import EpochLength

logger = logging.getLogger(__name__)


def drawn_here(
    saved: Mapping[str, Any],
    per_batch: int,
    ranks: int,
    epoch: EpochLength | None,
    tells: bool = True,
) -> int:
    """How many micro-batches of its own each rank has behind it.

    Batches have as many samples as they had. They may be cut into other micro-batches now, for
    other ranks; passes over the data are then as long as they were in samples, but for the last,
    smaller micro-batch of each not in micro-batches.

    Args:
        saved: what `Loaders.state_dict` gave on any rank. Earlier releases left out `ranks` and
            `pass`: they are taken to be as they are.
        per_batch: micro-batches of a rank's in a batch now.
        ranks: data-parallel ranks now.
        epoch: how long a pass is now.
        tells: whether to warn of samples that are seen again; other ranks would say the same.
    """
    ranks_then = int(saved.get("ranks", ranks))
    smaller = Fraction(per_batch * ranks, int(saved["per_batch"]) * ranks_then)
    seen = int(saved["drawn"]) * ranks_then
    pass_then = saved.get("pass")
    if smaller == 1 or pass_then is None or epoch is None:
        place = seen * smaller
    else:
        passes, within = divmod(seen, int(pass_then))
        place = passes * epoch.micro_batches + within * smaller
    drawn = math.floor(place / ranks)
    again = place - drawn * ranks
    if again and tells:
        logger.warning(
            "training goes on with samples for %.3g micro-batch(es) that have been trained on: "
            "micro-batches are of another size now, and the %d of a round of all ranks do not "
            "begin where the last batch ended",
            again,
            ranks,
        )
    return drawn
