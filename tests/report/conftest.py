"""Pages opened in the browser."""

from dataclasses import dataclass, field

import pytest

from tests.browser import PATIENCE_MS


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
