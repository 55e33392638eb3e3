"""The code of a run's trial: the folder that its ranks start in, and what its checkpoints name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.code_objects import RunCode, check_code, read_code
from trial_core.checkpoint.manifest import Manifest, StoredCode
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.run.run_dirs import home_folder
from trial_core.storage.local_files import atomic_file
from trial_core.storage.storage_errors import ErrorTranslator
from trial_core.transfer.code_folder import pack_code, unpack_code

_FILE = "file://"


@dataclass(frozen=True)
class TrialCode:
    """The code of a run's trial.

    Attributes:
        folder: where it is on this machine.
        archive: what checkpoints name; None: they name no code.
    """

    folder: Path
    archive: RunCode | None = None


def code_of_folder(
    folder: Path, store: CheckpointStore, logger: logging.Logger | logging.LoggerAdapter[Any]
) -> TrialCode:
    """Pack a code folder for the checkpoints in `store`. Warns of what they will not have."""
    not_code = [home_folder()]
    if store.url.startswith(_FILE):  # a storage may be in the code folder, or be that folder
        root = Path(store.url.removeprefix(_FILE))
        not_code += [root / family for family in layout.FAMILIES]
    packed = pack_code(folder, not_code)
    if (warning := packed.warning(folder)) is not None:
        logger.warning("%s", warning)
    return TrialCode(folder, RunCode(packed.data) if packed.data is not None else None)


def code_of_checkpoint(store: CheckpointStore, manifest: Manifest, target: Path) -> TrialCode:
    """Fetch the code that a checkpoint names into a folder, replacing the folder.

    Raises:
        CheckpointError: the checkpoint names no code.
        CheckpointDamaged: its code is missing or differs.
    """
    data = read_code(store.storage, named_code(manifest), manifest.uuid)
    unpack_code(data, target)
    return TrialCode(target, RunCode(data))


def named_code(manifest: Manifest) -> StoredCode:
    """The code that a checkpoint names.

    Raises:
        CheckpointError: it names none.
    """
    if manifest.code is None:
        raise CheckpointError(
            f"checkpoint {manifest.uuid} names no code of {manifest.entrypoint}: an earlier "
            "version of trialflow saved it, or its code folder held no code; use the original "
            "code folder"
        )
    return manifest.code


def downloaded_code(folder: Path, code: StoredCode) -> Path:
    """The code archive in the folder of a downloaded checkpoint."""
    return folder / f"code-{code.digest.removeprefix('sha256:')[:16]}.tar"


def download_code(store: CheckpointStore, manifest: Manifest, folder: Path) -> None:
    """Bring the code that a checkpoint names, if any, into the folder of its files."""
    if manifest.code is None:
        return
    path = downloaded_code(folder, manifest.code)
    data = read_code(store.storage, manifest.code, manifest.uuid)
    with (
        ErrorTranslator(str(folder)).translated("write into"),
        atomic_file(path, is_durable=False) as file,
    ):
        file.write(data)


def read_downloaded_code(folder: Path, manifest: Manifest) -> bytes:
    """The code archive in the folder of a downloaded checkpoint, compared with its digest.

    Raises:
        CheckpointError: the checkpoint names no code.
        CheckpointDamaged: its code is missing or differs.
    """
    code = named_code(manifest)
    path = downloaded_code(folder, code)
    if not path.is_file():
        raise CheckpointDamaged(
            f"{path}, the code of checkpoint {manifest.uuid}, is missing: download the checkpoint "
            "again, or use the original code folder"
        )
    with ErrorTranslator(str(folder)).translated("read"):
        data = path.read_bytes()
    check_code(data, code, str(path))
    return data
