"""Refuses a checkpoint of Hugging Face's Trainer that would run code when the Trainer reads it.

DeepSpeed and torch's distributed checkpoints unpickle without limits, and the Trainer itself allows
classes of numpy. So the restricted reader reads each pickle first: what it accepts contains the
same calls for the other readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader

_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_DISTRIBUTED = (".metadata", ".distcp")
"""Of torch.distributed.checkpoint: pickles within a format of its own."""
_NOT_READ = "training_args.bin"  # written by the Trainer, not read by it
_TAGS = ("latest", "latest_universal")
"""DeepSpeed's files that name the folder to read."""
CHECKPOINT = re.compile(r"checkpoint-\d+", re.ASCII)
"""The name of a Trainer's folder."""
_BEST = "best_model_checkpoint"
_ADAPTER, _MEGATRON = "adapter_config.json", "megatron.core"
"""An adapter's config of peft, and the one module that it may name."""
_WAY_OUT = (
    "If you trust the writers of the storage, set checkpointing.trusted: true; without an "
    "experiment file, TrialflowCallback(exp_conf={'checkpointing': {'trusted': True}})"
)


def require_safe(folder: Path, classes: Sequence[Any]) -> None:
    """Refuse a checkpoint if one of its files may run code when it is unpickled.

    Args:
        folder: holds the Trainer's folder, ``checkpoint-<step>``.
        classes: as of `Reader`.

    Raises:
        CheckpointError: names the file, and the class.
    """
    reader = Reader(classes=[*classes, *_numpys_of_random_states()])
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder)
        if file.name.endswith(_DISTRIBUTED):
            raise CheckpointError(
                f"{name} is a part of a distributed checkpoint (FSDP's sharded state), which torch "
                f"unpickles without limits. {_WAY_OUT}, or save with FULL_STATE_DICT"
            )
        if file.name in _TAGS and not re.fullmatch(r"\w[\w.-]{,150}\s{,9}", _beginning(file)):
            raise CheckpointError(
                f"{name} names {_beginning(file)!r}; expected a folder next to it, such as "
                "global_step100"
            )
        if file.name == _ADAPTER and (module := _module_of(file)) not in (None, _MEGATRON):
            raise CheckpointError(
                f"{name} names the module {module!r}, which peft 0.18 imports: it may be a file of "
                f"this folder; expected {_MEGATRON}. {_WAY_OUT}"
            )
        if file.name.endswith(_PICKLES) and name.parts[1:] != (_NOT_READ,):
            try:
                reader.load_mapped(file)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}. {_WAY_OUT}") from error


def name_best_beside(folder: Path) -> None:
    """Have the Trainer look for its best checkpoint beside `folder`, its fetched checkpoint.

    Its state names a path, on the machine that has saved it, and DeepSpeed unpickles what is there.
    """
    file = folder / "trainer_state.json"
    try:
        state = json.loads(file.read_text())
        best = state.get(_BEST)
    except (OSError, ValueError, RecursionError, AttributeError):
        return  # the Trainer cannot read it, either
    if best is not None:
        name = Path(str(best)).name
        state[_BEST] = str(folder.parent / name) if CHECKPOINT.fullmatch(name) else None
        replace_file(file, json.dumps(state, indent=2, sort_keys=True).encode())


def _module_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text()).get("megatron_core")
    except (ValueError, RecursionError, AttributeError):
        return None  # peft cannot read it, either


def _beginning(file: Path) -> str:
    with file.open(errors="replace") as opened:
        return opened.read(200)


class _Dtype:
    """What a pickle says of numpy's dtype of random states, without numpy."""

    def __new__(cls, *arguments: object) -> _Dtype:  # not __init__: NEWOBJ does not call it
        _require(arguments == ("u4", False, True), "dtype", arguments)
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        _require(state == (3, "<", None, None, None, -1, -1, 0), "dtype", state)


class _Words:
    """What a pickle says of the array of 624 words in numpy's random state, without numpy."""

    def __setstate__(self, state: Any) -> None:
        is_known = type(state) is tuple and len(state) == 5 and type(state[2]) is _Dtype
        is_known = is_known and type(state[4]) is bytes and len(state[4]) == 4 * 624
        _require(is_known and (*state[:2], state[3]) == (1, (624,), False), "array", state)


def _new_words(*arguments: Any) -> _Words:
    _require(arguments == (_Words, (0,), b"b"), "array", arguments)
    return _Words()


def _require(is_known: bool, kind: str, given: object) -> None:
    if not is_known:
        raise ValueError(f"expected the {kind} of a random state of numpy's, got {given!r:.80}")


def _numpys_of_random_states() -> list[Any]:
    core = [(_new_words, f"numpy.{each}.multiarray._reconstruct") for each in ("core", "_core")]
    return [*core, (_Words, "numpy.ndarray"), (_Dtype, "numpy.dtype")]
