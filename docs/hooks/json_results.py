"""The tables of reference/json.md, made from the types of what commands print with `--json`.

``python docs/hooks/json_results.py`` writes them into the page; `make docs` does so first. As a
hook of MkDocs, it writes the JSON Schema of all results beside the page.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from json_types import PRINTED_BY_ALL, json_types  # MkDocs finds it beside this one, as Python does

from trialflow.deployments.cli.json_output import SCHEMA_VERSION

PAGE = Path(__file__).parents[1] / "reference" / "json.md"
MARKS = "<!-- results -->\n", "<!-- end of results -->"


def on_post_build(config: Any) -> None:
    """A hook of MkDocs': write the JSON Schema of all results."""
    path = Path(config.site_dir, "reference", "json.schema.json")
    path.write_text(json.dumps(json_schema(), indent=1) + "\n")


def json_schema() -> dict[str, Any]:
    """A JSON Schema: ``$defs`` has all types, and ``oneOf`` one entry for each command."""
    types = json_types()
    of_commands, types_used = msgspec.json.schema_components(
        types.values(), ref_template="#/$defs/{name}"
    )
    heads = [
        {"properties": {"command": {"const": name}, "schema_version": {"const": SCHEMA_VERSION}}}
        for name in types
    ]
    results = [{"allOf": [*pair]} for pair in zip(heads, of_commands, strict=True)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "oneOf": results,
        "$defs": types_used,
    }


def with_tables(page: str) -> str:
    """The page with its tables as the code is now, between their marks."""
    before, begin, rest = page.partition(MARKS[0])
    return f"{before}{begin}{chr(10).join(_tables())}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def _tables() -> Iterator[str]:
    schema = json_schema()
    commands: dict[str, list[str]] = {}
    for each in schema["oneOf"]:
        head, kind = each["allOf"]
        commands.setdefault(_name(kind), []).append(head["properties"]["command"]["const"])
    yield f"Version of the schema: {SCHEMA_VERSION}. Every result has\n"
    yield "| field | meaning |\n|---|---|"
    for name, meaning in PRINTED_BY_ALL.items():
        yield f"| `{name}` | {meaning} |"
    for kind, names in commands.items():
        yield f"\n## {', '.join(f'`{name}`' for name in names)}\n"
        yield from _fields(schema["$defs"][kind])
    yield "\n## Parts of results\n"
    for kind, definition in schema["$defs"].items():
        if kind not in commands:
            yield f"\n### {kind}\n"
            yield from _fields(definition)


def _fields(definition: dict[str, Any]) -> Iterator[str]:
    described = inspect.cleandoc(definition.get("description", "")).replace("``", "`")
    described = re.sub(r"\bNone\b", "null", described)
    text, _, attributes = described.partition("Attributes:\n")
    if text.strip():
        yield text.partition("\n\n")[0].replace("\n", " ") + "\n"
    meanings = {}
    joined = re.sub(r"\n {4,}(?! )(?![\w, ]+:)", " ", inspect.cleandoc(attributes))
    for names, meaning in re.findall(r"^ *([\w, ]+): (.+)$", joined, re.MULTILINE):
        meanings.update(dict.fromkeys(names.split(", "), meaning))
    yield "| field | type | meaning |\n|---|---|---|"
    required = definition.get("required", [])
    for name, field in definition["properties"].items():
        is_missing = name not in required and "default" not in field  # those are always printed
        meaning = meanings.get(name, "").replace("|", "\\|")
        meaning = f"{meaning[:1].upper()}{meaning[1:]}{' It may be missing.' * is_missing}".strip()
        yield f"| `{name}` | {_type(field)} | {meaning} |"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return f"[{_name(field)}](#{_name(field).lower()})"
    if choices := field.get("anyOf"):
        return ", ".join(_type(each) for each in choices)
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"mapping to {_type(inner)}" if isinstance(inner, dict) and inner else "mapping"
    return str(kind)


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
