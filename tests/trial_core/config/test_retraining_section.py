"""The section `retraining` of an experiment."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from trial_core.config import ExperimentConfig, RetrainingConfig, error_lines
from trial_core.errors import ConfigError

USUAL = {
    "name": "my-gpt",
    "entrypoint": "model:Trial",
    "searcher": {"metric": "loss", "max_length": {"batches": 3}},
}


def experiment(**fields: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate({**USUAL, **fields})


def problems(**fields: Any) -> list[str]:
    with pytest.raises(ValidationError) as error:
        experiment(**fields)
    return error_lines(error.value)


def test_the_default_model() -> None:
    """It has the name of the experiment, also without a section."""
    assert experiment(retraining={}).effective_retraining().model == "my-gpt"
    assert experiment(retraining={"model": None}).retraining == RetrainingConfig(model="my-gpt")
    assert experiment().retraining is None
    assert experiment().effective_retraining() == RetrainingConfig(model="my-gpt")
    assert experiment(retraining=RetrainingConfig()).effective_retraining().model == "my-gpt"
    assert experiment(retraining={"model": "GPT_2.x"}).effective_retraining().model == "GPT_2.x"


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("売上予測", "trial"),
        ("在庫予測", "trial"),
        ("gpt_large", "gpt-large"),
        ("GPT large", "gpt-large"),
        ("a" * 61, "a" * 60),
    ],
)
def test_a_name_that_others_would_share_is_no_default_model(name: str, stored: str) -> None:
    """Two experiments never share a champion by accident. The message says how to go on."""
    (problem,) = problems(name=name, retraining={})
    assert problem.startswith("retraining.model: missing; the default is the experiment's name")
    assert problem.endswith(f"set model, for example to {stored}")
    for section in (None, RetrainingConfig()):
        with pytest.raises(ConfigError, match=r"^retraining\.model: missing; the default is"):
            experiment(name=name, retraining=section).effective_retraining()
    named = experiment(name=name, retraining={"model": stored})
    assert named.effective_retraining().model == stored


def test_the_callback_timeout() -> None:
    """Null is no limit; the default is ten minutes."""
    assert experiment().effective_retraining().callback_timeout_seconds == 600
    unlimited = experiment(retraining={"callback_timeout_seconds": None}).effective_retraining()
    assert unlimited.callback_timeout_seconds is None


def test_the_section_survives_json() -> None:
    """As a parameter of a deployment."""
    given = {
        "model": "gpt",
        "start": "warm",
        "margin": 0.25,
        "max_lateness_seconds": 60.0,
        "callbacks": ["hooks:tell", "a.b:c.d"],
        "schedule": {"cron": "0 3 * * *", "timezone": "Europe/Berlin"},
        "on_data_arrived": True,
    }
    made = experiment(retraining=given)
    dumped = made.model_dump(mode="json")
    assert given.items() <= {**dumped["retraining"], "schedule": given["schedule"]}.items()
    assert ExperimentConfig.model_validate(dumped) == made


def test_the_section_is_not_part_of_the_digest() -> None:
    """The same training has the same digest, however it is retrained."""
    assert experiment(retraining={"margin": 0.5}).digest() == experiment().digest()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"model": "a/b"}, 'model: expected letters and digits, with dots, .* got "a/b"'),
        ({"model": 3}, "model: expected text, got 3"),
        ({"modl": "a"}, 'modl: unknown field; did you mean "model"?'),
        ({"start": "cold"}, 'start: expected "scratch", "warm" or "continue", got "cold"'),
        ({"margin": -0.1}, "margin: .* greater than or equal to 0"),
        ({"margin": float("nan")}, "margin: .* finite"),
        ({"max_lateness_seconds": 0}, "max_lateness_seconds: .* greater than 0"),
        ({"callback_timeout_seconds": 0}, "callback_timeout_seconds: .* greater than 0"),
        ({"callbacks": ["hooks.tell"]}, 'callbacks.0.: expected "module:function" .*"hooks.tell"'),
        ({"schedule": {}}, "schedule: expected either cron or interval_seconds, got neither"),
        (
            {"schedule": {"cron": "0 3 * * *", "interval_seconds": 60}},
            "schedule: expected either cron or interval_seconds, got both",
        ),
        ({"schedule": {"interval_seconds": 0}}, "schedule.interval_seconds: .* greater than 0"),
        ({"schedule": {"interval_seconds": 1e13}}, "schedule.interval_seconds: .* less than"),
        ({"max_lateness_seconds": float("inf")}, "max_lateness_seconds: "),
        (
            {"schedule": {"interval_seconds": 60, "timezone": "UTC"}},
            "schedule.timezone: has no effect without cron",
        ),
        ({"on_data_arrived": "yes"}, 'on_data_arrived: expected true or false, got "yes"'),
    ],
)
def test_invalid_values(given: dict[str, Any], problem: str) -> None:
    """The error has the path, the expectation and the value."""
    (line,) = problems(retraining=given)
    assert re.match(rf"retraining\.{problem.replace('?', '[?]')}", line), line


def test_a_field_outside_its_section() -> None:
    """The error names the right place."""
    assert problems(margin=0.1) == ['margin: unknown field; did you mean "retraining.margin"?']


def test_a_retraining_by_a_search_needs_a_searcher() -> None:
    """A search is not silently a training of one trial."""
    (problem,) = problems(retraining={"search": True})
    assert problem.startswith("retraining.search: true retrains by a search, and searcher.name is ")
    assert experiment(retraining={"search": False}).retraining == RetrainingConfig(model="my-gpt")
