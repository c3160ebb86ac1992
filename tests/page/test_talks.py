"""Conversations that the browser keeps."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.client.fake_server import FakeServer, Script
from tests.page.test_page import answered, answers, questions, say, told


def start_over(page: Page) -> None:
    page.get_by_role("button", name="New conversation").click()


def open_list(page: Page) -> None:
    page.get_by_role("button", name="Conversations", exact=True).click()


def titles(page: Page) -> list[str]:
    return page.locator("#talks-list .title span").all_inner_texts()


def test_conversations_stay_in_a_list(page: Page, server: FakeServer) -> None:
    told(server, "of the first")
    say(page, "first question\nsecond line")
    expect(answers(page)).to_contain_text("of the first")
    start_over(page)
    told(server, "of the second")
    say(page, "second question")
    expect(answers(page)).to_contain_text("of the second")
    expect(page).to_have_title("second question · forkpoint")
    open_list(page)
    assert titles(page) == ["second question", "first question"]
    page.get_by_role("button", name="first question", exact=False).first.click()
    expect(questions(page)).to_contain_text(["first question"])
    say(page, "more")
    expect(answers(page)).to_have_count(2)
    page.reload()
    expect(answers(page)).to_have_count(2)
    other = page.context.new_page()  # a new tab begins anew, and knows the list
    other.goto(server.url + "/")
    expect(other.get_by_text("What would you like to ask?")).to_be_visible()
    open_list(other)
    assert titles(other) == ["first question", "second question"]
    other.close()


def test_one_is_renamed_and_deleted_after_a_question(page: Page, server: FakeServer) -> None:
    say(page, "a")
    answered(page)
    open_list(page)
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    assert titles(page) == ["<img src=x onerror=alert(1)>"]
    expect(page).to_have_title("<img src=x onerror=alert(1)> · forkpoint")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("with all its branches?")).to_be_visible()
    page.get_by_role("button", name="Keep").click()
    assert len(titles(page)) == 1
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Nothing here yet")).to_be_visible()
    page.get_by_role("button", name="Close conversations").click()
    expect(answers(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_text("What would you like to ask?")).to_be_visible()


def test_a_conversation_goes_out_and_comes_back_with_its_branches(
    page: Page, server: FakeServer, tmp_path: Path
) -> None:
    told(server, "red it is")
    say(page, "red")
    expect(answers(page)).to_contain_text("red it is")
    told(server, "blue it is")
    questions(page).hover()
    questions(page).get_by_role("button", name="Edit and branch").click()
    page.get_by_label("Edit: you").fill("blue")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("blue it is")
    open_list(page)
    with page.expect_download() as markdown:
        page.get_by_role("button", name="Export Markdown").click()
    assert markdown.value.suggested_filename == "blue.md"
    assert markdown.value.path().read_text() == "# blue\n\n## You\n\nblue\n\n## Answer\n\nblue it is\n"
    with page.expect_download() as document:
        page.get_by_role("button", name="Export JSON").click()
    path = tmp_path / "saved.json"
    document.value.save_as(path)
    messages = [{"role": "user", "content": "blue"}, {"role": "assistant", "content": "blue it is"}]
    assert json.loads(path.read_text())["messages"] == messages
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#import-file").set_input_files(path)
    page.get_by_role("button", name="blue", exact=False).first.click()
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()
    expect(answers(page)).to_contain_text("blue it is")
    page.get_by_role("button", name="Previous branch").click()
    expect(answers(page)).to_contain_text("red it is")


def test_files_that_are_no_conversations_are_told(page: Page, tmp_path: Path) -> None:
    open_list(page)
    loop = {"role": "user", "content": "x", "children": ["1"]}
    texts = {
        "{": "is not a JSON",
        "[]": "not a conversation that was exported here",
        json.dumps({"kind": "forkpoint conversation", "tree": {"nodes": []}}): "has no beginning",
        json.dumps(
            {"kind": "forkpoint conversation", "tree": {"nodes": [["root", {"children": ["1"]}], ["1", loop]]}}
        ): "is broken",
    }
    for number, (text, says) in enumerate(texts.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        page.locator("#import-file").set_input_files(path)
        expect(page.locator("#talks-note")).to_contain_text(f"{number}.json: ")
        expect(page.locator("#talks-note")).to_contain_text(says)
    assert titles(page) == []


def test_a_full_browser_says_so_and_goes_on(page: Page, server: FakeServer) -> None:
    say(page, "kept")
    answered(page)
    page.evaluate(
        """() => {
            for (let size = 5_242_000; ; size -= 1000)
                try {
                    const pad = "x".repeat(size);
                    return localStorage.setItem("forkpoint.talk.big", JSON.stringify({ name: "x", pad, changed: 1 }));
                } catch {}
        }"""
    )
    told(server, "y" * 2000)
    say(page, "not kept any more")
    expect(answers(page)).to_have_count(2)
    expect(page.get_by_role("alert")).to_contain_text("room for conversations is full")
    page.get_by_role("alert").get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="More about x").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Close conversations").click()
    say(page, "kept again")
    expect(answers(page)).to_have_count(3)
    answered(page, 3)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.reload()
    expect(answers(page)).to_have_count(3)


def test_leaving_a_conversation_while_it_is_answered_keeps_what_came(page: Page, server: FakeServer) -> None:
    server.script.words, server.script.gap_s = ["word "] * 2000, 0.02
    say(page, "talk")
    expect(answers(page)).to_contain_text("word word")
    start_over(page)
    expect(answers(page)).to_have_count(0)
    open_list(page)
    page.get_by_role("button", name="talk", exact=False).first.click()
    expect(answers(page)).to_contain_text("word word")
    expect(page.locator(".figures")).to_contain_text("stopped")
    server.wait_for_abort()


def test_another_tab_shows_what_this_one_writes(page: Page, server: FakeServer) -> None:
    say(page, "one")
    answered(page)
    other = page.context.new_page()
    other.goto(server.url + "/")
    open_list(other)
    other.get_by_role("button", name="one", exact=False).first.click()
    say(page, "two")
    expect(answers(page)).to_have_count(2)
    expect(answers(other)).to_have_count(2)
    other.close()


def test_a_reload_while_an_answer_streams_keeps_all_that_was_shown(page: Page, server: FakeServer) -> None:
    server.script = Script(words=[f"word{number} " for number in range(2000)], reasoning=["why"], gap_s=0.02)
    say(page, "talk")
    expect(answers(page)).to_contain_text("word5 ")
    shown = page.evaluate(
        """() => { const text = document.querySelector(".prose").innerText; location.reload(); return text.trim() }"""
    )
    expect(page.get_by_text("Interrupted: the page was closed or reloaded")).to_be_visible()
    kept = answers(page).locator(".prose").inner_text()
    assert kept.startswith(shown)
    expect(page.locator("details.thought")).to_be_visible()
    told(server, "and the end.")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_contain_text("and the end.")
    expect(answers(page)).to_contain_text(kept)
    expect(page.get_by_text("Interrupted")).to_have_count(0)
    body = server.requests[-1]
    assert body["continue_final_message"] is True
    assert body["messages"][-1]["role"] == "assistant" and body["messages"][-1]["content"].startswith(kept)
    page.reload()
    expect(answers(page)).to_contain_text("and the end.")


def test_an_interrupted_answer_can_be_generated_again(page: Page, server: FakeServer) -> None:
    server.script = Script(words=["word "] * 2000, gap_s=0.02)
    say(page, "talk")
    expect(answers(page)).to_contain_text("word word")
    page.reload()
    told(server, "new")
    page.locator(".unfinished").get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_contain_text("new")
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()
    assert [message["role"] for message in server.requests[-1]["messages"]] == ["user"]


def test_a_tab_that_ended_without_a_word_leaves_an_interrupted_answer(browser: Browser, server: FakeServer) -> None:
    server.script = Script(words=["word "] * 2000, gap_s=0.02)
    with browser.new_context() as context:  # whose clock this test sets
        page = context.new_page()
        page.goto(server.url + "/")
        say(page, "talk")
        expect(answers(page)).to_contain_text("word word")
        other = second_tab(page, server, "talk")
        expect(other.locator(".unfinished")).to_have_count(0)
        shielded = "window.addEventListener('pagehide', event => event.stopImmediatePropagation(), { capture: true })"
        page.evaluate(shielded)
        page.close(run_before_unload=False)
        other.clock.install()
        other.clock.fast_forward(15_000)
        expect(other.get_by_text("Interrupted: the page was closed or reloaded")).to_be_visible()


def second_tab(page: Page, server: FakeServer, name: str) -> Page:
    other = page.context.new_page()
    other.goto(server.url + "/")
    expect(other.get_by_label("Model")).to_be_visible()
    open_list(other)
    other.get_by_role("button", name=name, exact=False).first.click()
    return other


def test_two_tabs_that_write_at_once_keep_both(page: Page, server: FakeServer) -> None:
    say(page, "one")
    answered(page)
    other = second_tab(page, server, "one")
    server.choose = lambda body: Script(words=[body["messages"][-1]["content"].upper() + " "] * 20, gap_s=0.02)
    say(page, "from this tab")
    say(other, "from the other")
    answered(page, 2)
    answered(other, 2)
    expect(questions(page).last).to_contain_text("from this tab")
    expect(questions(other).last).to_contain_text("from the other")
    for tab in (page, other):
        tab.reload()
        expect(tab.get_by_label("Branch", exact=False).filter(has_text="/2")).to_have_count(1)
        texts = {answers(tab).last.locator(".prose").inner_text().split(" ")[2]}
        if tab.get_by_role("button", name="Next branch").is_enabled():
            tab.get_by_role("button", name="Next branch").click()
        else:
            tab.get_by_role("button", name="Previous branch").click()
        texts.add(answers(tab).last.locator(".prose").inner_text().split(" ")[2])
        assert texts == {"TAB", "OTHER"}
    other.close()


def test_another_tab_shows_an_answer_as_it_grows(page: Page, server: FakeServer) -> None:
    say(page, "one")
    answered(page)
    other = second_tab(page, server, "one")
    server.script = Script(words=["word "] * 2000, gap_s=0.02)
    say(page, "two")
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last).to_contain_text("word word")
    expect(other.locator(".unfinished")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(other.locator(".figures").last).to_contain_text("stopped")
    other.close()


def test_words_of_messages_find_conversations(page: Page, server: FakeServer) -> None:
    for question, answer in (("about fruit", "An Apple a day"), ("about cars", "Four wheels")):
        start_over(page)
        told(server, answer)
        say(page, question)
        answered(page)
    open_list(page)
    search = page.get_by_label("Search in conversations")
    for words, expected in (("apple", ["about fruit"]), ("ABOUT", ["about cars", "about fruit"]), ("boat", [])):
        search.fill(words)
        expect(page.locator("#talks-list .title span")).to_have_text(expected)
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()


def test_a_conversation_stored_as_one_record_still_opens(page: Page, server: FakeServer) -> None:
    nodes = [
        ["root", {"id": "root", "children": ["1"], "active": "1"}],
        ["1", {"id": "1", "parent": "root", "role": "user", "content": "old one", "children": ["2"], "active": "2"}],
        ["2", {"id": "2", "parent": "1", "role": "assistant", "content": "answer", "children": [], "active": None}],
    ]
    record = {"title": "", "name": "old one", "changed": 1, "tree": {"nodes": nodes, "nextId": 3}}
    page.evaluate("text => localStorage.setItem('forkpoint.talk.old', text)", json.dumps(record))
    open_list(page)
    page.get_by_role("button", name="old one", exact=False).first.click()
    say(page, "more")
    expect(answers(page)).to_have_count(2)
    answered(page)
    page.reload()
    expect(answers(page)).to_have_count(2)
