"""The chat page against a real server."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, expect

from tests.page.conftest import browser  # noqa: F401
from tests.server.running import RunningServer


def test_the_chat_page_branches_for_less(server: RunningServer, browser: Browser) -> None:  # noqa: F811
    page = browser.new_page()
    page.goto(server.url + "/")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill("8")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Add system prompt").click()
    page.get_by_label("Edit: system prompt").fill("Fill some blocks. " * 10)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_label("Model")).to_be_visible()
    page.get_by_label("Message", exact=True).fill("first")
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_contain_text("0 of ")
    page.get_by_role("button", name="Edit and branch").first.click()
    page.get_by_label("Edit: you").fill("other")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()
    expect(page.locator(".figures")).to_contain_text(re.compile("[1-9][0-9]* of "))
    page.close()
