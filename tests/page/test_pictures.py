"""Pictures in the chat page: chosen, pasted and dropped, shown, sent again in every turn, and kept."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.client.fake_server import FakeServer
from tests.page.test_page import answered, answers, questions, say, told

PUT = """([name, kind, data, event]) => {
    const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, { type: kind }));
    const options = { bubbles: true, cancelable: true };
    const made = event === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
        : new DragEvent("drop", { ...options, dataTransfer: transfer });
    document.getElementById("input").dispatchEvent(made);
}"""
# one red pixel
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="


def put(page: Page, event: str, name: str = "dot.png", kind: str = "image/png", data: str = DOT) -> None:
    page.evaluate(PUT, [name, kind, data, event])


def sent_images(server: FakeServer, number: int = -1) -> list[list[str]]:
    """The images of each message of a request."""
    contents = [message["content"] for message in server.requests[number]["messages"]]
    parts = [content if isinstance(content, list) else [] for content in contents]
    return [[part["image_url"]["url"] for part in each if part["type"] == "image_url"] for each in parts]


def test_pictures_are_chosen_pasted_dropped_and_sent_in_every_turn(
    page: Page, server: FakeServer, tmp_path: Path
) -> None:
    told(server, "a dot", num_prompt_tokens=300, num_cached_tokens=128, image_tokens=(192, 122))
    url, thumbnails = f"data:image/png;base64,{DOT}", page.locator("#pictures").get_by_role("img")
    (tmp_path / "dot.png").write_bytes(base64.b64decode(DOT))
    page.get_by_label("Image files").set_input_files(tmp_path / "dot.png")
    expect(thumbnails).to_have_count(1)
    put(page, "paste")
    put(page, "drop")
    expect(thumbnails).to_have_count(3)
    page.get_by_role("button", name="Remove image 2").click()
    expect(thumbnails).to_have_count(2)
    say(page, "what is this?")
    expect(answers(page)).to_contain_text("a dot")
    expect(page.locator(".figures")).to_contain_text("122 of 192 image tokens cached")
    expect(questions(page).get_by_role("img", name="Image")).to_have_count(2)
    expect(thumbnails).to_have_count(0)
    assert sent_images(server) == [[url, url]]
    assert server.requests[0]["messages"][0]["content"][-1] == {"type": "text", "text": "what is this?"}
    page.reload()
    expect(questions(page).get_by_role("img", name="Image")).to_have_count(2)
    assert questions(page).get_by_role("img").first.evaluate("image => image.naturalWidth") == 1
    say(page, "and now?")
    answered(page, 2)
    assert sent_images(server) == [[url, url], [], []]
    put(page, "drop")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_role("button", name="Send").click()  # a picture without a word
    answered(page, 3)
    assert server.requests[-1]["messages"][-1]["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    answers(page).last.get_by_role("button", name="Raw").click()
    expect(page.get_by_label("Request as sent")).to_contain_text("data:image/png;base64,")
    expect(page.get_by_label("Request as sent")).not_to_contain_text(DOT)


NUM_PICTURES = """async () => {
    const request = indexedDB.open("forkpoint");
    const database = await new Promise((resolve) => (request.onsuccess = () => resolve(request.result)));
    const count = database.transaction("pictures").objectStore("pictures").count();
    return new Promise((resolve) => (count.onsuccess = () => resolve(count.result)));
}"""


def test_pictures_take_no_room_from_conversations(page: Page, server: FakeServer) -> None:
    """A picture larger than what is left of localStorage is there after a reload, in another tab and in an export."""
    image: Any = pytest.importorskip("PIL.Image")
    file, noise = io.BytesIO(), np.random.default_rng(1).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    image.fromarray(noise).save(file, "JPEG", quality=95)
    page.evaluate("localStorage.setItem('filler', 'x'.repeat(5_000_000))")
    for number in (1, 2):
        put(page, "paste", kind="image/jpeg", data=base64.b64encode(file.getvalue()).decode())
        say(page, f"what is this? {number}")
        answered(page, number)
    expect(page.get_by_text("room for conversations is full")).to_be_hidden()
    sent = sent_images(server)
    assert min(len(url) for each in sent for url in each) > 5_242_880 - 5_000_000
    page.reload()
    expect(questions(page).get_by_role("img", name="Image")).to_have_count(2)
    say(page, "and now?")
    answered(page, 3)
    assert [url for each in sent_images(server) for url in each] == [url for each in sent for url in each]
    page.get_by_role("button", name="Conversations").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON").click()
    exported = json.loads(download.value.path().read_text())
    contents = [message["content"] for message in exported["messages"] if isinstance(message["content"], list)]
    found = [part["image_url"]["url"] for content in contents for part in content if "image_url" in part]
    assert found == [url for each in sent for url in each]
    assert page.evaluate(NUM_PICTURES) == 2
    page.get_by_role("button", name="Delete").click()
    page.locator(".sure").get_by_role("button", name="Delete").click()
    page.wait_for_function(f"async () => (await ({NUM_PICTURES})()) === 0")


def test_an_edited_question_keeps_its_pictures(page: Page, server: FakeServer) -> None:
    put(page, "paste")
    say(page, "red?")
    answered(page)
    questions(page).first.hover()
    questions(page).first.get_by_role("button", name="Edit and branch").click()
    page.get_by_label("Edit: you").fill("blue?")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()
    expect(questions(page).get_by_role("img", name="Image")).to_have_count(1)
    answered(page)
    assert sent_images(server) == sent_images(server, 0) != [[]]


def test_a_model_without_images_is_offered_none(page: Page, server: FakeServer) -> None:
    button, note = (
        page.get_by_role("button", name="Add images"),
        page.get_by_role("alert").get_by_text("reads no images"),
    )
    expect(button).to_be_visible()
    for card in server.models:
        card["input_modalities"] = ["text"]
    page.reload()
    expect(page.get_by_label("Model")).to_be_visible()
    expect(button).to_be_hidden()
    for event in ("paste", "drop"):
        put(page, event)
        expect(note).to_be_visible()
        expect(page.locator("#pictures").get_by_role("img")).to_have_count(0)
        say(page, "what is this?")
        expect(note).to_be_hidden()
    answered(page, 2)
    assert sent_images(server) == [[], [], []]


def test_large_pictures_are_made_smaller_and_others_are_refused(page: Page, server: FakeServer) -> None:
    image: Any = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGBA", (3072, 100), (0, 0, 0, 0)).save(file, "PNG")
    put(page, "paste", data=base64.b64encode(file.getvalue()).decode())
    expect(page.locator("#pictures").get_by_role("img")).to_have_count(1)
    put(page, "drop", name="broken.png", data=base64.b64encode(b"x").decode())
    expect(page.get_by_role("alert").get_by_text("broken.png cannot be read as an image.")).to_be_visible()
    put(page, "drop", name="notes.pdf", kind="application/pdf", data=base64.b64encode(b"%PDF-1.7").decode())
    expect(page.get_by_role("alert").get_by_text("notes.pdf cannot be read as an image.")).to_be_visible()
    say(page, "what is this?")
    answered(page)
    ((url,),) = sent_images(server)
    sent = image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert sent.size == (1536, 50) and sent.getpixel((0, 0)) == (255, 255, 255)
