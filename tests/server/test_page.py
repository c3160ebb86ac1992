"""The chat page against a real server."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import forkpoint
from tests.page.conftest import browser  # noqa: F401
from tests.server.running import RunningServer


def test_the_chat_page_branches_for_less(server: RunningServer, browser: Browser) -> None:  # noqa: F811
    page = browser.new_page()
    page.goto(server.url + "/")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Add system prompt").click()
    page.get_by_label("Edit: system prompt").fill("Fill some blocks. " * 10)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_label("Model")).to_be_visible()
    page.get_by_label("Message", exact=True).fill("first")
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_contain_text("none cached")
    page.get_by_role("button", name="Edit and branch").first.click()
    page.get_by_label("Edit: you").fill("other")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()
    expect(page.locator(".figures")).to_contain_text(re.compile("[1-9][0-9]* of "))
    page.close()


def test_its_files_come_with_their_types_and_only_once(server: RunningServer) -> None:
    page = get(server.url + "/")
    assert page.headers["Content-Type"].startswith("text/html")
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]
    named = re.findall(r'(?:href|src)="(static/[^"]+)"', page.read().decode())
    assert len(named) == 3
    vendored = sorted((Path(forkpoint.__file__).parent / "server" / "static" / "vendor").glob("*.js"))
    assert len(vendored) == 4
    for path in [*named, *(f"static/vendor/{file.name}" for file in vendored)]:
        answer = get(f"{server.url}/{path}")
        kind = "text/javascript" if path.endswith(".js") else "text/css"
        assert answer.headers["Content-Type"].startswith(kind) and answer.headers["X-Content-Type-Options"] == "nosniff"
        with pytest.raises(urllib.error.HTTPError) as again:
            get(f"{server.url}/{path}", {"If-None-Match": answer.headers["ETag"]})
        assert again.value.code == 304
    for path in ("static/../app.py", "static/vendor/../../app.py", "static/vendor/", "static/nothing.js", "static/"):
        with pytest.raises(urllib.error.HTTPError) as missing:
            get(f"{server.url}/{path}")
        assert missing.value.code == 404


def get(url: str, headers: dict[str, str] | None = None) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=30)
