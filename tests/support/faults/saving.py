"""A save on 2 simulated ranks against an S3 endpoint that fails on purpose, and its check.

Each client (the driver, each rank) has a separate address of the endpoint, as if it were a process.
The check reads the real server directly.
"""

from __future__ import annotations

import threading
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from s3fs import S3FileSystem

from tests.support.faults.s3 import FaultyS3
from tests.support.manifests import keys_of, new_manifest, stage
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest
from trial_core.checkpoint.storage import buffer_pool
from trial_core.checkpoint.storage.base import PROBES
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.checkpoint.transfer.upload import merge_entries, upload_files
from trial_core.errors import CheckpointNotFound, StorageError

Result = TypeVar("Result")

TRIAL = "gpt-0123abcd"
ATTEMPT = "attempt-1"
RANKS = (0, 1)
CLIENTS = ("driver", "rank-0", "rank-1")

CODE = b"code"
PATIENT = {"connect_timeout": 20, "read_timeout": 20}
HASTY = {"connect_timeout": 2, "read_timeout": 0.3}


def rank_files(part_bytes: int) -> dict[int, dict[str, bytes]]:
    """The files of each rank: one of several parts, small ones, an empty one; all different."""

    def data(size: int, rank: int) -> bytes:
        return bytes((n * 7 + rank * 31) % 251 for n in range(1009)) * (size // 1009 + 1)

    return {
        0: {
            "model0/mp_rank_00_model_states.pt": data(2 * part_bytes, 0)[: 2 * part_bytes + 13],
            "state/rank-0.pt": data(700, 0)[:700],
            "empty": b"",
        },
        1: {
            "model0/zero_pp_rank_1_optim_states.pt": data(3 * part_bytes, 1)[: 3 * part_bytes - 7],
            "state/rank-1.pt": data(900, 1)[:900],
        },
    }


def stage_ranks(folder: Path, part_bytes: int) -> dict[int, Path]:
    """Write each rank's files; each rank's folder."""
    files = rank_files(part_bytes)
    return {rank: stage(folder / f"rank-{rank}", files[rank]) for rank in RANKS}


def save(
    stores: Mapping[str, CheckpointStore], staged: Mapping[int, Path], uuid: str, batches: int = 7
) -> Manifest:
    """Save as a run does: take over, announce, upload code and both ranks' files, commit."""
    fence = stores["driver"].take_over(TRIAL, ATTEMPT)
    stores["driver"].announce_upload(TRIAL, uuid, ATTEMPT, fence)
    code = upload_code(stores["driver"], uuid, CODE)

    def upload(rank: int) -> list[FileEntry]:
        return upload_files(stores[f"rank-{rank}"], uuid, staged[rank], rank)

    with ThreadPoolExecutor(len(staged)) as pool:
        uploads = {rank: pool.submit(upload, rank) for rank in staged}
    files = merge_entries({rank: done.result() for rank, done in uploads.items()})
    manifest = new_manifest(batches, uuid=uuid, trial=TRIAL, writer=ATTEMPT, files=files, code=code)
    stores["driver"].commit(manifest, fence)
    return manifest


@contextmanager
def parts_of(part_bytes: int) -> Iterator[None]:
    """Within the block, this process uploads and reads in pieces of this size."""
    usual, buffer_pool.PIECE_BYTES = buffer_pool.PIECE_BYTES, part_bytes
    try:
        yield
    finally:
        buffer_pool.PIECE_BYTES = usual


@dataclass
class Site:
    """A folder of a bucket, behind an endpoint that fails on purpose.

    Attributes:
        url: the folder's.
        options: fsspec's options of each client.
    """

    endpoint: FaultyS3
    url: str
    options: Mapping[str, Mapping[str, Any]]

    def stores(self) -> dict[str, CheckpointStore]:
        """Each client's store."""
        return {
            client: CheckpointStore(self.url, options) for client, options in self.options.items()
        }

    @property
    def behind(self) -> CheckpointStore:
        """The store on the real server, without faults."""
        return CheckpointStore(self.url, self.endpoint.backend.options)

    def objects(self) -> set[str]:
        """All keys below the folder, except attempts and the storage's mark."""
        fs, root = self._raw()
        keys = {name.removeprefix(f"{root}/") for name in fs.find(root)}
        return {key for key in keys if not key.startswith((f"{layout.ATTEMPTS}/", layout.MARK))}

    def multipart_uploads(self) -> list[str]:
        """The keys below the folder with a multipart upload in progress."""
        fs, root = self._raw()
        bucket, _, prefix = root.partition("/")
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def begin_multipart_upload(self, key: str) -> None:
        """Leave a multipart upload open, as a killed process does."""
        fs, root = self._raw()
        bucket, _, prefix = root.partition("/")
        name = f"{prefix}/{key}"
        begun = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name)
        part = {"UploadId": begun["UploadId"], "PartNumber": 1, "Body": b"1"}
        fs.call_s3("upload_part", Bucket=bucket, Key=name, **part)

    def clear(self) -> None:
        """Delete everything: the server keeps it in memory, and a session saves often."""
        fs, root = self._raw()
        if fs.find(root):
            fs.rm(root, recursive=True)

    def _raw(self) -> tuple[S3FileSystem, str]:
        fs = S3FileSystem(**self.endpoint.backend.options, use_listings_cache=False)
        return fs, self.url.removeprefix("s3://")


def client_options(options: Mapping[str, Any], timeouts: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a client that sends a request at most twice, with these timeouts."""
    retries = {"max_attempts": 1, "mode": "standard"}
    return {**options, "config_kwargs": {"retries": retries, **timeouts}}


class Sites:
    """Creates folders in one bucket."""

    def __init__(self, endpoint: FaultyS3) -> None:
        self._endpoint = endpoint
        self._bucket = endpoint.backend.new_bucket()
        self._options = {client: endpoint.server(client).options for client in CLIENTS}

    def new(self, *, hasty: bool = False) -> Site:
        """An empty folder, and clients for it.

        Args:
            hasty: whether the clients' timeouts are short.
        """
        timeouts = HASTY if hasty else PATIENT
        options = {
            client: client_options(options, timeouts) for client, options in self._options.items()
        }
        return Site(self._endpoint, f"{self._bucket}/{uuids.uuid4().hex[:8]}", options)


def within(seconds: float, work: Callable[[], Result]) -> Result | StorageError:
    """The result of `work`, or its StorageError. Raises other errors, and after the deadline."""
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below, on the test's own thread
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return ended.result(seconds)
    except StorageError as error:
        return error


def check(site: Site, uuid: str, outcome: Manifest | StorageError | None) -> None:
    """Check the storage after a save with this outcome (None: killed), then sweep and check again.

    A returned manifest is listed; listed checkpoints are intact; others cannot be opened; a sweep
    leaves the listed checkpoints and nothing else. Deletes everything at the end.
    """
    store = site.behind
    listed = store.list()
    if isinstance(outcome, Manifest):
        assert listed == [outcome]
    assert {manifest.uuid for manifest in listed} <= {uuid}
    for manifest in listed:
        assert store.find_damage(manifest.uuid, manifest.files) == []
    if not listed:
        assert store.resume_candidates(TRIAL) == []
        _cannot_be_opened(store, uuid)
    store.sweep(TRIAL)
    assert store.list() == listed
    # A run probes its storage at its start. Here the save does it, and may be killed meanwhile.
    left = {key for key in site.objects() if not key.startswith(f"{PROBES}/")}
    assert left == keys_of(listed)
    assert site.multipart_uploads() == []
    site.clear()


def _cannot_be_opened(store: CheckpointStore, uuid: str) -> None:
    try:
        found = store.open(uuid)
    except CheckpointNotFound:
        return
    raise AssertionError(f"an unlisted checkpoint was opened: {msgspec.to_builtins(found)}")
