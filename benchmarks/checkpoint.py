"""Measures the cost of checkpoints, compared with other libraries.

It runs against a real S3 gateway (Ceph) on this machine, which uses the same cores. All compared
figures come from one run. ``--server moto`` is for testing the benchmark only.

- blocked: how long one checkpoint of a ZeRO-1 state on 2 ranks blocks training.
- transfers: processor time and memory to upload and download a 512 MiB file in a fresh process.
- share: the part of a ZeRO-3 checkpoint that one of four ranks on separate machines fetches.
- training: batches of more than half a second, with and without a checkpoint every ten batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Estimate, conclude
from benchmarks.ranks import (
    ENVIRONMENT,
    ROOT,
    built,
    experiment,
    launched,
    processor_seconds_with_helpers,
)
from tests.support.faults.plan import Fault
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.s3 import S3Server, ceph_gateway, moto_server
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.checkpoint.transfer.upload import merge_entries
from trial_core.deepspeed.restore_files import files_for_ranks
from trial_core.errors import StorageError
from trial_core.messages import (
    BuildLoadersAndRestore,
    BuildTrial,
    Done,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    ReleaseStaging,
    Result,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
    TrialBuilt,
)

MIB, GIB = 2**20, 2**30
PEERS = ("copy", "deepspeed_boto3", "torch_dcp", "torch_dcp_async", "lightning")
BYTES_PER_LAYER = 16 * (1024 * 1024 + 1024)
CONNECTIONS = 8
SLOWDOWN = 10
MIN_BATCH_SECONDS = 0.5
SERVERS = {"ceph": ceph_gateway, "moto": moto_server}

TARGETS = {
    "blocked_ratio_deepspeed_boto3": 1 / 25,
    "lazy_ratio": 1 / 5,
    "lazy_ratio_deepspeed_boto3": 1 / 60,
    "blocked_ratio_slow_store": 1.1,
    "upload_processor_ratio": 1 / 2,
    "upload_memory_ratio": 1 / 4,
    "restore_processor_ratio": 2 / 3,
    "restore_memory_ratio": 1 / 4,
    "fetched_share": 0.27,
    "training_ratio": 1.03,
}


def blocked(server: S3Server, state_mib: int, turns: int) -> dict[str, float]:
    """Save with every library in turns, then to a store that is ten times slower."""
    layers = max(1, state_mib * MIB // BYTES_PER_LAYER)
    with faulty_s3(server) as proxy, tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job: dict[str, Any] = {
            "layers": layers,
            "bucket": server.new_bucket(),
            "stores": {"fast": server.options, "slow": proxy.server().options},
        }
        methods = ["ours", "ours_lazy", "fingerprints", *PEERS]
        lines = in_ranks(
            Path(folder),
            {**job, "methods": methods, "turns": turns},
        )
        # The bytes per second of one connection; each rank uses a few.
        whole = median(lines, "ours", "whole")
        pace = layers * BYTES_PER_LAYER / (SLOWDOWN * whole) / CONNECTIONS
        pace *= slowdown(saved_slowly(proxy, Path(folder), job, pace, 1)) / SLOWDOWN
        slow = saved_slowly(proxy, Path(folder), job, pace, max(2, turns // 2))
    figures = {
        "blocked_s": median(lines, "ours", "blocked"),
        "state_mib": layers * BYTES_PER_LAYER / MIB,
    }
    pairs = ratios(lines, "fingerprints", "ours")
    print(f"fingerprints, of what blocks: {Estimate.of(pairs).shown(4)}", flush=True)
    figures["fingerprints_share"] = Estimate.of(pairs).median
    for name, other in (("lazy_ratio", "ours"), ("lazy_ratio_deepspeed_boto3", "deepspeed_boto3")):
        pairs = ratios(lines, "ours_lazy", other)
        print(
            f"blocked with snapshot: lazy, against {other}: {Estimate.of(pairs).shown(4)}",
            flush=True,
        )
        figures[name] = Estimate.of(pairs).median
    for peer in PEERS:
        pairs = ratios(lines, "ours", peer)
        print(f"blocked, against {peer}: {Estimate.of(pairs).shown(4)}", flush=True)
        figures[f"blocked_s_{peer}"] = median(lines, peer, "blocked")
        figures[f"blocked_ratio_{peer}"] = Estimate.of(pairs).median
    figures["blocked_ratio_slow_store"] = Estimate.of(
        ratios(slow, "ours_slow_store", "ours")
    ).median
    figures["store_slowdown"] = slowdown(slow)
    return figures


def saved_slowly(
    proxy: FaultyS3, folder: Path, job: dict[str, Any], pace: float, turns: int
) -> list[dict[str, Any]]:
    """Save in turns to the fast store and to one that reads `pace` bytes/s per connection."""
    proxy.new_plan(Fault("slow", times=None, method="PUT", bytes_per_second=int(pace)))
    return in_ranks(folder, {**job, "methods": ["ours", "ours_slow_store"], "turns": turns})


def slowdown(lines: list[dict[str, Any]]) -> float:
    """Return the duration of a save to the slow store, divided by one to the fast store."""
    return median(lines, "ours_slow_store", "whole") / median(lines, "ours", "whole")


def in_ranks(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `benchmarks.checkpoint_ranks` on 2 ranks; return its results without the warm-up."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = subprocess.run(
        [*launcher, "-m", "benchmarks.checkpoint_ranks", str(path)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "TRIALFLOW_HOME": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [line for line in lines if line["turn"] > 0]


def median(lines: Iterable[dict[str, Any]], method: str, figure: str) -> float:
    """Return the median of a method's seconds."""
    return statistics.median(float(line[figure]) for line in lines if line["method"] == method)


def ratios(lines: Iterable[dict[str, Any]], method: str, other: str) -> list[float]:
    """Return each turn's ratio of the seconds that `method` and `other` blocked."""
    turns: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:
        turns[line["turn"]][line["method"]] = line["blocked"]
    return [turn[method] / turn[other] for turn in turns.values()]


def transfers(server: S3Server, size_mib: int, turns: int) -> dict[str, float]:
    """Upload and download a file with s3fs and with trialflow, each in a fresh process."""
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        large, small = new_file(Path(folder, "large"), size_mib), new_file(Path(folder, "small"), 1)
        for turn in range(turns):
            job = {
                **large,
                "small": {
                    **small,
                    "uuid": str(uuid.uuid4()),
                    "target": f"{folder}/down-small-{turn}",
                },
                "uuid": str(uuid.uuid4()),
                "bucket": server.new_bucket(),
                "options": server.options,
                "target": f"{folder}/down-{turn}",
            }
            for library in ("s3fs", "ours"):
                for direction in ("upload", "restore"):
                    seen[f"{direction}_{library}"].append(
                        transfer({**job, "work": f"{direction}_{library}"})
                    )
    figures: dict[str, float] = {}
    for direction in ("upload", "restore"):
        ours, peer = seen[f"{direction}_ours"], seen[f"{direction}_s3fs"]
        for name, field, unit in (
            ("processor", "processor_seconds", size_mib / 1024),
            ("memory", "extra_bytes", MIB),
            ("time", "seconds", 1.0),
        ):
            of_ours = statistics.median(each[field] for each in ours)
            of_peer = statistics.median(each[field] for each in peer)
            figures[f"{direction}_{name}_ratio"] = of_ours / of_peer
            figures[f"{direction}_{name}_ours"] = of_ours / unit
            figures[f"{direction}_{name}_s3fs"] = of_peer / unit
    return figures


def transfer(job: dict[str, Any]) -> dict[str, float]:
    """Run a job in `benchmarks.transfers`."""
    command = [sys.executable, "-m", "benchmarks.transfers", json.dumps(job)]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(printed.stdout.splitlines()[-1])
    return result


def new_file(folder: Path, size_mib: int) -> dict[str, Any]:
    """Write a file of random bytes. Return its part of a transfer's job."""
    folder.mkdir()
    digest = hashlib.sha256()
    with open(folder / "shard.bin", "wb") as file:
        for _ in range(size_mib):
            piece = os.urandom(MIB)
            digest.update(piece)
            file.write(piece)
    return {
        "folder": str(folder),
        "bytes": size_mib * MIB,
        "digest": f"sha256:{digest.hexdigest()}",
    }


def share(server: S3Server) -> dict[str, float]:
    """Save under ZeRO-3 on 4 ranks; measure the largest part that one rank needs to restore."""
    with launched(4) as slots, tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        config = experiment(
            "ShardedTrial", 4, server.new_bucket(), hyperparameters={"model": "medium"}
        )
        store = CheckpointStore(config.checkpoint_storage.url, server.options)
        built_trial = slots.request(
            BuildTrial(
                trial="benchmark-00000000",
                experiment=config.model_dump(mode="json"),
                run_dir=folder,
                storage=store.spec,
            ),
            TrialBuilt,
        )[0]
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
        slots.request(TrainBatches(until=1), Trained)
        checkpoint = str(uuid.uuid4())
        slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
        persisted = slots.request(PersistCheckpoint(uuid=checkpoint), Persisted)
        files, saved_by = merge_entries(by_rank(persisted)), built_trial.topology
        fetched = [
            fetch_files(
                store,
                checkpoint,
                files_for_ranks(files, saved_by, [rank], saved_by),
                Path(folder, f"machine-{rank}"),
            )
            for rank in range(4)
        ]
    return {"fetched_share": max(fetched) / sum(file.size_bytes for file in files)}


def by_rank(persisted: Sequence[Result]) -> dict[int, list[FileEntry]]:
    """Return the files that each rank has stored.

    Raises:
        StorageError: a rank has stored nothing, so that nothing was measured.
    """
    files = {}
    for rank, part in enumerate(persisted):
        if not isinstance(part, Persisted) or part.problem or part.mistake:
            raise StorageError(f"nothing was measured, because rank {rank} stored no files: {part}")
        files[rank] = part.files
    return files


def training(server: S3Server, pairs: int) -> dict[str, float]:
    """Train ten batches in turns, with and without a checkpoint that is uploaded meanwhile."""
    found: list[float] = []
    seconds: list[float] = []
    added: list[float] = []
    added_by_ranks: list[float] = []
    with (
        launched(2) as slots,
        built(
            slots,
            "LoopTrial",
            {"model": "long", "bare_batches": 1},
            CheckpointStore(server.new_bucket(), server.options),
        ),
    ):
        trained = 0
        for pair in range(pairs + 2):
            turn: dict[bool, float] = {}
            busy: dict[bool, float] = {}
            of_ranks: dict[bool, float] = {}
            for saves in (pair % 2 == 0, pair % 2 == 1):
                trained += 10
                busy_before = _busy_seconds()
                ranks_before = processor_seconds_with_helpers(slots.pids)
                began = time.perf_counter()
                if saves:
                    checkpoint = str(uuid.uuid4())
                    slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
                    persisted = slots.submit(PersistCheckpoint(uuid=checkpoint))
                slots.request(TrainBatches(until=trained), Trained)
                if saves:
                    by_rank(persisted.result())  # raises if the upload failed
                turn[saves] = time.perf_counter() - began
                busy[saves] = _busy_seconds() - busy_before
                of_ranks[saves] = processor_seconds_with_helpers(slots.pids) - ranks_before
                if saves:
                    slots.request(ReleaseStaging(uuid=checkpoint), Done)
            if pair > 1:  # the first snapshots are copied at once
                found.append(turn[True] / turn[False])
                seconds.append(turn[False] / 10)
                added.append(busy[True] - busy[False])
                added_by_ranks.append(of_ranks[True] - of_ranks[False])
    print(f"training with a checkpoint every 10 batches: {Estimate.of(found).shown(4)}", flush=True)
    if statistics.median(seconds) < MIN_BATCH_SECONDS:
        print(f"the target applies to batches of at least {MIN_BATCH_SECONDS} s: these are faster")
    whole, own = statistics.median(added), statistics.median(added_by_ranks)
    available = 10 * statistics.median(seconds) * (os.cpu_count() or 1)
    print(
        f"a checkpoint takes {whole:.2f} s of processor time, {own:.2f} s of it in the ranks, the "
        f"rest in the S3 gateway: {whole / available:.3f} of the time of all cores in ten batches",
        flush=True,
    )
    return {
        "training_ratio": Estimate.of(found).median,
        "training_batch_s": statistics.median(seconds),
        "training_added_processor_s": whole,
        "training_added_processor_by_ranks_s": own,
        "training_added_processor_share": whole / available,
    }


def _busy_seconds() -> float:
    """Return the processor seconds used so far by the whole machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["blocked", "transfers", "share", "training"])
    parser.add_argument("--state-mib", type=int, default=700)
    parser.add_argument("--file-mib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--server", choices=SERVERS, default="ceph")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    with SERVERS[given.server]() as server:
        if "blocked" in given.parts:
            figures |= blocked(server, given.state_mib, given.turns)
        if "transfers" in given.parts:
            figures |= transfers(server, given.file_mib, given.turns)
        if "share" in given.parts:
            figures |= share(server)
        if "training" in given.parts:
            figures |= training(server, given.pairs)
    conclude(figures, {name: limit for name, limit in TARGETS.items() if name in figures})


if __name__ == "__main__":
    main()
