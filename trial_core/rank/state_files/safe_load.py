"""Reads a checkpoint's files without running code that they may contain."""

from __future__ import annotations

import datetime
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from trial_core.errors import CheckpointError
from trial_core.rank.state_files.frozen_files import frozen_path, with_frozen
from trial_core.rank.state_files.stored_arrays import with_arrays

_MAX_RANGE = 1_000_000
_MALFORMED = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, EOFError,
    AssertionError, NotImplementedError, MemoryError, BufferError, SyntaxError, SystemError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What torch raises for a file that is not a state, besides UnpicklingError."""


def _short_range(*numbers: int) -> range:
    """A range that is not so long that a set of it fills the memory."""
    made = range(*numbers)
    if made and (abs(made[-1] - made[0]) // abs(made.step)) >= _MAX_RANGE:
        raise ValueError(f"a range of more than {_MAX_RANGE} numbers")
    return made


_PLAIN = (
    frozenset, (_short_range, "builtins.range"), slice,
    datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone,
    pathlib.PosixPath, pathlib.PurePosixPath,
)  # fmt: skip


class Reader:
    """Reads files that `torch.save` wrote.

    Args:
        trusted: True if the files may contain objects of any class (``checkpointing.trusted``).
        classes: classes that are safe to construct, besides plain data and torch's own.
        options: further arguments of `torch.load`, which override ours; not ``weights_only``.
    """

    def __init__(
        self,
        trusted: bool = False,
        classes: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.trusted = trusted
        self.classes = tuple(classes)
        self._options = dict(options or {})
        self._safe = [*classes, *_PLAIN]

    def load(self, path: Path, map_location: Any = "cpu", mapped: bool = False) -> Any:
        """The content of the file at `path`, with the frozen weights from the file next to it.

        Args:
            map_location: where tensors arrive, as for `torch.load`. None is the device that they
                were on: often another rank's, on which this process would create a context.
            mapped: leave tensors in the file until they are used, if the file can be mapped.

        Raises:
            CheckpointError: the file contains objects of a class not known to be safe, or is not
                a state at all.
        """
        content = self._load(path, map_location, mapped)
        try:
            content = with_arrays(content)
        except RecursionError as error:
            raise CheckpointError(f"{path.name} is nested too deeply to be a state") from error
        if (beside := frozen_path(path)).is_file():
            content = with_frozen(content, self._load(beside, map_location, mapped))
        return content

    def _load(self, path: Path, map_location: Any, mapped: bool) -> Any:
        options: dict[str, Any] = {
            "map_location": map_location,
            # torch's older format cannot be mapped
            "mmap": mapped and zipfile.is_zipfile(path),
            **self._options,
            "weights_only": not self.trusted,
        }
        if self.trusted:
            return torch.load(path, **options)
        try:
            with self._known_classes():
                return torch.load(path, **options)
        except pickle.UnpicklingError as error:
            try:
                names = self.unsafe_classes(path)
            except (pickle.UnpicklingError, *_MALFORMED):  # torch's older format, or not a pickle
                names = []
            # Never numpy's: see `stored_arrays`.
            *_, cause = str(error).split("WeightsUnpickler error:")
            first_line = cause.strip().partition("\n")[0]
            single = (
                "To allow single classes, call torch.serialization.add_safe_globals([…]) in the "
                f"trial's module [{first_line}]"
            )
            if any(map(is_numpys, names)):
                single = (
                    "Arrays and numbers of numpy's in a pickle are such objects: trialflow stores "
                    "them as plain data, but an earlier version and other programs do not"
                )
            raise CheckpointError(
                f"{path.name} holds objects of "
                f"{', '.join(names) or 'a class that is not known to be safe'}, and reading such "
                "objects can run code. If you trust the writer of this checkpoint, set "
                f"checkpointing.trusted: true (trialflow export: --trusted). {single}"
            ) from None
        except _MALFORMED as error:
            if options["map_location"] != "cpu":
                Reader(classes=self.classes)._load(path, "cpu", mapped)
                raise  # the CPU can read it: the device is at fault
            first_line = str(error).strip().partition("\n")[0]
            advice = "verify the checkpoint with trialflow checkpoints verify"
            if isinstance(error, MemoryError) or "allocate memory" in first_line:
                advice = f"it needs more memory than is free, or is malformed: {advice}"
            raise CheckpointError(
                f"{path.name} cannot be read as a state: {type(error).__name__}: {first_line}; "
                f"{advice}"
            ) from error
        finally:
            # torch keeps those of a file that it refuses, and would refuse the next file for them.
            torch._utils._sparse_tensors_to_validate.clear()

    def load_mapped(self, path: Path) -> Any:
        """Like `load`, on the CPU; tensors stay in the file until they are used."""
        return self.load(path, mapped=True)

    def unsafe_classes(self, file: Path | IO[bytes]) -> list[str]:
        """Dotted names of the file's classes that only a trusting reader constructs."""
        with self._known_classes():
            return sorted(get_unsafe_globals_in_checkpoint(file))

    @contextmanager
    def _known_classes(self) -> Iterator[None]:
        """Inside the block, torch constructs our classes too, and none of numpy's.

        Another package may have allowed numpy's for the whole process.
        """
        allowed = get_safe_globals()
        if not any(map(_is_of_numpy, allowed)):
            with safe_globals([*({*self._safe} - {*allowed})]):  # the end removes them
                yield
            return
        clear_safe_globals()
        add_safe_globals([*(each for each in allowed if not _is_of_numpy(each)), *self._safe])
        try:
            yield
        finally:
            clear_safe_globals()
            add_safe_globals(allowed)


def is_numpys(name: str) -> bool:
    return name.startswith("numpy.")


def _is_of_numpy(allowed: Any) -> bool:
    names = allowed[1] if isinstance(allowed, tuple) else getattr(allowed, "__module__", "") or ""
    return f"{names}.".startswith("numpy.")
