"""`forkpoint deploy` as people run it: two replicas on this machine, under load, some of them killed.

Ray is no part of the development environment: `pip install 'forkpoint[ray]'` has these run, in one to two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import httpx2
import pytest
from starlette.requests import Request

from benchmarks.random_model import make_random_model
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError, EngineStoppedError
from forkpoint.fleet.config import FleetConfig
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import CLIENT_LEFT
from tests.conftest import TINY

pytest.importorskip("ray", reason="ray is not installed: pip install 'forkpoint[ray]'")

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from forkpoint.fleet.deploy import _wait_for_signal, check_rays_options, deploy
from forkpoint.fleet.gateway import SENT_TO_ALL, Gateway
from forkpoint.fleet.messages import ForwardedRequest, Head, RoutingHint

START_S = 240.0
NUM_CLIENTS, LOAD_S = 8, 8.0


@dataclass(frozen=True)
class Deployed:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def pids(self, kind: str) -> list[int]:
        """Return the deployment's processes of Ray's of that name."""
        of_kind = re.compile(rf"ray::ServeReplica:\S+:{kind}")
        return [pid for pid in descendants(self.process.pid) if of_kind.match(Path(f"/proc/{pid}/cmdline").read_text())]

    def is_whole(self) -> bool:
        """Both replicas answer, and none is on its way out."""
        answer = httpx2.get(f"{self.url}/metrics", timeout=60)
        names = set(re.findall(r'replica="(\w+)"', answer.text))
        return answer.status_code == 200 and len(names) == len(self.pids("Replica")) == 2

    def engine_pid(self) -> int:
        """The engine of one of the replicas."""
        for replica in self.pids("Replica"):
            for server in children(replica):
                for engine in children(server):
                    if "spawn_main" in Path(f"/proc/{engine}/cmdline").read_text():
                        return engine
        raise AssertionError("no replica has an engine")


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deploying(tmp_path_factory.mktemp("fleet"), "--num-replicas", "2") as found:
        yield found


@contextlib.contextmanager
def deploying(folder: Path, *more: str) -> Iterator[Deployed]:
    model = make_random_model(folder / "model", TINY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*more, "--port", str(port), "--deterministic", "--num-threads", "1", "--skip-tokenizer-init"]
    flags += ["--ray-actor-options", '{"num_cpus": 0.1}', "--enable-dev-endpoints", "--max-model-len", "2048"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "forkpoint.cli.main", "deploy", str(model), *flags], stdout=out, stderr=out
        )
    found = Deployed(process, log, f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: "ready: replicas" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield found
    finally:
        replicas = found.pids("(Prefill)?Replica")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
        assert not any(Path(f"/proc/{pid}").exists() for pid in replicas), "a replica was left behind"


def wait_for(holds: Any) -> None:
    until = time.monotonic() + START_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.2)
    assert holds()


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def test_turns_go_where_their_conversation_is(deployed: Deployed) -> None:
    with httpx2.Client(base_url=deployed.url, timeout=120) as http:
        histories = [ids(seed, 300) for seed in range(8)]
        for history in histories:
            answer = http.post("/v1/completions", json={"prompt": history, "max_tokens": 2}).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        time.sleep(1.0)  # for the last events
        for history in histories:
            answer = http.post("/v1/completions", json={"prompt": history + ids(99, 70), "max_tokens": 2}).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
        metrics = http.get("/metrics").text
        answered = re.findall(r'http_requests_total\{replica="(\w+)",handler="/v1/completions".* (\d+)\.0', metrics)
        assert len(answered) == 2 and sum(int(count) for _, count in answered) == 16
        assert all(int(count) >= 4 for _, count in answered), "one replica had nearly all"
        assert http.post("/reset_prefix_cache").json() == {"done": True}
        models = http.get("/v1/models", headers={"x-request-id": "a"})
        assert models.status_code == 200
        assert models.headers.get_list("x-request-id") == ["a"] and len(models.headers.get_list("date")) == 1
        assert http.get("/v1/models", headers={"host": "pages.example.org"}).status_code == 403  # it asks for no key
        assert http.post("/v1/completions", json={"prompt": "text"}).status_code == 400


def test_long_prompts_are_computed_by_prefill_replicas(tmp_path: Path) -> None:
    prefill = ["--num-prefill-replicas", "1", "--prefill-min-tokens", "256"]
    with deploying(tmp_path, *prefill) as found, httpx2.Client(base_url=found.url, timeout=120) as http:
        for seed, length, num_fetched in ((1, 200, 0), (2, 600, 576), (3, 700, 640)):
            body = {"prompt": ids(seed, length), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["cache"]["num_peer_tokens"] == num_fetched
            salted = http.post("/v1/completions", json={**body, "cache_salt": "its own"}).json()  # nobody hands it over
            assert salted["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        assert "peer_offered_bytes_total" in http.get("/metrics").text
        os.kill(found.pids("PrefillReplica")[0], signal.SIGKILL)
        answer = http.post("/v1/completions", json={"prompt": ids(4, 600), "max_tokens": 8}).json()
        assert answer["usage"]["completion_tokens"] > 0, "a decode replica computes the prompt"


def test_a_stream_that_is_open_at_ctrl_c_ends_whole(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with deploying(tmp_path) as found:
            http = stack.enter_context(httpx2.Client(base_url=found.url, timeout=120))
            body = {"prompt": ids(1, 20), "max_tokens": 1800, "ignore_eos": True, "stream": True}
            lines = stack.enter_context(http.stream("POST", "/v1/completions", json=body)).iter_lines()
            next(lines)
            ended = stack.enter_context(ThreadPoolExecutor()).submit(lambda: list(filter(None, lines))[-1])
        assert ended.result() == "data: [DONE]"
    assert "will be retried" not in found.log.read_text(), "Ray warns"


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], *, stream: bool) -> tuple[str, list[int]]:
    """How it ended, and the ids of the answer; a stream that ends in an error is told as `cut`."""
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": stream, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as response:
        if response.status != 200:
            return f"status {response.status}: {await response.text()}", []
        if not stream:
            return "whole", (await response.json())["choices"][0]["token_ids"]
        found: list[int] = []
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return "whole", found
            if line.startswith(b"data: "):
                data = json.loads(line[6:])
                if "error" in data:
                    return "cut", found
                found += data["choices"][0]["token_ids"]
        return "open", found


async def load(deployed: Deployed, victim: int) -> Counter[str]:
    """Greedy requests from several clients, one process killed meanwhile: how they ended."""
    prompts = [ids(1000 + number, 150 + 40 * number) for number in range(8)]
    ends: Counter[str] = Counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        expected = [(await ask(session, deployed.url, prompt, stream=False))[1] for prompt in prompts]
        until = time.monotonic() + LOAD_S

        async def client(number: int) -> None:
            chosen = random.Random(number)
            while time.monotonic() < until:
                index, stream = chosen.randrange(len(prompts)), chosen.random() < 0.5
                end, found = await ask(session, deployed.url, prompts[index], stream=stream)
                right = found == expected[index] if end == "whole" else found == expected[index][: len(found)]
                ends[end if right else "wrong"] += 1

        async def killer() -> None:
            await asyncio.sleep(LOAD_S / 4)
            os.kill(victim, signal.SIGKILL)

        await asyncio.gather(killer(), *map(client, range(NUM_CLIENTS)))
    return ends


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ray_actor_options": '{"gpus": 1}'}, "ray_actor_options: .*'gpus'.* is not allowed. Allowed options"),
        ({"autoscaling_config": '{"min_replica": 1}'}, "autoscaling_config: 'min_replica' is unknown; fields are"),
        ({"autoscaling_config": '{"min_replicas": "x"}'}, "autoscaling_config: .*valid integer"),
    ],
)
def test_what_ray_would_not_take_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_rays_options(FleetConfig(**given))


@pytest.mark.parametrize(("given", "joined"), [(None, "local"), ("auto", "auto")])
def test_a_fleet_joins_only_the_cluster_that_is_given(
    given: str | None, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, Ray would join a cluster that runs on this machine."""

    def init(address: str | None = None, **_: Any) -> None:
        raise ConnectionError(f"joins {address}")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError, match=f"joins {joined}"):
        deploy(EngineConfig.from_flat(model="m"), ServerConfig(port=0), FleetConfig(ray_address=given))


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray needs seconds to find out"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on .*: Address already in use"):
            deploy(EngineConfig.from_flat(model="m"), server, FleetConfig())


def test_replicas_that_cannot_start_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to update the deployments ['Replica'].")

    monkeypatch.setattr(serve, "run", failing)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(EngineStoppedError, match=r"\['Replica'\]. The lines of its replicas above say why"):
        deploy(EngineConfig.from_flat(model="m"), ServerConfig(port=0), FleetConfig())


def test_ctrl_c_again_is_not_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    _wait_for_signal()
    assert signal.getsignal(signal.SIGINT) is before


class Stopping:
    """In the place of a handle: every replica's engine stops with the request, and another replica comes."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answer = self

    def options(self, **options: Any) -> Stopping:
        return self

    async def remote(self, route: RoutingHint, asked: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        self.num_asked += 1
        yield Head(f"replica {self.num_asked}", 503, (("content-type", "application/json"),))
        yield json.dumps({"error": {"code": "engine_stopped"}}).encode()


def test_a_request_that_stops_engines_is_tried_on_two() -> None:
    replicas = Stopping()
    gateway: Any = Gateway(cast(Any, replicas), asks_prefix=False)
    answer = asyncio.run(gateway._answer(ForwardedRequest("POST", "/v1/completions", "", (), b"{}")))
    assert (answer.head.status, replicas.num_asked) == (503, 2)


def test_a_client_that_leaves_while_it_sends_costs_no_replica() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    replicas = Stopping()
    gateway: Any = Gateway(cast(Any, replicas), asks_prefix=False)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    answer = asyncio.run(gateway(Request(scope, receive)))
    assert (answer.status_code, replicas.num_asked) == (CLIENT_LEFT, 0)


def test_a_request_to_all_does_not_wait_for_replicas_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.fleet.gateway.ALL_ANSWER_S", 0.05)

    cancelled = list[str]()

    async def never() -> Any:
        await asyncio.Event().wait()

    def remote(route: RoutingHint, asked: ForwardedRequest) -> SimpleAnswer:
        return SimpleAnswer(never, lambda: cancelled.append(asked.path))

    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(answer=SimpleNamespace(remote=remote)))
    gateway: Any = Gateway(cast(Any, handle), asks_prefix=False)
    for path in SENT_TO_ALL:
        asked = ForwardedRequest("POST", path, "", (), b"")
        assert asyncio.run(asyncio.wait_for(gateway._answer_of_all(asked), 5)).status_code == 503
    assert cancelled == list(SENT_TO_ALL), "Ray leaves a call running that a replica has taken"


@dataclass(frozen=True)
class SimpleAnswer:
    """In the place of Ray's answers in pieces."""

    next: Callable[[], Awaitable[Any]]
    cancel: Callable[[], None]

    def __aiter__(self) -> SimpleAnswer:
        return self

    async def __anext__(self) -> Any:
        return await self.next()


class Pair:
    """In the place of both handles: replicas of a pair, which note what they are asked while others answer."""

    def __init__(self, earlier: dict[str, Any] | None, fails: str) -> None:
        self.earlier, self.fails = earlier, fails
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.computed = asyncio.Event()
        self.num_cancelled = 0

    def handle(self, name: str, call: Any) -> Any:
        def remote(*arguments: Any) -> Any:
            pieces = call(*arguments)
            return SimpleAnswer(pieces.__anext__, self.cancel)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(**{name: SimpleNamespace(remote=remote)}))

    def cancel(self) -> None:
        self.num_cancelled += 1

    async def prompt(self, route: RoutingHint, asked: ForwardedRequest) -> AsyncIterator[Any]:
        self.asked.append(("prefill", json.loads(asked.body)))
        if self.fails == "unavailable":
            raise RayServeException("it could not be deployed")
        if self.fails == "busy":
            await self.computed.wait()
        yield self.earlier
        if self.earlier is not None:
            await self.computed.wait()
            if self.fails == "late":
                await asyncio.Event().wait()
        if self.fails == "lost":
            raise RayError("gone")
        status = 429 if self.fails == "refused" else 200
        yield Head("prefill", status)
        yield json.dumps({"kv_transfer_params": {"forkpoint": {"lease": 5}}}).encode()

    async def reply(self, route: RoutingHint, asked: ForwardedRequest) -> AsyncIterator[Any]:
        self.asked.append(("decode", json.loads(asked.body)))
        self.computed.set()
        await asyncio.sleep(0)
        yield Head("decode", 200)
        yield b"answer"


@pytest.mark.parametrize("fails", ["", "refused", "lost", "unavailable", "busy", "late"])
@pytest.mark.parametrize("knows", [True, False])
def test_both_replicas_of_a_pair_are_asked_at_once(knows: bool, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill replica has said where its prompts are fetched. Whatever it answers, the decode replica answers."""
    monkeypatch.setattr("forkpoint.fleet.gateway.TAKEN_S", 0.1)

    async def run() -> tuple[Any, Pair, set[Any]]:
        pair = Pair({"remote_port": 7, "forkpoint": {"lease": 3, "namespace": "n"}} if knows else None, fails)

        async def prefix(*_: Any) -> tuple[int, ...]:
            return tuple(range(40))

        replicas = pair.handle("answer", pair.reply)
        replicas.prefix = SimpleNamespace(remote=prefix)
        gateway: Any = Gateway(replicas, False, pair.handle("compute_prompt", pair.prompt), 256)
        answer = await gateway._answer(ForwardedRequest("POST", "/v1/completions", "", (), b'{"prompt": "p"}'))
        await asyncio.sleep(0.01)
        return answer, pair, asyncio.all_tasks() - {asyncio.current_task()}

    answer, pair, left = asyncio.run(run())
    assert answer.body == b"answer" and not left
    (first, half), (second, whole) = pair.asked
    assert (first, second) == ("prefill", "decode")
    lease = half["kv_transfer_params"]["forkpoint"]["lease"]
    params = whole.get("kv_transfer_params")
    assert pair.num_cancelled == (fails == "busy" or (knows and fails == "late"))
    if knows and fails not in ("unavailable", "busy"):  # the decode replica was asked before the prompt was computed
        assert params == {"remote_port": 7, "forkpoint": {"lease": lease, "namespace": "n", "early": True}}
    else:
        assert params == ({"forkpoint": {"lease": 5}} if fails in ("", "late") else None)


@pytest.mark.parametrize("kind", ["engine", "replica"])
def test_what_is_killed_costs_no_request_that_had_streamed_nothing(deployed: Deployed, kind: str) -> None:
    wait_for(deployed.is_whole)
    victim = deployed.engine_pid() if kind == "engine" else deployed.pids("Replica")[0]
    ends = asyncio.run(load(deployed, victim))
    assert ends["whole"] > NUM_CLIENTS and not ends.keys() - {"whole", "cut"}, ends
    assert ends["cut"] <= NUM_CLIENTS
