"""Measures the cost of loading a checkpoint from S3, compared with torch's DCP and DeepSpeed.

An engine under ZeRO-1 is saved on 2 ranks, once with each library, to a real S3 gateway (Ceph) on
this machine, which uses the same cores. Then 2 and 4 new ranks load it, with all libraries in
turns. Then 4 ranks save, and 2 load. Each load is checked: weights and the optimizer's state equal
the saved ones, bit for bit.

- trialflow: the requests of a resumed run, FetchCheckpoint (verified) and BuildLoadersAndRestore;
- dcp: torch.distributed.checkpoint's `load` with its FsspecReader, in place;
- deepspeed: boto3's `download_file`, then `load_checkpoint`; with another number of ranks,
  `ds_to_universal` between them;
- kept: as trialflow, by ranks whose machine has kept the files of the earlier ranks.

A load is timed from the moment when all ranks have built the engine until all have loaded.
``--server moto`` is for testing the benchmark only.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import BYTES_PER_LAYER, MIB, SERVERS, by_rank
from benchmarks.figures import conclude
from benchmarks.memory import PeakMemory, Resident, resident_bytes
from benchmarks.ranks import experiment, launched, processor_seconds_with_helpers, with_helpers
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.storage.open_storage import packages_of
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import merge_entries
from trial_core.errors import CheckpointError
from trial_core.messages import (
    BuildLoadersAndRestore,
    BuildTrial,
    Done,
    FetchCheckpoint,
    Fetched,
    HookDone,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    ReleaseStaging,
    RunHook,
    SaveCheckpoint,
    Saved,
    TrialBuilt,
)
from trial_core.processes.machine.memory_files import GIB, free_bytes
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.rank_main import TRIAL_MODULES
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.checkpoint_files import RESTORED

OURS, KEPT = "trialflow", "kept"
PEERS = ("dcp", "deepspeed")
CASES = ((2, 2), (2, 4), (4, 2))
"""The numbers of ranks that save, and that load."""
MEMORY_RATIO = 12
"""The benchmark's memory, relative to the state. The gateway takes half."""
TRIAL_CLASS = "benchmarks.loading_trial:LoadingTrial"
WORK, CHECK = RunHook(hook="on_training_start"), RunHook(hook="on_validation_start")


def case_name(saved_by: int, ranks: int) -> str:
    """Return the part of a figure's name that tells the case."""
    return f"{saved_by}_to_{ranks}"


TARGETS = {
    f"{figure}_{case_name(*case)}": limit
    for case in CASES
    for figure, limit in {
        "time_ratio_dcp": 1 / 2,
        "processor_ratio_dcp": 1 / 2,
        f"{OURS}_memory_mib": 256.0,
    }.items()
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of trialflow's, and the local folder of the run that saved it."""

    uuid: str
    files: list[FileEntry]
    topology: Topology
    run_dir: Path


@dataclass(frozen=True)
class Load:
    """The cost of a load.

    Attributes:
        fetch_seconds: trialflow's part until the verified files are on the machine.
        processor_seconds: of all ranks and their helper processes.
        memory: the most that a rank took, with its helper processes, in addition to its memory
            before the load; None if that was not watched.
    """

    seconds: float
    fetch_seconds: float
    processor_seconds: float
    memory: Resident | None

    def __str__(self) -> str:
        memory = f", {self.memory.own / MIB:.0f} MiB" if self.memory else ""
        return f"{self.seconds:.2f} s, {self.processor_seconds:.2f} s of processor time{memory}"


@dataclass(frozen=True)
class Bench:
    """The machine and the engine.

    Attributes:
        store: the storage of all libraries.
        fork_servers: by number of ranks; they import the ranks' modules, and keep saved files.
        folder: for files on this machine.
    """

    store: CheckpointStore
    options: dict[str, Any]
    layers: int
    fork_servers: dict[int, ForkServer]
    folder: Path

    @contextmanager
    def ranks(
        self, count: int, way: str, saved_by: int | None, run_dir: Path
    ) -> Iterator[tuple[SlotGroup, Topology]]:
        """Start ranks that have built the engine.

        Args:
            saved_by: the number of ranks that saved; None if the new ranks save.
        """
        hyperparameters = {
            "way": way,
            "saves": saved_by is None,
            "is_resharded": saved_by != count,
            "url": f"{self.store.url}/peers",
            "options": self.options,
            "folder": str(run_dir),
            "layers": self.layers,
        }
        config = experiment(TRIAL_CLASS, count, self.store.url, hyperparameters=hyperparameters)
        build = BuildTrial(
            trial="benchmark-00000000",
            experiment=config.model_dump(mode="json"),
            run_dir=str(run_dir),
            storage=self.store.spec,
        )
        with launched(count, self.fork_servers[count]) as slots:
            yield slots, slots.request(build, TrialBuilt)[0].topology

    def save(self, ranks: int) -> Checkpoint:
        """Save with every library on that many ranks. Return trialflow's checkpoint."""
        for way in PEERS:
            with self._new_folder() as folder, self.ranks(ranks, way, None, folder) as (slots, _):
                slots.request(WORK, HookDone)
        run_dir, checkpoint = self.folder / f"saved-{ranks}", str(uuid.uuid4())
        with self.ranks(ranks, OURS, None, run_dir) as (slots, topology):
            slots.request(WORK, HookDone)
            slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
            slots.request(SaveCheckpoint(uuid=checkpoint), Saved)
            files = by_rank(slots.request(PersistCheckpoint(uuid=checkpoint), Persisted))
            slots.request(ReleaseStaging(uuid=checkpoint), Done)
        return Checkpoint(checkpoint, merge_entries(files), topology, run_dir)

    def load(self, way: str, saved: Checkpoint, ranks: int, watches_memory: bool) -> Load:
        """Load on new ranks, and check the loaded state."""
        with ExitStack() as stack:
            folder = saved.run_dir if way == KEPT else stack.enter_context(self._new_folder())
            library = OURS if way == KEPT else way
            slots, _ = stack.enter_context(
                self.ranks(ranks, library, saved.topology.world_size, folder)
            )
            with ExitStack() as watching:
                peaks = [
                    watching.enter_context(PeakMemory(partial(_memory, pid)))
                    for pid in slots.pids
                    if watches_memory
                ]
                used = processor_seconds_with_helpers(slots.pids)
                began = fetched = time.perf_counter()
                if library == OURS:
                    fetched = _restore(slots, saved)
                else:
                    slots.request(WORK, HookDone)
                ended = time.perf_counter()
                used = processor_seconds_with_helpers(slots.pids) - used
            slots.request(CHECK, HookDone)
            shutil.rmtree(folder / RESTORED, ignore_errors=True)  # else the next one finds it
        return Load(ended - began, fetched - began, used, _most(peaks))

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)


def _restore(slots: SlotGroup, saved: Checkpoint) -> float:
    """Fetch and restore as a resumed run does. Return when the files were there.

    Raises:
        CheckpointError: a rank could not fetch.
    """
    fetch = FetchCheckpoint(uuid=saved.uuid, files=saved.files, saved_by=saved.topology)
    answers = slots.request(fetch, Fetched)
    fetched = time.perf_counter()
    if problems := [each.damage or each.problem for each in answers if each != Fetched()]:
        raise CheckpointError(f"nothing was measured, because a rank could not fetch: {problems}")
    restore = BuildLoadersAndRestore(
        batches_trained=0, checkpoint=saved.uuid, saved_by=saved.topology
    )
    slots.request(restore, ReadyToTrain)
    return fetched


def _memory(pid: int) -> Resident:
    return resident_bytes(process.pid for process in with_helpers(pid))


def _most(peaks: list[PeakMemory]) -> Resident | None:
    if not peaks:
        return None
    return Resident(
        max(peak.own - peak.before.own for peak in peaks),
        max(peak.mapped - peak.before.mapped for peak in peaks),
    )


Loads = dict[tuple[str, str], list[Load]]
"""The loads of each library and case, one of each turn."""


@contextmanager
def new_bench(server_name: str, layers: int) -> Iterator[Bench]:
    """Open a separate gateway, folder and fork servers: their memory is free at the end."""
    with (
        SERVERS[server_name]() as server,
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
    ):
        store = CheckpointStore(server.new_bucket(), server.options)
        modules = [*TRIAL_MODULES, *packages_of(store.url), "benchmarks.loading_trial"]
        fork_servers = {
            ranks: stack.enter_context(ForkServer(modules))
            for ranks in sorted({ranks for case in CASES for ranks in case})
        }
        yield Bench(store, server.options, layers, fork_servers, Path(folder))


def measure(bench: Bench, saved_by: int, repeats: int) -> Loads:
    """Save, then load in turns. The first turn warms up, and alone watches the memory."""
    saved = bench.save(saved_by)
    loads: Loads = defaultdict(list)
    for turn in range(repeats + 1):
        for ranks in [loading for saving, loading in CASES if saving == saved_by]:
            case = case_name(saved_by, ranks)
            for way in (OURS, *PEERS, *([KEPT] if saved_by == ranks else [])):
                watches_memory = turn == 0 and way != KEPT  # memory files are there anyway
                load = bench.load(way, saved, ranks, watches_memory)
                loads[way, case].append(load)
                print(f"turn {turn}, {case}, {way}: {load}", flush=True)
    return loads


def figures_of(loads: Loads) -> dict[str, float]:
    """Return the medians, memory in the first turn, and our cost relative to each peer."""
    figures: dict[str, float] = {}
    for (way, case), (first, *timed) in loads.items():
        figures[f"{way}_seconds_{case}"] = statistics.median(load.seconds for load in timed)
        if way not in PEERS:
            figures[f"{way}_fetch_seconds_{case}"] = statistics.median(
                load.fetch_seconds for load in timed
            )
        figures[f"{way}_processor_seconds_{case}"] = statistics.median(
            load.processor_seconds for load in timed
        )
        if first.memory is not None:
            figures[f"{way}_memory_mib_{case}"] = first.memory.own / MIB
            figures[f"{way}_mapped_mib_{case}"] = first.memory.mapped / MIB
    for way, case in loads:
        if way in PEERS:
            pairs = [*zip(loads[OURS, case], loads[way, case], strict=True)][1:]
            figures[f"time_ratio_{way}_{case}"] = statistics.median(
                ours.seconds / peer.seconds for ours, peer in pairs
            )
            figures[f"processor_ratio_{way}_{case}"] = statistics.median(
                ours.processor_seconds / peer.processor_seconds for ours, peer in pairs
            )
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.loading", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", choices=SERVERS, default="ceph")
    given = parser.parse_args()
    needed, free = MEMORY_RATIO * given.mib * MIB, free_bytes()
    if free < needed:
        parser.error(
            f"--mib {given.mib} needs {needed / GIB:.0f} GiB of memory, and {free / GIB:.0f} are "
            "free: the kernel would kill the gateway; choose fewer"
        )
    layers = max(1, round(given.mib * MIB / BYTES_PER_LAYER))
    loads: Loads = {}
    for saved_by in sorted({saved_by for saved_by, _ in CASES}):
        with new_bench(given.server, layers) as bench:
            loads |= measure(bench, saved_by, given.repeats)
    conclude({"state_mib": layers * BYTES_PER_LAYER / MIB, **figures_of(loads)}, TARGETS)


if __name__ == "__main__":
    main()
