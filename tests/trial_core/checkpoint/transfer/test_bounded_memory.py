"""The memory of uploads and fetches, measured in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moto.s3 import models as moto_models

from tests.support.s3 import S3Server

MIB = 2**20
FILE_MIB, FILES = 16, 3
SCRIPT = """
import json, os, resource, sys
from pathlib import Path
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.storage import buffer_pool
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.checkpoint.transfer.upload import upload_files

MIB = 2**20
buffer_pool.PIECE_BYTES = 2 * MIB
url, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])

def mib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

def peak_of(work):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = mib("VmRSS")
    result = work()
    return result, mib("VmHWM") - before

store = CheckpointStore(url, options)
(folder / "warm").mkdir()
(folder / "warm" / "up").write_bytes(b"1")
warm = upload_files(store, "w", folder / "warm", 0)
fetch_files(store, "w", warm, folder / "warmed")
files, up = peak_of(lambda: upload_files(store, "u", folder / "files", 0))
_, down = peak_of(lambda: fetch_files(store, "u", files, folder / "target"))
print(json.dumps([up, down]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux only")
def test_memory_is_bounded_by_the_buffer_pool(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files of 48 MiB together share one pool, here of 12 MiB, and take little more."""
    monkeypatch.setattr(moto_models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    (tmp_path / "files").mkdir()
    for number in range(FILES):
        (tmp_path / "files" / str(number)).write_bytes(os.urandom(MIB) * FILE_MIB)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, moto_s3.new_bucket(), json.dumps(moto_s3.options), tmp_path],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    up_mib, down_mib = json.loads(ran.stdout)
    assert up_mib < 0.5 * FILES * FILE_MIB
    assert down_mib < 0.5 * FILES * FILE_MIB
