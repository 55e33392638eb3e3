"""`trialflow retrain`, as a shell runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.states import Running

from tests.support.cli import trialflow, write_experiment
from tests.support.prefect import PrefectServer
from trialflow.deployments.cli.main import main
from trialflow.flows.retrain import retrain
from trialflow.flows.retraining.model_lock import MODEL_LABEL, limit_of
from trialflow.flows.server.embedded import prefect_api
from trialflow.flows.server.prefect_settings import environment


@pytest.fixture
def server(prefect_server: PrefectServer) -> Mapping[str, str]:
    return prefect_server.environment


def test_a_template_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the field and what is wrong; so is data that is no assignment."""
    path = write_experiment(
        tmp_path, data={"end": "{{ tomorrow }}"}, checkpoint_storage=str(tmp_path / "storage")
    )
    assert main(["retrain", str(path)]) == 2
    err = capsys.readouterr().err
    assert 'data.end: the template "{{ tomorrow }}" cannot be rendered' in err
    assert main(["retrain", str(path), "--data", "end"]) == 2
    assert "--data end: expected key=value" in capsys.readouterr().err
    assert not (tmp_path / "storage").exists()


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_retrain_twice(tmp_path: Path, server: Mapping[str, str]) -> None:
    """The first is promoted; the second, the same training, is no better. What became of it is
    printed, for people and for programs; the data given is what the run has."""
    path = write_experiment(
        tmp_path, checkpoint_storage=str(tmp_path / "storage"), data={"day": "{{ 1 + 1 }}"},
        retraining={"model": "gpt"},
    )  # fmt: skip
    first = trialflow(tmp_path, "retrain", str(path), "--json", variables=server)
    assert first.returncode == 0, first.stderr
    said = json.loads(first.stdout)
    assert (said["status"], said["champion"], said["challenger"]) == ("promoted", None, 1)
    assert said["data"] == {"day": "2"}
    second = trialflow(
        tmp_path, "retrain", str(path), "--data", "day=3", "--quiet", variables=server
    )
    assert second.returncode == 0, second.stderr
    headline, *facts = second.stdout.splitlines()
    assert headline == "model gpt: version 1 kept"
    assert facts[0].startswith("  why         no better: loss ")
    assert facts[-1].startswith("  report      ")
    assert '"day": 3' in Path(facts[-1].split()[-1]).read_text()
    listed = trialflow(tmp_path, "models", "list", "--json", "--storage", str(tmp_path / "storage"))
    (model,) = json.loads(listed.stdout)
    assert (model["model"], model["champion"], model["versions"]) == ("gpt", 1, 2)


@pytest.mark.slots
@pytest.mark.long
def test_without_a_server_of_the_users_own(tmp_path: Path) -> None:
    """On the embedded server, which never takes a place back from a run that was killed: no run
    there is skipped for the sake of one that may be dead."""
    path = write_experiment(
        tmp_path, checkpoint_storage=str(tmp_path / "storage"),
        searcher={"metric": "loss", "max_length": {"batches": 4}},
    )  # fmt: skip
    variables = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": ""}
    with environment(variables), prefect_api(), get_client(sync_client=True) as client:
        name = limit_of("toy")
        client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name=name, limit=1, active=True)
        )
        client.increment_concurrency_slots([name], 1, "concurrency")
        retrain_run = client.create_flow_run(retrain, state=Running())
        client.update_flow_run_labels(retrain_run.id, {MODEL_LABEL: "toy"})
    done = trialflow(tmp_path, "retrain", str(path), "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "promoted"
