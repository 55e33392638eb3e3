"""`trialflow search`: `--resume` finds the search to continue, `--simulate` trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import write_experiment
from tests.support.searches import RANGES, search_experiment, searched
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError, SearchError
from trial_core.search.simulate import simulate
from trialflow.deployments.cli import search as command
from trialflow.deployments.cli.experiment_options import StoragePlace
from trialflow.deployments.cli.main import main
from trialflow.flows.search import SearchResult


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


def test_a_simulated_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings, how far it has trained in all, the best, rungs, trials and promotions."""
    of = search_experiment(max_concurrent_trials=4)
    path = write_experiment(
        tmp_path, hyperparameters=dict(RANGES), searcher=of.searcher.model_dump(mode="json")
    )
    curves = [[(4, 1 - i / 100), (16, 0.5 - i / 200)] for i in range(16)]
    rows = (f"{i},{at},{value}" for i, curve in enumerate(curves) for at, value in curve)
    (tmp_path / "curves.csv").write_text("\n".join(["trial,length,metric", *rows]))
    code = main(["search", str(path), "--simulate", str(tmp_path / "curves.csv")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    state = simulate(of, curves).state
    total = sum(trial.reached[-1].length for trial in state.trials)
    assert code == 0
    assert lines[0] == (
        "asha: 16 trials of at most 64 batches; one in 4 continues; the smaller loss is better"
    )
    assert (
        lines[1]
        == f"trained: {total} batches, {100 * total / (16 * 64):.1f}% of every trial to its end"
    )
    assert lines[2] == "best: loss 0.425 at 16 batches, trial 15"
    promoted = lines[lines.index("Promoted") + 4 :]
    assert len(promoted) == len(state.promotions)
    assert (
        f"1 4 batches 16 {sum(each.rung == 1 for each in state.promotions)} 0.85 (trial 15)"
        in lines
    )


def test_the_summary_names_the_storage_for_the_next_command() -> None:
    """The search may not be in the default one."""
    place = StoragePlace(Path("s.yaml"), "s3://b/r")
    lines = command._summary(SearchResult("toy-a", True), search_experiment(), place, None)
    assert "trialflow search show toy-a --config s.yaml --storage s3://b/r" in "\n".join(lines)
