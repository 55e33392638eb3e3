"""`trialflow retrain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Running

from tests.support.cli import trialflow, write_experiment
from tests.support.json_types import check_json
from tests.support.prefect import PrefectServer
from trialflow.deployments.cli.main import main
from trialflow.flows.retrain import retrain
from trialflow.flows.retraining.model_lock import HEARTBEAT_LABEL, MODEL_LABEL
from trialflow.flows.server.embedded_server import prefect_api
from trialflow.flows.server.prefect_settings import environment


@pytest.fixture
def server(prefect_server: PrefectServer) -> Mapping[str, str]:
    return prefect_server.environment


def test_invalid_templates_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused before anything starts."""
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
    """The first challenger is promoted, the second is no better. The outcome is printed, as text
    and as JSON; the run has the data given."""
    path = write_experiment(
        tmp_path, checkpoint_storage=str(tmp_path / "storage"), data={"day": "{{ 1 + 1 }}"},
        retraining={"model": "gpt"},
    )  # fmt: skip
    first = trialflow(tmp_path, "retrain", str(path), "--json", variables=server)
    assert first.returncode == 0, first.stderr
    outcome = check_json(json.loads(first.stdout))
    assert (outcome["status"], outcome["champion"], outcome["challenger"]) == ("promoted", None, 1)
    assert outcome["data"] == {"day": "2"}
    second = trialflow(
        tmp_path, "retrain", str(path), "--data", "day=3", "--quiet", variables=server
    )
    assert second.returncode == 0, second.stderr
    headline, *facts = second.stdout.splitlines()
    assert headline == "model gpt: version 1 kept"
    assert facts[0].startswith("  why         no better: the challenger's loss ")
    assert facts[1].startswith("  champion    version 1, loss ")
    assert facts[2].startswith("  challenger  version 2, loss ")
    assert facts[-1].startswith("  UI          http://")
    assert facts[-2].startswith("  report      ")
    assert '"day": 3' in Path(facts[-2].split()[-1]).read_text()
    listed = trialflow(tmp_path, "models", "list", "--json", "--storage", str(tmp_path / "storage"))
    (model,) = json.loads(listed.stdout)["models"]
    assert (model["model"], model["champion"], model["versions"]) == ("gpt", 1, 2)


@pytest.mark.slots
@pytest.mark.long
def test_on_the_embedded_server(tmp_path: Path) -> None:
    """No run is skipped because of a killed one: the embedded server lives for one run."""
    path = write_experiment(
        tmp_path, checkpoint_storage=str(tmp_path / "storage"),
        searcher={"metric": "loss", "max_length": {"batches": 4}},
    )  # fmt: skip
    variables = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": ""}
    with environment(variables), prefect_api(), get_client(sync_client=True) as client:
        killed = client.create_flow_run(retrain, state=Running())
        heartbeat = datetime.now(timezone.utc).isoformat()
        client.update_flow_run_labels(killed.id, {MODEL_LABEL: "toy", HEARTBEAT_LABEL: heartbeat})
    done = trialflow(tmp_path, "retrain", str(path), "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "promoted"


def test_help_of_data_arrived_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """With data. Tests of deployed retrainings send the event."""
    assert main(["data-arrived", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "trialflow data-arrived gpt --data path=s3://bucket/2026-11-21" in shown
