"""Writes a shard's content so that staging it blocks training for as short as possible.

`torch.save` would copy each storage of an accelerator to the host as a whole: into pinned memory
that it keeps for ever, or into pageable memory. Here the storages go in pieces through two halves
of one pinned buffer into the file, or are copied later (`late_copies`). torch writes everything
else: with `skip_data` it seeks over the bytes of each storage, in the order in which its pickler
found them, and they are written then. The file is the same, byte for byte.
"""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.utils.serialization import config as serialization

from trial_core.errors import CheckpointError
from trial_core.processes.machine.memory_files import SpillingFile
from trial_core.rank.state_files.late_copies import collecting
from trial_core.rank.state_files.storage_bytes import on_host


def write_tensors(state: Any, file: IO[bytes]) -> None:
    """Write as `torch.save` does, without a CRC and with bounded memory for accelerators."""
    # The manifest's digest covers every byte, and is computed while training continues.
    with serialization.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]  # added at run time
        storages: list[torch.UntypedStorage] = []
        with torch.serialization.skip_data(), warnings.catch_warnings():
            # Placeholders on the device "meta" have no data to skip.
            warnings.filterwarnings("ignore", "Serializing tensors on the meta device")
            target: Any = _FilledFile(file, storages)
            torch.save(state, target, pickle_module=_pickle_that_lists(storages))


class _FilledFile:
    """A file that `torch.save` writes, with the bytes of a storage wherever torch seeks.

    `storages` is complete before the first seek.
    """

    def __init__(self, file: IO[bytes], storages: list[torch.UntypedStorage]) -> None:
        self._file = file
        self._storages = (each for each in storages if each.nbytes() > 0)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def seek(self, skipped_bytes: int, whence: int) -> None:
        storage = next(self._storages, None)
        found_bytes = 0 if storage is None else storage.nbytes()
        if storage is None or found_bytes != skipped_bytes:
            raise CheckpointError(
                f"torch {torch.__version__} left room for {skipped_bytes} bytes of a tensor, and "
                f"the next one has {found_bytes}; install a torch that trialflow supports"
            )
        if self._is_reserved(storage):
            return
        if isinstance(self._file, SpillingFile):
            # Copies that are made then use the same buffer on the host as the pieces below.
            self._file.make_room(storage.nbytes())
        for piece in on_host(storage):
            self._file.write(piece.data)

    def _is_reserved(self, storage: torch.UntypedStorage) -> bool:
        """Leave room for the storage if it may be copied later, and the file is in memory."""
        late = collecting()
        if late is None or not isinstance(self._file, SpillingFile) or not late.takes(storage):
            return False
        return self._file.reserve(storage.nbytes(), late.copy_of(storage))


def _pickle_that_lists(storages: list[torch.UntypedStorage]) -> Any:
    """The module `pickle` for `torch.save`: lists each storage when torch first finds it.

    torch derives its pickler from the module's, and numbers storages by a method `persistent_id`.
    """

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            identified = cls.persistent_id

            def persistent_id(self: pickle.Pickler, value: Any) -> Any:
                found = identified(self, value)
                if found is not None and int(found[2]) == len(storages):
                    storages.append(getattr(value, "_untyped_storage", value))
                return found

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)
