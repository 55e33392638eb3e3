"""What `retraining` sections request, read without a server."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ParameterTypeError

from tests.support.cli import trialflow_here, write_experiment
from tests.support.slots import toy_config
from trial_core.errors import ConfigError
from trial_core.search.settings import SearchExperiment
from trialflow.deployments.cli.deploy import read_retrainings
from trialflow.deployments.retraining import retraining_requests
from trialflow.flows.retrain import retrain

FILE = Path("toy.yaml")


def request(**section: Any) -> Any:
    """The request of a toy with this `retraining` section."""
    data = section.pop("data", {})
    config = toy_config(Path("/nowhere"), retraining=section, data=data)
    (found,) = retraining_requests({FILE: config})
    return found


def test_schedules() -> None:
    """Cron has a time zone, by default UTC; intervals always count from the same day."""
    berlin = request(schedule={"cron": "0 3 * * *", "timezone": "Europe/Berlin"}).schedule
    assert berlin == CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin")
    assert request(schedule={"cron": "@daily"}).schedule.timezone == "UTC"
    every = request(schedule={"interval_seconds": 90}).schedule
    assert isinstance(every, IntervalSchedule)
    assert every.interval == timedelta(seconds=90)
    assert every == request(schedule={"interval_seconds": 90}).schedule
    assert request().schedule is None


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"schedule": {"cron": "0 25 * * *"}}, 'schedule.cron: Invalid cron string: "0 25 * * *"'),
        ({"schedule": {"cron": "0 0 30 2 *"}}, "schedule.cron: '0 0 30 2 *' has no future time"),
        (
            {"schedule": {"cron": "0 3 * * *", "timezone": "Berlin"}},
            'schedule.timezone: Invalid timezone: "Berlin"',
        ),
        ({"model": "retrain"}, "model: 'retrain' is the name of the deployment"),
    ],
)
def test_invalid_sections(section: dict[str, Any], problem: str) -> None:
    """The error has the file, the field and the value."""
    with pytest.raises(ConfigError, match=re.escape(f"toy.yaml: retraining.{problem}")):
        request(**section)


def test_templates_are_checked() -> None:
    """A template that cannot be rendered now is refused."""
    assert request(data={"day": "{{ scheduled_time.date() }}"}).model == "toy"
    with pytest.raises(ConfigError, match=r"toy\.yaml: data\.day: .*scheduled_tim"):
        request(data={"day": "{{ scheduled_tim }}"})


def test_two_files_of_one_model() -> None:
    """They are refused: they would overwrite each other's deployment."""
    config = toy_config(Path("/nowhere"), retraining={"model": "gpt"})
    with pytest.raises(
        ConfigError, match=r"b\.yaml: retraining\.model: 'gpt' is also the model of a"
    ):
        retraining_requests({Path("a.yaml"): config, Path("b.yaml"): config})


@pytest.mark.parametrize("command", ["deploy", pytest.param("up", marks=pytest.mark.long)])
def test_a_file_without_the_section(tmp_path: Path, command: str) -> None:
    """It is refused before a server is contacted or started."""
    write_experiment(tmp_path)
    no_server = {"PREFECT_API_URL": "http://127.0.0.1:1/api" if command == "deploy" else ""}
    done = trialflow_here(tmp_path, command, "experiment.yaml", variables=no_server)
    assert (done.returncode, done.stdout) == (2, "")
    assert "experiment.yaml: there is no `retraining` section" in done.stderr
    assert "then `trialflow start experiment.yaml`; on a schedule: `trialflow dep" in done.stderr


SEARCH = {
    "hyperparameters": {"micro_batch_size": {"type": "categorical", "vals": [1, 3]}},
    "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 3}},
}


@pytest.mark.xdist_group("schemas")
def test_a_search_is_deployed_with_its_ranges(tmp_path: Path) -> None:
    """The schema of the flow takes the deployment's experiment, and names a wrong field alone."""
    from prefect.utilities.schema_tools.validation import validate  # takes a second

    path = write_experiment(tmp_path, **SEARCH, retraining={"search": True})
    (found,) = read_retrainings([path])
    config, schema = found.deployment.from_file["config"], retrain.parameters.model_dump()
    assert config["hyperparameters"] == SEARCH["hyperparameters"]
    assert validate({"config": config}, schema, raise_on_error=False) == []
    assert isinstance(retrain.validate_parameters({"config": config})["config"], SearchExperiment)
    wrong = {"config": {**config, "max_restarts": -1}}
    (problem,) = validate(wrong, schema, raise_on_error=False)
    assert problem.message == "-1 is less than the minimum of 0"
    with pytest.raises(ParameterTypeError) as error:
        retrain.validate_parameters(wrong)
    assert str(error.value).splitlines()[1:] == [
        " - config.max_restarts: expected an integer of at least 0, got -1"
    ]


def test_a_search_that_is_not_asked_for(tmp_path: Path) -> None:
    """It is refused: the error names the file and both ways."""
    path = write_experiment(tmp_path, **SEARCH, retraining={})
    expected = f"{path}: searcher.name: .*set retraining.search: true; .*`trialflow search`"
    with pytest.raises(ConfigError, match=expected):
        read_retrainings([path])
