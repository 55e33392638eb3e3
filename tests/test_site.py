"""The documentation site, built as `make docs` does and read in a browser; needs the extra docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.support.browser import Browser, chromium
from tests.support.snippets import ROOT

PHONE = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
LISTS = ("cli", "configuration", "deepspeed-features", "determined-names", "json")
LONG_PAGES = [f"reference/{each}.html" for each in LISTS]
"""Lists, which are searched and not read."""

pytestmark = [pytest.mark.browser, pytest.mark.long]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    return folder


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def driver_of(browser: Browser) -> Chrome:
    return browser._driver


def test_llms_txt_lists_the_markdown_of_each_page(site: Path) -> None:
    """In their order, with titles; each is beside its page."""
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert listed[:2] == [("Home", "index.md"), ("Quick start", "quickstart.md")]
    pages = {str(page.relative_to(site)) for page in site.glob("**/*.html")} - {"404.html"}
    assert {url.replace(".md", ".html") for _, url in listed} == pages
    assert [url for _, url in listed if not (site / url).is_file()] == []
    assert len(listed) > 50


def test_the_markdown_has_what_the_page_has(site: Path) -> None:
    """Also what is generated from the code; blocks of code name their language, and links lead to
    the Markdown of other pages."""
    assert "`--take-over`" in (site / "reference/cli.md").read_text()
    guide = (site / "guides/stopping.md").read_text()
    assert "```yaml\nstopping:" in guide
    assert "](scripts.md#stops-and-failures)" in guide


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("cancel", "guides/stopping.html"),
        ("early stop", "guides/cookbook.html"),
        ("is not among the validation metrics", "troubleshooting.html"),
        ("get_hparam", "reference/pytorch/context.html"),
    ],
)
def test_search_works_without_a_server(site: Path, browser: Browser, words: str, page: str) -> None:
    """In pages that are opened as files. Help comes first, and no page of decisions is found."""
    browser.open((site / "guides/pytorch.html").as_uri(), "PyTorch trials")
    driver = driver_of(browser)
    driver.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(words)

    def found() -> list[str]:
        links = driver.find_elements(By.CSS_SELECTOR, ".md-search-result__item > a")
        paths = [(link.get_attribute("href") or "").partition("?")[0] for link in links]
        pages = [path.removeprefix(site.as_uri() + "/").partition("#")[0] for path in paths]
        return list(dict.fromkeys(pages))

    browser.wait_for(lambda: bool(found()), "search result")
    assert page in found()[:3]
    assert "decisions.html" not in found()


def test_no_page_is_endless_on_a_phone(site: Path, browser: Browser) -> None:
    """No page of classes or of help is longer than some dozen screens, or wider than the screen.
    Tables are lists there, so that no row has to be pushed aside to be read."""
    driver = driver_of(browser)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    size = "const page = document.documentElement; return [page.scrollWidth, page.scrollHeight]"
    tables = (
        "return [...document.querySelectorAll('table')].filter(t => t.scrollWidth > innerWidth)"
    )
    pages = [*site.glob("reference/**/*.html"), *site.glob("guides/*.html")]
    shown = [*pages, site / "index.html", site / "benchmarks.html"]
    endless = {}
    for page in shown:
        driver.get(page.as_uri())
        width, height = driver.execute_script(size)
        path = str(page.relative_to(site))
        is_wide = width > PHONE["width"] or driver.execute_script(tables)
        if is_wide or (height > 22_000 and path not in LONG_PAGES):
            endless[path] = width, height
    assert len(pages) > 30
    assert endless == {}


def test_a_cell_names_its_column_on_a_phone(site: Path, browser: Browser) -> None:
    """What is read below another cell, and not below the column's head."""
    driver = driver_of(browser)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    browser.open((site / "index.html").as_uri(), "pause of training for a checkpoint")
    script = "const cell = document.querySelectorAll('.home-table td')[1];"
    script += "return getComputedStyle(cell, '::before').content + cell.textContent"
    assert "measured: " in str(driver.execute_script(f"{script}.replace('\"', '')"))


def test_the_first_page_shows_both_files_side_by_side(site: Path, browser: Browser) -> None:
    """With two pictures, six cards, and everything from the site's own folder."""
    driver = driver_of(browser)
    browser.open((site / "index.html").as_uri(), "experiment.yaml")
    files = driver.find_elements(By.CSS_SELECTOR, ".home-files pre")
    assert [each.text.split(maxsplit=1)[0] for each in files] == ['"""Learns', "name:"]
    tops = [each.location["y"] for each in files]
    assert tops[0] == tops[1]
    cut_off = "return [...document.querySelectorAll('pre code, .home-shot img, .home-cards li')]"
    cut_off += ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    assert driver.execute_script(cut_off) == []
    drawn = "return [...document.querySelectorAll('.home-shot img')].map(i => i.naturalWidth)"
    assert min(driver.execute_script(drawn)) > 0
    assert len(driver.find_elements(By.CSS_SELECTOR, ".home-cards li")) == 6
    page = (site / "index.html").read_text()
    assert re.findall(r'(?:src="|<link[^>]* href=")(\w+:[^"]+)', page) == []
    assert re.search(r'<link rel="icon" href="assets/mark.svg"', page)


def test_a_reader_switches_between_dark_and_light(site: Path, browser: Browser) -> None:
    """One press, and the text still stands out from what is behind it."""
    browser.open((site / "index.html").as_uri(), "experiment.yaml")
    driver = driver_of(browser)
    colours = "const style = getComputedStyle(document.body); return"
    colours += (
        " [style.backgroundColor, style.color].map(each => each.match(/[\\d.]+/g).map(Number))"
    )
    seen = []
    for _ in range(2):
        behind, text = (sum(each[:3]) for each in driver.execute_script(colours))
        seen.append(behind > text)
        assert abs(behind - text) > 400
        shown = [
            each
            for each in driver.find_elements(By.CSS_SELECTOR, "[data-md-component=palette] label")
            if each.is_displayed()
        ]
        shown[0].click()
    assert sorted(seen) == [False, True]


def test_no_page_says_to_build_the_site(site: Path) -> None:
    """Its reader is in it. Contributors are told, because they change it."""
    told = {
        str(page.relative_to(site))
        for page in site.rglob("*.html")
        if "make docs" in page.read_text()
    }
    assert told == {"contributing.html"}


def test_an_example_of_a_class_is_code(site: Path, browser: Browser) -> None:
    """The first one of `PyTorchTrial`, how to wrap a model, is no paragraph."""
    browser.open((site / "reference/pytorch/trial.html").as_uri(), "PyTorchTrial")
    code = driver_of(browser).find_elements(By.CSS_SELECTOR, "pre")
    assert any("self.model = context.wrap_model(" in each.text for each in code)
