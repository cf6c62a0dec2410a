"""A real Chromium for the pages of the dashboard."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

if TYPE_CHECKING:
    from tests.conftest import Headrace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[[Headrace], Page]]:
    """Yield a function that returns an empty page for a server.

    At the end, no script may have failed, and no other server may have got a request.
    """
    context, wrong = browser.new_context(), list[str]()

    def new_page(server: Headrace) -> Page:
        page, own = context.new_page(), (f"http://127.0.0.1:{server.http}/", "blob:")
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(request.url))
        return page

    yield new_page
    context.close()
    assert wrong == []
