"""`trialflow search --resume` finds the search to continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.searches import search_experiment, searched
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, SearchError
from trialflow.deployments.cli import search_command as command


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """With two searches of the experiment toy, the first of which is the newer one."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    searched(store.storage, "toy-b", results=1)
    searched(store.storage, "toy-a", results=1)
    searched(store.storage, "zoo-a", search_experiment(experiment="zoo"), results=1)
    return store


def test_the_search_to_resume(store: CheckpointStore) -> None:
    """The experiment's newest, or the one that is named."""
    said: list[str] = []
    assert command._to_resume(store, search_experiment(), None, said.append) == "toy-a"
    assert said == ["continuing search toy-a"]
    assert command._to_resume(store, search_experiment(), "toy-b", said.append) == "toy-b"
    with pytest.raises(ConfigError, match="--search zoo: no search of experiment toy"):
        command._to_resume(store, search_experiment(), "zoo", said.append)


def test_nothing_to_resume(store: CheckpointStore) -> None:
    said: list[str] = []
    experiment = search_experiment(experiment="another")
    assert command._to_resume(store, experiment, None, said.append) is None
    assert said[0].startswith("nothing to resume: no search of experiment another")


def test_a_search_that_cannot_be_read_keeps_no_other_from_continuing(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning names them. One that is named is an error, which says why."""
    (other,) = (key for key in store.storage.sizes("searches/zoo-a") if key.endswith("000001.json"))
    store.storage.write("searches/toy-c/000001.json", b"{}")
    store.storage.write("searches/toy-d/000001.json", b"nothing")
    store.storage.write("searches/toy-e/000001.json", store.storage.read(other) or b"")
    store.storage.write("searches/toy-f/000002.json", b"{}")
    assert command._to_resume(store, search_experiment(), None, lambda _: None) == "toy-a"
    warned = " ".join(capsys.readouterr().err.split())
    assert warned.count("warning") == 1
    assert "toy-c, toy-d, toy-e, toy-f" in warned
    assert command._to_resume(store, search_experiment(), "toy-b", lambda _: None) == "toy-b"
    with pytest.raises(SearchError, match=r"toy-d.* cannot be read"):
        command._to_resume(store, search_experiment(), "toy-d", lambda _: None)
