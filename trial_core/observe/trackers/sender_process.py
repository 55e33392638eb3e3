"""Starts and ends the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from trial_core.common import text_format
from trial_core.observe.trackers.journal import SENDER_LOG
from trial_core.observe.trackers.sender import END, SenderOrder
from trial_core.processes.machine.child import Child


class SenderProcess:
    """The sender, as the driver sees it. Its trackers' output is in ``logs/trackers.log``.

    Args:
        variables: environment variables in addition to this process's.
        hear: called in a thread with news for people.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, order: SenderOrder, variables: Mapping[str, str], hear: Callable[[str], None]
    ) -> None:
        path = Path(order.run_dir) / SENDER_LOG
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            command = ["-m", "trial_core.observe.trackers.sender"]
            self._child = Child(command, variables, log=log, answers=True)
        self._child.tell(msgspec.json.encode(order) + b"\n")
        self._listener = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._listener.start()

    def wake(self) -> bool:
        """Tell it that there are new records. Return whether it lives."""
        self._child.wake(b"\n")
        return self._child.lives()

    def end(self, wait: Callable[[Callable[[float], bool]], bool]) -> None:
        """Tell it that no more records come, and wait for its end; then kill it.

        Its child processes end, too.

        Args:
            wait: waits for its end, like `Ending.wait`.
        """
        self._child.wake(END)
        self._child.close_input()
        wait(self._child.wait)
        self._child.kill()
        self._listener.join(1.0)

    def _listen(self, hear: Callable[[str], None]) -> None:
        for line in self._child.lines():
            hear(text_format.clean(line.decode(errors="replace").strip()))
