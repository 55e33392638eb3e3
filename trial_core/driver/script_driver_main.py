"""The driver of a script whose ranks another program has started: a process started by rank 0.

torchrun, `deepspeed`, srun, plain python or a notebook has started the ranks. Rank 0 starts this
process (`trial_core/rank/script/driver_process.py`) and writes an `Order` to its standard input.
The driver answers with one line: the `Invitation` for all ranks, or an error. Then the ranks join,
and it drives them as any others, except that it cannot launch them again.

The driver's log goes to rank 0, whose script decides where logs go. The driver ends with the run,
or when rank 0, which holds its standard input, is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from trial_core.checkpoint.fencing import Fence
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.retention.known_storages import refuse_other_storage
from trial_core.checkpoint.storage.storage_errors import retry_storage
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import copy_into, is_place, resume_manifest
from trial_core.common.decoding import decode
from trial_core.common.text_format import duration, plural
from trial_core.config import ExperimentConfig
from trial_core.driver.choose_resume_point import resume_points
from trial_core.driver.drive import drive_trial, try_trial
from trial_core.driver.placement import Placement
from trial_core.driver.result import TrialResult, status_of
from trial_core.driver.run import Given, Launch
from trial_core.driver.script_order import Order
from trial_core.driver.summary import best_checkpoint, next_step, storage_option, summary_lines
from trial_core.errors import CheckpointError, ConfigError, TrialflowError
from trial_core.messages import Abort, Invitation, Logged, encode
from trial_core.observe.report.live_report import REPORT
from trial_core.processes.machine.run_dirs import run_dir_of
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.joined_launcher import joining
from trial_core.processes.slots.launcher import Launcher
from trial_core.processes.slots.rank_main import show_title
from trial_core.schedule.stop_requests import StopHandler

LATEST = "latest"
LATEST_ARGUMENT = f'latest_checkpoint="{LATEST}"'
NO_GRACE_SECONDS = 1e8
"""No limit: the scheduler or person that stops a script decides how long to wait."""
ANSWERS = 1
"""The descriptor of standard output, which is the pipe to rank 0."""
RANK_0_GONE_SECONDS = 60.0
"""How long the driver may take to write its report once rank 0 is gone."""

HOW_TO_GO_ON = (
    "to train it further, give fit a greater max_length; to begin a new trial, leave out "
    "latest_checkpoint"
)

logger = logging.getLogger("trial_core.driver")


class JoiningRanks(Placement):
    """Waits for the ranks of a script to join, and sends them the driver's log."""

    def __init__(self, order: Order, listen: ListenAddress, log: ForwardedLog) -> None:
        self._world_size = order.world_size
        self._launcher = joining(_answer, listen if order.has_other_machines else None)
        self._log = log

    def prepare(self, launch: Launch) -> tuple[int, Launcher]:
        """Return the number of ranks of the order, and a launcher that lets them join."""
        return self._world_size, self._launcher

    def watching(self, launch: Launch) -> AbstractContextManager[None]:
        """Send the driver's log to the ranks during the block."""
        return self._log.sent_to(launch)


class ForwardedLog(logging.Handler):
    """Sends log lines to rank 0, and keeps them until the ranks have joined.

    After they have left, lines go to standard error, which is rank 0's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._launch: Launch | None = None
        self._waiting: list[Logged] | None = []

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, keep it, or print it, as the class says."""
        try:
            line = Logged(level=record.levelno, text=self.format(record))
            if self._launch is not None:
                self._launch.slots.tell(line)
            elif self._waiting is not None:
                self._waiting.append(line)
            else:
                print(line.text, file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - as other handlers: a line that cannot be sent ends no run
            self.handleError(record)

    @contextmanager
    def sent_to(self, launch: Launch) -> Iterator[None]:
        """Send lines to the ranks during the block, first the kept lines."""
        kept, self._waiting = self._waiting, None
        for line in kept or ():
            launch.slots.tell(line)
        self._launch = launch
        try:
            yield
        finally:
            self._launch = None

    def flush_kept(self) -> None:
        """Write the kept lines to standard error."""
        kept, self._waiting = self._waiting, None
        for line in kept or ():
            print(line.text, file=sys.stderr, flush=True)


def main() -> None:
    """Read an order from standard input, and drive its ranks until the run ends."""
    show_title("trialflow: driver")
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the script ended without an order
    threading.Thread(target=_end_after_rank_0, daemon=True).start()
    # Rank 0 reads a single line. Output of libraries, such as OpenTelemetry's console exporter,
    # would fill the pipe.
    sys.stdout = sys.stderr
    log = ForwardedLog()
    ours = logging.getLogger("trial_core")
    ours.setLevel(logging.INFO)
    ours.addHandler(log)
    try:
        carry_out(decode(line, Order), log)
    except TrialflowError as error:
        _answer(Abort.of(error))  # if the ranks were invited, they know it already
        sys.exit(1)
    finally:
        log.flush_kept()


def carry_out(order: Order, log: ForwardedLog) -> None:
    """Drive a script's ranks. Raises TrialflowError if the run fails, or cannot begin."""
    # The ranks cannot be launched again.
    config = ExperimentConfig.from_mapping(order.experiment)
    config = config.model_copy(update={"max_restarts": 0})
    storage = config.checkpoint_storage
    store = CheckpointStore(storage.url, storage.options)
    if store.is_process_local:
        raise ConfigError(
            f"checkpoint_storage: {store.url} is in the memory of one process, and the driver of a "
            "script is another process; use a folder that all ranks see, or an object storage"
        )
    began = time.monotonic()
    point = first_point(store, config, order.latest_checkpoint)
    found = point.checkpoint if point.restore == "everything" else None
    trial = order.new_trial if found is None else found.trial
    channel = config.resources.channel
    listen = ListenAddress(channel.bind, channel.port_range, channel.advertise)
    with StopHandler(NO_GRACE_SECONDS) as stopping:
        signal.signal(signal.SIGTERM, lambda *_: stopping.ask("preempted", "SIGTERM"))
        given = Given(
            stopping=stopping,
            find_logger=lambda: logger,
            # The storage need not know the trial of a checkpoint in another place.
            is_new=True if found is None else None,
            take_over=order.take_over,
            fit=order.fit,
            has_metric=order.has_metric,
            how_to_go_on=HOW_TO_GO_ON,
            choose_resume_points=_fixed(order.latest_checkpoint, point),
            has_code=order.has_code,
            task="a script",
        )
        joining = JoiningRanks(order, listen, log)
        if order.test_mode:
            try_trial(config, trial, given, joining)
            return
        logger.info("trial %s; its report: %s", trial, run_dir_of(trial) / REPORT)
        result = drive_trial(config, trial, given, joining)
    lines = summary(result, store, time.monotonic() - began, is_script=order.fit is None)
    _answer(Logged(level=logging.INFO, text="\n".join(lines)))


def summary(
    result: TrialResult, store: CheckpointStore, seconds: float, is_script: bool
) -> list[str]:
    """The lines that end the script's log."""
    try:
        best = best_checkpoint(store, result.trial)
    except CheckpointError as error:  # the run has ended well
        logger.warning("the best checkpoint is not known: %s", error)
        best = None
    trained, took = plural(result.batches_trained, "batch"), duration(seconds)
    place, again = storage_option(store.url), f"start the script again with {LATEST_ARGUMENT}"
    return summary_lines(
        f"{result.trial} {status_of(result)}: {trained} trained ({took})", result, best,
        continue_with=again if result.stop_reason else None,
        next_step=next_step(result, best, place, is_script),
    )  # fmt: skip


def first_point(
    store: CheckpointStore, config: ExperimentConfig, latest_checkpoint: str | None
) -> ResumePoint:
    """Return the best resume point of a run that has not taken over its trial yet.

    Raises CheckpointNotFound if the storage has no such checkpoint; StorageError if it has none at
    all, and has been replaced or is not mounted.
    """
    if latest_checkpoint is not None and latest_checkpoint != LATEST:
        of_place = is_place(latest_checkpoint)
        found = (resume_manifest if of_place else CheckpointStore.open)(store, latest_checkpoint)
        return ResumePoint.continuing(found)
    trial = None
    if latest_checkpoint == LATEST and (trial := store.newest_trial(config.name)) is None:
        refuse_other_storage(store)
    return next(resume_points(store, config, trial))


def _fixed(
    latest_checkpoint: str | None, point: ResumePoint
) -> Callable[[CheckpointStore, Fence | None], Iterator[ResumePoint]] | None:
    """Return how to choose resume points if the script names a checkpoint, `point`; else None.

    A checkpoint in another place is copied to the run's own storage.
    """
    if latest_checkpoint is None or latest_checkpoint == LATEST:
        return None
    place = latest_checkpoint

    def choose(store: CheckpointStore, fence: Fence | None) -> Iterator[ResumePoint]:
        if not is_place(place):
            return iter([point])
        return iter([ResumePoint.continuing(retry_storage(lambda: copy_into(store, place, fence)))])

    return choose


def _answer(message: Invitation | Abort | Logged) -> None:
    """Write a line for rank 0, which reads those after the first at the end, and may be gone."""
    with suppress(BrokenPipeError):
        os.write(ANSWERS, _line_of(message))


def _line_of(message: Invitation | Abort | Logged) -> bytes:
    """Encode a message as a line of text."""
    return encode(message).hex().encode() + b"\n"


def _end_after_rank_0() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    time.sleep(RANK_0_GONE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
