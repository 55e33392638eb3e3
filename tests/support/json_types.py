"""Compares what commands print with `--json` with the types that the reference page shows."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from tests.support.snippets import ROOT
from trialflow.deployments.cli.json_output import SCHEMA_VERSION

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
from json_types import PRINTED_BY_ALL, json_types

__all__ = ["PRINTED_BY_ALL", "check_json", "json_types"]


def check_json(document: dict[str, Any]) -> dict[str, Any]:
    """The result without the two fields that all have; fails if it has not the command's type."""
    assert document["schema_version"] == SCHEMA_VERSION
    kind = json_types()[document["command"]]
    result = {key: document[key] for key in document if key not in ("command", "schema_version")}
    known = json.loads(msgspec.json.encode(msgspec.convert(result, kind)))
    assert known == result, f"{document['command']} prints what its type in json_types lacks"
    return result
