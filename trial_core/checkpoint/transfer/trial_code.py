"""The code of a run's trial: the folder that its ranks start in, and the archive of that folder.

The archive is one of a checkpoint's files, so it is verified, downloaded and deleted with it. Code
that has not changed is stored by two checkpoints, as other files.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.credentials import secrets_in
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource
from trial_core.checkpoint.transfer.code_archive import MAX_ARCHIVE_BYTES, unpack_code
from trial_core.checkpoint.transfer.code_folder import IGNORE_FILES, TAKE_IN, PackedCode, pack_code
from trial_core.common.any_logger import AnyLogger
from trial_core.common.text_format import size
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointDamaged, CheckpointError, ConfigError
from trial_core.processes.machine.run_dirs import home_folder
from trial_core.schedule.command import command_of

_FILE = "file://"


@dataclass(frozen=True)
class TrialCode:
    """The code of a run's trial: its folder on this machine, and that packed for its checkpoints;
    None if they have no code."""

    folder: Path
    archive: bytes | None = None

    @property
    def digest(self) -> str:
        """``sha256:`` and the digest of the archive; empty without an archive."""
        return f"sha256:{hashlib.sha256(self.archive).hexdigest()}" if self.archive else ""


def code_of_folder(
    config: ExperimentConfig, store: CheckpointStore, logger: AnyLogger, must_send: bool = False
) -> TrialCode:
    """Pack the code folder of an experiment for the checkpoints in `store`. Logs the size, and
    warns of files that are left out.

    Raises ConfigError as `pack_code`; or, if the archive is all that the ranks have where they
    start (`must_send`), because it lacks the entrypoint's own file.
    """
    packed = packed_code(config, store)
    logger.info("checkpoints get %s", packed.summary(config.code))
    for warning in packed.warnings(config.code):
        logger.warning("%s", warning)
    if (missing := entrypoint_left_out(config, packed)) is not None:
        if must_send:
            raise ConfigError(
                f"entrypoint: {missing}; or mount the code folder on every node "
                "(environment.code: shared)"
            )
        logger.warning("%s", missing)
    return TrialCode(config.code, packed.data)


def entrypoint_left_out(config: ExperimentConfig, packed: PackedCode) -> str | None:
    """Why an archive lacks the entrypoint's own file; None if it has it, or is empty."""
    command = command_of(config.entrypoint)
    target = command.target if command is not None else config.entrypoint.partition(":")[0]
    if command is not None and not command.is_module:
        names = [posixpath.normpath(target)]
    else:
        path = target.replace(".", "/")
        names = [f"{path}.py", f"{path}/__init__.py"]
    there = [name for name in names if os.path.isfile(config.code / name)]
    is_packed = packed.data is None or any(name in packed.files for name in names)
    if is_packed or not there or os.path.isabs(there[0]):
        return None
    found = [
        each for each in packed.left_out if f"{there[0]}/".startswith(f"{each.path.rstrip('/')}/")
    ]
    why, remedy = (found[0].why, found[0].remedy) if found else ("it is ignored", TAKE_IN)
    remedy = (
        f"in {config.code / IGNORE_FILES[0]}, {remedy}" if remedy else "keep the code elsewhere"
    )
    return (
        f"the code that checkpoints and nodes get lacks {there[0]}, the module or script of "
        f"entrypoint {config.entrypoint} ({why}): {remedy}"
    )


def packed_code(config: ExperimentConfig, store: CheckpointStore) -> PackedCode:
    """The packed code folder of an experiment, without its files that are not code: the runs'
    folder, the storage, the token of its nodes, its credentials. Raises as `pack_code`."""
    not_code = [home_folder()]
    if (token := config.resources.channel.token_file) is not None:
        not_code.append(token.expanduser())
    storage = store.spec
    if storage.url.startswith(_FILE):  # a storage may be in the code folder, or be that folder
        root = Path(storage.url.removeprefix(_FILE))
        not_code += [root / name for name in (*layout.FAMILIES, layout.MARK)]
    variables = config.environment.environment_variables
    secrets = [*secrets_in(storage.url, storage.options), *secrets_in("", variables)]
    return pack_code(config.code, not_code, secrets)


def upload_code(
    store: CheckpointStore, uuid: str, archive: bytes | None, shared: Iterable[FileEntry] = ()
) -> FileEntry | None:
    """Store a checkpoint's code, after `CheckpointStore.announce_upload`, so that leftovers are
    found; return its entry for the manifest. May be repeated. `shared`: as for `upload_staged`."""
    if archive is None:
        return None
    digest = f"sha256:{hashlib.sha256(archive).hexdigest()}"
    there = next((each for each in shared if each.digest == digest), None)
    entry = FileEntry(
        path=StoredPath(layout.CODE_NAME), size_bytes=len(archive), digest=digest, rank=0,
        stored_at=there.stored_at if there else StoredPath(""),
        copy_at=there.copy_at if there else StoredPath(""),
    )  # fmt: skip
    if not entry.stored_at:
        store.storage.write(layout.file_key(uuid, layout.CODE_NAME), archive)
    return entry


def code_of_checkpoint(checkpoint: CheckpointSource, target: Path) -> TrialCode:
    """Fetch the code of a checkpoint into a folder, replacing the folder.

    Raises as `CheckpointSource.files`, CheckpointError if the checkpoint has no code, and
    CheckpointDamaged if it has more than trialflow packs.
    """
    manifest = checkpoint.manifest
    if manifest.code is None:
        raise CheckpointError(
            f"checkpoint {manifest.uuid} has no code of {manifest.entrypoint}: its trial had no "
            "code folder, or that held no code; use the original code folder"
        )
    if manifest.code.size_bytes > MAX_ARCHIVE_BYTES:
        raise CheckpointDamaged(
            f"the code of the checkpoint {manifest.uuid} has {size(manifest.code.size_bytes)}, and "
            f"trialflow writes no more than {size(MAX_ARCHIVE_BYTES)}: it may be hostile; use the "
            "original code folder"
        )
    with checkpoint.files([manifest.code]) as folder:
        data = (folder / manifest.code.checked_path).read_bytes()
    unpack_code(data, target, f"the code of the checkpoint {manifest.uuid}")
    return TrialCode(target, data)
