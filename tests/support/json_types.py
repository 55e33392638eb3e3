"""Compares what commands print with `--json` with the types that the reference page shows."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from trialflow.deployments.cli.json_output import SCHEMA_VERSION
from trialflow.deployments.cli.json_types import json_types


def check_json(document: dict[str, Any]) -> dict[str, Any]:
    """The result without the two fields that all have; fails if it has not the command's type."""
    assert document["schema_version"] == SCHEMA_VERSION
    kind = json_types()[document["command"]]
    result = {key: document[key] for key in document if key not in ("command", "schema_version")}
    known = json.loads(msgspec.json.encode(msgspec.convert(result, kind)))
    assert known == result, f"{document['command']} prints what its type in json_types lacks"
    return result
