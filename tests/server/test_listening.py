"""A Unix socket, a proxy's prefix, comments in silent streams, on one server; and what is refused before it loads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.types import Message

from forkpoint.errors import ConfigError
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.listener import listen
from forkpoint.server.sse import COMMENT, EventStream, begin
from tests.server.running import RunningServer, start_server

FLAGS = ["--root-path", "/models/one", "--api-key", "k", "--sse-keep-alive-interval", "0.02", "--max-num-seqs", "1"]
FLAGS += ["--disable-log-stats", "--log-interval-s", "0.05", "--max-model-len", "2048", "--served-model-name", "tiny"]


@pytest.fixture(scope="module")
def behind(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("uds")
    path = folder / "forkpoint.sock"
    with socket.socket(socket.AF_UNIX) as stale:  # what a server that was killed leaves
        stale.bind(str(path))
    running = start_server(tiny_model, folder, *FLAGS, "--uds", str(path))
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log
        assert not path.exists()


@pytest.fixture
def client(behind: RunningServer) -> Iterator[httpx2.Client]:
    path = behind.url.removeprefix("unix:")
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://localhost", timeout=60) as client:
        yield client


KEY = {"Authorization": "Bearer k"}


def test_all_is_there_under_the_prefix_and_without_it(client: httpx2.Client) -> None:
    """Some proxies remove the prefix from the path, and others keep it."""
    for prefix in ("/models/one", ""):
        page = client.get(prefix + "/")
        assert page.status_code == 200 and 'src="static/main.js"' in page.text
        assert client.get(prefix + "/static/main.js").status_code == 200
        assert client.get(prefix + "/v1/models").status_code == 401
        assert client.get(prefix + "/v1/models", headers=KEY).json()["data"][0]["id"] == "tiny"
        assert '"/models/one/openapi.json"' in client.get(prefix + "/docs").text.replace("'", '"')
    assert client.get("/models/one").headers["Location"].endswith("/models/one/")
    assert client.get("/models/other/v1/models", headers=KEY).status_code == 404
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/models/one"}]


def test_a_stream_that_waits_has_comments_and_then_its_answer(behind: RunningServer, client: httpx2.Client) -> None:
    long = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
    runs = threading.Event()

    def take_the_only_place() -> None:
        with client.stream("POST", "/v1/completions", json=long, headers=KEY) as stream:
            for _ in stream.iter_lines():
                runs.set()

    first = threading.Thread(target=take_the_only_place)
    first.start()
    assert runs.wait(60)
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    second = client.post("/v1/chat/completions", json=asked, headers=KEY)
    first.join()
    events = second.text.split("\n\n")
    assert second.status_code == 200 and events[0] == ": keep-alive"
    assert events[-2] == "data: [DONE]" and any('"finish_reason":"length"' in event for event in events)
    refused = client.post("/v1/chat/completions", json={**asked, "temperature": -1}, headers=KEY)
    assert refused.status_code == 400  # what is known at once has its status
    assert "tokens/s" not in behind.log and "throughput" not in behind.log


async def sent(events: AsyncIterator[bytes], interval_s: float) -> list[bytes]:
    """The bodies that an EventStream sends; the last one, which is empty, is left out."""
    found: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        found.append(message)

    stream = EventStream(events, lambda: None, lambda error: str(error).encode(), interval_s)
    await stream.stream_response(send)
    start, *bodies = found
    assert start["type"] == "http.response.start" and [body["more_body"] for body in bodies][-1] is False
    assert all(body["more_body"] for body in bodies[:-1])
    return [body["body"] for body in bodies[:-1]]


def test_comments_come_while_nothing_does() -> None:
    async def run(interval_s: float, first_s: float, gap_s: float) -> list[bytes]:
        async def first() -> None:
            await asyncio.sleep(first_s)

        async def events() -> AsyncIterator[bytes]:
            for text in (b"a", b"b"):
                yield text
                await asyncio.sleep(gap_s)

        async def receive() -> dict[str, str]:
            await asyncio.sleep(60)
            return {}

        return await sent(await begin(receive, first(), events(), interval_s), interval_s)

    assert asyncio.run(run(0, 0.01, 0.01)) == [b"a", b"b"]
    assert asyncio.run(run(30, 0.01, 0.01)) == [b"a", b"b"]
    told = asyncio.run(run(0.02, 0.5, 0.5))
    assert [data for data in told if data != COMMENT] == [b"a", b"b"]
    assert told[0] == COMMENT and told.index(b"b") - told.index(b"a") > 1 and told[-1] == COMMENT


def test_an_error_before_the_first_token_is_raised_in_time_or_comes_in_the_stream() -> None:
    async def run(interval_s: float) -> None:
        async def first() -> None:
            await asyncio.sleep(0.5)
            raise ConfigError("late")

        async def events() -> AsyncIterator[bytes]:
            yield b""

        async def receive() -> dict[str, str]:
            await asyncio.sleep(60)
            return {}

        stream = await begin(receive, first(), events(), interval_s)
        *comments, error = await sent(stream, interval_s)
        assert set(comments) == {COMMENT} and error == b"late"

    for interval_s in (0.0, 30.0):
        with pytest.raises(ConfigError, match="late"):
            asyncio.run(run(interval_s))
    asyncio.run(run(0.01))


def test_a_client_that_leaves_before_the_first_token_ends_the_work() -> None:
    async def run() -> bool:
        ended = False

        async def first() -> None:
            nonlocal ended
            try:
                await asyncio.Event().wait()
            finally:
                ended = True

        async def events() -> AsyncIterator[bytes]:
            yield b""

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        with pytest.raises(HTTPError, match="the client has left"):
            await begin(receive, first(), events(), 30.0)
        return ended

    assert asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"root_path": "models"}, "/a/path"),
        ({"root_path": "/models/"}, "/a/path"),
        ({"sse_keep_alive_interval": -1.0}, "0 or more"),
        ({"ssl_cert_reqs": 3}, "0, 1 or 2"),
        ({"ssl_cert_reqs": 2}, "ssl_ca_certs too"),
        ({"served_model_name": ("a", "\udcc3")}, "valid Unicode"),
        ({"response_role": "\udcc3"}, "valid Unicode"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_a_path_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"), listen(ServerConfig(uds=str(file))):
        pass
    assert file.read_text() == "mine"
    path = str(tmp_path / "one.sock")
    with listen(ServerConfig(uds=path)):
        with pytest.raises(ConfigError, match="another server listens there"), listen(ServerConfig(uds=path)):
            pass
        assert Path(path).exists()
    assert not Path(path).exists()
    with pytest.raises(ConfigError, match="give another --uds"), listen(ServerConfig(uds="/nowhere/x.sock")):
        pass
