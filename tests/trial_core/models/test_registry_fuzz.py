"""Whatever lies under a model's keys: the registry answers, or raises an error of trialflow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import strategies as st

from tests.support.strategies import fuzz, json_bytes, plain_data, stored
from tests.trial_core.models.helpers import MODEL, commit, memory_store, register
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.retention.protections import Protection
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RegistryError, TrialflowError
from trial_core.models.journal import (
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
    explain_versions,
)
from trial_core.models.records import Move, Version
from trial_core.models.registry import Registry

BY = {"by": "a@b", "at": "2031-05-09T17:04:00.000000Z"}
VERSION = Version(
    number=3, model=MODEL, checkpoint="u", trial="gpt-1", experiment="gpt", batches_trained=7,
    metric="loss", smaller_is_better=True, value=0.25, run="r", **BY,
)  # fmt: skip
MOVE = Move(number=1, model=MODEL, kind="promote", champion=1, previous=None, run="r", **BY)
PLAN = RetrainingPlan(
    trial="gpt-1", scheduled_at=BY["at"], begun_at=BY["at"], data={"day": "1"}, champion=1, move=1
)
OUTCOME = PromotionDecision(promoted=True, why="better")
HOLD = Protection(uuid="u", kind="hold", model=MODEL, version=1, move=1, unique="x", **BY)
RECORDS = [VERSION, MOVE, PLAN, OUTCOME, HOLD, Champion(metrics={"loss": 1.5}, value=1.5)]
PLAIN = [msgspec.to_builtins(record) for record in RECORDS]
KEYS = [
    *(layout.numbered_key(layout.versions_folder(MODEL), number) for number in (1, 2, 3)),
    *(layout.numbered_key(layout.moves_folder(MODEL), number) for number in (1, 2, 10**18 - 1)),
    *(layout.retraining_key(MODEL, "r", f"{name}.json") for name in ("plan", "plan-01", "outcome")),
    f"{layout.MODELS}/../versions/000001.json",
    f"{layout.versions_folder(MODEL)}/0000001.json",
    f"{layout.PINS}/a_b/{MODEL}/000001-x.json",
    layout.ProtectionName("u", "hold", MODEL, 1, "x").key,
]  # fmt: skip
objects = st.dictionaries(
    st.sampled_from(KEYS), st.sampled_from(PLAIN).flatmap(stored), min_size=1, max_size=3
)


def history(registry: Registry) -> object:
    versions, moves = registry.versions(MODEL), registry.moves(MODEL)
    return explain_versions(registry.store, versions, moves), [*map(str, moves)]


def read_journal(registry: Registry) -> object:
    journal = Journal(registry.store, MODEL, "r")
    plan = journal.plan()
    late = plan.lateness_seconds if plan is not None else 0.0
    return late, journal.read("outcome", PromotionDecision), journal.read("champion", Champion)


STEPS: list[Callable[[Registry], object]] = [
    Registry.models,
    history,
    read_journal,
    lambda registry: registry.champion(MODEL),
    Registry.held,
    lambda registry: registry.promote(MODEL, 2),
    lambda registry: registry.rollback(MODEL),
    lambda registry: register(registry.store, commit(registry.store, 9)),
    lambda registry: registry.promote(MODEL, 1),
    read_journal,
]


def use(store: CheckpointStore) -> None:
    for step in STEPS:
        with contextlib.suppress(TrialflowError):
            step(Registry(store))


@fuzz(30, found=objects, promoted=st.booleans())
def test_no_object_stops_the_registry_with_a_foreign_error(
    found: dict[str, bytes], promoted: bool
) -> None:
    """All records stay as they are."""
    with memory_store() as store:
        for batches in (3, 5):
            register(store, commit(store, batches))
        if promoted:
            Registry(store).promote(MODEL, 1)
        root = store.url.removeprefix("memory:/")
        for key, data in found.items():
            fsspec.filesystem("memory").pipe_file(f"{root}/{key}", data)
        read = store.storage.read
        before = {key: read(key) for key in store.storage.sizes(layout.MODELS)}
        use(store)
        assert {key: read(key) for key in before} == before


@fuzz(20, data=st.dictionaries(st.text(max_size=3), plain_data, max_size=3))
def test_a_journal_survives(data: dict[str, Any]) -> None:
    """An attempt after a crash reads what was written."""
    plan = msgspec.structs.replace(PLAN, data=data)
    with memory_store() as store:
        journal = Journal(store, MODEL, "r")
        journal.write_plan(plan)
        assert journal.plan() == plan


@pytest.mark.parametrize("at", ["2031-13-41T25:61:61Z", "2031-05-09T17:04:00", "soon"])
def test_a_plan_whose_times_cannot_be_compared_is_refused(at: str) -> None:
    """Impossible, or without an offset."""
    data = json_bytes({**msgspec.to_builtins(PLAN), "scheduled_at": at})
    with memory_store() as store:
        store.storage.write(layout.retraining_key(MODEL, "r", "plan.json"), data)
        with pytest.raises(RegistryError, match="cannot be read: expected times in ISO 8601"):
            Journal(store, MODEL, "r").plan()


def test_a_version_that_was_copied_from_another_model_is_refused() -> None:
    """It would move the aliases of the model that it names."""
    with memory_store() as store:
        register(store, commit(store, 3))
        key = layout.numbered_key(layout.versions_folder("copy"), 1)
        version = Registry(store).version(MODEL, 1)
        store.storage.write(key, encode_json(version))
        with pytest.raises(RegistryError, match="belongs to 'gpt', not 'copy': it was copied"):
            Registry(store).promote("copy", 1)
        assert Registry(store).last_move(MODEL) is None


def test_a_hold_on_no_checkpoint_does_not_stop_a_promotion() -> None:
    """No uuid is like that: nothing is protected, and nothing is removed."""
    key = f"{layout.PINS}/a_b/{MODEL}/000001-x.json"
    with memory_store() as store:
        register(store, commit(store, 3))
        store.storage.write(key, b"{}")
        assert Registry(store).promote(MODEL, 1).champion == 1
        assert store.storage.read(key) == b"{}"


def test_a_deep_journal_is_refused() -> None:
    """With an error that names the object."""
    data = json_bytes({**msgspec.to_builtins(PLAN), "data": {"a": "<deep 100000>"}})
    with memory_store() as store:
        store.storage.write(layout.retraining_key(MODEL, "r", "plan.json"), data)
        with pytest.raises(RegistryError, match=r"plan\.json cannot be read"):
            Journal(store, MODEL, "r").plan()
