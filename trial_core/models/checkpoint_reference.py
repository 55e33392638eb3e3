"""References to checkpoints: a uuid, or an alias or a version of a model in the registry.

``champion:gpt``, ``previous:gpt`` and ``gpt:7``. Neither uuids nor models have colons.
"""

from __future__ import annotations

import re

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, ModelNotFound
from trial_core.models.records import Version
from trial_core.models.registry import Registry

FORMS = "a uuid or its first characters, champion:MODEL, previous:MODEL or MODEL:VERSION"
_VERSION = re.compile(r"[0-9]{1,18}")


def open_checkpoint(store: CheckpointStore, reference: str) -> Manifest:
    """The checkpoint that a reference names.

    Raises:
        CheckpointNotFound: there is no such checkpoint, or several begin with the given uuid.
        CheckpointDamaged: its manifest cannot be read.
        ModelNotFound: there is no such model, alias or version.
        RegistryError: no model may have that name.
    """
    return store.open(referenced_uuid(store, reference))


def referenced_uuid(store: CheckpointStore, reference: str) -> str:
    """The uuid that a reference names. A uuid, or the beginning of one, stands for itself.

    Raises:
        CheckpointNotFound: the reference has another form, or the checkpoint was deleted.
        ModelNotFound: there is no such model, alias or version.
        RegistryError: no model may have that name.
    """
    if ":" not in reference:
        return reference
    version = _version(Registry(store), reference)
    if store.storage.read(version.manifest_key) is None:
        raise CheckpointNotFound(
            f"checkpoint {version.checkpoint} of {version} was deleted from {store.url}"
        )
    return version.checkpoint


def _version(registry: Registry, reference: str) -> Version:
    first, _, second = reference.partition(":")
    if first in ("champion", "previous"):
        move = registry.last_move(second)
        aliases = {"champion": move.champion, "previous": move.previous} if move else {}
        number = aliases.get(first)
        if number is None:
            registry.check_exists(second)
            what = "champion" if first == "champion" else "previous champion"
            raise ModelNotFound(f"model {second} has no {what} in {registry.store.url}")
        return registry.version(second, number)
    if _VERSION.fullmatch(second):
        return registry.version(first, int(second))
    raise CheckpointNotFound(f"{reference!r} names no checkpoint: expected {FORMS}")
