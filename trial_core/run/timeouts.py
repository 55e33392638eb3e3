"""Default timeouts that several packages share."""

from __future__ import annotations

RANK_STALL_SECONDS = 1800.0
"""How long ranks may go without a trained or validated batch."""

COLLECTIVE_SECONDS = 1800.0
"""How long a collective of `DistributedContext` waits for other ranks."""
