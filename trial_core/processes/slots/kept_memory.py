"""Memory files that outlive their rank: the fork server keeps those of the newest checkpoint.

When a checkpoint is committed, each rank sends its fork server the descriptors of its memory files.
The keeper, in the fork server, holds them open. It puts links to them into the folder in which a
restart looks for kept files. The memory is the rank's own, so as long as the rank lives nothing is
taken twice. The rank's next snapshot overwrites it. From then until that one is committed, a
restart finds other contents, and fetches the files from the storage.

The memory is freed when the next checkpoint is committed, when the ranks of the next launch begin
their own snapshots, and at the end of the run: the fork server ends with the process that started
it, or is told.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import msgspec

from trial_core.common.decoding import decode

KEEPER_VARIABLE = "TRIALFLOW_KEEPER"
"""Set by the fork server for a rank: the descriptor of its socket to the keeper."""

MESSAGE_BYTES = 2**16
MESSAGE_FILES = 100
"""The most files in one message; the kernel takes up to 253 descriptors."""


class Keep(msgspec.Struct):
    """Keep the files whose descriptors come with this, and none of other checkpoints.

    Attributes:
        folder: where links to them are made: a rank's folder in that of a checkpoint.
        names: POSIX paths below it.
    """

    folder: str
    names: list[str]


class Keeper:
    """The fork server's end. `inbox` is readable when a rank has sent something."""

    def __init__(self) -> None:
        # Keeps the boundaries of messages, so that all ranks can share an end.
        self.inbox, self.ranks_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inbox.setblocking(False)
        self._held: dict[Path, list[int]] = {}

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self.inbox, MESSAGE_BYTES, MESSAGE_FILES)
                self._keep(decode(data, Keep), list(descriptors))

    def leave_behind(self) -> None:
        """In a process that was just forked, close the fork server's own descriptors."""
        self.inbox.close()
        self.free()

    def free(self) -> None:
        """Keep nothing."""
        self._drop_all_but(None)

    def _keep(self, message: Keep, descriptors: list[int]) -> None:
        folder = Path(message.folder)
        self._drop_all_but(folder.parent)
        # There are fewer descriptors than names if this process may open no more files.
        for name, descriptor in zip(message.names, descriptors, strict=False):
            try:
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            except OSError:  # the run has deleted the folder
                os.close(descriptor)
            else:
                self._held.setdefault(folder.parent, []).append(descriptor)

    def _drop_all_but(self, checkpoint: Path | None) -> None:
        for other in self._held.keys() - {checkpoint}:
            for descriptor in self._held.pop(other):
                os.close(descriptor)


_keeper: socket.socket | None = None


def connect_keeper() -> None:
    """Take over the socket from the fork server, hidden from programs that this rank starts."""
    global _keeper
    descriptor = os.environ.pop(KEEPER_VARIABLE, None)
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)
        _keeper = socket.socket(fileno=int(descriptor))


def keep_in_memory(folder: Path, files: Mapping[str, str]) -> None:
    """Have memory files of this rank kept, in place of those of other checkpoints.

    They are given by their POSIX paths below `folder`, see `Keep`; these paths' folders exist.
    Without a keeper, as under torchrun, nothing is kept.
    """
    remaining = iter(files.items())
    while True:
        share = dict(islice(remaining, MESSAGE_FILES))
        _send(Keep(str(folder), [*share]), [*share.values()])
        if len(share) < MESSAGE_FILES:
            return


def drop_kept() -> None:
    """Free the memory of all kept files, also for other ranks of this machine."""
    _send(Keep("", []), [])


def _send(message: Keep, files: list[str]) -> None:
    if _keeper is None:
        return
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # not kept, then
        descriptors = []
        for path in files:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, descriptors[-1])
        socket.send_fds(_keeper, [msgspec.json.encode(message)], descriptors, socket.MSG_DONTWAIT)
