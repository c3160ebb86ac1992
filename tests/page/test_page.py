"""The chat page in a real browser, against a server whose answers are told to it."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from forkpoint.demo.model import MODEL_NAME
from tests.client.fake_server import MODEL, FakeServer, Script


def say(page: Page, text: str) -> None:
    expect(page.get_by_label("Model")).to_be_visible()  # nothing is sent before the models are known
    page.get_by_label("Message", exact=True).fill(text)
    # the page takes nothing while an answer arrives or a picture is read
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def answered(page: Page, number: int = 1) -> None:
    """Waits until `number` answers ended: only then does the server have every request that the page made."""
    expect(page.locator(".figures")).to_have_count(number)


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


def sent(server: FakeServer, number: int = -1) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in server.requests[number]["messages"]]


def told(server: FakeServer, words: str, **options: Any) -> None:
    server.script = Script(words=re.findall(r"\s*\S+", words), **options)


WATCH = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const answer = document.querySelector(".message.assistant");
        const text = answer && (answer.querySelector(".waiting") ? "(waiting)" : answer.innerText.trim());
        if (text && text !== seen.at(-1)) seen.push(text);
    }).observe(document.body, { subtree: true, childList: true });
}"""


def test_an_answer_streams_with_its_figures(page: Page, server: FakeServer) -> None:
    reused = {"num_prompt_tokens": 4100, "num_cached_tokens": 3072, "num_restored_tokens": 2560, "num_peer_tokens": 512}
    told(server, "one two three", gap_s=0.3, first_token_s=0.2, **reused)
    page.evaluate(WATCH)
    say(page, "count")
    figures = page.locator(".figures")
    expect(answers(page)).to_contain_text("one two three")
    seen = page.evaluate("seen")
    assert seen[0] == "(waiting)" and {"one", "one two"} & set(seen)  # a busy browser skips one of the two
    expect(figures).to_contain_text("3,072 of 4,100 prompt tokens cached")
    expect(figures).to_contain_text("2,048 of them from a tier")
    expect(figures).to_contain_text("512 of them from another server")
    expect(page.get_by_role("img", name="75 % of the prompt cached")).to_be_visible()
    first = re.search(r"first token (\d+) ms", figures.inner_text())
    assert first is not None and 200 <= int(first[1]) < 10_000
    speed = re.search(r"([\d.]+) tokens/s", figures.inner_text())
    assert speed is not None and 0.2 < float(speed[1]) < 4  # at most a token each 0.3 s
    assert sent(server) == [("user", "count")]
    body = server.requests[0]
    assert (body["model"], body["stream"], "temperature" in body, "max_tokens" in body) == (MODEL, True, False, False)


def test_no_speed_is_told_of_an_instant(page: Page, server: FakeServer) -> None:
    told(server, "one two three")
    say(page, "count")
    expect(page.locator(".figures")).to_contain_text("first token")
    expect(page.locator(".figures")).not_to_contain_text("tokens/s")


def test_tokens_a_step_are_told_where_there_are_drafts(page: Page, server: FakeServer) -> None:
    told(server, "one two three four five six", drafts=(5, 2))
    say(page, "count")
    expect(page.get_by_text("1.50 tokens a step")).to_have_attribute("title", "2 of 5 drafted tokens were right.")
    told(server, "one two three four five six")
    say(page, "again")
    answered(page, 2)
    expect(page.get_by_text("tokens a step")).to_have_count(1)


def test_the_model_that_comes_along_says_what_it_understands(page: Page, server: FakeServer) -> None:
    expect(page.get_by_label("Model")).to_be_visible()
    opening = page.get_by_role("button", name="My name is Nora. My lucky number is 42.")
    expect(opening).to_have_count(0)
    server.models[0]["id"] = MODEL_NAME
    page.set_viewport_size({"width": 375, "height": 700})
    page.reload()
    for button in page.locator(".welcome button").all():
        box = button.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 375
    told(server, "Noted.")
    opening.click()
    expect(answers(page)).to_contain_text("Noted.")
    assert sent(server) == [("user", "My name is Nora. My lucky number is 42.")]


def test_what_the_cache_could_not_do_is_explained(page: Page, server: FakeServer) -> None:
    told(server, "yes", num_prompt_tokens=900, num_cached_tokens=64, kv_num_tokens=832, miss="no_checkpoint")
    say(page, "hi")
    expect(answers(page)).to_contain_text("Keys and values are kept for 832 tokens, but no state was kept there.")


def test_editing_a_question_makes_a_branch_and_both_stay(page: Page, server: FakeServer) -> None:
    told(server, "first answer")
    say(page, "red")
    expect(answers(page)).to_contain_text("first answer")
    say(page, "more")
    expect(answers(page)).to_have_count(2)
    told(server, "other answer")
    questions(page).first.hover()
    questions(page).first.get_by_role("button", name="Edit and branch").click()
    editor = page.get_by_label("Edit: you")
    expect(editor).to_be_focused()
    editor.fill("blue")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("other answer")
    assert sent(server) == [("user", "blue")]
    page.get_by_role("button", name="Previous branch").click()
    expect(questions(page)).to_contain_text(["red", "more"])
    expect(page.get_by_role("button", name="Previous branch")).to_be_disabled()
    page.get_by_role("button", name="Next branch").click()
    expect(questions(page)).to_contain_text(["blue"])
    page.reload()
    expect(answers(page)).to_contain_text("other answer")
    expect(page.get_by_label("Branch 2 of 2")).to_be_visible()


def test_an_edited_answer_is_what_the_next_question_follows(page: Page, server: FakeServer) -> None:
    told(server, "four")
    say(page, "2+2?")
    answers(page).get_by_role("button", name="Edit and branch").click()
    page.get_by_label("Edit: answer").fill("five")
    page.keyboard.press("Control+Enter")
    expect(answers(page)).to_contain_text("five")
    expect(answers(page)).to_contain_text("edited by you")
    say(page, "sure?")
    expect(answers(page).last.locator(".figures")).to_be_visible()
    assert sent(server) == [("user", "2+2?"), ("assistant", "five"), ("user", "sure?")]
    answers(page).last.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Branch 2 of 2")).to_have_count(2)
    assert sent(server) == [("user", "2+2?"), ("assistant", "five"), ("user", "sure?")]


def test_a_system_prompt_branches_too(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Add system prompt").click()
    page.get_by_label("Edit: system prompt").fill("Be brief.")
    page.get_by_role("button", name="Save").click()
    say(page, "hello")
    answered(page)
    assert sent(server) == [("system", "Be brief."), ("user", "hello")]
    page.get_by_role("button", name="Edit system prompt").click()
    page.get_by_label("Edit: system prompt").fill("Be long.")
    page.get_by_role("button", name="Save as a new branch").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    page.keyboard.press("Enter")
    answered(page)
    assert sent(server) == [("system", "Be long."), ("user", "hello")]
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("article", name="System prompt")).to_contain_text("Be long.")


def test_stopping_keeps_what_came_and_ends_the_request(page: Page, server: FakeServer) -> None:
    server.script = Script(words=["word "] * 2000, gap_s=0.02)
    say(page, "talk")
    expect(answers(page)).to_contain_text("word word")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    expect(page.locator(".figures")).to_contain_text("64 of 100 prompt tokens cached")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    told(server, "fine")
    say(page, "go on")
    answered(page, 2)
    server.wait_for_abort()
    role, text = sent(server)[1]
    assert role == "assistant" and text.startswith("word word")


def test_the_stop_button_and_a_new_conversation_end_it_too(page: Page, server: FakeServer) -> None:
    server.script = Script(words=["word "] * 2000, gap_s=0.02)
    say(page, "talk")
    expect(answers(page)).to_contain_text("word")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_contain_text("stopped")
    say(page, "again")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text("word")
    page.get_by_role("button", name="New conversation").click()
    expect(answers(page)).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    expect(page.get_by_text("What would you like to ask?")).to_be_visible()


def test_reasoning_is_folded(page: Page, server: FakeServer) -> None:
    told(server, "42", reasoning=["six", " times", " seven"])
    say(page, "what?")
    fold = page.locator("details.thought")
    expect(fold).to_have_text(re.compile(r"Thought( for \d\.\d s)?six times seven"))  # a slow machine takes a while
    assert fold.get_attribute("open") is None
    fold.locator("summary").click()
    expect(fold.get_by_text("six times seven")).to_be_visible()
    say(page, "and then?")
    answered(page, 2)
    assert sent(server)[1] == ("assistant", "42")


def test_errors_say_what_happened_and_can_be_tried_again(page: Page, server: FakeServer) -> None:
    server.script = Script(refuse=(400, {"error": {"message": "the prompt is too long", "code": 400}}))
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("the prompt is too long")
    server.script = Script(words=["a ", "b ", "c"], error_after=2)
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("a b")
    expect(page.get_by_role("alert")).to_contain_text("the engine died")
    server.script = Script(words=["a ", "b ", "c"], break_after=2)
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be read")
    told(server, "at last")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("at last")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert sent(server) == [("user", "hello")]


def test_a_model_that_loads_is_waited_for(page: Page, server: FakeServer) -> None:
    loading = {"error": {"message": "the model is loading", "type": "service_unavailable_error", "code": "loading"}}
    server.script = Script(refuse=(503, loading))
    say(page, "hello")
    expect(answers(page)).to_contain_text("The model is still loading")
    told(server, "ready now")
    expect(answers(page)).to_contain_text("ready now")
    expect(answers(page)).not_to_contain_text("loading")
    assert len(server.requests) >= 2 and all(request == server.requests[0] for request in server.requests)
    server.script = Script(refuse=(503, loading))
    say(page, "again")
    expect(answers(page).last).to_contain_text("The model is still loading")
    page.keyboard.press("Escape")
    expect(answers(page).last).to_contain_text("Stopped before the first word.")


def test_stopping_while_it_thinks_is_no_stop_before_the_first_word(page: Page, server: FakeServer) -> None:
    server.script = Script(reasoning=["hmm "] * 2000, gap_s=0.02)
    say(page, "think")
    expect(page.get_by_text("Thinking…")).to_be_visible()
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("Stopped while thinking.")
    expect(answers(page)).not_to_contain_text("first word")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_an_answer_cut_at_the_limit_can_be_continued(page: Page, server: FakeServer) -> None:
    told(server, "one two", finish_reason="length")
    say(page, "count")
    expect(page.locator(".figures")).to_contain_text("cut at the token limit")
    told(server, " three")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator(".prose")).to_have_text("one two three")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    page.get_by_role("button", name="Raw").click()
    assert json.loads(page.get_by_label("Request as sent").inner_text()) == server.requests[-1]


def test_a_server_that_is_gone(page: Page, server: FakeServer) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")


def test_key_temperature_and_limit_are_sent(page: Page, server: FakeServer) -> None:
    server.script = Script(refuse=(401, {"error": {"message": "no", "code": 401}}))
    say(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("wants an API key, and none is set")
    page.get_by_role("button", name="Open settings").click()
    page.get_by_label("API key").fill("secret")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Max tokens").fill("77")
    page.get_by_role("button", name="Save").click()
    server.script = Script()
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("Hello, world!")
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    assert (server.requests[-1]["temperature"], server.requests[-1]["max_tokens"]) == (0.3, 77)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("0.3")
    page.get_by_label("Dark").check()
    page.get_by_role("button", name="Save").click()
    expect(page.locator("body")).to_have_css("background-color", "rgb(23, 23, 22)")


def test_all_ways_to_sample_are_sent_and_shown_raw(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in (
        ("Top p", "0.9"),
        ("Top k", "40"),
        ("Seed", "7"),
        ("Stop sequences", "END\n\\n\\nUser:\na\\\\b"),
    ):
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Save").click()
    page.reload()
    say(page, "hello")
    expect(answers(page)).to_contain_text("Hello")
    body = server.requests[-1]
    expected = {"top_p": 0.9, "top_k": 40, "seed": 7, "stop": ["END", "\n\nUser:", "a\\b"]}
    assert {name: body.get(name) for name in expected} == expected
    assert body["stream_options"]["include_usage"] is True
    page.get_by_role("button", name="Raw").click()
    assert json.loads(page.get_by_label("Request as sent").inner_text()) == body
    came = json.loads(page.get_by_label("Answer as it came").inner_text())
    assert (came["usage"]["prompt_tokens"], came["cache"]["miss"], came["finish_reason"]) == (100, "cold", "stop")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Stop sequences")).to_have_value("END\n\\n\\nUser:\na\\\\b")


def test_a_server_that_hides_its_models_asks_for_the_key(page: Page, server: FakeServer) -> None:
    server.key = "sesame"
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("wants an API key, and none is set")
    page.get_by_label("Message", exact=True).fill("hello")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    for key, text in (("wrong", "refused this one"), ("sesame", "")):
        page.get_by_role("button", name="Open settings").click()
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#banner")).to_contain_text(text)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()


def test_models_to_choose_from(page: Page, server: FakeServer) -> None:
    server.models = [{"id": name, "input_modalities": ["text"]} for name in ("a/first", "b/second")]
    page.reload()
    page.get_by_label("Model").select_option("b/second")
    say(page, "hello")
    answered(page)
    assert server.requests[-1]["model"] == "b/second"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("b/second")


def test_keys_on_the_keyboard(page: Page, server: FakeServer) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("Hello")
    assert sent(server) == [("user", "one\ntwo")]
    answered(page)  # until then the key does nothing
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit: you")).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_be_focused()
    expect(page.get_by_label("Edit: you")).to_have_count(0)


MARKDOWN = """# Title

Some **bold**, *weak*, `a < b` and [a link](https://example.org/x).

- one
  - inner
- two

3. three

```html
<b>not bold</b>
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

<img src=x onerror="document.title='owned'"> [bad](javascript:alert(1))"""


def test_markdown_becomes_nodes_and_html_stays_text(page: Page, server: FakeServer) -> None:
    server.script = Script(words=[MARKDOWN])
    say(page, "show")
    answer = answers(page)
    expect(answer.get_by_role("heading", name="Title")).to_be_visible()
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("em")).to_have_text("weak")
    expect(answer.locator("p code")).to_have_text("a < b")
    expect(answer.get_by_role("link")).to_have_count(1)
    expect(answer.get_by_role("link")).to_have_attribute("href", "https://example.org/x")
    expect(answer.locator("ul > li > ul > li")).to_have_text("inner")
    expect(answer.locator("ol")).to_have_attribute("start", "3")
    expect(answer.locator("pre code")).to_have_text("<b>not bold</b>")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("blockquote")).to_have_text("quoted")
    expect(answer.locator("img:not([alt]), b")).to_have_count(0)
    assert page.title() == "show · forkpoint"


def test_nothing_is_fetched_from_elsewhere_and_nothing_overflows(page: Page, server: FakeServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_viewport_size({"width": 320, "height": 600})
    server.script = Script(words=["x" * 300, "\n\n```\n" + "y" * 300 + "\n```"])
    page.reload()
    say(page, "z" * 300)
    expect(answers(page)).to_contain_text("prompt tokens cached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert asked and all(url.startswith((server.url, "data:")) for url in asked)


def test_every_control_has_a_name(page: Page, server: FakeServer) -> None:
    say(page, "hello")
    expect(answers(page)).to_have_count(1)
    page.get_by_role("button", name="Settings").click()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea")].filter((control) =>
             !(control.ariaLabel || control.textContent.trim() || control.labels?.length)).map((c) => c.outerHTML)"""
    )
    assert unnamed == []
