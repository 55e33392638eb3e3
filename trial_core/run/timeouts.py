"""Default timeouts that several packages share."""

from __future__ import annotations

TRANSFER_STALL_SECONDS = 900.0
"""How long an upload or fetch may move no byte. A disk with much cached data may need minutes to
write it, and shows no progress meanwhile."""

RANK_STALL_SECONDS = 1800.0
"""How long ranks may go without a trained or validated batch."""

COLLECTIVE_SECONDS = 1800.0
"""How long a collective of `DistributedContext` waits for other ranks."""
