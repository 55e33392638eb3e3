from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.json_types import check_json
from trialflow.deployments.cli import json_output, json_result


@pytest.fixture(autouse=True)
def printed_json_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command prints as JSON in these tests is what the reference page says."""
    make = json_output.json_document

    def checked(command: str, result: Mapping[str, Any]) -> dict[str, Any]:
        document = make(command, result)
        check_json(document)
        return document

    for module in (json_output, json_result):
        monkeypatch.setattr(module, "json_document", checked)
