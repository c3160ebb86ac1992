"""`bench serve` against a server whose latencies are told to it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.bench.datasets import synthetic
from forkpoint.bench.load import STYLES, Load, Outcome
from forkpoint.bench.metrics import figures
from forkpoint.bench.options import DatasetOptions, LoadOptions, ReportOptions, TargetOptions
from forkpoint.bench.request import BenchRequest
from forkpoint.bench.run import ServeBench, arrival_times
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta, Usage
from forkpoint.client.server import Server
from forkpoint.errors import ConfigError
from tests.client.fake_server import FakeServer, Script

# ---- figures


def outcome(
    start: float,
    token_times: list[float],
    usage: Usage | None = None,
    miss: str | None = None,
    error: str | None = None,
) -> Outcome:
    answer = Answer(start)
    for time in token_times:
        answer.add(Delta(text="x"), time)
    if usage is not None:
        answer.add(Delta(usage=usage, miss=miss), token_times[-1])
    return Outcome(BenchRequest("prompt", 7, len(token_times)), answer, error)


def test_figures_of_known_times() -> None:
    usage = Usage(num_prompt_tokens=100, num_completion_tokens=5, num_cached_tokens=64)
    cold = Usage(num_prompt_tokens=100, num_completion_tokens=3, num_cached_tokens=0)
    runs = [
        outcome(10.0, [10.5, 10.6, 10.8], usage, "short"),  # two of its five tokens came with others
        outcome(11.0, [11.1, 11.2, 11.3], cold, "cold"),
        outcome(11.0, [11.1], error="died"),
    ]
    found = figures(runs, 2.0, percentiles=(50.0, 99.0), limits_ms={"ttft": 200.0})
    assert (found["completed"], found["failed"], found["request_goodput"]) == (2, 1, 0.5)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (200, 8, 64)
    assert found["requests_by_miss"] == {"short": 1, "cold": 1}
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx((300 / 4 + 200 / 2) / 2)
    assert found["median_itl_ms"] == found["p50_itl_ms"] == pytest.approx(100)
    assert found["p99_itl_ms"] == pytest.approx(np.percentile([100, 200, 100, 100], 99))
    assert found["std_e2el_ms"] == pytest.approx(250)
    assert found["output_throughput"] == 4
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (3, 1)


def test_figures_where_nothing_was_answered() -> None:
    found = figures([outcome(0.0, [0.1], error="no")], 1.0)
    assert found["total_cached_tokens"] is None and found["mean_ttft_ms"] == 0 == found["max_concurrent_requests"]


def test_a_server_without_usage_is_counted_by_chunks() -> None:
    found = figures([outcome(0.0, [0.1, 0.2])], 1.0)
    assert [found[f"total_{name}_tokens"] for name in ("input", "output", "cached")] == [7, 2, None]


# ---- pacing


@given(st.integers(1, 200), st.floats(0.1, 1000), st.floats(0.2, 50), st.integers(0, 2**31))
def test_arrivals_offer_the_rate_asked_for(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness, np.random.default_rng(seed))
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


def test_bursts_of_any_strength_end_in_time() -> None:
    for seed in range(30):  # of such gaps most are smaller than any number
        times = arrival_times(2, 1.0, 0.0005, np.random.default_rng(seed))
        assert times == sorted(times) and times[-1] == pytest.approx(2.0)


def test_burstiness_spreads_the_gaps() -> None:
    def spread(burstiness: float) -> float:
        gaps = np.diff(arrival_times(2000, 10.0, burstiness, np.random.default_rng(0)))
        return float(gaps.std() / gaps.mean())

    assert spread(1.0) == pytest.approx(1.0, abs=0.1)
    assert spread(0.25) == pytest.approx(2.0, abs=0.3) and spread(25.0) == pytest.approx(0.2, abs=0.05)
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0] * 3


# ---- sending


def send(server: FakeServer, requests: list[BenchRequest], vocabulary: Vocabulary, **options: Any) -> list[Outcome]:
    backend, arrivals = options.pop("backend", "openai"), options.pop("arrivals", [0.0] * len(requests))

    async def run() -> list[Outcome]:
        async with Server(server.url) as there:
            path = TargetOptions(backend=backend).path
            load = Load(there, path, STYLES[backend](vocabulary), {"model": "m"}, **options)
            return await load.run(requests, arrivals)

    return asyncio.run(run())


def ids(*tokens: int) -> Any:
    return np.asarray(tokens, np.int32)


def test_a_conversation_repeats_prompts_and_answers(server: FakeServer, vocabulary: Vocabulary) -> None:
    server.script = Script(words=[" w7", " w8"])
    requests = [
        BenchRequest(ids(1, 2), 2, 2),
        BenchRequest(ids(3), 1, 2, after=0, continues=True),
        BenchRequest(ids(4), 1, 2, after=0, continues=True),
        BenchRequest(ids(5), 1, 2, after=1, continues=True),
    ]
    send(server, requests, vocabulary)
    prompts = [body["prompt"] for body in server.requests]
    assert sorted(prompts) == [[1, 2], [1, 2, 8, 9, 3], [1, 2, 8, 9, 3, 8, 9, 5], [1, 2, 8, 9, 4]]
    server.requests.clear()
    send(server, requests[:2], vocabulary, backend="openai-chat")
    messages = [[(m["role"], m["content"].strip()) for m in body["messages"]] for body in server.requests]
    assert messages[1] == [("user", "w0 w1"), ("assistant", "w7 w8"), ("user", "w2")]
    assert server.requests[0]["max_completion_tokens"] == 2


def test_concurrency_arrivals_and_think_times_are_kept(server: FakeServer, vocabulary: Vocabulary) -> None:
    server.script = Script(first_token_s=0.05)
    independent = [BenchRequest(ids(1), 1, 1) for _ in range(9)]
    send(server, independent, vocabulary, max_concurrency=3)
    assert server.max_open == 3
    outcomes = send(server, independent[:3], vocabulary, arrivals=[0.0, 0.3, 0.1])
    starts = [outcome.answer.start_s - outcomes[0].answer.start_s for outcome in outcomes]
    assert starts == pytest.approx([0.0, 0.3, 0.1], abs=0.08)
    chain = [BenchRequest(ids(1), 1, 1), BenchRequest(ids(1), 1, 1, after=0, think_s=0.2)]
    first, second = send(server, chain, vocabulary)
    assert second.answer.start_s - first.answer.last_s == pytest.approx(0.2, abs=0.08)


def test_what_follows_a_failure_fails_and_the_rest_goes_on(server: FakeServer, vocabulary: Vocabulary) -> None:
    server.choose = lambda body: Script(break_after=1) if body["prompt"] == [1] else Script()
    requests = [
        BenchRequest(ids(1), 1, 1),
        BenchRequest(ids(2), 1, 1, after=0, continues=True),
        BenchRequest(ids(3), 1, 1),
    ]
    outcomes = send(server, requests, vocabulary)
    assert [outcome.error is None for outcome in outcomes] == [False, False, True]
    assert "before it failed" in str(outcomes[1].error) and len(server.requests) == 2


# ---- the whole command


def bench(server: FakeServer, **options: Any) -> ServeBench:
    made = []
    for kind in (TargetOptions, LoadOptions, DatasetOptions, ReportOptions):
        names = set(kind.__dataclass_fields__)
        made.append(kind(**{name: value for name, value in options.items() if name in names}))
    target, load, dataset, report = made
    assert not set(options) - {name for part in made for name in part.__dataclass_fields__}
    return ServeBench(target, load, dataset, report)


def test_a_run_measures_what_the_server_does(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = Script(words=["w "] * 6, first_token_s=0.1, gap_s=0.05, num_cached_tokens=75, miss="short")
    run = bench(
        server,
        base_url=server.url,
        num_prompts=8,
        request_rate=20.0,
        random_input_len=40,
        random_output_len=6,
        num_warmups=2,
        ignore_eos=True,
        percentile_metrics="ttft,tpot,itl,e2el",
        metric_percentiles="50,99",
        goodput=("ttft:150", "e2el:1000"),
        save_detailed=True,
        save_result=True,
        result_dir=str(tmp_path),
        metadata=("note=x",),
    )
    assert run.run() == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "============ Serving Benchmark Result ============" and printed[-1] == "=" * 50
    assert printed[1] == "Successful requests:                     8         "
    assert "-----Time per Output Token (excl. 1st token)------" in printed
    assert "Share of input tokens cached (%):        75.00     " in printed
    assert "Not cached in full (short):              8         " in printed
    [path] = tmp_path.iterdir()
    assert path.name.startswith("openai-20.0qps-fake-model-") and path.suffix == ".json"
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["note"]) == (8, 0, "x")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (800, 48)
    assert found["cached_token_share"] == 0.75 and found["requests_by_miss"] == {"short": 8}
    assert 100 <= found["mean_ttft_ms"] < 200 and 50 <= found["mean_tpot_ms"] < 90
    assert 45 <= found["median_itl_ms"] < 90 and 350 <= found["p50_e2el_ms"] < 600
    assert found["duration"] == pytest.approx(8 / 20 + 0.35, abs=0.25)
    assert found["request_throughput"] == pytest.approx(8 / found["duration"])
    assert found["request_goodput"] <= found["request_throughput"]
    assert len(found["ttfts"]) == len(found["itls"]) == 8 and found["cached_lens"] == [75] * 8
    assert len(server.requests) == 10 and all(len(body["prompt"]) == 40 for body in server.requests)
    assert len({tuple(body["prompt"]) for body in server.requests}) == 10
    body = server.requests[-1]
    assert (body["ignore_eos"], body["temperature"], body["max_tokens"], body["stream"]) == (True, 0.0, 6, True)


def test_random_images_are_as_asked_for(vocabulary: Vocabulary, server: FakeServer, folder: str) -> None:
    image = pytest.importorskip("PIL.Image")
    flags = {"random_mm_bucket_config": "{(32, 48, 1): 3, (16, 16, 1): 1, (16, 16, 8): 0}"}
    options = DatasetOptions(
        dataset_name="random-mm",
        random_mm_base_items_per_request=2,
        random_mm_num_mm_items_range_ratio=0.5,
        random_mm_limit_mm_per_prompt='{"image": 2}',
        **flags,
    )
    found, again = (synthetic(options, vocabulary, 40, 0) for _ in range(2))
    assert [request.images for request in found] == [request.images for request in again]
    assert {len(request.images) for request in found} == {1, 2}
    urls = [url for request in found for url in request.images]
    files = [io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))) for url in urls]
    sizes = [image.open(file).size for file in files]
    assert set(sizes) == {(48, 32), (16, 16)} and len(set(urls)) == len(urls)
    assert 0.55 < sizes.count((48, 32)) / len(sizes) < 0.95
    with pytest.raises(ConfigError, match="backend=openai-chat"):
        bench(server, dataset_name="random-mm", **flags).run()
    target = {"backend": "openai-chat", "base_url": server.url, "tokenizer": folder}
    assert bench(server, dataset_name="random-mm", num_prompts=2, **target, **flags).run() == 0
    (message,) = server.requests[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]


def test_a_result_that_cannot_be_written_is_refused_before_the_run(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    run = bench(server, base_url=server.url, save_result=True, result_dir=str(tmp_path), result_filename="results")
    with pytest.raises(ConfigError, match="results is a folder; give another --result-filename"):
        run.run()
    assert not server.requests


def test_failures_are_told_and_fail_the_run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = Script(refuse=(400, {"error": {"message": "too long"}}))
    assert bench(server, base_url=server.url, num_prompts=3, random_input_len=5).run() == 1
    shown = capsys.readouterr()
    assert "Failed requests:                         3" in shown.out and "Prefix Cache" not in shown.out
    assert "error: 3 of 3 requests: the server answered 400: too long" in shown.err


def test_a_warm_up_that_fails_measures_nothing(server: FakeServer) -> None:
    server.script = Script(refuse=(503, "not now"))
    with pytest.raises(ConfigError, match="not now"):
        bench(server, base_url=server.url, num_prompts=3, num_warmups=1, random_input_len=5).run()


WRONG: list[dict[str, Any]] = [
    {"num_prompts": 0},
    {"seed": -1},
    {"burstiness": math.inf},
    {"request_rate": 0.0},
    {"percentile_metrics": "ttft,speed"},
    {"metric_percentiles": "high"},
    {"goodput": ("itl:5",)},
    {"goodput": ("ttft",)},
    {"extra_body": "[1]"},
    {"header": ("x",)},
    {"base_url": "host:1"},
    {"ready_check_timeout_sec": -1.0},
    {"dataset_name": "trace"},
    {"random_input_len": 0},
    {"random_range_ratio": 1.0},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_options_that_make_no_sense(server: FakeServer, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        bench(server, **options)
