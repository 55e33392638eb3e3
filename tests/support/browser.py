"""Prefect's UI in a headless Chromium, for tests and screenshots.

Tests that use it have the marker ``browser``. They need Debian's packages chromium and
chromium-driver, and are skipped without them. With TRIALFLOW_TEST_BROWSER=require, as in CI, they
fail instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    # A container's shared memory is too small.
    "--disable-dev-shm-usage",
    # The run's timeline is drawn with WebGL; without a GPU, in software.
    "--enable-unsafe-swiftshader",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PAGE_LIMIT_SECONDS = 60.0
SETTLED_SHOTS = 3


class Browser:
    """One tab."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def open(self, url: str, expecting: str) -> None:
        """Open `url` and wait until the page contains `expecting`.

        Raises:
            TimeoutException: it does not within a minute; with the page's text.
        """
        self._driver.get(url)
        self.wait_for(lambda: expecting in self.text, f"{expecting!r} on {url}")

    @property
    def text(self) -> str:
        """The page's text."""
        return str(self._driver.find_element(By.TAG_NAME, "body").text)

    def wait_for(self, condition: Callable[[], bool], what: str, poll_seconds: float = 0.2) -> None:
        """Wait until `condition` holds; `what` names it in the error."""
        try:
            # A page may be replaced while its text is read.
            WebDriverWait(
                self._driver,
                PAGE_LIMIT_SECONDS,
                poll_seconds,
                ignored_exceptions=[StaleElementReferenceException],
            ).until(lambda _: condition())
        except TimeoutException:
            raise TimeoutException(f"no {what}; the page says:\n{self.text}") from None

    def press(self, text: str, in_dialog: bool = False) -> None:
        """Press the first button or menu item with exactly this text, once there is one.

        Args:
            in_dialog: only in a dialog: the menu that has opened it may still be there.
        """
        where = f"//*[self::button or @role='menuitem'][normalize-space()='{text}']"
        if in_dialog:
            where = f"//*[@role='dialog' or @role='alertdialog']{where}"
        self.wait_for(lambda: bool(self._driver.find_elements(By.XPATH, where)), text)
        self._driver.find_element(By.XPATH, where).click()

    def type_into(self, placeholder: str, text: str) -> None:
        """Type into the field with that placeholder, once there is one."""
        where = f"//input[@placeholder='{placeholder}']"
        self.wait_for(lambda: bool(self._driver.find_elements(By.XPATH, where)), placeholder)
        self._driver.find_element(By.XPATH, where).send_keys(text)

    def wait_until_idle(self) -> None:
        """Wait until the page has handled all events and has been drawn, or some seconds.

        Animations may keep a page from ever being idle.
        """
        self._driver.execute_async_script(
            "const done = arguments[0];"
            "const draw = () => requestAnimationFrame(() => setTimeout(done));"
            "requestIdleCallback(draw, {timeout: 5000});"
        )

    def save_png(self, path: Path, is_changing: bool = False) -> None:
        """Save a screenshot, once the page has stopped changing unless it always changes.

        A run's timeline is a canvas, so no text tells when it has been drawn.
        """
        shots: list[bytes] = []

        def is_settled() -> bool:
            shots.append(self._driver.get_screenshot_as_png())
            is_same = is_changing or len(set(shots[-SETTLED_SHOTS:])) == 1
            return is_same and len(shots) >= SETTLED_SHOTS

        self.wait_for(is_settled, "end of changes", poll_seconds=1.0)
        path.write_bytes(shots[-1])


@contextmanager
def chromium(width: int = 1600, height: int = 1000) -> Iterator[Browser]:
    """A Chromium with a new profile, which ends with the block."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        how = f"{', '.join(missing)} not found: apt-get install chromium chromium-driver"
        if os.environ.get("TRIALFLOW_TEST_BROWSER") == "require":
            pytest.fail(how)
        pytest.skip(how)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
