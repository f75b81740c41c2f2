"""One headless Chromium for all tests of a process that look at a page: a second one would be refused."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
"""A browser that asks nobody anything by itself, so that every request is the page's."""

PATIENCE_MS = 180_000
"""How long a browser on a busy machine may take for anything."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, where one is found."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium found on this machine, so the page was not tested in a browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS), timeout=PATIENCE_MS)
        yield browser
        browser.close()
