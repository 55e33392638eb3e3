"""Documents: links resolve, no placeholder is left, and every public name has a reference page."""

from __future__ import annotations

import hashlib
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import trial_core.core
import trial_core.deepspeed
import trial_core.pytorch
import trialflow
from tests.support.json_types import json_types
from tests.support.snippets import DOCUMENTS, ROOT
from tests.support.strategies import LONG_FACTOR
from trialflow.deployments.cli.console import EXIT_CODES

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\(([^)\s]+)\)")
SCHEME = re.compile(r"[a-z]+:")
GUIDES = ROOT / "docs" / "guides"
PROMISES = (ROOT / "docs" / "promises.md").read_text()
# The last alternative: a table's cell that waits for a figure, such as RATIO1.
PLACEHOLDER = re.compile(r"\b(?:FIGURES|TODO|FIXME|XXX)\b|\|\s*[A-Z]{3,}\d\b")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_documents_are_found() -> None:
    """The patterns above find the documents."""
    assert {
        "README.md",
        "docs/reference/determined-names.md",
        "examples/gpt_stdlib/README.md",
    } <= set(map(name, DOCUMENTS))


def test_links_and_images_resolve() -> None:
    """Relative links and images of each document exist."""
    targets = {each: TARGET.findall(CODE.sub("", each.read_text())) for each in DOCUMENTS}
    paths = [
        (document, target.partition("#")[0])
        for document, found in targets.items()
        for target in found
        if not SCHEME.match(target)
    ]
    dead = [
        (name(document), path) for document, path in paths if not (document.parent / path).exists()
    ]
    assert len(paths) > 300
    assert dead == []


def test_no_placeholder_is_left() -> None:
    """No document has a word that stands for missing text."""
    left = {name(each): PLACEHOLDER.findall(each.read_text()) for each in DOCUMENTS}
    assert {document: words for document, words in left.items() if words} == {}


def test_the_tables_of_the_configuration_are_those_of_the_code() -> None:
    """`make docs` writes them; they can be read in the repository, too."""
    made = runpy.run_path(str(ROOT / "docs" / "hooks" / "configuration.py"))
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert page == made["with_tables"](page)
    assert "| `scheduling_unit` |" in page


def test_the_tables_of_json_are_those_of_the_code() -> None:
    """`make docs` writes them; a test of commands compares what they print with the same types."""
    made = runpy.run_path(str(ROOT / "docs" / "hooks" / "json_results.py"))
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    assert page == made["with_tables"](page)
    assert [name for name in json_types() if f"`{name}`" not in page] == []


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    """Programs branch on them."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_screen_says_what_has_not_been_tried(page: str) -> None:
    """The reader learns it above the first picture."""
    first_screen = (ROOT / page).read_text().partition("\n![")[0]
    assert "**Not tried yet:** several GPUs" in first_screen


def test_the_first_page_promises_what_the_readme_promises() -> None:
    """Its six cards have the README's words."""
    listed = re.compile(r"^- \*\*.+\.\*\* .+$", flags=re.MULTILINE)
    promised = listed.findall((ROOT / "README.md").read_text().replace("(docs/", "("))
    cards = listed.findall((ROOT / "docs" / "index.md").read_text())
    assert len(cards) == 6
    assert set(cards) <= set(promised)


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda guide: guide.stem)
def test_a_guide_begins_with_its_purpose_and_something_to_see(guide: Path) -> None:
    """A sentence, then a picture or a block of code, before its first section."""
    head, _, _ = guide.read_text().partition("\n## ")
    assert re.match(r"# .+\n\n[A-Za-z`][^|]+?\.\s", head)
    assert re.search(r"^(```|!\[)", head, flags=re.MULTILINE)


def test_the_first_page_leads_to_every_guide() -> None:
    """Where a code host shows it, there is no other list of them."""
    linked = set(re.findall(r"\]\(guides/(\S+?)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked >= {guide.name for guide in GUIDES.glob("*.md")}


def test_the_test_of_each_promise_exists() -> None:
    """The page of promises names tests that pytest runs."""
    named = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROMISES)))
    texts = {path: (ROOT / path).read_text() for path, _ in named}
    assert len(named) > 400
    missing = [each for each in named if f"\ndef {each[1]}(" not in texts[each[0]]]
    assert missing == []


def test_promises_without_a_mark_are_tested_by_default(request: pytest.FixtureRequest) -> None:
    """The page marks the tests that `make test` leaves out."""
    selected = {
        (
            item.nodeid.partition("::")[0],
            item.nodeid.partition("::")[2].partition("[")[0].partition("@")[0],
        )
        for item in request.session.items
    }
    if len({path for path, _ in selected}) < 250:
        pytest.skip("only some tests were chosen")
    rows = [row for row in PROMISES.splitlines() if "†" not in row]
    named = {each for row in rows for each in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)}
    assert named - selected == set()


def test_every_promise_has_a_test() -> None:
    """The page has a row for each promise of the README, in its order; each row names a test."""
    section = (ROOT / "README.md").read_text().partition("## What it guarantees")[2]
    promised = re.findall(r"^- \*\*(.+?)\.\*\*", section.partition("\n## ")[0], flags=re.MULTILINE)
    table = PROMISES.partition("## What strangers")[0]
    rows = re.findall(r"^\| (.*?) ?\| .* \| (.*) \|$", table, flags=re.MULTILINE)[1:]
    assert [promise for promise, _ in rows if promise] == promised
    assert all("::test_" in test for _, test in rows)


@pytest.mark.parametrize(
    ("path", "test", "quick", "long"),
    re.findall(r"`(tests/[\w/]+_fuzz\.py)::(\w+)` \| (?:(\d+), (\d+))? *\|", PROMISES),
    ids=lambda part: part[-40:],
)
def test_the_page_of_promises_counts_inputs(path: str, test: str, quick: str, long: str) -> None:
    """As many as the test tries, by default and in its long form."""
    before = (ROOT / path).read_text().partition(f"\ndef {test}(")[0]
    tried = int(re.findall(r"^@fuzz\(\s*(\d+)", before, flags=re.MULTILINE)[-1])
    assert (int(quick), int(long)) == (tried, tried * LONG_FACTOR)


LOWER = ("benchmarks", "benchmarks-history", "contributing", "decisions", "promises")
"""Pages that are not for those who look for help."""

PACKAGES = (trial_core.core, trial_core.deepspeed, trial_core.pytorch, trialflow)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_reference_page(package: ModuleType) -> None:
    """The reference names everything that a package exports, and nothing else of it."""
    pages = (ROOT / "docs" / "reference").rglob("*.md")
    text = "\n".join(page.read_text() for page in pages if page.name != "events.md")
    names = set(re.findall(rf"(?:^::: |`){package.__name__}\.(\w+)", text, flags=re.MULTILINE))
    assert names == set(package.__all__)


def test_every_decision_has_four_parts() -> None:
    """In one order, and in at most 12 lines."""
    page = (ROOT / "DECISIONS.md").read_text()
    parts = ["Context", "Decision", "Consequence", "Rejected"]
    decisions = re.findall(r"^### (.+)\n((?:(?!##).*\n)*)", page, flags=re.MULTILINE)
    assert len(decisions) == len(re.findall(r"^###", page, flags=re.MULTILINE))
    for title, text in decisions:
        lines = [line for line in text.splitlines() if line]
        named = [line.partition("**: ")[0].removeprefix("- **") for line in lines if "**: " in line]
        assert named == parts, title
        assert len(lines) <= 12, title


def test_the_picture_of_the_architecture_is_drawn_from_its_source() -> None:
    """After a change of the source, `make docs/architecture.svg` has to draw it again."""
    digest = hashlib.sha256((ROOT / "docs" / "architecture.dot").read_bytes()).hexdigest()
    assert f"sha256 of architecture.dot: {digest}" in (ROOT / "docs/architecture.svg").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_example_of_the_reference_is_code(package: ModuleType) -> None:
    """What follows `::` in a docstring is indented; else the site shows it as a paragraph."""
    exported = [getattr(package, name) for name in package.__all__]
    classes = [each for each in exported if isinstance(each, type)]
    members = [member for each in classes for member in vars(each).values()]
    for each in (*exported, *members):
        text = inspect.getdoc(each) or "" if callable(each) else ""
        assert re.findall(r"::\n\n\S.*", text) == [], each


def test_troubleshooting_explains_messages_that_exist() -> None:
    """The words of each heading are in the code; an ellipsis stands for what differs."""
    folders = ("trial_core", "flows", "tasks", "deployments")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # Strings over several lines become one.
    code = re.sub(r"""["']\n\s+f?["']""", "", "\n".join(path.read_text() for path in paths))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r"^### `(.+?)`", page, flags=re.MULTILINE)
    parts = [part.strip() for message in explained for part in message.split("…")]
    assert len(explained) > 20
    assert [part for part in parts if part not in code] == []


def test_a_search_shows_help_first() -> None:
    """Pages for contributors, and long lists, are not searched or rank below the others."""
    pages = {each: (ROOT / f"docs/{each}.md").read_text() for each in LOWER}
    ranked = {each: re.match(r"---\nsearch:\n  (.+)\n", text) for each, text in pages.items()}
    assert {found and found[1] for found in ranked.values()} == {"exclude: true", "boost: 0.01"}
