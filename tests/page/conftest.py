from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

import forkpoint
from tests.client.fake_server import FakeServer, fake_server

PAGE = Path(forkpoint.__file__).parent / "server" / "static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the session: while it lives, its event loop counts as running in this thread."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine; `apt-get install chromium` runs the tests of the chat page")
    expect.set_options(timeout=15_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        running.page = PAGE
        yield running


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """A tab for all tests of a module. Each test has a server of its own, so nothing that its page keeps is seen."""
    with browser.new_context(reduced_motion="reduce") as context:
        yield context.new_page()


@pytest.fixture
def page(tab: Page, server: FakeServer) -> Iterator[Page]:
    """The chat page, loaded; a test fails if a script of it raises or breaks the content security policy."""
    wrong: list[str] = []

    def note_console(message: ConsoleMessage) -> None:
        if "Content Security" in message.text:
            wrong.append(message.text)

    def note_error(error: Error) -> None:
        wrong.append(str(error))

    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.on("pageerror", note_error)
    tab.on("console", note_console)
    tab.goto(server.url + "/")
    yield tab
    tab.remove_listener("pageerror", note_error)
    tab.remove_listener("console", note_console)
    tab.unroute_all()
    tab.goto("about:blank")  # so that nothing asks a server that has ended
    for other in tab.context.pages:
        if other is not tab:
            other.close()
    assert wrong == []
