"""Examines a node for the driver and `trialflow doctor`: its equipment and its connections."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.checkpoint.store import CheckpointStore, StorageSpec
from trial_core.checkpoint.verified_read import Damage, StoredFile, read_files
from trial_core.errors import LaunchError, TrialflowError
from trial_core.processes.machine.accelerators import (
    available_cores,
    described,
    try_accelerators,
    visible_accelerators,
)
from trial_core.processes.nodes.node_messages import (
    Examine,
    Examined,
    ListeningNode,
    NodeAnswer,
    Question,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
)

SHARED_MEMORY = Path("/dev/shm")
CONNECT_SECONDS = 10.0
CONNECT_THREADS = 64


class Examination:
    """Answers the driver's questions; slow ones are answered in the agent's thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._greeter: _Greeter | None = None

    def answer(self, question: Question, address: str) -> NodeAnswer:
        """The answer to a question. `address` is the node's, on the ranks' network."""
        if isinstance(question, Examine):
            return self._examine(question, address)
        if isinstance(question, Reach):
            return Reached(problems=unreachable(question.nodes))
        return try_storage(question, self._folder)

    def close(self) -> None:
        if self._greeter is not None:
            self._greeter.close()

    def _examine(self, question: Examine, address: str) -> Examined:
        received_at = time.time()
        accelerators, of_ranks, of_operators = _accelerators({**os.environ, **question.environment})
        shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        return Examined(
            received_at=received_at,
            packages=installed_packages(),
            cores=available_cores(),
            accelerators=accelerators,
            accelerator_problem=of_ranks,
            operator_problem=of_operators,
            shared_memory=None if shared is None else (shared.total, shared.free),
            folder=str(self._folder),
            disk_free_bytes=shutil.disk_usage(self._folder).free,
            listening=self._listen(address),
            answered_at=time.time(),
        )

    def _listen(self, address: str) -> ListeningNode | str:
        self.close()
        greeting = secrets.token_hex(16)
        try:
            self._greeter = _Greeter(address, greeting)
        except OSError as error:
            return str(error)
        return ListeningNode(address, self._greeter.port, greeting)


def installed_packages() -> dict[str, str]:
    """The version of each Python package here, by its name in lower case, with dashes."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        # A broken installation has no name; setuptools, once imported, shows what it brings along.
        if name and Path(str(package.locate_file(""))).name != "_vendor":
            # The first one is imported, as for `importlib.metadata.version`.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), package.version)
    return found


def unreachable(nodes: Mapping[str, ListeningNode]) -> dict[str, str]:
    """The nodes that this machine cannot reach, and why."""
    problems = in_parallel(
        lambda each, _: _connection_problem(each), nodes.values(), CONNECT_THREADS
    )
    return {name: why for name, why in zip(nodes, problems, strict=True) if why is not None}


def _connection_problem(node: ListeningNode) -> str | None:
    try:
        with (
            socket.create_connection((node.address, node.port), CONNECT_SECONDS) as connection,
            connection.makefile("rb") as stream,
        ):
            seen = stream.read(len(node.greeting))
    except OSError as error:
        return str(error)
    is_the_node = seen == node.greeting.encode()
    return None if is_the_node else "something else answers at its address and port"


def try_storage(question: TryStorage, folder: Path) -> StorageTried:
    """Use the storage as ranks do, and measure how long one object takes each way."""
    try:
        store = CheckpointStore.from_spec(question.storage)
        store.storage.check_usable()
        read_seconds = _read(store, question)
        write_seconds = _write(store, question, folder)
    except (TrialflowError, OSError) as error:
        return StorageTried(problem=str(error))
    return StorageTried(read_seconds=read_seconds, write_seconds=write_seconds)


def check_storage(spec: StorageSpec, key: str) -> None:
    """Raise LaunchError or StorageError unless this node sees an object of the driver's storage."""
    try:
        store = CheckpointStore.from_spec(spec)
        is_there = store.storage.exists(key)
    except (TypeError, ValueError, KeyError) as error:  # fsspec's, of an option
        raise LaunchError(
            f"this node cannot use the storage {spec.url}: {type(error).__name__}: {error}. Check "
            "its options, and that the node has the driver's version of the storage's package"
        ) from error
    if not is_there:
        raise _other_storage(store, key)


def _other_storage(store: CheckpointStore, key: str) -> LaunchError:
    return LaunchError(
        f"this node sees another storage than the driver: {store.url} has no {key} here. Mount "
        "that folder on every node, or use an object storage (checkpoint_storage)"
    )


def _read(store: CheckpointStore, question: TryStorage) -> float:
    """The seconds to read the driver's object, which no cache here has. Raises LaunchError."""
    key, damaged = f"{question.folder}/{question.object.path}", list[Damage]()
    if key not in store.storage.sizes(question.folder):
        raise _other_storage(store, key)
    began = time.monotonic()
    read_files(store.storage, [StoredFile(question.object, key)], damaged.append)
    if damaged:
        raise LaunchError(f"{store.url}/{key} is read here with other bytes than the driver wrote")
    return time.monotonic() - began


def _write(store: CheckpointStore, question: TryStorage, folder: Path) -> float:
    """The seconds to write an object, which the driver deletes. Raises StorageError."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(question.object.size_bytes))
        file.flush()
        began = time.monotonic()
        key = f"{question.folder}/{uuid.uuid4()}"
        store.storage.upload(Path(file.name), key, CancelSignal())
        return time.monotonic() - began


def _accelerators(environment: Mapping[str, str]) -> tuple[str, str | None, str | None]:
    try:
        visible = visible_accelerators(environment)
        if not visible.devices:
            return "", None, None
        return described(visible), *try_accelerators(visible, environment)
    except TrialflowError as error:
        return "", str(error), None


class _Greeter(socketserver.TCPServer):
    """Sends a text to everyone who connects to a port at an address, until it is closed."""

    request_queue_size = 1024

    def __init__(self, address: str, text: str) -> None:
        def greet(request: socket.socket, *_: object) -> None:
            with contextlib.suppress(OSError):
                request.sendall(text.encode())

        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), greet)  # type: ignore[arg-type]  # any callable will do
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, name="trialflow-greeter", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
