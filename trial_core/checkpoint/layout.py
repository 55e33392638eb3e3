"""The keys of all objects in a storage. Pure names, no I/O.

A key is a POSIX path relative to the storage's root. All families of keys:

==============================================  ======================================  ==================================================
key                                             written by                              deleted by
==============================================  ======================================  ==================================================
manifests/{trial}/{batches:010d}-{uuid}.json    driver, to commit: last, create-only    prune
checkpoints/{uuid}/{path}                       ranks, while they upload                prune, once unreferenced; sweep if never committed
checkpoints/{uuid}/trial-code.tar               driver, before the ranks upload         as the other files
uploads/{trial}/{uuid}.json                     driver, before the upload (intent)      commit; sweep if never committed
attempts/{trial}/{number:06d}.json              driver, to take over the trial          later attempts: the last 8 stay
claims/{trial}/{run}.json                       driver, when it starts and restores     end of the run, or the next run of the trial
pins/{uuid}/pin-{unique}.json                   a person who pins                       a person who unpins, or pins again
pins/{uuid}/{model}/{move:06d}-{unique}.json    registry, before a promotion (hold)     a later move of the model's aliases
deletions/{uuid}/{unique}.json                  prune, before it deletes: one a prune   prune, when it has deleted
damages/{uuid}/{path}.json                      a reader that found the file damaged    prune, with the file
runs/{trial}/{path}                             ranks: TensorBoard files, traces        nothing
runs/{trial}/ledger/{number:06d}.json           driver, each minute and at the end      nothing
models/{model}/versions/{number:06d}.json       registry, to register; create-only      nothing
models/{model}/moves/{number:06d}.json          registry, to move aliases; create-only  nothing
models/{model}/retrainings/{run}/{path}         a retraining: its journal, its report   nothing
searches/{search}/{number:06d}.json             driver of a search; create-only         nothing
probes/{uuid}                                   a check of the storage                  the same check, or one after 7 days
trialflow-storage.json                          the first run: the storage's mark        nothing
==============================================  ======================================  ==================================================

Files without a manifest are not a checkpoint: an upload is in progress, or they are leftovers.

Trials, uuids and models come from users and from stored objects. Every function here that makes a
key of one checks it, because `..` or `/` would lead into another family or out of the storage.
What parses a key returns None for a key of another family.

The texts of stored objects that lead to a key, a file, a module or a server, by their check. All
others are only shown or compared (``test_stored_texts.py`` lists them):

=====================  =============================================================================
checked by             fields
=====================  =============================================================================
`checked_path`         FileEntry.path
`checked_place`        FileEntry.stored_at, FileEntry.copy_at
`checked_uuid`         Manifest.uuid, Intent.uuid, Intent.base, Version.checkpoint, Claim.needs,
                       Challenger.checkpoint, Protection.uuid, SavedCheckpoint.uuid,
                       RungReached.checkpoint
`checked_trial`        Manifest.trial, Intent.trial, Version.trial, RetrainingPlan.trial, Begun.id
`checked_model`        Numbered.model, Protection.model
`retraining_key`       Version.run
`_path`                Move.unique, Protection.unique: in keys alone
`checked_entrypoint`   Manifest.entrypoint
`from_json`            Deletion.manifest: a manifest
`without_paths`        SenderOrder.trackers: the options; the names are those of `find_tracker`
`sync_trackers`        SenderOrder.run_dir, SenderOrder.trial: replaced by its caller's
`find_tracker`         State.run: an id that only that tracker's server interprets
=====================  =============================================================================
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from trial_core.errors import CheckpointDamaged, CheckpointError, RegistryError

if TYPE_CHECKING:

    class StoredPath:
        """A path or a place in a stored object: at run time a text, to mypy none. So mypy refuses
        it where a file is opened, a path is joined or a command is run. Only `checked_path` and
        `checked_place` make usable texts of it."""

        def __init__(self, text: str) -> None: ...
        def __eq__(self, other: object) -> bool: ...
        def __hash__(self) -> int: ...
        def __lt__(self, other: StoredPath) -> bool: ...
        def __bool__(self) -> bool: ...
        def startswith(self, prefix: str | tuple[str, ...]) -> bool: ...
        def endswith(self, suffix: str) -> bool: ...
else:
    StoredPath = str

MANIFESTS = "manifests"
CHECKPOINTS = "checkpoints"
UPLOADS = "uploads"
ATTEMPTS = "attempts"
CLAIMS = "claims"
PINS = "pins"
DELETIONS = "deletions"
DAMAGES = "damages"
RUNS = "runs"
MODELS = "models"
SEARCHES = "searches"
FAMILIES = (
    MANIFESTS, CHECKPOINTS, UPLOADS, ATTEMPTS, CLAIMS, PINS, DELETIONS, DAMAGES, RUNS, MODELS,
    SEARCHES,
)  # fmt: skip
"""The folders at the root of a storage."""

MARK = "trialflow-storage.json"
"""The object that identifies a storage: see `storage_mark`."""

MANIFEST_NAME = "manifest.json"
"""The manifest's name in a downloaded checkpoint's folder. No file of a checkpoint may have it."""

CODE_NAME = "trial-code.tar"
"""The file of a checkpoint with its trial's code. No file of a rank may have this name."""

IMPORTED = "imported"
"""The folder of a checkpoint's files with weights alone that another program has written."""

VALIDATED = "validated"
"""Begins the folders of a checkpoint's files with the weights that validations saw, by engine."""

MAX_NUMBER = 10**18 - 1
"""The greatest number that a key has. A few more digits would not fit into a stored record."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_NAME_RULE = "expected up to 200 letters and digits, with '.', '_' and '-' between them"
_UUID = r"[A-Za-z0-9][A-Za-z0-9-]{0,63}"
# Each number has one spelling, so no two keys have one name: zeros fill up to the shortest width.
_NUMBER = r"(?P<number>[0-9]{6}|[1-9][0-9]{6,17})"
_BATCHES = r"(?P<batches>[0-9]{10}|[1-9][0-9]{10,17})"
_MANIFEST_KEY = re.compile(rf"{MANIFESTS}/(?P<trial>{_NAME})/{_BATCHES}-(?P<uuid>{_UUID})\.json")
_INTENT_KEY = re.compile(rf"{UPLOADS}/(?P<trial>{_NAME})/(?P<uuid>{_UUID})\.json")
_CLAIM_KEY = re.compile(rf"{CLAIMS}/(?P<trial>{_NAME})(/(?P<owner>[0-9a-f]+))?\.json")
_PROTECTION_KEY = re.compile(
    rf"{PINS}/(?P<uuid>{_UUID})/"
    rf"(pin(-(?P<pin>[0-9a-f]+))?|(?P<model>{_NAME})/{_NUMBER}-(?P<unique>[^/]+))\.json"
)
_DELETION_KEY = re.compile(rf"{DELETIONS}/(?P<uuid>{_UUID})/[0-9a-f]+\.json")
_NUMBERED = re.compile(rf"(?P<folder>.+)/{_NUMBER}\.json")


class ManifestName(NamedTuple):
    trial: str
    batches: int
    uuid: str

    @property
    def key(self) -> str:
        return manifest_key(self.trial, self.batches, self.uuid)


class IntentName(NamedTuple):
    trial: str
    uuid: str


class ClaimName(NamedTuple):
    """The parts of a claim's key. A claim without its run's id counts, too."""

    trial: str
    owner: str = ""


class ProtectionName(NamedTuple):
    """The parts of the key of a pin or a hold. Only a hold has a model and a move. A pin without an
    id counts, too."""

    uuid: str
    kind: Literal["pin", "hold"] = "pin"
    model: str = ""
    move: int = 0
    unique: str = ""

    @property
    def key(self) -> str:
        folder = protections_folder(self.uuid)
        if self.kind == "pin":
            return f"{folder}/pin{self.unique and f'-{self.unique}'}.json"
        return f"{folder}/{checked_model(self.model)}/{self.move:06d}-{self.unique}.json"


# ------------------------------------------------------------------------------- checkpoints


def manifest_key(trial: str, batches: int, uuid: str) -> str:
    """The key of a checkpoint's manifest. Sorting a trial's keys sorts them by batches."""
    return f"{trial_folder(trial)}/{batches:010d}-{checked_uuid(uuid)}.json"


def parse_manifest_key(key: str) -> ManifestName | None:
    match = _MANIFEST_KEY.fullmatch(key)
    return match and ManifestName(match["trial"], int(match["batches"]), match["uuid"])


def trial_folder(trial: str) -> str:
    """The folder of a trial's manifests."""
    return f"{MANIFESTS}/{checked_trial(trial)}"


def files_folder(uuid: str) -> str:
    return f"{CHECKPOINTS}/{checked_uuid(uuid)}"


def file_key(uuid: str, path: str) -> str:
    return f"{files_folder(uuid)}/{path}"


def checked_place(place: StoredPath) -> tuple[str, str]:
    """The uuid of the checkpoint that has stored a file, and the file's path there. Raises
    CheckpointDamaged if the text is not ``{uuid}/{path}``."""
    uuid, _, path = str(place).partition("/")
    if not is_uuid(uuid) or not is_file_path(path):
        raise CheckpointDamaged(
            f"no file is stored at {place!r}: expected the uuid of a checkpoint and a path below "
            "it; the manifest may be hostile, do not use it"
        )
    return uuid, path


def damages_folder(uuid: str) -> str:
    return f"{DAMAGES}/{checked_uuid(uuid)}"


def damage_key(uuid: str, path: str) -> str:
    return f"{damages_folder(uuid)}/{path}.json"


# --------------------------------------------------------------------- trials and their runs


def intents_folder(trial: str) -> str:
    return f"{UPLOADS}/{checked_trial(trial)}"


def intent_key(trial: str, uuid: str) -> str:
    return f"{intents_folder(trial)}/{checked_uuid(uuid)}.json"


def parse_intent_key(key: str) -> IntentName | None:
    match = _INTENT_KEY.fullmatch(key)
    return match and IntentName(match["trial"], match["uuid"])


def attempts_folder(trial: str) -> str:
    return f"{ATTEMPTS}/{checked_trial(trial)}"


def attempt_key(trial: str, number: int) -> str:
    return numbered_key(attempts_folder(trial), number)


def claim_key(trial: str, owner: str = "") -> str:
    return f"{CLAIMS}/{checked_trial(trial)}{owner and f'/{owner}'}.json"


def parse_claim_key(key: str) -> ClaimName | None:
    match = _CLAIM_KEY.fullmatch(key)
    return match and ClaimName(match["trial"], match["owner"] or "")


def run_folder(trial: str) -> str:
    """The folder of the files that a trial's runs write besides checkpoints."""
    return f"{RUNS}/{checked_trial(trial)}"


def run_file_key(trial: str, path: str) -> str:
    return f"{run_folder(trial)}/{path}"


def ledger_folder(trial: str) -> str:
    return run_file_key(trial, "ledger")


def ledger_key(trial: str, number: int) -> str:
    return numbered_key(ledger_folder(trial), number)


def trial_folders(trial: str) -> tuple[str, ...]:
    """The folders that only one trial writes to, except for its checkpoints' files."""
    return trial_folder(trial), intents_folder(trial), run_folder(trial)


# ---------------------------------------------------------------------- keeping and deleting


def protections_folder(uuid: str) -> str:
    return f"{PINS}/{checked_uuid(uuid)}"


def parse_protection_key(key: str) -> ProtectionName | None:
    if (match := _PROTECTION_KEY.fullmatch(key)) is None:
        return None
    if (model := match["model"]) is None:
        return ProtectionName(match["uuid"], unique=match["pin"] or "")
    return ProtectionName(match["uuid"], "hold", model, int(match["number"]), match["unique"])


def deletions_folder(uuid: str) -> str:
    return f"{DELETIONS}/{checked_uuid(uuid)}"


def deletion_key(uuid: str, unique: str) -> str:
    return f"{deletions_folder(uuid)}/{unique}.json"


def parse_deletion_key(key: str) -> str | None:
    """The uuid that a deletion marker's key names."""
    match = _DELETION_KEY.fullmatch(key)
    return match and match["uuid"]


# ------------------------------------------------------------------------------------ models


def model_folder(model: str) -> str:
    return f"{MODELS}/{checked_model(model)}"


def versions_folder(model: str) -> str:
    return f"{model_folder(model)}/versions"


def moves_folder(model: str) -> str:
    return f"{model_folder(model)}/moves"


def retraining_key(model: str, run: str, path: str) -> str:
    """The key of a file that a retraining of a model writes. Raises RegistryError if its id `run`
    is invalid."""
    if not is_name(run):
        raise RegistryError(f"{run!r} cannot be the id of a retraining: {_NAME_RULE}")
    return f"{model_folder(model)}/retrainings/{run}/{path}"


# ---------------------------------------------------------------------------------- searches


def search_folder(search: str) -> str:
    return f"{SEARCHES}/{checked_trial(search)}"


# ------------------------------------------------------------------------------------- names


def numbered_key(folder: str, number: int) -> str:
    """The key of a numbered object. Sorting the keys sorts them by number."""
    return f"{folder}/{number:06d}.json"


def parse_numbered_key(folder: str, key: str) -> int | None:
    """The number of an object in `folder`; None if the key is another one."""
    match = _NUMBERED.fullmatch(key)
    return int(match["number"]) if match is not None and match["folder"] == folder else None


def is_name(text: str) -> bool:
    """Return whether a trial or a model may have this name: letters, digits, inner ``._-``."""
    return re.fullmatch(_NAME, text) is not None


def checked_trial(trial: str) -> str:
    """Check and return a trial's id, a part of keys and folders. Raises CheckpointError if
    invalid."""
    if not is_name(trial):
        raise CheckpointError(f"{trial!r} cannot be a trial's id: {_NAME_RULE}")
    return trial


def checked_model(model: str) -> str:
    """Check and return a model's name, a part of keys. Raises RegistryError if it is invalid."""
    if not is_name(model):
        raise RegistryError(f"{model!r} is not a valid model name: {_NAME_RULE}")
    return model


def checked_uuid(uuid: str) -> str:
    """Check and return a checkpoint's uuid, a part of keys. Raises CheckpointError if invalid."""
    if not is_uuid(uuid):
        raise CheckpointError(
            f"{uuid!r} cannot be a checkpoint's uuid: expected up to 64 letters and digits, with "
            "'-' between them"
        )
    return uuid


def is_uuid(text: str) -> bool:
    """Return whether a checkpoint may have this uuid: letters, digits, inner ``-``."""
    return re.fullmatch(_UUID, text) is not None


def is_file_path(path: str) -> bool:
    """Return whether a checkpoint's file may have this path, which must not leave its folder.

    It is a relative POSIX path in its plainest spelling: no ``..``, ``.`` or empty part, no control
    character, valid UTF-8. No backslash and no drive either: on Windows both leave the folder.
    """
    if not path.isprintable() or "\\" in path or re.match(r"[A-Za-z]:", path):
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def checked_path(path: StoredPath) -> str:
    """Check and return the path of a checkpoint's file, to be joined to a folder or a key. Raises
    CheckpointDamaged if it might leave the folder, or is that of the manifest."""
    text = str(path)
    if not is_file_path(text) or text == MANIFEST_NAME:
        raise CheckpointDamaged(
            f"{text!r} is not a plain relative path below the checkpoint's folder: the manifest "
            "may be hostile, do not use it"
        )
    return text
