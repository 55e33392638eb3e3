"""Where things lie under a storage's root. Pure names, no I/O.

::

    manifests/{trial}/{batches:010d}-{uuid}.json   the commit: written last, once, create-only
    checkpoints/{uuid}/{path}                      files as the trial's save wrote them
    uploads/{trial}/{uuid}.json                    that somebody uploads it, until the commit
    attempts/{trial}/{number:06d}.json             who has taken the trial over; the last may commit
    pins/{uuid}.json                               that a checkpoint stays
    pins/{uuid}/{model}/{move:06d}-{unique}.json   that the registry needs it
    claims/{trial}.json                            that a trial runs, and what it needs
    deletions/{uuid}.json                          that a checkpoint is being deleted
    runs/{trial}/{path}                            what a run writes beside: TensorBoard, traces
    models/{model}/versions/{number:06d}.json      a checkpoint under a number; create-only
    models/{model}/moves/{number:06d}.json         what the model's aliases are; the last holds
    models/{model}/locks/{time}-{unique}.json      who appends to these, where `create` is not safe
    models/{model}/retrainings/{run}/{path}        what a retraining writes
    probes/{uuid}                                  written, read and deleted to try the storage

A key is a POSIX path relative to the root. A file without a manifest is no checkpoint: it is an
upload under way, or what is left of one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MANIFESTS = "manifests"
CHECKPOINTS = "checkpoints"
UPLOADS = "uploads"
ATTEMPTS = "attempts"
RUNS = "runs"
MODELS = "models"

MANIFEST_NAME = "manifest.json"
"""What the manifest is called in a downloaded checkpoint's folder; no file may be called so."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_MANIFEST_KEY = re.compile(
    rf"{MANIFESTS}/(?P<trial>[^/]+)/(?P<batches>[0-9]{{10,}})-(?P<uuid>[^/]+)\.json"
)
_INTENT_KEY = re.compile(rf"{UPLOADS}/(?P<trial>[^/]+)/(?P<uuid>[^/]+)\.json")
_NUMBERED = re.compile(r"(?P<folder>.+)/(?P<number>[0-9]{6,})\.json")
_ATTEMPT_KEY = re.compile(rf"{ATTEMPTS}/[^/]+/(?P<number>[0-9]{{6,}})\.json")


class ManifestName(NamedTuple):
    """What a manifest's key says of its checkpoint."""

    trial: str
    batches: int
    uuid: str

    @property
    def key(self) -> str:
        """The key this was read from."""
        return manifest_key(self.trial, self.batches, self.uuid)


def manifest_key(trial: str, batches: int, uuid: str) -> str:
    """The key of a checkpoint's manifest. Sorting the keys of a trial sorts by batches."""
    return f"{trial_folder(trial)}/{batches:010d}-{uuid}.json"


def trial_folder(trial: str) -> str:
    """The folder of a trial's manifests."""
    return f"{MANIFESTS}/{trial}"


def files_folder(uuid: str) -> str:
    """The folder of a checkpoint's files."""
    return f"{CHECKPOINTS}/{uuid}"


def file_key(uuid: str, path: str) -> str:
    """The key of one of a checkpoint's files."""
    return f"{files_folder(uuid)}/{path}"


def intents_folder(trial: str) -> str:
    """The folder of what says which checkpoints of a trial are being uploaded."""
    return f"{UPLOADS}/{trial}"


def intent_key(trial: str, uuid: str) -> str:
    """The key of what says that a checkpoint is being uploaded."""
    return f"{intents_folder(trial)}/{uuid}.json"


def parse_intent_key(key: str) -> str | None:
    """The uuid of the checkpoint that is being uploaded; None where the key is another one."""
    match = _INTENT_KEY.fullmatch(key)
    return match["uuid"] if match is not None and is_uuid(match["uuid"]) else None


def attempts_folder(trial: str) -> str:
    """The folder of what says who has taken a trial over."""
    return f"{ATTEMPTS}/{trial}"


def attempt_key(trial: str, number: int) -> str:
    """The key of what says that an attempt has taken a trial over."""
    return f"{attempts_folder(trial)}/{number:06d}.json"


def parse_attempt_key(key: str) -> int | None:
    """The attempt's number; None where the key is another one."""
    match = _ATTEMPT_KEY.fullmatch(key)
    return int(match["number"]) if match is not None else None


def model_folder(model: str) -> str:
    """The folder of all that belongs to a model."""
    return f"{MODELS}/{model}"


def versions_folder(model: str) -> str:
    """The folder of a model's versions."""
    return f"{model_folder(model)}/versions"


def moves_folder(model: str) -> str:
    """The folder of the moves of a model's aliases."""
    return f"{model_folder(model)}/moves"


def locks_folder(model: str) -> str:
    """The folder of what says who appends to a model's versions or moves."""
    return f"{model_folder(model)}/locks"


def retraining_key(model: str, run: str, path: str) -> str:
    """The key of one of the files that a retraining of a model writes.

    Args:
        run: the retraining's id.
    """
    return f"{model_folder(model)}/retrainings/{run}/{path}"


def numbered_key(folder: str, number: int) -> str:
    """The key of an object that is called by a number. Sorting the keys sorts by it."""
    return f"{folder}/{number:06d}.json"


def parse_numbered_key(folder: str, key: str) -> int | None:
    """The number; None where the key is another one."""
    match = _NUMBERED.fullmatch(key)
    return int(match["number"]) if match is not None and match["folder"] == folder else None


def run_folder(trial: str) -> str:
    """The folder of what a trial's runs write beside checkpoints."""
    return f"{RUNS}/{trial}"


def folders_of(trial: str) -> tuple[str, ...]:
    """The folders that belong to a trial as a whole."""
    return trial_folder(trial), intents_folder(trial), run_folder(trial)


def run_file_key(trial: str, path: str) -> str:
    """The key of one of those files."""
    return f"{run_folder(trial)}/{path}"


def parse_manifest_key(key: str) -> ManifestName | None:
    """What the key of a manifest says, or None when it is no manifest's key."""
    match = _MANIFEST_KEY.fullmatch(key)
    if match is None or not is_name(match["trial"]) or not is_uuid(match["uuid"]):
        return None
    return ManifestName(match["trial"], int(match["batches"]), match["uuid"])


def is_name(text: str) -> bool:
    """Whether a trial or a model may be called so: letters, digits, and within them ``._-``."""
    return _NAME.fullmatch(text) is not None


def is_uuid(text: str) -> bool:
    """Whether a checkpoint may be called so: letters, digits, and within them ``-``."""
    return _UUID.fullmatch(text) is not None


def is_file_path(path: str) -> bool:
    """Whether a checkpoint's file may be called so, and joined to a folder stays inside it.

    A relative POSIX path in its plainest spelling: no ``..``, ``.`` or empty part, no backslash
    and no drive (either would climb out on Windows), no control character, valid UTF-8.
    """
    if not path.isprintable() or "\\" in path or re.match(r"[A-Za-z]:", path):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
