"""Random pickles over the names that the restricted reader allows, read in this process.

``python -m tests.support.pickle_fuzz FIRST_SEED COUNT`` prints counts as JSON. A line on stderr
names each seed just before it is read if ``PICKLE_FUZZ_SHOW`` is set.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler as torchs

from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader

MEMORY_BYTES = 256 << 20
"""Address space beyond what the process has after its imports."""

TORCHS_VARIABLES = {"CUDA_MODULE_LOADING"}
"""Set by a torch for CUDA when it looks for a GPU."""

ENUMS: list[str] = []
KINDS: list[Any] = []
"""DeepSpeed's classes, if it is installed."""

OTHERS = (
    "functools.partial", "builtins.getattr", "os.system", "numpy.dtype", "numpy.ndarray",
    "numpy._core.multiarray._reconstruct", "torch.optim.lr_scheduler.LambdaLR", "enum.Enum",
)  # fmt: skip
SIZES = (0, 1, 2, 3, -1, 7, 255, 4096, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63, 2**64, -(2**63))
TEXTS = (
    "", "a", "__class__", "__dict__", "_value_", "storage", "cpu", "cuda:0", "meta",
    "torch.strided", "torch.sparse_coo", "latin1", "utf-8", "rot13", "_metadata", "requires_grad",
    "0", "__setstate__",
)  # fmt: skip


def names() -> list[str]:
    plain = [
        *(f"builtins.{each}" for each in ("frozenset", "range", "slice")),
        *(f"datetime.{each}" for each in ("datetime", "date", "timedelta", "timezone")),
        "pathlib.PosixPath", "pathlib.PurePosixPath", *ENUMS,
    ]  # fmt: skip
    return sorted(torchs._get_allowed_globals()) + plain


class Fuzz:
    """One pickle of random values; `values` are on the stack when `program` has run."""

    def __init__(self, seed: int, known: list[str], likely: list[str]) -> None:
        self.random = random.Random(seed)
        self.known = known
        self.likely = likely
        self.program = bytearray(b"\x80\x02")
        self.memos = 0

    def pickle(self) -> bytes:
        for _ in range(self.random.randint(1, 4)):
            self.value(0)
        if self.random.random() < 0.1:  # anything may follow
            self.program += bytes(self.random.choice(b"()}]tbRo\x81saeuQh0") for _ in range(6))
        return bytes(self.program + b".")

    def number(self) -> None:
        size = self.random.choice(SIZES)
        if self.random.random() < 0.6:
            size = self.random.randint(0, 5)
        data = pickle.encode_long(size)
        self.program += b"\x8a" + bytes([len(data)]) + data

    def text(self) -> None:
        data = self.random.choice(TEXTS).encode()
        self.program += b"X" + struct.pack("<I", len(data)) + data

    def name(self) -> None:
        weights = self.random.random()
        some = OTHERS if weights < 0.02 else self.known
        if weights > 0.5:
            some = self.likely
        module, _, name = self.random.choice(some).rpartition(".")
        self.program += f"c{module}\n{name}\n".encode()

    def storage(self) -> None:
        """What torch's own files have: a tuple that names a storage of the file."""
        self.program += b"("
        self.program += b"X\x07\x00\x00\x00storage" if self.random.random() < 0.95 else b"N"
        kind = self.random.choice(["FloatStorage", "LongStorage", "ByteStorage", "UntypedStorage"])
        module = "torch.storage" if kind == "UntypedStorage" else "torch"
        self.program += f"c{module}\n{kind}\n".encode()
        self.program += b"X\x01\x00\x00\x00" + self.random.choice([b"0", b"1", b"9"])
        self.program += b"X\x03\x00\x00\x00cpu"
        self.number()
        self.program += b"tQ"

    def numbers(self) -> None:
        self.program += b"("
        for _ in range(self.random.randint(0, 3)):
            self.number()
        self.program += b"t"

    def tensor(self) -> None:
        """The call with right types and wild sizes."""
        self.program += b"ctorch._utils\n_rebuild_tensor_v2\n("
        self.storage()
        self.number()
        self.numbers()
        self.numbers()
        self.program += self.random.choice([b"\x88", b"\x89"])
        self.program += b"ccollections\nOrderedDict\n)RtR"

    def value(self, depth: int) -> None:
        kinds: list[Any] = [self.number, self.text, self.numbers, self.storage, self.tensor]
        simple = [b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"G" + struct.pack(">d", 0.5)]
        draw = self.random.random()
        if depth > 4 or draw < 0.15:
            self.program += self.random.choice(simple)
        elif draw < 0.45:
            self.random.choice(kinds)()
        elif draw < 0.52 and self.memos:
            self.program += b"h" + bytes([self.random.randrange(self.memos)])
        elif draw < 0.58:
            self.name()
        elif draw < 0.80:  # a call, or a new object
            self.name()
            self.arguments(depth)
            self.program += self.random.choice([b"R", b"R", b"R", b"\x81"])
        elif draw < 0.90:  # BUILD
            self.value(depth + 1)
            self.mapping(depth)
            self.program += b"b"
        elif draw < 0.95:
            self.mapping(depth)
        else:
            self.program += b"](" if self.random.random() < 0.5 else b"("
            for _ in range(self.random.randint(0, 3)):
                self.value(depth + 1)
            self.program += b"e" if self.program.endswith(b"](") else b"t"
        if self.random.random() < 0.2 and self.memos < 255:
            self.program += b"q" + bytes([self.memos])
            self.memos += 1

    def arguments(self, depth: int) -> None:
        self.program += b"("
        for _ in range(self.random.randint(0, 7)):
            self.value(depth + 1)
        self.program += b"t"

    def mapping(self, depth: int) -> None:
        self.program += self.random.choice([b"}", b"}", b"ccollections\nOrderedDict\n)R"]) + b"("
        for _ in range(self.random.randint(0, 3)):
            self.text()
            self.value(depth + 1)
        self.program += b"u"


def archive(content: bytes) -> bytes:
    """A file of `torch.save` with this pickle and two storages."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("state/data.pkl", content)
        target.writestr("state/byteorder", "little")
        target.writestr("state/data/0", bytes(64))
        target.writestr("state/data/1", b"")
        target.writestr("state/version", "3\n")
    return file.getvalue()


def shared() -> list[Any]:
    """What a pickle could change for the whole process: attributes of classes and functions."""
    objects = {
        *torchs._get_allowed_globals().values(),
        *torchs._get_user_allowed_globals().values(),
    }
    members = [dict(vars(each)) for kind in KINDS for each in kind]
    return [
        members,
        sorted((repr(each), sorted(vars(each))) for each in objects if hasattr(each, "__dict__")),
        sorted(vars(torch)), sorted({*os.environ} - TORCHS_VARIABLES), torch.get_default_dtype(),
    ]  # fmt: skip


def main(first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    reader = Reader()
    try:
        from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES, ZeroStageEnum

        reader = Reader(classes=CHECKPOINT_CLASSES)
        ENUMS.extend(
            [
                "deepspeed.runtime.zero.config.ZeroStageEnum",
                "deepspeed.runtime.fp16.loss_scaler.LossScaler",
                "deepspeed.utils.tensor_fragment.fragment_address",
            ]
        )
        KINDS.append(ZeroStageEnum)
    except ImportError:
        pass
    known = names()
    likely = [each for each in known if "_rebuild" in each or "builtins" in each or each in ENUMS]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        path = Path(folder, "state.pt")
        reader.load(_written(path, pickle.dumps({}, 2)))
        before = shared()
        for seed in range(first, first + count):
            if os.environ.get("PICKLE_FUZZ_SHOW"):
                print(seed, file=sys.stderr, flush=True)
            try:
                reader.load(_written(path, Fuzz(seed, known, likely).pickle()))
                results["returned"] += 1
            except CheckpointError as error:
                results["refused" if "can run code" in str(error) else "malformed"] += 1
            except BaseException as error:  # noqa: BLE001 - what the fuzz is to find
                results[f"{seed}: {type(error).__name__}: {error}"[:200]] += 1
            if (seed % 500 == 0 or seed == first + count - 1) and shared() != before:
                results[f"{seed}: the process is changed"] += 1
                before = shared()
    print(json.dumps(results))


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(archive(content))
    return path


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
