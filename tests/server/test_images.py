"""Images over HTTP: three APIs read the same prompt, what is refused is answered 400, and the server goes on."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forkpoint.cli.main import main
from forkpoint.routing.feed import EventFeed
from forkpoint.shared_arrays import NAME
from tests.engine.test_events import wait_for
from tests.engine.test_video_files import clip
from tests.image_models import CHAT_IDS, picture, write_chat_model
from tests.server.conftest import EVENTS
from tests.server.running import RunningServer, start_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    pytest.importorskip("PIL.Image")
    folder: Path = tmp_path_factory.mktemp("chat")
    write_chat_model(folder)
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864", "--limit-mm-per-prompt", '{"image": 3}']
    events = {"enable_kv_cache_events": True, **{name: at.format(folder) for name, at in EVENTS.items()}}
    flags += [
        "--served-model-name",
        "m",
        "--allowed-media-domains",
        "127.0.0.1:*",
        "--device",
        "cpu",
        "--max-stored-responses-bytes",
        "1000000",
        "--kv-events-config",
        json.dumps(events),
    ]
    running = start_server(folder, folder, *flags, "--log-interval-s", "0.5")
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


def encoded(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chat_part(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def post(http: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_three_apis_read_one_prompt(http: httpx2.Client) -> None:
    """They hit what the first of them has cached; usage counts the tokens of images."""
    data, text = encoded(picture(1, 320, 448)), "what is this?"
    parts = [chat_part(data), {"type": "text", "text": text}]
    options = {"temperature": 0, "max_tokens": 8}
    first = post(http, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **options)
    usage = first["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 140}
    again = post(http, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **options)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 128, "image_tokens": 140}
    text_tokens = 1 + len("user\n") + 1  # before the image
    assert again["cache"]["num_image_tokens"] == 128 - text_tokens and first["cache"]["num_image_tokens"] == 0
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        {"type": "input_text", "text": text},
    ]
    response = post(
        http,
        "/v1/responses",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=8,
    )
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 128
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    message = post(http, "/v1/messages", messages=[{"role": "user", "content": blocks}], **options)
    assert message["usage"]["cache_read_input_tokens"] == 128
    assert message["usage"]["input_tokens"] == usage["prompt_tokens"] - 128
    other = [chat_part(encoded(picture(2, 320, 448))), {"type": "text", "text": text}]
    fresh = post(http, "/v1/chat/completions", messages=[{"role": "user", "content": other}], **options)
    assert fresh["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 140}


@contextmanager
def site(file: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a web server that answers every path with `file`, except /moved, and the paths that it sees."""
    paths: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "/")
            self.send_header("Content-Length", str(len(file)))
            self.end_headers()
            self.wfile.write(file)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", paths
        listening.shutdown()
        thread.join()


def test_images_are_fetched_from_named_hosts(http: httpx2.Client) -> None:
    """They are the pictures that data URLs hold, and each URL of a request is fetched once."""
    data = encoded(picture(21, 96, 96))
    with site(base64.b64decode(data)) as (url, paths):
        remote = {"type": "image_url", "image_url": {"url": f"{url}/cat.png?a=b"}}
        options = {"temperature": 0, "max_tokens": 4}
        want, found = (
            post(http, "/v1/chat/completions", messages=[{"role": "user", "content": [part, part]}], **options)
            for part in (chat_part(data), remote)
        )
        assert found["choices"][0]["message"] == want["choices"][0]["message"]
        assert found["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
        assert paths == ["/cat.png?a=b"]
        image = {"type": "input_image", "image_url": f"{url}/other.png"}
        first = post(http, "/v1/responses", input=[{"role": "user", "content": [image]}], max_output_tokens=4)
        post(http, "/v1/responses", input="and?", previous_response_id=first["id"], max_output_tokens=4)
        source = {"type": "url", "url": f"{url}/third.png"}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        assert post(http, "/v1/messages/count_tokens", messages=messages)["input_tokens"] > 9
        assert paths[1:] == ["/other.png", "/other.png", "/third.png"]
        moved = {"type": "image_url", "image_url": {"url": f"{url}/moved"}}
        body = {"model": "m", "messages": [{"role": "user", "content": [moved]}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "redirect" in answer.text and paths[-1] == "/moved"


def test_videos_are_read_from_data_urls_and_named_hosts(http: httpx2.Client) -> None:
    """Both give one prompt; the next turn reuses its frames."""
    pytest.importorskip("av")
    data = clip(8, 4)
    with site(data) as (url, paths):
        inline = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        answers = []
        for where in (inline, f"{url}/clip.mp4"):
            parts = [{"type": "video_url", "video_url": {"url": where}}, {"type": "text", "text": "what happens? " * 5}]
            messages = [{"role": "user", "content": parts}]
            answers.append(post(http, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=2))
    first, again = (answer["usage"] for answer in answers)
    assert first["prompt_tokens_details"]["image_tokens"] == 4 // 2 * 2 * 3 and paths == ["/clip.mp4"]
    assert again["prompt_tokens"] == first["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= 64
    broken = {"type": "video_url", "video_url": {"url": inline[: len(inline) // 2]}}
    answer = http.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": [broken]}]})
    assert answer.status_code == 400 and "video" in answer.json()["error"]["message"]


def num_memories(pid: int) -> int:
    """The number of open descriptors of shared memory with pixels."""
    count = 0
    with suppress(OSError):  # the process has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                count += NAME in os.readlink(link)
    return count


def test_large_requests_decode_their_images_once(server: RunningServer, http: httpx2.Client) -> None:
    """The reader of a conversation of more than 1 MiB reads the next turn, too, and gives shared memory back."""
    part = chat_part(encoded(picture(51, 1400, 1400)))
    body = {"messages": [{"role": "user", "content": [part]}], "mm_processor_kwargs": {"max_pixels": 524288}}
    assert len(part["image_url"]["url"]) > 2**21

    def seconds() -> float:
        found = re.search(r"^forkpoint_image_read_seconds_total.* (.*)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    times, pids = [seconds()], list[set[int]]()
    for _ in range(2):
        post(http, "/v1/chat/completions", max_tokens=1, **body)
        times.append(seconds())
        pids.append(set(server.reader_pids))
    assert pids[0] == pids[1]
    assert times[2] - times[1] < (times[1] - times[0]) / 4
    post(http, "/v1/chat/completions", max_tokens=3, n=3, **body)
    post(http, "/v1/completions", prompt="x", max_tokens=1)  # the next step drops the rows of the last one
    processes = {*pids[1], *server.reader_pids, server.process.pid, server.engine_pid}
    wait_for(lambda: not any(num_memories(pid) for pid in processes))


def test_routers_hash_images_as_the_cache_does(server: RunningServer, http: httpx2.Client) -> None:
    feed = EventFeed(**{name: at.format(server.log_path.parent) for name, at in EVENTS.items()})
    try:
        image, other = (chat_part(encoded(picture(seed, 320, 448))) for seed in (11, 12))
        body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        other_body = {"messages": [{"role": "user", "content": [other]}], "max_tokens": 1}
        hashes = post(http, "/prefix/v1/chat/completions", **body)["block_hashes"]
        assert len(hashes) == 2 and hashes != post(http, "/prefix/v1/chat/completions", **other_body)["block_hashes"]
        post(http, "/v1/chat/completions", **body)
        wait_for(lambda: feed.index.restorable(hashes) == 2)
    finally:
        feed.close()


def test_metrics_and_log_count_images(server: RunningServer, http: httpx2.Client) -> None:
    def metrics() -> dict[str, float]:
        lines = [line.split(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, value in lines if "image" in name}

    data = encoded(picture(31, 320, 320))
    before = metrics()
    with site(base64.b64decode(data)) as (url, _):
        for image in ({"url": url}, {"url": f"data:image/png;base64,{data}"}):
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
            post(http, "/v1/chat/completions", messages=messages, max_tokens=1)
    after = metrics()
    grown = {name.removeprefix("forkpoint_").removesuffix("_total"): after[name] - before[name] for name in after}
    cached, seconds = (
        grown.pop("image_tokens_cached"),
        [grown.pop(f"image_{what}_seconds") for what in ("fetch", "read")],
    )
    assert cached > 0 and all(each > 0 for each in seconds)
    assert grown == {
        "images": 2,
        "image_tokens": 200,
        "image_bytes": 2 * 320 * 320 * 3,
        "images_fetched": 1,
        "image_fetch_bytes": len(base64.b64decode(data)),
        "images_encoded": 1,
        "image_tokens_encoded": 100,
        "encoded_images_reused": 1,
        "encoded_image_tokens_reused": 100,
    }
    wait_for(lambda: "images " in server.log and "tokens encoded" in server.log)


def test_results_of_tools_may_be_images(http: httpx2.Client) -> None:
    data = encoded(picture(3, 64, 64))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    call = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "see", "input_schema": {"type": "object"}}]
    with_image = post(http, "/v1/messages/count_tokens", messages=messages, tools=tools)
    result["content"] = []
    without = post(http, "/v1/messages/count_tokens", messages=messages, tools=tools)
    assert with_image["input_tokens"] == without["input_tokens"] + 2 + 4
    content = [{"type": "image", "source": {"type": "base64", "data": data}}]
    result["content"] = [{"type": "document", "source": {"type": "content", "content": content}}]
    assert post(http, "/v1/messages/count_tokens", messages=messages, tools=tools) == with_image
    call = {"id": "t", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    chat = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "t", "content": [chat_part(data)]})
    usage = post(http, "/v1/chat/completions", messages=chat, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 4
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "t", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t", "output": [chat_part(data) | {"type": "input_image"}]},
    ]
    items[2]["output"][0]["image_url"] = chat_part(data)["image_url"]["url"]
    response = post(http, "/v1/responses", input=items, max_output_tokens=1)
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert response["usage"]["input_tokens_details"]["image_tokens"] == 4
    assert post(http, "/v1/responses/input_tokens", input=items)["input_tokens"] == usage["prompt_tokens"]


def test_stored_responses_count_their_images(http: httpx2.Client) -> None:
    """A response whose images alone are larger than the bound is not stored."""
    for side, status in (64, 200), (640, 404):
        url = chat_part(encoded(picture(5, side, side)))["image_url"]["url"]
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        smaller = {"mm_processor_kwargs": {"max_pixels": 65536}}
        name = post(http, "/v1/responses", input=items, max_output_tokens=1, **smaller)["id"]
        assert http.get(f"/v1/responses/{name}").status_code == status


def test_input_items_have_images_as_they_were_given(http: httpx2.Client) -> None:
    image = {"type": "input_image", "image_url": chat_part(encoded(picture(6, 64, 64)))["image_url"]["url"]}
    content = [{**image, "detail": "low"}, {"type": "input_text", "text": "what is this?"}]
    first = post(http, "/v1/responses", input=[{"role": "user", "content": content}], max_output_tokens=2)
    shot = {"type": "computer_call_output", "call_id": "c", "output": {**image, "type": "computer_screenshot"}}
    call = {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}}
    second = post(http, "/v1/responses", input=[call, shot], max_output_tokens=2, previous_response_id=first["id"])
    page = http.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()
    assert page["data"][0]["content"] == content and page["data"][-1]["output"] == shot["output"]
    assert [item["type"] for item in page["data"]] == ["message", "message", "computer_call", "computer_call_output"]
    linked = {"previous_response_id": first["id"], "input": [call, shot]}
    counts = [post(http, "/v1/responses/input_tokens", **fields) for fields in (linked, {"input": page["data"]})]
    assert counts[0] == counts[1]


def test_requests_bound_the_size_of_their_images(http: httpx2.Client) -> None:
    """Counting and tokenising agree with the answer's usage."""
    part = chat_part(encoded(picture(4, 320, 320)))
    messages, smaller = [{"role": "user", "content": [part]}], {"mm_processor_kwargs": {"max_pixels": 16384}}
    options = {"max_tokens": 1}
    for bounds, num_tokens in ({}, 100), (smaller, 16):
        usage = post(http, "/v1/chat/completions", messages=messages, **options, **bounds)["usage"]
        assert usage["prompt_tokens_details"]["image_tokens"] == num_tokens
        tokens = post(http, "/tokenize", messages=messages, **bounds)["tokens"]
        assert len(tokens) == usage["prompt_tokens"] and tokens.count(CHAT_IDS["image_token_id"]) == num_tokens
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": part["image_url"]["url"]}]}]
        assert post(http, "/v1/responses/input_tokens", input=items, **bounds)["input_tokens"] == usage["prompt_tokens"]
    clear = [
        {"role": "user", "content": [chat_part(encoded(pytest.importorskip("PIL.Image").new("RGBA", (320, 320))))]}
    ]
    colours = [None, None, {"image": {"rgba_background_color": [0, 0, 0]}}]
    usages = [
        post(http, "/v1/chat/completions", messages=clear, media_io_kwargs=colour, **options)["usage"]
        for colour in colours
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 64, 0]
    low = {**part, "image_url": {**part["image_url"], "detail": "sharp"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [low]}]}
    assert "one of 'low'" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]


def test_commands_send_images(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """run-batch passes them on, and chat reads a path in the message."""
    image = picture(41, 96, 96)
    image.save(tmp_path / "cat.png")
    body = {"messages": [{"role": "user", "content": [chat_part(encoded(image))]}], "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **body}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *files, "--url", server.url]) == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 9
    assert main(["chat", "--url", server.url, "-q", f"{tmp_path / 'cat.png'}", "--max-tokens", "1"]) == 0
    assert f"of {answer['usage']['prompt_tokens']} prompt tokens" in capsys.readouterr().out


def test_what_is_refused_is_answered_400_and_the_server_goes_on(server: RunningServer, http: httpx2.Client) -> None:
    good = encoded(picture(1, 64, 64))
    remote = {"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}}
    bomb = chat_part(encoded(pytest.importorskip("PIL.Image").new("1", (9000, 9000))))
    for parts, says in [
        ([remote], "--allowed-media-domains"),
        ([bomb], "9000x9000 pixels"),
        ([chat_part(good)] * 4, "at most 3 are allowed"),
        ([chat_part("AAAA")], "is broken"),
    ]:
        body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    blocks = [{"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}]
    answer = http.post(
        "/v1/messages", json={"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    )
    assert answer.status_code == 400 and "--allowed-media-domains" in answer.text
    blocks[0]["source"] = {"type": "file", "file_id": "file-1"}
    answer = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": blocks}]})
    assert answer.status_code == 400 and "this server stores no files" in answer.json()["error"]["message"]
    typed = post(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": "<|image_pad|> typed"}], max_tokens=1
    )
    assert typed["usage"]["prompt_tokens_details"]["image_tokens"] == 0
    assert good[40:80] not in server.log


def test_the_model_card_says_what_a_prompt_may_have(http: httpx2.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image", "video"]
