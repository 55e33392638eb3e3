"""Shows the operation that a command waits for, once it has taken longer than two seconds.

On a terminal, a line that is redrawn; elsewhere one plain line. Both on stderr: stdout is for the
command's result::

    ⠼ verifying 4f0c21aa ━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━ 1.2 GiB of 3.4 GiB 0:04
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, TextIO, TypeVar

from trial_core.common import text_format
from trialflow.deployments.cli.run_display import is_interactive

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

T = TypeVar("T")

SHOWN_AFTER_SECONDS = 2.0
BAR_CELLS = 30
REDRAWS_PER_SECOND = 8


class Waiting:
    """An operation that a command waits for.

    Attributes:
        text: its description for people: "reading s3://bucket/runs".
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._stderr = sys.stderr  # the block may redirect it
        self._began = time.monotonic()
        self._bytes = (0, 0)
        self._lock = threading.RLock()
        self._has_ended = False
        self._live: Live | None = None

    def bytes_read(self, done: int, total: int) -> None:
        """Show how many of `total` bytes are read so far, until all are."""
        self._bytes = (done, total)

    def show(self) -> None:
        """Show it from now on. Called in the timer's thread."""
        with self._lock, suppress(OSError):  # a terminal that was closed
            if self._has_ended:
                return
            if not is_interactive(self._stderr):
                print(text_format.clean(f"{self.text}…"), file=self._stderr, flush=True)
                return
            from rich.console import Console
            from rich.live import Live

            # Redirecting would undo redirections that the block makes or ends meanwhile.
            self._live = Live(
                console=Console(file=self._stderr), get_renderable=self.render, transient=True,
                refresh_per_second=REDRAWS_PER_SECOND, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()

    def close(self) -> None:
        """The wait is over: remove its line from the terminal."""
        with self._lock, suppress(OSError):
            self._has_ended = True
            if self._live is not None:
                self._live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the line from the terminal during the block, which prints."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
            yield
            if self._live is not None and not self._has_ended:
                self._live.start()

    def render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        done, total = self._bytes
        bar: list[RenderableType] = []
        if done < total:
            read = f"{text_format.size(done)} of {text_format.size(total)}"
            bar = [ProgressBar(total, done, width=BAR_CELLS), Text(read)]
        seconds = time.monotonic() - self._began
        text = Text(text_format.clean(self.text), no_wrap=True, overflow="ellipsis")
        spinner = Spinner("dots")
        spinner.start_time = 0.0  # a new spinner each time: it turns by the clock
        line.add_row(spinner, text, *bar, Text(text_format.clock(seconds), style="dim"))
        return line


_current: Waiting | None = None


@contextmanager
def waiting(text: str) -> Iterator[Waiting]:
    """Show `text` once the block has taken two seconds, until it ends.

    For the main thread. The block itself prints with `print_above_the_wait`. A block within another
    one shows nothing of its own.
    """
    global _current
    if _current is not None:
        yield Waiting(text)
        return
    _current = wait = Waiting(text)
    timer = threading.Timer(SHOWN_AFTER_SECONDS, wait.show)
    timer.daemon = True
    timer.start()
    try:
        yield wait
    finally:
        timer.cancel()
        wait.close()
        _current = None


@contextmanager
def waiting_at_end(context: AbstractContextManager[T], text: str) -> Iterator[T]:
    """Enter a context for the block, and show `text` if leaving it takes longer than two seconds.

    The context is not told of the block's exception.
    """
    with ExitStack() as until_the_end:
        entered = until_the_end.enter_context(context)
        try:
            yield entered
        finally:
            with waiting(text):
                until_the_end.close()


def print_above_the_wait(text: str, file: TextIO | None = None) -> None:
    """Print a line apart from the line of a wait. Any thread may call it."""
    with nullcontext() if (wait := _current) is None else wait.hidden():
        print(text, file=file, flush=True)
