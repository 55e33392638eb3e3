"""The training text, which every machine has: the source code of Python's standard library.

A hash of a file's path decides whether the whole file is for training or for validation. `Days`
selects the files of some days, for a model that is retrained daily. `baselines` gives the
entropies of byte counts, for comparison with a model.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Installed packages, tests (which some distributions omit), tables and generated text.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)
VALIDATION_PERIOD = 10  # about one file in ten is for validation


@dataclass(frozen=True)
class Text:
    """The training and the validation text, as 1-D uint8 tensors."""

    training: Tensor
    validation: Tensor


class Windows(Dataset[Tensor]):
    """A text cut into windows. Item *i* is (window + 1) bytes as uint8: bytes 0 to window - 1 are
    the inputs, bytes 1 to window the targets.

    Neighbouring windows share one byte, so each byte but the first is a target exactly once.

    Args:
        limit: number of windows to keep, evenly spaced over the text; None keeps all.
    """

    def __init__(self, text: Tensor, window: int, limit: int | None = None) -> None:
        if len(text) <= window:
            raise ValueError(
                f"a text of {len(text)} bytes is too short for a window of {window} bytes and its "
                "last target"
            )
        self._windows = text.unfold(0, window + 1, window)
        if limit is not None and limit < len(self._windows):
            self._windows = self._windows[torch.arange(limit) * len(self._windows) // limit]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All (byte, next byte) pairs as two 1-D int64 tensors."""
        windows = self._windows.long()
        return windows[:, :-1].flatten(), windows[:, 1:].flatten()


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """The Python files of the text, as sorted paths relative to `root`."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # it enters no others
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(path.relative_to(root) for path in found if path.is_file())


def is_for_validation(path: Path) -> bool:
    """Whether a file is for validation; depends only on its relative path."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % VALIDATION_PERIOD == 0


@dataclass(frozen=True)
class Days:
    """A window of days. On each day the next files arrive, in the order of their paths; after the
    last file follows the first. So the files of a window depend only on its days.

    Attributes:
        end: the day after the last one.
        count: number of days.
        files_per_day: number of files that arrive on each day.
    """

    end: date
    count: int
    files_per_day: int

    @classmethod
    def from_config(cls, data: Mapping[str, Any]) -> Days | None:
        """The days in an experiment's `data` section; None if it has none.

        Raises:
            ValueError: `window_end` is not a date.
        """
        if "window_end" not in data:
            return None
        end = data["window_end"]
        try:
            day = date.fromisoformat(end)
        except ValueError:
            raise ValueError(
                f"data.window_end is {end!r}, expected a day such as 2026-11-21; only `trialflow "
                "retrain` replaces templates in braces; to train once, add "
                "--set data.window_end=2026-11-21"
            ) from None
        return cls(day, data["window_days"], data["files_per_day"])

    def select(self, files: list[Path]) -> list[Path]:
        """Those of all files that arrived on these days, each once."""
        last = self.end.toordinal() * self.files_per_day
        count = min(self.count * self.files_per_day, len(files))
        return [files[index % len(files)] for index in range(last - count, last)]


@lru_cache(maxsize=1)
def load_text(root: Path | None = None, days: Days | None = None) -> Text:
    """The standard library's source, split by file.

    Args:
        days: only the files that arrived on these days.

    Raises:
        FileNotFoundError: this Python has no source of its library, or the days have too few files.
    """
    root = root or standard_library()
    files = source_files(root)
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in days.select(files) if days and files else files:
        texts[is_for_validation(path)].append((root / path).read_bytes())
    if not all(texts.values()):
        raise FileNotFoundError(
            f"found {sum(map(len, texts.values()))} Python files in {root}, too few for a training "
            "and a validation text; use a Python that is installed with its library's source"
            + (", or more days" if days else "")
        )
    training, validation = (
        torch.frombuffer(bytearray(b"".join(texts[side])), dtype=torch.uint8)
        for side in (False, True)
    )
    return Text(training, validation)


@dataclass(frozen=True)
class Baselines:
    """The loss of predictions that only count bytes, in bits per byte.

    Attributes:
        unigram: entropy of the validation bytes: no prediction without context can do better.
        bigram: cross-entropy of each byte given the previous one, by the frequency of such pairs in
            the training text (add-one smoothed, so that unseen pairs have a probability).
    """

    unigram: float
    bigram: float


def baselines(training: Tensor, windows: Windows) -> Baselines:
    """The baselines on exactly the bytes that a model predicts on `windows`."""
    inputs, targets = windows.pairs()
    frequencies = torch.bincount(targets, minlength=256).double() / len(targets)
    unigram = -torch.xlogy(frequencies, frequencies).sum()
    pairs = training[:-1].long() * 256 + training[1:]
    counts = torch.bincount(pairs, minlength=256 * 256).reshape(256, 256).double() + 1
    bigram = -(counts / counts.sum(dim=1, keepdim=True)).log()[inputs, targets].mean()
    return Baselines(unigram.item() / math.log(2), bigram.item() / math.log(2))
