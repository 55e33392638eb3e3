"""Our events on a server, and what docs/reference/events.md says of them."""

from __future__ import annotations

import re
from typing import Any

from tests.support.prefect import PrefectServer
from tests.support.snippets import ROOT
from tests.support.waiting import ask, until

PAGE = ROOT / "docs" / "reference" / "events.md"
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def documented(event: str) -> dict[str, tuple[type, ...]]:
    """The types of an event's fields, by its tables."""
    (section,) = re.findall(rf"^## {event}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", section, re.M)
    return {
        name: tuple(each for word in types.split(" or ") for each in TYPES[word])
        for name, types in rows
    }


def check_fields(event: dict[str, Any]) -> None:
    """Each field is documented and sent, with its type. Both outcomes of a retraining are alike."""
    name = event["event"].replace("model.kept", "model.promoted")
    fields, payload = documented(name), event["payload"]
    assert fields.keys() == payload.keys()
    assert all(isinstance(payload[name], types) for name, types in fields.items()), payload


def related(event: dict[str, Any]) -> dict[str, str]:
    """Ids of an event's related resources, by role."""
    return {each["prefect.resource.role"]: each["prefect.resource.id"] for each in event["related"]}


def events_of(
    server: PrefectServer, flow_run_id: str | None, count: int, prefix: str = "trialflow."
) -> list[dict[str, Any]]:
    """Our events of a flow run, once there are so many, in their order."""
    return events_about(server, f"prefect.flow-run.{flow_run_id}", count, prefix)


def events_about(
    server: PrefectServer, resource: str, count: int, prefix: str = "trialflow."
) -> list[dict[str, Any]]:
    """Our events that a resource is related to, once there are so many, in their order."""
    related = {"id": [resource]}
    body = {"filter": {"event": {"prefix": [prefix]}, "related": related}, "limit": 50}
    found: list[dict[str, Any]] = []

    def are_recorded() -> bool:
        found[:] = ask(server, "events/filter", body)["events"]
        return len(found) >= count

    until(are_recorded, f"{count} events", 60, lambda: [each["event"] for each in found])
    return sorted(found, key=lambda each: str(each["occurred"]))
