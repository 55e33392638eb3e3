"""Measures the processor time and memory of one transfer in a fresh process.

`benchmarks.checkpoint` runs it with a job as JSON and reads the result from stdout as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import fsspec

from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.checkpoint.transfer.upload import upload_files


def upload_s3fs(job: dict[str, Any]) -> None:
    """Upload with s3fs's defaults."""
    files = fsspec.filesystem("s3", **job["options"])
    files.put_file(f"{job['folder']}/shard.bin", f"{job['bucket']}/s3fs/shard.bin")


def restore_s3fs(job: dict[str, Any]) -> None:
    """Download with s3fs's defaults, without verification."""
    files = fsspec.filesystem("s3", **job["options"])
    Path(job["target"]).mkdir(parents=True, exist_ok=True)
    files.get_file(f"{job['bucket']}/s3fs/shard.bin", f"{job['target']}/shard.bin")


def upload_ours(job: dict[str, Any]) -> None:
    """Upload with trialflow, with digests."""
    store = CheckpointStore(job["bucket"], job["options"])
    upload_files(store, job["uuid"], Path(job["folder"]), 0)


def restore_ours(job: dict[str, Any]) -> None:
    """Download with trialflow, verified."""
    store = CheckpointStore(job["bucket"], job["options"])
    entry = FileEntry(
        path=StoredPath("shard.bin"), size_bytes=job["bytes"], digest=job["digest"], rank=0
    )
    fetch_files(store, job["uuid"], [entry], Path(job["target"]))


WORK = {
    "upload_s3fs": upload_s3fs,
    "restore_s3fs": restore_s3fs,
    "upload_ours": upload_ours,
    "restore_ours": restore_ours,
}


def reset_peak_memory() -> int:
    """Reset the peak, which the imports have raised. Return this process's memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return this process's peak memory since the reset: anonymous and mapped pages."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")


def main() -> None:
    """Transfer a small file first, which imports and connects, then measure the large one."""
    job = json.loads(sys.argv[1])
    work = WORK[job["work"]]
    work({**job, **job["small"]})
    before, processor_start, start = reset_peak_memory(), time.process_time(), time.perf_counter()
    work(job)
    result = {
        "processor_seconds": time.process_time() - processor_start,
        "seconds": time.perf_counter() - start,
        "extra_bytes": peak_bytes() - before,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
