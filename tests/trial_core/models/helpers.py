"""Registries for tests: models whose versions are small checkpoints."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from tests.support.interleaving import VERBS
from tests.support.manifests import entry, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.pruning import plan_pruning, prune
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.records import Move, Version
from trial_core.models.registry import Registry

MODEL = "gpt"
NOTHING = RetentionPolicy(save_trial_best=0, save_trial_latest=0)


@contextmanager
def memory_store() -> Iterator[CheckpointStore]:
    """A store in memory, deleted afterwards: its listings read all objects of the process."""
    url = f"memory://{uuids.uuid4()}"
    yield CheckpointStore(url)
    with suppress(FileNotFoundError):  # it is empty
        fsspec.filesystem("memory").rm(f"/{url.removeprefix('memory://')}", recursive=True)


def commit(store: CheckpointStore, batches: int) -> Manifest:
    """A committed checkpoint of one small file."""
    manifest = new_manifest(batches, files=[entry("shard")])
    store.storage.write(layout.file_key(manifest.uuid, "shard"), b"x")
    store.commit(manifest)
    return manifest


def register(store: CheckpointStore, manifest: Manifest, **fields: Any) -> Version:
    """Register a checkpoint as a version of the model."""
    fields = {"metric": "loss", "smaller_is_better": True, "value": 0.25, **fields}
    return Registry(store).register(MODEL, manifest, **fields)


def new_registry(store: CheckpointStore, versions: int) -> Registry:
    """A registry with a model of that many versions."""
    for batches in range(1, versions + 1):
        register(store, commit(store, batches))
    return Registry(store)


def aliases(registry: Registry) -> tuple[int | None, int | None]:
    """The numbers of champion and previous."""
    move = registry.last_move(MODEL)
    return (None, None) if move is None else (move.champion, move.previous)


def prune_all(store: CheckpointStore) -> None:
    """Prune without keeping anything by rules."""
    prune(store, plan_pruning(store, NOTHING, "gpt"))


def kept_versions(store: CheckpointStore) -> set[int]:
    """The versions with a checkpoint, which must be intact."""
    committed = {manifest.uuid for manifest in store.list()}
    found = {each for each in Registry(store).versions(MODEL) if each.checkpoint in committed}
    for version in found:
        store.verify(version.checkpoint)
    return {version.number for version in found}


def held_versions(registry: Registry) -> set[int]:
    """The versions with a hold."""
    return {held.version for of_one in registry.held().values() for held in of_one}


def check_log(moves: list[Move]) -> None:
    """Check that numbers have no gaps, and that each move starts from the one before it."""
    assert [move.number for move in moves] == list(range(1, len(moves) + 1))
    champions = [None, *(move.champion for move in moves)]
    for before, move in zip(champions, moves, strict=False):
        assert move.previous == before
        assert move.champion != before


class Killed(BaseException):
    """Stands for a SIGKILL."""


class DyingStorage:
    """A storage whose process is killed after its `nth` request.

    Attributes:
        requests: number of requests so far.
    """

    def __init__(self, storage: Any, nth: int) -> None:
        self._storage, self._nth = storage, nth
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if name not in VERBS:
            return attribute

        def request(*arguments: Any, **named: Any) -> Any:
            if self.requests >= self._nth:
                self.die()
            result = attribute(*arguments, **named)
            self.requests += 1
            if self.requests == self._nth:
                self.die()
            return result

        return request

    def die(self) -> None:
        """End the process."""
        raise Killed
