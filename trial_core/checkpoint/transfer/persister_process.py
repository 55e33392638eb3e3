"""The persister process: its messages, and its work.

It opens the rank's staged files by their paths (memory files too), reports each stored file, and
ends with its rank. It imports neither torch nor deepspeed.

Messages are lines of JSON. Credentials are in them only, not on the command line.

The persister process of a rank that a fork server has forked is itself forked from the rank, with
its imports done. Any other, and one that takes the place of a killed one, is a new interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from io import BufferedRWPair
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
from fsspec import config
from fsspec.registry import registry

from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.base import StorageSpec
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files
from trial_core.checkpoint.transfer.upload import StagedFile, upload_staged
from trial_core.common.decoding import decoder
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError

_logger = logging.getLogger(__name__)

NICENESS = 5
"""Training has priority when cores are scarce."""


class UploadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Upload one rank's files of a checkpoint; see `upload_staged`."""

    storage: StorageSpec
    uuid: str
    rank: int
    files: list[StagedFile]
    shared: list[FileEntry]
    stored: list[FileEntry]


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fetch files of a checkpoint; see `fetch_files`."""

    storage: StorageSpec
    uuid: str
    files: list[FileEntry]
    target: str


class BeginTrial(msgspec.Struct, frozen=True, tag=True):
    """Serve a trial, with the rank's changes to its environment since this process was forked, or
    since its last trial: names and new values; None where a variable is gone. They may be any
    bytes."""

    variables: list[tuple[bytes, bytes | None]]


PersisterRequest = UploadRequest | FetchRequest
PersisterMessage = PersisterRequest | BeginTrial


class Stored(msgspec.Struct, frozen=True, tag=True):
    file: FileEntry


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All files of a request are fetched, or uploaded: then `files` has their entries."""

    files: list[FileEntry] = []
    fetched_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request has failed. For `storage` a retry may help, for `damage` another checkpoint, for
    `invalid` neither."""

    message: str
    kind: Literal["storage", "damage", "invalid"]


PersisterReport = Stored | Finished | Failed
_message_decoder: msgspec.json.Decoder[PersisterMessage] = decoder(PersisterMessage)


def serve_rank(connection: socket.socket) -> NoReturn:
    """Be the persister process of the rank at the other end: handle its requests until it closes
    the connection, then exit at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles Ctrl-C
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [storage] %(message)s")
    os.nice(NICENESS)
    stream = connection.makefile("rwb")
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def work() -> None:
        try:
            while True:
                message = _message_decoder.decode(messages.get())
                if isinstance(message, BeginTrial):
                    _begin(message)
                else:
                    _report(stream, _handle(message, stream))
        except BaseException:  # the thread's top frame; the rank would wait for its answer
            _logger.exception("the persister failed and exits")
            os._exit(1)

    threading.Thread(target=work, name="files", daemon=True).start()
    with contextlib.suppress(OSError):  # the rank was killed
        for line in stream:
            messages.put(line)
    os._exit(0)


_changing: set[StoredPath] = set()
"""The `changing` of `upload_staged`: it is for all checkpoints of one trial."""


def _begin(trial: BeginTrial) -> None:
    _changing.clear()
    for name, value in trial.variables:
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
    config.conf.clear()  # fsspec reads the variables FSSPEC_… when it is imported
    config.set_conf_files(config.conf_dir, config.conf)
    config.set_conf_env(config.conf)
    for file_system in registry.values():  # each keeps credentials that it has read
        file_system.clear_instance_cache()


def _handle(request: PersisterRequest, stream: BufferedRWPair) -> PersisterReport:
    try:
        store = CheckpointStore.from_spec(request.storage)
        if isinstance(request, FetchRequest):
            fetched = fetch_files(store, request.uuid, request.files, Path(request.target))
            return Finished(fetched_bytes=fetched)
        entries = upload_staged(
            store,
            request.uuid,
            request.files,
            request.rank,
            shared=request.shared,
            changing=_changing,
            stored={entry.path: entry for entry in request.stored},
            on_stored=lambda entry: _report(stream, Stored(entry)),
        )
        return Finished(files=entries)
    except StorageError as error:
        return Failed(str(error), "storage")
    except CheckpointDamaged as error:
        return Failed(str(error), "damage")
    except CheckpointError as error:
        return Failed(str(error), "invalid")


def _report(stream: BufferedRWPair, report: PersisterReport) -> None:
    stream.write(msgspec.json.encode(report) + b"\n")
    stream.flush()


if __name__ == "__main__":
    serve_rank(socket.socket(fileno=int(sys.argv[1])))
