"""References to checkpoints: a uuid, a trial's best or latest one, or a model's in the registry.

``best`` and ``latest`` refer to the newest trial of the store's experiment; ``best:gpt-4f0c21aa``
and ``latest:gpt-4f0c21aa`` name the trial. ``champion:gpt``, ``previous:gpt`` and ``gpt:7`` refer
to a model. Neither uuids, trials nor models have colons, and no uuid begins with such a word.
"""

from __future__ import annotations

import re

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import best_of_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointNotFound, ModelNotFound
from trial_core.models.records import Version
from trial_core.models.registry import Registry

FORMS = (
    "a uuid or its first characters, best, latest, best:TRIAL, latest:TRIAL, champion:MODEL, "
    "previous:MODEL or MODEL:VERSION"
)
OF_TRIAL = ("best", "latest")
_VERSION = re.compile(r"[0-9]{1,18}")


def open_checkpoint(store: CheckpointStore, reference: str) -> Manifest:
    """The checkpoint that a reference names. Raises as `referenced_uuid`, and CheckpointDamaged."""
    return store.open(referenced_uuid(store, reference))


def referenced_uuid(store: CheckpointStore, reference: str) -> str:
    """The uuid that a reference names. A uuid, or the beginning of one, stands for itself.

    Raises:
        CheckpointNotFound: `reference` has another form, or names no checkpoint.
        CheckpointError, RegistryError: no trial, or no model, may have that id or name.
        ModelNotFound: the model, alias or version does not exist.
    """
    first, colon, trial = reference.partition(":")
    if first in OF_TRIAL:
        return _of_trial(store, first, trial if colon else _newest_trial(store, first)).uuid
    if ":" not in reference:
        return reference
    version = _version(Registry(store), reference)
    if not store.storage.exists(version.manifest_key):
        raise CheckpointNotFound(
            f"checkpoint {version.checkpoint} of {version} was deleted from {store.url}"
        )
    return version.checkpoint


def _newest_trial(store: CheckpointStore, which: str) -> str:
    """The trial that ``best`` and ``latest`` mean: the newest of the store's experiment, or of the
    only experiment that is stored there."""
    experiment = store.experiment
    if not experiment:
        stored = sorted({each.experiment for each in store.list()})
        if len(stored) != 1:
            there = ", ".join(stored) or "none"
            raise CheckpointNotFound(
                f"{which!r} does not say of which experiment: name its file with --config, or name "
                f"the trial, {which}:TRIAL; experiments in {store.url}: {there}"
            )
        (experiment,) = stored
    trial = store.newest_trial(experiment)
    if trial is None:
        raise CheckpointNotFound(
            f"{which!r}: no checkpoint in {store.url} is of experiment {experiment!r}"
        )
    return trial


def _of_trial(store: CheckpointStore, which: str, named: str) -> Manifest:
    trial = store.trial(named)
    if which == "latest":
        found = store.newest(trial)
    else:
        found = best_of_trial(manifests := store.list(trial))
        if found is None and manifests:
            raise CheckpointNotFound(
                f"no checkpoint of trial {trial} is its best: none was saved at a batch whose "
                "validation reported searcher.metric as a number; `trialflow checkpoints list` "
                f"shows them, and latest:{trial} is the one with the most batches"
            )
    if found is None:
        raise CheckpointNotFound(f"trial {trial!r} has no checkpoint in {store.url}")
    return found


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
