"""Saves in forked processes, which start quickly because everything is imported already.

Reads jobs from stdin, one JSON object a line: ``url``, ``options`` (by client),
``staged`` (folder by rank), ``uuid``, ``part_bytes``, and ``rank``: null to save as a whole run, a
number to upload as that rank. For each job it prints ``{"pid": …}`` and, when the process has
ended, ``{"code": …}``: 0 done, 3 the storage failed, -9 killed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.support.faults.saving import parts_of, save
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.errors import StorageError

EAGER = ("s3fs", "aiobotocore.session", "trial_core.checkpoint.storage.s3_storage")


def carry_out(job: dict[str, Any]) -> None:
    """Save, or upload one rank's part of a checkpoint."""
    stores = {
        client: CheckpointStore(job["url"], options) for client, options in job["options"].items()
    }
    staged = {int(rank): Path(folder) for rank, folder in job["staged"].items()}
    with parts_of(job["part_bytes"]):
        if job["rank"] is None:
            save(stores, staged, job["uuid"])
        else:
            upload_files(
                stores[f"rank-{job['rank']}"], job["uuid"], staged[job["rank"]], job["rank"]
            )


def fork(job: dict[str, Any]) -> int:
    """Run a job in a forked process; its pid."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        carry_out(job)
        code = 0
    except StorageError:
        code = 3
    except BaseException:  # noqa: BLE001 - the process's top frame
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run one job after the other."""
    for module in EAGER:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    for line in sys.stdin:
        pid = fork(json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
