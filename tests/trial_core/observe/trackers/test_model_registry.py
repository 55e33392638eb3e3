"""A model's champion in MLflow's registry."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.driving import TRIAL, drive
from tests.support.flow import one_slot
from tests.support.mlflow_server import MlflowServer
from tests.support.s3 import S3Server
from tests.trial_core.models.helpers import MODEL, new_registry
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry
from trial_core.observe.trackers.journal import FOLDER, ORDER
from trial_core.observe.trackers.model_registry import NotShown, show_champion
from trial_core.observe.trackers.sender import SenderOrder


def promoted(store: CheckpointStore, **options: object) -> Registry:
    """A registry whose champion's trial had these options of MLflow, by its storage."""
    registry = new_registry(store, 1)
    registry.promote(MODEL, 1, why="")
    trial = registry.version(MODEL, 1).trial
    order = SenderOrder(
        trial=trial, experiment="gpt", run_dir="", patience_seconds=1.0,
        trackers={"mlflow": options},
    )  # fmt: skip
    key = layout.run_file_key(trial, f"{FOLDER}/{ORDER}")
    store.storage.write(key, msgspec.json.encode(order))
    return registry


@pytest.mark.long
def test_the_alias_follows_the_champion(
    mlflow: MlflowServer, moto_s3: S3Server, here: Path
) -> None:
    """Also after a rollback, and after a promotion that MLflow did not hear of."""
    place = {"url": f"{moto_s3.new_bucket()}/runs", "options": moto_s3.options}
    tracker = {"tracking_uri": mlflow.url, "registered_model": f"shown-{here.name}"}
    trackers = [{"mlflow": tracker}]
    drive(one_slot(here, 12, name=here.name, trackers=trackers, checkpoint_storage=place))
    store = CheckpointStore(place["url"], moto_s3.options)
    registry = Registry(store)
    first, second, third = (
        registry.register("gpt", each, metric="loss", smaller_is_better=True, value=None)
        for each in store.list()
    )

    def shown() -> tuple[str | None, str]:
        """The checkpoint and the URL of the version that has the alias."""
        version = mlflow.client.get_model_version_by_alias(f"shown-{here.name}", "champion")
        assert version.run_id == mlflow.run(TRIAL, here.name).info.run_id
        return version.tags["trialflow.checkpoint"], version.source

    for version in (first, second):
        registry.promote("gpt", version.number, why="")
        assert (
            show_champion(registry, "gpt", {"mlflow": tracker})
            == f"shown-{here.name} version {version.number}"
        )
        assert shown() == (version.checkpoint, store.files_url(version.checkpoint))
    registry.rollback("gpt", why="")
    assert show_champion(registry, "gpt", {"mlflow": tracker}) == f"shown-{here.name} version 1"
    assert shown()[0] == first.checkpoint
    registry.promote("gpt", third.number, why="")
    mlflow.kill()
    with pytest.raises(NotShown):
        show_champion(registry, "gpt", {"mlflow": tracker})
    mlflow.start()
    show_champion(registry, "gpt", {"mlflow": tracker})
    assert shown()[0] == third.checkpoint


@pytest.mark.long
def test_without_the_option_nothing_is_shown(here: Path) -> None:
    """And MLflow's package is not needed."""
    drive(one_slot(here, 4))
    store = CheckpointStore(f"file://{here}/checkpoints")
    registry = Registry(store)
    registry.register("gpt", store.list()[0], metric=None, smaller_is_better=True, value=None)
    registry.promote("gpt", 1, why="")
    assert show_champion(registry, "gpt") is None


def test_what_mlflow_says_is_shown_without_secrets(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors name the server's URL, with the password in it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:9")
    registry = promoted(local_store, registered_model=True)
    with pytest.raises(NotShown, match=r"127\.0\.0\.1") as problem:
        show_champion(registry, MODEL)
    assert "hunter22" not in str(problem.value)


def test_a_server_that_only_the_storage_names_is_not_asked(local_store: CheckpointStore) -> None:
    """It would get the caller's token."""
    options = {"registered_model": True, "tracking_uri": "http://127.0.0.1:9"}
    registry = promoted(local_store, **options)
    with pytest.raises(NotShown, match="set MLFLOW_TRACKING_URI"):
        show_champion(registry, MODEL)
    with pytest.raises(NotShown, match="127"):
        show_champion(registry, MODEL, {"mlflow": options})


@pytest.mark.parametrize("named", [None, MODEL, "payments"])
def test_no_storage_moves_the_alias_of_another_model(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """MLflow's own models are not those of who writes to the storage."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    registry = promoted(local_store, registered_model=MODEL if named == MODEL else "payments")
    own = {} if named is None else {"mlflow": {"registered_model": named}}
    with pytest.raises(NotShown, match="payments" if named is None else "Connection"):
        show_champion(registry, MODEL, own)
