"""/metrics, the dashboard that shows them, the log line, and the small endpoints."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forkpoint.errors import EngineStoppedError
from forkpoint.obs.logs import Reading, is_idle, load_line
from forkpoint.server.metrics import CONTENT_TYPE, Metrics
from forkpoint.server.run import log_load
from tests.server.running import RunningServer
from tests.server.test_readers import until

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "forkpoint.json"
# Names that vLLM's dashboards query, after the prefix.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "iteration_tokens_total_bucket",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
}


def samples(http: httpx2.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the model by name and labels, those that all of them have left out."""
    reply = http.get("/metrics")
    assert reply.headers["Content-Type"] == CONTENT_TYPE
    found = {}
    for family in text_string_to_metric_families(reply.text):
        if not family.name.startswith("forkpoint_"):
            assert family.name.startswith(("http_", "process_")), family.name  # of the server, whatever it serves
            continue
        for sample in family.samples:
            assert {"model_name": "tiny", "engine": "0"}.items() <= sample.labels.items()
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name.removeprefix("forkpoint_"), tuple(sorted(rest.items()))] = sample.value
    return found


def grown(before: Mapping[Any, float], after: Mapping[Any, float], name: str, **labels: str) -> float:
    key = (name, tuple(sorted(labels.items())))
    return after.get(key, 0) - before.get(key, 0)


def test_what_requests_do_is_counted(http: httpx2.Client) -> None:
    assert http.post("/reset_prefix_cache").json() == {"done": True}
    before = samples(http)
    body = {"prompt": "Counting every token of it. " * 8, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    num_prompt = len(body["prompt"])  # type: ignore[arg-type]
    first = http.post("/v1/completions", json=body).json()
    second = http.post("/v1/completions", json=body).json()
    after = samples(http)
    cached = second["cache"]["num_tokens"]
    assert (first["cache"]["num_tokens"], cached) == (0, (num_prompt - 1) // 64 * 64)
    assert grown(before, after, "prompt_tokens_total") == 2 * num_prompt
    assert grown(before, after, "prompt_tokens_cached_total") == cached
    assert grown(before, after, "prefix_cache_queries_total") == 2 * num_prompt
    assert grown(before, after, "prefix_cache_hits_total") == cached
    assert grown(before, after, "generation_tokens_total") == 10
    assert grown(before, after, "request_success_total", finished_reason="length") == 2
    assert grown(before, after, "checkpoint_hits_total", origin="prompt_end") == 1
    assert grown(before, after, "checkpoints_saved_total", origin="prompt_end") >= 1
    assert grown(before, after, "prefix_miss_total", reason="cold") == 1
    assert grown(before, after, "prefix_lost_tokens_total", reason="cold") == 0  # nothing was there to be lost
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(before, after, f"{name}_count") == 2
    assert grown(before, after, "inter_token_latency_seconds_count") == 8
    assert grown(before, after, "request_generation_tokens_sum") == 10
    assert grown(before, after, "request_max_num_generation_tokens_sum") == 10
    assert (
        grown(before, after, "iteration_tokens_total_sum")
        == grown(before, after, "model_tokens_total")
        == (2 * num_prompt - cached + 8)
    )
    assert after["num_requests_open", ()] == 0
    assert 0 < after["state_slots_usage_perc", ()] <= 1
    assert after["checkpoints", ()] == after["state_slots_used", ()] > 0


def test_each_completion_counts_its_own_hit(http: httpx2.Client) -> None:
    """The first one finds nothing, and the others reuse what it has computed."""
    assert http.post("/reset_prefix_cache").json() == {"done": True}
    before = samples(http)
    body = {"prompt": "One prompt, three answers. " * 16, "max_tokens": 2, "n": 3, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = samples(http)
    cached = grown(before, after, "prompt_tokens_cached_total")
    assert cached == grown(before, after, "prefix_cache_hits_total") > 0
    assert grown(before, after, "prefix_miss_total", reason="cold") == 1


def test_an_engine_amid_a_long_step_keeps_its_figures(http: httpx2.Client, server: RunningServer) -> None:
    """Prometheus gives up after 10 s, and would miss those of the API process too."""
    before = samples(http)
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        meanwhile = samples(http)
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    assert meanwhile["steps_total", ()] == before["steps_total", ()]


def test_refusals_are_counted_too(http: httpx2.Client) -> None:
    before = samples(http)
    assert http.post("/v1/completions", json={"prompt": "x", "n": 257}).status_code == 400
    assert grown(before, samples(http), "request_success_total", finished_reason="error") == 0


def test_names_are_those_of_vllm_behind_any_prefix(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert {name for name, _ in samples(http)} >= VLLM_NAMES
    assert "vllm:prompt_tokens_total{" in Metrics("vllm:", "m").text({}, {}, {}).decode()


def test_the_dashboard_asks_for_metrics_that_exist(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x" * 200, "max_tokens": 2})
    known = {f"forkpoint_{name}" for name, _ in samples(http)} | {
        "forkpoint_checkpoints_evicted_total",  # appear with their first event
        "forkpoint_checkpoints_skipped_total",
    }
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for expr in targets for name in re.findall(r"forkpoint_\w+", expr)}
    assert len(targets) >= 15 and asked <= known, asked - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_log_sums_up_the_load(http: httpx2.Client, server: RunningServer) -> None:
    deadline = time.monotonic() + 120
    pattern = r"prompts [\d.,]+ tokens/s, answers [\d.,]+ tokens/s, running \d+, waiting \d+, arena [\d.]+% held"
    while not re.search(pattern, server.log):
        assert time.monotonic() < deadline, server.log
        http.post("/v1/completions", json={"prompt": "x" * 100, "max_tokens": 50})
    assert re.search(r"slots \d+ running \+ \d+ checkpoints", server.log)


def test_the_log_says_that_the_engine_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Hung:
        is_ready = True

        async def call(self, name: str) -> Any:
            raise EngineStoppedError(f"no answer to {name} within 30 s")

    async def run() -> None:
        task = asyncio.create_task(log_load(cast(Any, Hung()), Metrics("", "m"), 0.001))
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(run())
    assert caplog.records[0].levelname == "WARNING" and "no answer to stats within 30 s" in caplog.text


def test_a_log_line() -> None:
    stats = {
        "num_running": 2,
        "num_waiting": 1,
        "num_pages": 11,
        "num_pages_held": 4,
        "slots_per_page": 2,
        "num_slots_held": 2,
        "num_checkpoints": 5,
        "query_tokens": 100,
        "hit_tokens": 0,
        "lost_tokens": {"no_checkpoint": 10},
        "num_preemptions": 0,
        "num_drafts": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 2,
        "host_hit_tokens": 0,
        "disk_hit_tokens": 0,
        "peer_hit_tokens": 0,
        "num_image_tokens_encoded": 100,
        "num_image_tokens_kept": 0,
    }
    later = {**stats, "query_tokens": 300, "hit_tokens": 50, "lost_tokens": {"no_checkpoint": 74}, "num_preemptions": 3}
    later |= {"num_drafts": 11, "num_draft_tokens": 32, "num_accepted_tokens": 17}
    later |= {"num_image_tokens_encoded": 1356, "num_image_tokens_kept": 64}
    later |= {"host_hit_tokens": 128, "disk_hit_tokens": 64, "peer_hit_tokens": 320}
    before, now = Reading(0.0, 1000, 10, stats), Reading(10.0, 3000, 1010, later)
    assert load_line(before, now) == (
        "prompts 200.0 tokens/s, answers 100.0 tokens/s, running 2, waiting 1, arena 40.0% held by requests, "
        "slots 2 running + 5 checkpoints, prefix cache hit rate 25.0%, 128 tokens restored from the host tier, "
        "64 tokens restored from the disk tier, 320 tokens fetched from other servers, "
        "computed 64 tokens again that had been cached, drafts accepted 50.0% of 30, mean acceptance length 2.50, "
        "images 1,256 tokens encoded, 64 reused, preempted 3"
    )
    assert not is_idle(before, now)
    assert is_idle(before, Reading(20.0, 1000, 10, {**stats, "num_running": 0, "num_waiting": 0}))


def test_the_small_endpoints(http: httpx2.Client, tiny_model: Path) -> None:
    assert http.get("/version").json() == {"version": version("forkpoint")}
    until(lambda: http.get("/load").json() == {"server_load": 0})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9"
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as slow:
        slow.sendall(f"{head}\r\n\r\n{{".encode())  # open until the rest of the body comes
        until(lambda: http.get("/load").json() == {"server_load": 1})
    until(lambda: http.get("/load").json() == {"server_load": 0})
    assert http.get("/health").status_code == 200
    models = http.get("/v1/models").json()["data"]
    assert [card["id"] for card in models] == ["tiny", "alias"]
    assert [http.get(f"/v1/models/{card['id']}").json() for card in models] == models
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert all(card["max_model_len"] == 512 and card["root"] == str(tiny_model) for card in models)
    assert all(card["input_modalities"] == ["text"] for card in models)
    assert http.post("/v1/completions", json={"model": "alias", "prompt": "x"}).json()["model"] == "alias"
    page = http.get("/")
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")


def test_request_ids_come_back(http: httpx2.Client) -> None:
    reply = http.get("/v1/models", headers={"X-Request-Id": "abc"})
    assert reply.headers["X-Request-Id"] == "abc"
    assert len(http.get("/nothing").headers["X-Request-Id"]) == 32


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"truncate_prompt_tokens": None, "temperature": 0, "stream": False},
    ],
)
def test_conversations_are_tokenised_as_chats_read_them(http: httpx2.Client, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    body = {"messages": messages, **fields}
    chat = http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}).json()
    assert http.post("/tokenize", json=body).json()["tokens"] == chat["prompt_token_ids"]
    refusal = http.post("/tokenize", json={**body, "chat_template": "{{ messages }}"})
    assert refusal.status_code == 400 and "chat_template is not supported" in refusal.json()["error"]["message"]


def test_tokenize_and_detokenize(http: httpx2.Client) -> None:
    reply = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == 6
    assert reply["max_model_len"] == 512 and reply["cache_breakpoints"] == []
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    answered = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    ).json()
    assert chat["count"] == answered["usage"]["prompt_tokens"]
    assert "user" in http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert http.post("/detokenize", json={"tokens": [1, 9999]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400
