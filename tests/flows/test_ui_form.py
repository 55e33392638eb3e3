"""The form of a deployment's parameters in Prefect's UI, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.browser import Browser, chromium
from tests.support.prefect import PrefectServer
from trial_core.config import ExperimentConfig
from trialflow.deployments.cli.deploy import wanted_resources
from trialflow.deployments.resources import set_up, take_down

pytestmark = [pytest.mark.server, pytest.mark.browser, pytest.mark.long]


@dataclass
class Form:
    """The form on its page, and the runs that it has created."""

    browser: Browser
    client: SyncPrefectClient
    deployment_id: str

    def put(self, label: str, value: str) -> None:
        """Replace a field's value."""
        self._field(label).send_keys(Keys.CONTROL, "a")
        self._field(label).send_keys(
            value, Keys.TAB
        )  # the page reads the value when the focus leaves
        self.browser.wait_for(
            lambda: self._field(label).get_property("value") == value, f"{value} in {label}"
        )
        self.browser.wait_until_idle()  # the page submits what it has drawn last

    def problem(self, label: str) -> str:
        """The browser's validation message for a field."""
        return str(self._field(label).get_property("validationMessage"))

    def submit(self) -> None:
        """Press Submit."""
        button = "//button[normalize-space()='Submit']"
        self.browser._driver.find_element(By.XPATH, button).click()

    def runs(self) -> list[dict[str, Any]]:
        """The parameters of the deployment's runs."""
        query = {"deployments": {"id": {"any_": [self.deployment_id]}}}
        found = self.client.request("POST", "/flow_runs/filter", json=query).json()
        return [run["parameters"] for run in found]

    def _field(self, label: str) -> Any:
        after = "following::*[self::input or self::textarea][1]"
        path = f"//label[normalize-space(text())='{label}']/{after}"
        return self.browser._driver.find_element(By.XPATH, path)


@pytest.fixture
def form(prefect_server: PrefectServer) -> Iterator[Form]:
    """The form of `train/train`, with the required fields filled in."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        resources = wanted_resources("process", "form", None, Path("/srv/runs"))
        for _ in set_up(resources, client, False):
            pass
        deployment = str(client.read_deployment_by_name("train/train").id)
        try:
            with chromium(height=3200) as browser:
                url = f"{prefect_server.ui_url}/v2/deployments/deployment/{deployment}/run"
                browser.open(url, "Entrypoint")
                form = Form(browser, client, deployment)
                form.put("Entrypoint", "toy_trial:ToyTrial")
                form.put("Metric", "loss")
                form.put("Batches (Optional)", "13")
                yield form
        finally:
            for _ in take_down(reversed(resources), client, False):
                pass


def test_the_form_rejects_invalid_values(form: Form) -> None:
    """It has all fields of an experiment, first those that most people set. A number that is too
    small is marked at its field, and no run is created."""
    titles = {field.title for field in ExperimentConfig.model_fields.values() if field.title}
    assert "Scheduling unit" in titles
    text = form.browser.text
    assert {title for title in titles if title not in text} == set()
    first = ["Trial to continue", "Entrypoint", "Batches", "Slots per trial", "Restarts"]
    assert sorted(first, key=text.index) == first

    form.put("Restarts (Optional)", "-1")
    form.submit()
    assert "greater than or equal to 0" in form.problem("Restarts (Optional)")
    form.put("Restarts (Optional)", "7")
    assert form.problem("Restarts (Optional)") == ""
    assert form.runs() == []


def test_the_form_creates_a_run(form: Form) -> None:
    """The run has the values of the fields."""
    form.put("Restarts (Optional)", "7")
    form.submit()
    form.browser.wait_for(lambda: bool(form.runs()), "a run")
    (run,) = form.runs()
    assert run["config"]["max_restarts"] == 7
    # Of several types: one is chosen first, and only then has it a field.
    assert run["config"]["scheduling_unit"] == "auto"
