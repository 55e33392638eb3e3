"""One transfer in a process of its own: its processor time and the memory that it took.

Run by `benchmarks.checkpoint`; the argument is a job as JSON, the outcome is printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import fsspec

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.transfer.fetch import fetch_files
from trial_core.transfer.upload import upload_files


def upload_s3fs(job: dict[str, Any]) -> None:
    """What s3fs does by default."""
    files = fsspec.filesystem("s3", **job["options"])
    files.put_file(f"{job['folder']}/shard.bin", f"{job['bucket']}/s3fs/shard.bin")


def restore_s3fs(job: dict[str, Any]) -> None:
    """What s3fs does by default, without verifying anything."""
    files = fsspec.filesystem("s3", **job["options"])
    Path(job["target"]).mkdir(parents=True, exist_ok=True)
    files.get_file(f"{job['bucket']}/s3fs/shard.bin", f"{job['target']}/shard.bin")


def upload_ours(job: dict[str, Any]) -> None:
    """With digests."""
    store = CheckpointStore(job["bucket"], job["options"])
    upload_files(store, job["uuid"], Path(job["folder"]), 0)


def restore_ours(job: dict[str, Any]) -> None:
    """Verified."""
    store = CheckpointStore(job["bucket"], job["options"])
    entry = FileEntry(path="shard.bin", size_bytes=job["bytes"], digest=job["digest"], rank=0)
    fetch_files(store, job["uuid"], [entry], Path(job["target"]))


WORK = {
    "upload_s3fs": upload_s3fs,
    "restore_s3fs": restore_s3fs,
    "upload_ours": upload_ours,
    "restore_ours": restore_ours,
}


def begin_to_watch_memory() -> int:
    """Forget the peak so far, which is that of the imports; what this process has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most memory this process has had since: anonymous and mapped pages."""
    return _status_bytes("VmHWM")


def _status_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def main() -> None:
    """Do the work once on something small, which loads and connects, then measure it."""
    job = json.loads(sys.argv[1])
    work = WORK[job["work"]]
    work({**job, **job["small"]})
    before, began, started = begin_to_watch_memory(), time.process_time(), time.perf_counter()
    work(job)
    outcome = {
        "processor_seconds": time.process_time() - began,
        "seconds": time.perf_counter() - started,
        "extra_bytes": peak_bytes() - before,
    }
    print(json.dumps(outcome), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
