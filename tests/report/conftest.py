"""One headless Chromium for all tests of the page, and pages opened in it."""

import shutil
from dataclasses import dataclass, field

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
def browser():
    """Chromium, where one is found."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium found on this machine, so the page was not tested in a browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS), timeout=PATIENCE_MS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in the browser, and what it complained about and asked for."""

    page: object
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def open_in(browser, path, *, width=1280, scheme="light"):
    """Open a file in a browser context of its own, unfold it, and wait until its charts are drawn."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    opened = Opened(context.new_page())
    page = opened.page
    page.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    more = page.locator("details.more")
    if more.count():
        # Closed until a reader asks for it.
        assert more.get_attribute("open") is None
        page.click("details.more > summary")
        page.wait_for_selector("details.more[data-drawn=true]")
    return opened


@pytest.fixture
def open_page(browser):
    """`open_page(path, width=..., scheme=...)`; what a test opened is closed with it, and draws no more."""
    opened = []

    def open_one(path, **window):
        opened.append(open_in(browser, path, **window))
        return opened[-1]

    yield open_one
    for one in opened:
        one.page.context.close()
