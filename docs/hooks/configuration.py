"""The tables of reference/configuration.md, made from the pydantic models.

``python docs/hooks/configuration.py`` writes them into the page; `make docs` does so first. As a
hook of MkDocs, it leaves out a sentence of the pages that mkdocstrings makes: where to read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trial_core.config import ExperimentConfig
from trial_core.config.section_base import Section
from trial_core.search.settings import SearchSettings

PAGE = Path(__file__).parents[1] / "reference" / "configuration.md"
WHERE = "read it in the site that `make docs` builds"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of MkDocs': on the site, the sentence for readers of the file is untrue."""
    return re.sub(rf"^.*{WHERE}.*\n", "", markdown, flags=re.MULTILINE)


def with_tables(page: str) -> str:
    """The page with its tables as the code is now, between their marks."""
    for mark, lines in (("fields", tables()), ("ignored", ignored())):
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{chr(10).join(lines)}\n\n{end}{rest.partition(end)[2]}"
    return page


def tables() -> Iterator[str]:
    """A table for the top level of the experiment file, and one for each section."""
    schema = ExperimentConfig.model_json_schema()
    sections = {
        name: schema["$defs"][section]
        for name, field in schema["properties"].items()
        if (section := _section(field))
    }
    yield from _table("Top level", schema, schema["$defs"])
    of_search = SearchSettings.model_json_schema()
    for name, section in sections.items():
        yield from _table(f"`{name}`", section, schema["$defs"])
        if name == "searcher":
            title = "`searcher` of a hyperparameter search"
            own = {**of_search, "properties": _only_of_search(of_search, section)}
            yield from _table(title, own, of_search.get("$defs", {}))
        for inner, field in section["properties"].items():
            if of_inner := _section(field):
                yield from _table(f"`{name}.{inner}`", schema["$defs"][of_inner], schema["$defs"])


def _only_of_search(of_search: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """The fields that the section of a single trial does not have, and the name."""
    return {
        name: field
        for name, field in of_search["properties"].items()
        if name == "name" or name not in section["properties"]
    }


def ignored() -> Iterator[str]:
    """A table of Determined's fields that have no effect here."""
    kinds = [field.annotation for field in ExperimentConfig.model_fields.values()]
    yield "| field | reason |\n|---|---|"
    for section in [ExperimentConfig, *kinds]:
        if isinstance(section, type) and issubclass(section, Section):
            for name, reason in section.ignored.items():
                path = ".".join(filter(None, (section.yaml_path, name)))
                yield f"| `{path}` | {reason} |"


def _table(title: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {title}\n\n{section.get('description', '')}\n"
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    required = section.get("required", [])
    for name, field in section["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field.get('default'))}`"
        text = field.get("description", "")
        if section_name := _section(field):
            default = "see below"
            text = text or definitions[section_name].get("description", "").partition("\n")[0]
        text = text.replace("|", "\\|").replace("\n", " ")
        yield f"| `{name}` | {_type(field, definitions)} | {default} | {text} |"


def _section(field: dict[str, Any]) -> str | None:
    """The name of the model that a field holds, if it holds one."""
    for each in (field, *field.get("anyOf", []), *field.get("allOf", [])):
        if "$ref" in each:
            return str(each["$ref"]).rpartition("/")[2]
    return None


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if choices := field.get("anyOf"):
        return ", ".join(dict.fromkeys(_type(each, definitions) for each in choices))
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "object" and "properties" in field:
        return " or ".join(f"`{{{key}: …}}`" for key in field["properties"])
    if field.get("type") == "array" and "items" in field:
        return f"list of {_type(field['items'], definitions)}"
    names = {"object": "mapping", "array": "list", "boolean": "boolean"}
    kind = field.get("type", "any")
    return names.get(kind, kind)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
