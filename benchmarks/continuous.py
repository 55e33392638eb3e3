"""Measures the cost of a SIGKILL with continuous checkpoints, and their cost to the loop.

2 CPU ranks store their checkpoints in a real S3 gateway (Ceph) on this machine, which uses the same
cores. ``--server moto`` is for testing the benchmark only. Parts ``as_is`` and ``throttled`` (its
uploads are slowed down) measure both:

- In one run, a rank is killed again and again, each time at a random moment once training goes on.
  A loss is the number of finished batches that are trained again.
- Runs without a kill come in pairs, one that saves continuously and one only at its end, in
  alternating order. The overhead is the time of the same batches, less the other run's.

Part ``remote`` has only such pairs, with a checkpoint every ten batches. There the shards end in a
process that counts and forgets them, so that of an upload only the ranks' own cost is left, as
beside a storage on another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import statistics
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import experiment, rank_processes
from benchmarks.workload import temporary_homes
from tests.support.faults.s3 import faulty_s3
from tests.support.s3 import S3Server, ceph_gateway, moto_server
from trial_core.config import ExperimentConfig
from trial_core.driver.drive import drive_trial
from trial_core.driver.run import Given
from trial_core.observe.events.observers import Observer
from trial_core.schedule.stop_requests import StopHandler

SERVERS = {"ceph": ceph_gateway, "moto": moto_server}
TARGETS = {"lost_batches_median": 3.0, "overhead_percent": 3.0, "remote_overhead_percent": 5.0}
PARTS = ("as_is", "throttled", "remote")
EVERY_BATCHES, SMALL_BYTES = 10, 2**18
RANKS, ENDLESS, WARM_UP = 2, 10**6, 3
CHUNK_BYTES = 2**16
Period = str | dict[str, int] | None


@contextmanager
def throttled(server: S3Server, bytes_per_second: float) -> Iterator[S3Server]:
    """Put a proxy before the server that passes so many bytes a second of all requests together."""
    loop = asyncio.new_event_loop()
    there, pacing = urlsplit(server.endpoint_url), asyncio.Lock()

    async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter, slow: bool) -> None:
        while data := await source.read(CHUNK_BYTES):
            if slow:
                async with pacing:
                    await asyncio.sleep(len(data) / bytes_per_second)
            to.write(data)
            await to.drain()
        to.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(there.hostname, there.port)
        await asyncio.gather(
            pump(reader, back_writer, True), pump(back_reader, writer, False),
            return_exceptions=True,  # a killed rank's connection ends anyhow
        )  # fmt: skip

    proxy = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        host, port = proxy.sockets[0].getsockname()
        yield replace(server, endpoint_url=f"http://{host}:{port}")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def counting(server: S3Server) -> Iterator[S3Server]:
    """Put a process before the server that forgets what is large, and passes on the rest."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_count, args=(server, theirs), daemon=True)
    process.start()
    try:
        yield replace(server, endpoint_url=ours.recv())
        ours.send("end")
        print(f"{ours.recv() / 1e6:.0f} MB were counted and forgotten", flush=True)
    finally:
        process.kill()
        process.join()


def _count(server: S3Server, driver: Connection) -> None:
    with faulty_s3(server) as proxy:
        proxy.discards_from = SMALL_BYTES
        driver.send(proxy.server().endpoint_url)
        driver.recv()
        driver.send(sum(proxy.discarded.values()))


@dataclass
class Kills(Observer):
    """Kills ranks of a run at random moments, and then asks the run to end.

    Attributes:
        record: the file to which rank 0 adds a line after each batch.
        handler: is asked to end the run after the last kill.
        count: the number of kills.
        within_seconds: the longest time from the first batch of a launch to the kill.
        lost: batches lost by each kill so far.
    """

    record: Path
    handler: StopHandler
    drawn: random.Random
    count: int
    within_seconds: float
    lost: list[int] = field(default_factory=list)
    _begins_at: int | None = None
    _lines_before: int = 0
    _is_armed: bool = False

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        lines = _lines(self.record)
        if self._begins_at is not None:
            reached = self._begins_at + lines - self._lines_before
            self.lost.append(reached - begins_at)
            print(f"killed at batch {reached}, {self.lost[-1]} lost", flush=True)
        self._begins_at, self._lines_before, self._is_armed = begins_at, lines, True
        if len(self.lost) == self.count:
            self._is_armed = False
            self.handler.ask("interrupted", "all kills are done")

    def batches_trained(self, batches: int) -> None:
        if self._is_armed and self._begins_at is not None and batches > self._begins_at:
            self._is_armed = False
            delay = self.drawn.uniform(0, self.within_seconds)
            threading.Timer(delay, self._kill, (self.drawn.randrange(RANKS),)).start()

    def _kill(self, rank: int) -> None:
        rank_processes()[rank].kill()


@dataclass
class Stalls(Observer):
    """Records how long each save has kept training waiting."""

    seconds: list[float] = field(default_factory=list)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        if stage == "checkpoint-save":
            self.seconds.append(seconds)


@dataclass(frozen=True)
class Plan:
    """The size of the benchmark. `batches` is the length of a run without a kill."""

    folder: Path
    model: str
    kills: int
    within_seconds: float
    pairs: int
    batches: int
    seed: int

    def lost(self, server: S3Server) -> list[int]:
        """Return the batches that each kill has cost."""
        record = self._new_record()
        config = self._config(server, record, "continuous", ENDLESS, self.kills)
        with StopHandler(config.stopping.grace_seconds) as stopping:
            kills = Kills(
                record, stopping, random.Random(self.seed), self.kills, self.within_seconds
            )
            _drive(config, stopping, kills)
        return kills.lost

    def timed(self, server: S3Server, period: Period) -> tuple[float, list[float]]:
        """Return the seconds of the batches after the first few, and of each save."""
        record, stalls = self._new_record(), Stalls()
        config = self._config(server, record, period, WARM_UP + self.batches, 0)
        with StopHandler(config.stopping.grace_seconds) as stopping:
            _drive(config, stopping, stalls)
        ended = [float(line) for line in record.read_text().splitlines()]
        return ended[-1] - ended[WARM_UP - 1], stalls.seconds

    def _new_record(self) -> Path:
        return self.folder / f"{uuid.uuid4().hex[:8]}.txt"

    def _config(
        self, server: S3Server, record: Path, period: Period, batches: int, restarts: int
    ) -> ExperimentConfig:
        return experiment(
            "benchmarks.stopping_trial:TimestampTrial", RANKS,
            {"url": server.new_bucket(), "options": server.options},
            name=record.stem,
            hyperparameters={
                "model": self.model, "bare_batches": 1, "record": str(record), "waits": False,
            },
            searcher={"name": "single", "metric": "seconds", "max_length": {"batches": batches}},
            min_checkpoint_period=period, max_restarts=restarts, tensorboard_logging=False,
            **({} if period == "continuous" else {"scheduling_unit": EVERY_BATCHES}),
        )  # fmt: skip


def losses(plan: Plan, server: S3Server, case: str) -> dict[str, float]:
    """Measure what kills cost. Prints and returns the figures, whose names begin with `case`."""
    lost = plan.lost(server)
    print(f"{case}lost batches {sorted(lost)}")
    return {
        f"{case}lost_batches_median": statistics.median(lost),
        f"{case}lost_batches_most": max(lost),
    }


def overhead(plan: Plan, server: S3Server, case: str, period: Period) -> dict[str, float]:
    """Measure what saving costs the loop. Prints and returns the figures, as `losses`."""
    overheads, stalls, seconds = [], list[float](), 0.0
    for number in range(plan.pairs):
        # The order alternates, so that a drift of the machine's speed cancels out.
        order = (True, False) if number % 2 == 0 else (False, True)
        taken = {saves: plan.timed(server, period if saves else None) for saves in order}
        (saving, saves), (bare, _) = taken[True], taken[False]
        overheads.append(100 * (saving / bare - 1))
        stalls += saves
        seconds += saving
        print(f"{case}{plan.batches} batches: {saving:.2f} s, {bare:.2f} s without", flush=True)
    added = Estimate.of(overheads)
    print(f"{case}overhead {added.shown(2)} %")
    return {
        f"{case}overhead_percent": added.median,
        f"{case}overhead_percent_low": added.low,
        f"{case}overhead_percent_high": added.high,
        f"{case}stall_ms_median": 1000 * statistics.median(stalls),
        f"{case}stall_percent": 100 * sum(stalls) / seconds,
        f"{case}checkpoints_a_run": len(stalls) / plan.pairs,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.continuous", description=__doc__)
    parser.add_argument("--model", default="long")
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--within", type=float, default=15.0, help="seconds until a kill at most")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40, help="in a run without a kill")
    parser.add_argument("--megabytes", type=float, default=20.0, help="a second, when throttled")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", choices=SERVERS, default="ceph")
    arguments = parser.parse_args()
    with temporary_homes() as folder, SERVERS[arguments.server]() as server:
        plan = Plan(
            folder, arguments.model, arguments.kills, arguments.within, arguments.pairs,
            arguments.batches, arguments.seed,
        )  # fmt: skip
        figures: dict[str, float] = {}
        if "as_is" in arguments.parts:
            figures |= losses(plan, server, "")
            figures |= overhead(plan, server, "", "continuous")
        if "throttled" in arguments.parts:
            with throttled(server, 1e6 * arguments.megabytes) as slow:
                figures |= losses(plan, slow, "throttled_")
                figures |= overhead(plan, slow, "throttled_", "continuous")
        if "remote" in arguments.parts:
            with counting(server) as remote:
                figures |= overhead(plan, remote, "remote_", {"batches": EVERY_BATCHES})
    conclude(figures, {name: most for name, most in TARGETS.items() if name in figures})


def _drive(config: ExperimentConfig, stopping: StopHandler, observer: Observer) -> None:
    logger = logging.getLogger("benchmarks.continuous")
    drive_trial(
        config, f"{config.name}-0000beef",
        Given(stopping=stopping, find_logger=lambda: logger, observer=observer),
    )  # fmt: skip


def _lines(record: Path) -> int:
    return len(record.read_text().splitlines()) if record.exists() else 0


if __name__ == "__main__":
    main()
