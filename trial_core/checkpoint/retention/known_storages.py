"""The storages that this machine's runs have used: a file with their marks for each address.

An address is a URL with the endpoint or, for a folder, this machine's name: machines that share the
home folder may have folders of their own.

A run that is to resume finds no checkpoint in a storage that is not mounted. That must not look as
if there were nothing to resume.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path

from trial_core.checkpoint.storage_mark import ANOTHER_STORAGE, described, read_mark
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.any_logger import AnyLogger
from trial_core.errors import StorageError
from trial_core.processes.machine.run_dirs import home_folder


def note_storage(store: CheckpointStore, mark: str, logger: AnyLogger) -> None:
    """Note a storage's mark, when a run begins. Warns if it is new, and there was another."""
    path, known = _known(store)
    if store.is_process_local or mark in known:
        return
    if known:
        logger.warning(
            "%s has another mark (%s) than at earlier runs on this machine (%s): it was replaced, "
            "or is not mounted; if it should be the same, stop this run; if the old one is gone "
            "for good, delete %s",
            store.url, mark, known[-1], path,
        )  # fmt: skip
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{mark}\n")


def refuse_other_storage(store: CheckpointStore) -> None:
    """Call this if there is nothing to resume, before a new trial begins in its place. Raises
    StorageError if runs on this machine have used another storage there, before this one."""
    path, known = _known(store)
    mark = read_mark(store.storage)
    if earlier := known[: known.index(mark)] if mark in known else known:
        raise StorageError(
            f"there is nothing to resume in {store.url}, and it is not the storage that runs on "
            f"this machine have used: {described(mark)}, expected {earlier[-1]}. "
            f"{ANOTHER_STORAGE}. To begin a new trial here, do not ask to resume; if the old "
            f"storage is gone for good, delete {path}"
        )


def _known(store: CheckpointStore) -> tuple[Path, list[str]]:
    """The file for a storage's address, and the marks in it: a line each, as they were seen."""
    options, is_folder = store.spec.options, store.url.startswith("file://")
    address = (
        store.url, socket.gethostname() if is_folder else os.environ.get("AWS_ENDPOINT_URL"),
        options.get("endpoint_url"), options.get("account_name"),
        (options.get("client_kwargs") or {}).get("endpoint_url"),
    )  # fmt: skip
    path = home_folder() / "storages" / hashlib.sha256(repr(address).encode()).hexdigest()[:16]
    with suppress(OSError):
        return path, path.read_text(errors="replace").split()
    return path, []
