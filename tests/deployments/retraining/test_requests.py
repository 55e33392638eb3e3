"""What `retraining` sections ask of a server, read and checked without one."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from tests.support.cli import trialflow, write_experiment
from tests.support.slots import toy_config
from trial_core.errors import ConfigError
from trialflow.deployments.retraining.requests import retrainings

FILE = Path("toy.yaml")


def asked(**section: Any) -> Any:
    """What a toy with this `retraining` section asks for."""
    data = section.pop("data", {})
    config = toy_config(Path("/nowhere"), retraining=section, data=data)
    (found,) = retrainings({FILE: config})
    return found


def test_a_calendar_and_a_clock() -> None:
    """Cron is of its time zone, or of UTC; intervals are counted from the same day always."""
    berlin = asked(schedule={"cron": "0 3 * * *", "timezone": "Europe/Berlin"}).schedule
    assert berlin == CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin")
    assert asked(schedule={"cron": "@daily"}).schedule.timezone == "UTC"
    every = asked(schedule={"interval_seconds": 90}).schedule
    assert isinstance(every, IntervalSchedule)
    assert every.interval == timedelta(seconds=90)
    assert every == asked(schedule={"interval_seconds": 90}).schedule
    assert asked().schedule is None


@pytest.mark.parametrize(
    ("section", "refusal"),
    [
        ({"schedule": {"cron": "0 25 * * *"}}, 'schedule.cron: Invalid cron string: "0 25 * * *"'),
        ({"schedule": {"cron": "0 0 30 2 *"}}, "schedule.cron: '0 0 30 2 *' never comes"),
        (
            {"schedule": {"cron": "0 3 * * *", "timezone": "Berlin"}},
            'schedule.timezone: Invalid timezone: "Berlin"',
        ),
        ({"model": "retrain"}, "model: 'retrain' is the name of the deployment"),
    ],
)
def test_what_cannot_be_deployed(section: dict[str, Any], refusal: str) -> None:
    """Is refused with the file, the field, and what was seen."""
    with pytest.raises(ConfigError, match=re.escape(f"toy.yaml: retraining.{refusal}")):
        asked(**section)


def test_data_that_could_never_be_filled_in() -> None:
    """A template that cannot be rendered today cannot be rendered in any night."""
    assert asked(data={"day": "{{ scheduled_time.date() }}"}).model == "toy"
    with pytest.raises(ConfigError, match=r"toy\.yaml: data\.day: .*scheduled_tim"):
        asked(data={"day": "{{ scheduled_tim }}"})


def test_a_model_has_one_file() -> None:
    """Two files of the same model would overwrite each other's deployment."""
    config = toy_config(Path("/nowhere"), retraining={"model": "gpt"})
    with pytest.raises(ConfigError, match=r"b\.yaml: retraining\.model: 'gpt' is that of a\.yaml"):
        retrainings({Path("a.yaml"): config, Path("b.yaml"): config})


@pytest.mark.parametrize("command", ["deploy", "up"])
def test_a_file_that_says_nothing_of_retraining(tmp_path: Path, command: str) -> None:
    """Is refused before a server is spoken to or started, and what it lacks is said."""
    write_experiment(tmp_path)
    nobody = {"PREFECT_API_URL": "http://127.0.0.1:1/api" if command == "deploy" else ""}
    told = trialflow(tmp_path, command, "experiment.yaml", variables=nobody)
    assert (told.returncode, told.stdout) == (2, "")
    assert "experiment.yaml: has no `retraining` section" in told.stderr
