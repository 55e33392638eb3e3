"""The text every machine has: the source code of Python's own standard library.

Files go whole to one side of the split, by a hash of their path, so that no function is trained
on and validated on. What to expect of a model is here too: the entropies of byte counts. And so are
days, for a model that is trained again and again: some files are of each.
"""

from __future__ import annotations

import hashlib
import math
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

# Installed packages, tests (which some distributions leave out), tables and generated text.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)
VALIDATION_SHARE = 10  # one file in so many is for validation


@dataclass(frozen=True)
class Text:
    """The two sides of the split, as 1-D uint8 tensors."""

    training: Tensor
    validation: Tensor


class Windows(Dataset[Tensor]):
    """A text cut into windows; item *i* is (window + 1) bytes as uint8: inputs, and targets one on.

    Neighbours share one byte, so each byte but the first is the target of exactly one window.

    Args:
        limit: keep only so many windows, evenly spaced over the text; None keeps all.
    """

    def __init__(self, text: Tensor, window: int, limit: int | None = None) -> None:
        if len(text) <= window:
            raise ValueError(
                f"a text of {len(text)} bytes holds no window of {window} bytes and its next one"
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
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """The Python files under `root` that make the text, as sorted paths relative to it."""
    found = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in found if not SKIPPED_FOLDERS.intersection(path.parts))


def is_for_validation(path: Path) -> bool:
    """Which side of the split a file is on, from its relative path alone."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0


@dataclass(frozen=True)
class Days:
    """Some days, on each of which the same number of files arrives: in the order of their paths,
    and from the beginning again when all have been there. So a later day has other files, and which
    they are depends on nothing but the day.

    Attributes:
        end: the day after the last one.
        count: how many days.
        files_per_day: how many files arrive on each.
    """

    end: date
    count: int
    files_per_day: int

    @classmethod
    def from_config(cls, data: Mapping[str, Any]) -> Days | None:
        """Those that the section `data` of an experiment names; None: it names none.

        Raises:
            ValueError: `window_end` is no date.
        """
        if "window_end" not in data:
            return None
        end = data["window_end"]
        try:
            day = date.fromisoformat(end)
        except ValueError:
            raise ValueError(
                f"data.window_end is {end!r}, not a day such as 2026-11-21; what is in braces is "
                "filled in by `trialflow retrain`; to train once, --set data.window_end=2026-11-21"
            ) from None
        return cls(day, data["window_days"], data["files_per_day"])

    def select(self, files: list[Path]) -> list[Path]:
        """Of all files, those that arrived on these days, each once."""
        last = self.end.toordinal() * self.files_per_day
        count = min(self.count * self.files_per_day, len(files))
        return [files[index % len(files)] for index in range(last - count, last)]


@lru_cache(maxsize=1)
def load_text(root: Path | None = None, days: Days | None = None) -> Text:
    """The standard library's source, split by file.

    Args:
        days: only what arrived on these.

    Raises:
        FileNotFoundError: this Python comes without its library's source; or there are too few days
            for both sides of the split.
    """
    root = root or standard_library()
    files = source_files(root)
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in days.select(files) if days and files else files:
        sides[is_for_validation(path)].append((root / path).read_bytes())
    if not all(sides.values()):
        raise FileNotFoundError(
            f"found {sum(map(len, sides.values()))} Python files in {root}, too few for a training "
            "and a validation text; use a Python that is installed with its library's source"
            + (", or more days" if days else "")
        )
    training, validation = (
        torch.frombuffer(bytearray(b"".join(sides[side])), dtype=torch.uint8)
        for side in (False, True)
    )
    return Text(training, validation)


@dataclass(frozen=True)
class Baselines:
    """What counting alone achieves on some validation windows, in bits per byte.

    Attributes:
        unigram: entropy of the windows' own bytes: the least that any prediction that ignores
            context can reach, even one that was told how often each byte will occur.
        bigram: cross-entropy of each byte given the one before, by how often such pairs occur in
            the training text (add-one smoothed, so that unseen pairs stay possible).
    """

    unigram: float
    bigram: float


def baselines(training: Tensor, windows: Windows) -> Baselines:
    """The baselines on exactly the bytes that a model predicts when validated on `windows`."""
    inputs, targets = windows.pairs()
    frequencies = torch.bincount(targets, minlength=256).double() / len(targets)
    unigram = -torch.xlogy(frequencies, frequencies).sum()
    pairs = training[:-1].long() * 256 + training[1:]
    counts = torch.bincount(pairs, minlength=256 * 256).reshape(256, 256).double() + 1
    bigram = -(counts / counts.sum(dim=1, keepdim=True)).log()[inputs, targets].mean()
    return Baselines(unigram.item() / math.log(2), bigram.item() / math.log(2))
