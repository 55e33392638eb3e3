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

pytestmark = [pytest.mark.server, pytest.mark.browser]


@dataclass
class Form:
    """The form on its page, and who can see what runs it has made."""

    browser: Browser
    client: SyncPrefectClient
    deployment_id: str

    def put(self, label: str, value: str) -> None:
        """Write into a field, instead of what is there."""
        self._field(label).send_keys(Keys.CONTROL, "a")
        self._field(label).send_keys(value, Keys.TAB)  # the page hears of it when it is left
        self.browser.wait_for(
            lambda: self._field(label).get_property("value") == value, f"{value} in {label}"
        )
        self.browser.wait_until_idle()  # what is submitted is what the page has drawn last

    def problem(self, label: str) -> str:
        """What the browser has against what is in a field."""
        return str(self._field(label).get_property("validationMessage"))

    def submit(self) -> None:
        """Ask for a run."""
        button = "//button[normalize-space()='Submit']"
        self.browser._driver.find_element(By.XPATH, button).click()

    def runs(self) -> list[dict[str, Any]]:
        """The parameters of the runs that there are."""
        asked = {"deployments": {"id": {"any_": [self.deployment_id]}}}
        found = self.client.request("POST", "/flow_runs/filter", json=asked).json()
        return [run["parameters"] for run in found]

    def _field(self, label: str) -> Any:
        after = "following::*[self::input or self::textarea][1]"
        path = f"//label[normalize-space(text())='{label}']/{after}"
        return self.browser._driver.find_element(By.XPATH, path)


@pytest.fixture
def form(prefect_server: PrefectServer) -> Iterator[Form]:
    """That of `train/train`; what a run cannot do without is filled in."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        things = wanted_resources("process", "form", None, Path("/srv/runs"))
        for _ in set_up(things, client, False):
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
            for _ in take_down(reversed(things), client, False):
                pass


@pytest.mark.long  # as below
def test_the_form_refuses_what_is_wrong(form: Form) -> None:
    """It has all fields of an experiment. With a number that is too small no run is made, and its
    field says why."""
    titles = {field.title for field in ExperimentConfig.model_fields.values() if field.title}
    assert "Scheduling unit" in titles
    text = form.browser.text
    assert {title for title in titles if title not in text} == set()

    form.put("Scheduling unit (Optional)", "0")
    form.submit()
    assert "greater than or equal to 1" in form.problem("Scheduling unit (Optional)")
    form.put("Scheduling unit (Optional)", "7")
    assert form.problem("Scheduling unit (Optional)") == ""
    assert form.runs() == []


@pytest.mark.long  # on a busy machine the page may not have taken a value over when it is submitted
def test_the_form_makes_a_run(form: Form) -> None:
    """It has what was written into a field."""
    form.put("Scheduling unit (Optional)", "7")
    form.submit()
    form.browser.wait_for(lambda: bool(form.runs()), "a run")
    assert [run["config"]["scheduling_unit"] for run in form.runs()] == [7]
