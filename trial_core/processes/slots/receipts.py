"""The driver's receipts for what a rank has sent.

Each rank has a connection of its own, so the driver may receive messages of two ranks in another
order than they were sent. Where the order counts, the rank that sends first waits for a receipt
before it lets the others go on::

    rank 1                 driver                  rank 0
      a report, with an id ──► queued
      ◄────────── receipt ─┘
      a barrier ─────────────────────────────────► a checkpoint: queued after the report
"""

from __future__ import annotations

import threading
from uuid import uuid4


class Receipts:
    """The receipts that a rank waits for. For any thread."""

    def __init__(self) -> None:
        self._awaited: set[str] = set()
        self._has_ended = False
        self._changed = threading.Condition()

    def expect(self) -> str:
        """Return the id of a new receipt, to be sent along."""
        receipt = uuid4().hex
        with self._changed:
            self._awaited.add(receipt)
        return receipt

    def note(self, receipt: str) -> None:
        """Note a receipt. Those of other ranks' messages are ignored."""
        with self._changed:
            self._awaited.discard(receipt)
            self._changed.notify_all()

    def wait(self, receipt: str) -> None:
        """Wait for a receipt, or until `end` is called."""
        with self._changed:
            self._changed.wait_for(lambda: receipt not in self._awaited or self._has_ended)

    def end(self) -> None:
        """Have nothing wait any more: the run has failed, and the driver may be gone."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
