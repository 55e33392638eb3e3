"""Shows the progress of a run: a live display on a terminal, plain lines elsewhere.

A run on a terminal; the last two lines are redrawn::

    trial gpt-1a2b3c4d5e6f: 300 batches of 16 samples
    validate @100: loss 2.912
    ⠼ train-workload [100→200] ━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━ 137/300 0:04
      412 samples/s · 105k tokens/s · 38 % MFU · 61.2 GiB · 0:42 left · loss 2.73 · checkpoint @100
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from typing_extensions import Self

from trial_core.common import text_format
from trial_core.observe.events.run_status import TRAINING, UPLOAD, RunStatus, Stage

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trial_core.messages import MetricsKind

REDRAWS_PER_SECOND = 8
NARROWEST_BAR, WIDEST_BAR = 10, 40
NARROWEST_WITH_BAR = 50
MOST_RUNGS = 12
# Shorter callbacks and parts of a script get no line.
SHORTEST_SECONDS = 1.0
PERCENT = re.compile(r"(\d*)\d%")
# A plain line names a longer stage, except for the stages of every few lines.
ANNOUNCED_AFTER_SECONDS = 2.0
OFTEN = (TRAINING, "validate")


class Display(RunStatus):
    """Shows nothing (`--quiet`). A context manager around the run.

    Args:
        preferred: the metrics to show where there is room for one only, in this order.

    Attributes:
        follows_ranks: True to show rank 0's output, and other ranks' warnings (`--follow`).
    """

    def __init__(self, preferred: tuple[str, ...] = ("loss",), **options: Any) -> None:
        super().__init__(**options)
        self.preferred = preferred
        self.follows_ranks = False
        self._stop_note: str | None = None
        self._subject = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The run is over."""

    def _names_stage(self, activity: str) -> bool:
        """Return whether an activity names the stage: "starting the ranks, for 10 s"."""
        return activity.startswith(str(self.stage))

    def say(self, line: str) -> None:
        """Show a line permanently."""

    def notice(self, text: str) -> None:
        self.say(text)

    def rank_logged(self, rank: int, line: str) -> None:
        if self.follows_ranks:
            self.say(f"rank {rank}: {line}")

    def stopping(self, why: str) -> None:
        """Note a stop request. Called in a signal handler, so it must not print."""
        self._stop_note = f"{why}: saving, then stopping; repeat to stop at once"

    def subject_changed(self, subject: str) -> None:
        self._subject = f"{subject}: " if subject else ""

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        super().run_started(trial, total_batches, begins_at, batch_samples)
        # A Core API script need not say how long it is, and never how many samples a batch has.
        length = f": {text_format.plural(total_batches, 'batch')}" if total_batches else ""
        samples = f" of {text_format.plural(batch_samples, 'sample')}" if batch_samples else ""
        resumed = f", continuing from batch {begins_at}" if begins_at else ""
        self.say(f"trial {trial}{length}{samples}{resumed}")
        self._say_if_nothing_is_left()

    def length_known(self, total_batches: int) -> None:
        super().length_known(total_batches)
        self.say(f"it trains until batch {total_batches}")
        self._say_if_nothing_is_left()

    def _say_if_nothing_is_left(self) -> None:
        if not self.had_batches_left:
            self.say(
                f"nothing is left to train: it is already at {self.batches} of "
                f"{text_format.plural(self.total_batches, 'batch')}"
            )

    def search_advanced(self, news: str) -> None:
        self.has_trained = True
        self.say(news)

    def moving(self, what: str) -> None:
        self.say(text_format.one_line(what))
        super().moving(what)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        begin = "the beginning" if self.committed_at is None else "the last checkpoint"
        self.say(
            f"restart {attempt} of at most {max_restarts}, from {begin}: "
            f"{text_format.one_line(reason)}"
        )
        super().restarting(reason, attempt, max_restarts)


class PlainLines(Display):
    """Prints a line when a stage ends, without control characters: for log files and CI."""

    def __init__(self, file: IO[str] | None = None, **display: Any) -> None:
        super().__init__(**display)
        self._file = file or LastingOutput(sys.stdout)
        self._ended: dict[str, tuple[str, float]] = {}
        self._announced: Stage | None = None
        self._tenth = ""
        self._is_over = threading.Event()
        self._watch = threading.Thread(
            target=self._announce_what_takes_long, name="plain-lines", daemon=True
        )

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watch.join()

    def _announce_what_takes_long(self) -> None:
        """Name the stage that is waited for, once: its own line follows when it ends."""
        while not self._is_over.wait(ANNOUNCED_AFTER_SECONDS / 4):
            stage = self.stage
            is_known = stage is self._announced or stage.name in OFTEN
            if not is_known and self.seconds_in(stage) >= ANNOUNCED_AFTER_SECONDS:
                self._announced = stage
                self.say(f"{stage}…")

    def say(self, line: str) -> None:
        print(text_format.clean(self._subject + line), file=self._file, flush=True)

    def stopping(self, why: str) -> None:
        is_known = self._stop_note is not None
        super().stopping(why)
        if not is_known:
            # Not print(): the signal may have interrupted one.
            with suppress(OSError):  # a terminal that was closed
                os.write(2, f"{self._stop_note}\n".encode())

    def waiting_for(self, what: str) -> None:
        super().waiting_for(what)
        self._announced = self.stage
        self.say(f"{what}…")

    def stage_takes_long(self, activity: str) -> None:
        super().stage_takes_long(activity)
        if percent := PERCENT.fullmatch(activity):  # of a script, which may tell each step
            tenth, self._tenth = self._tenth, percent[1]
            if tenth == self._tenth:
                return
        self.say(activity if self._names_stage(activity) else f"{self.stage}: {activity}")

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        super().stage_ended(stage, detail, seconds)
        self._ended[stage] = (detail, seconds)
        if stage in (TRAINING, "validate", UPLOAD):
            return  # shown with their metrics or their checkpoint
        if stage not in ("callbacks", "run-script") or seconds >= SHORTEST_SECONDS:
            self.say(f"{stage} {detail}".rstrip() + f": {text_format.duration(seconds)}")

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        super().metrics_reported(kind, batches, metrics)
        stage = TRAINING if kind == "training" else "validate"
        parts = [str(self.last_throughput)] if kind == "training" else []
        parts.append(text_format.metrics_line(metrics))
        if stage in self._ended:
            detail, seconds = self._ended[stage]
            parts.insert(0, text_format.duration(seconds))
        else:  # a Core API script reports within its own stage
            stage, detail = kind, f"@{batches}"
        self.say(f"{stage} {detail}: {' · '.join(filter(None, parts))}")

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        super().checkpoint_committed(uuid, batches, total_bytes)
        parts = [text_format.size(total_bytes), f"checkpoint {uuid}"]
        # The upload stage still runs: it releases its staged files after the commit.
        upload = self.running(UPLOAD, f"@{batches}")
        if upload is not None:
            parts.insert(0, text_format.duration(self.seconds_in(upload)))
        self.say(f"{UPLOAD} @{batches}: {' · '.join(parts)}")


class LiveDisplay(Display):
    """Redraws two lines at the bottom of a terminal; permanent lines scroll above them."""

    def __init__(self, console: Console, **display: Any) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        super().__init__(**display)
        self._console = console
        self._spinner = Spinner("dots")
        self._search: tuple[Sequence[str], Sequence[Sequence[str]], float] | None = None
        self._search_began = (0.0, 0.0)
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        text = text_format.clean(self._subject + line)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        super().metrics_reported(kind, batches, metrics)
        if kind == "validation":
            self.say(f"validate @{batches}: {text_format.metrics_line(metrics)}")

    def search_shown(
        self, lines: Sequence[str], rungs: Sequence[Sequence[str]], progress: float
    ) -> None:
        if self._search is None:
            self._search_began = (self._clock(), progress)
        self._search = (lines, rungs, progress)

    def _render_search(
        self, lines: Sequence[str], rungs: Sequence[Sequence[str]], progress: float
    ) -> RenderableType:
        """The rungs as a table, what the search has found, and the time left."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        columns, *rows = ([text_format.clean(cell) for cell in row] for row in rungs)
        table = Table(*columns, box=None, header_style="dim", pad_edge=False)
        for row in rows[-MOST_RUNGS:]:
            table.add_row(*row)
        began, before = self._search_began
        spent, done = self._clock() - began, progress - before
        facts = [note for note in (self._stop_note, f"{progress:.0%}") if note]
        facts.append(text_format.clock(spent))
        if done > 0:
            facts.append(f"{text_format.clock(spent * (1 - progress) / done)} left")
        head = Table.grid(padding=(0, 1))
        head.add_row(self._spinner, Text(" · ".join(facts), no_wrap=True, overflow="ellipsis"))
        shown = [Text(text_format.clean(line), no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(table, *shown, head)

    def render(self) -> RenderableType:
        if self._search is not None:
            return self._render_search(*self._search)
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        stage = self.stage
        after: list[RenderableType] = [Text(text_format.clock(self.seconds_in(stage)), style="dim")]
        if self.total_batches:
            after.insert(0, Text(f"{self.batches}/{self.total_batches}"))
        room = self._console.width - 2 - sum(len(str(text)) + 1 for text in after)
        if self.total_batches and self._console.width >= NARROWEST_WITH_BAR:
            width = self._bar_width()
            after.insert(0, ProgressBar(self.total_batches, self.batches, width=width))
            room -= width + 1
        name = Text(text_format.clean(f"{self._subject}{stage}"))
        # On a narrow terminal the stage's name is cut, never the progress.
        name.truncate(max(1, room), overflow="ellipsis")
        head = Table.grid(padding=(0, 1))
        head.add_row(self._spinner, name, *after)
        facts = Text("  " + " · ".join(self._facts()), no_wrap=True, overflow="ellipsis")
        return Group(head, facts) if self._facts() else head

    def _bar_width(self) -> int:
        return min(WIDEST_BAR, max(NARROWEST_BAR, self._console.width - 60))

    def _facts(self) -> list[str]:
        activity = "" if self._names_stage(self.activity) else text_format.clean(self.activity)
        facts = [note for note in (self._stop_note, activity) if note]
        if speed := str(self.throughput):
            facts.append(speed)
        if self.seconds_left is not None:
            facts.append(f"{text_format.clock(self.seconds_left)} left")
        if training := text_format.main_metric(self.training, ("loss", *self.preferred)):
            facts.append(text_format.metrics_line(dict([training])))
        if validation := text_format.main_metric(self.validation, self.preferred):
            facts.append(
                f"validated @{self.validated_at}: {text_format.metrics_line(dict([validation]))}"
            )
        if self.uploads:
            facts += [str(upload) for upload in self.uploads]
        elif self.committed_at is not None:
            facts.append(f"checkpoint @{self.committed_at}")
        return facts


class LastingOutput(io.TextIOBase):
    """A stream that drops its output once its terminal or pipe is closed, so training continues."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _drop(self) -> None:
        # By the descriptor: data that is still in the stream's buffer must go somewhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def display_for_stdout(is_quiet: bool, preferred: tuple[str, ...]) -> Display:
    """The display for this process's stdout."""
    if is_quiet:
        return Display(preferred)
    if is_interactive(sys.stdout):
        from rich.console import Console

        return LiveDisplay(
            Console(file=cast("IO[str]", LastingOutput(sys.stdout))), preferred=preferred
        )
    return PlainLines(preferred=preferred)


def is_interactive(file: IO[str], getenv: Callable[[str], str | None] = os.environ.get) -> bool:
    """Return whether `file` is a terminal that can redraw lines."""
    return file.isatty() and getenv("TERM") not in ("dumb", "unknown", None)
