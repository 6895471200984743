"""A browser and the server that it looks at.  Without Chromium, chromedriver or selenium the tests here are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.server.process import Server, start_server

if TYPE_CHECKING:
    from tests.server.browser.page import Page

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,860"
)


@pytest.fixture(scope="module")
def nano() -> Iterator[Server]:
    running = start_server(Path("nano"))
    yield running
    running.process.terminate()
    running.process.wait(timeout=60)


@pytest.fixture
def page(nano: Server, tmp_path: Path) -> Iterator[Page]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    from tests.server.browser.page import CHROMIUM, Page

    if not CHROMIUM or not shutil.which("chromedriver"):
        pytest.skip("no Chromium or no chromedriver")

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS.split(), f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Page(driver, nano)
    finally:
        driver.quit()
