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

from forkpoint.bench.datasets import sharegpt_requests, synthetic, trace_requests
from forkpoint.bench.images import read_buckets
from forkpoint.bench.load import STYLES, Load, Outcome
from forkpoint.bench.metrics import figures
from forkpoint.bench.options import DatasetOptions, LoadOptions, ReportOptions, TargetOptions
from forkpoint.bench.request import BenchRequest
from forkpoint.bench.run import ServeBench, arrival_times, without_too_long
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta, Usage
from forkpoint.client.server import Server
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ConfigError
from forkpoint.sim.readers import read_trace
from tests.bench.serve_tokenizer import make_word_tokenizer
from tests.client.fake_server import FakeServer, Script, fake_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def vocabulary(folder: str) -> Vocabulary:
    return Vocabulary(Tokenizer.load(folder))


@pytest.fixture(scope="module")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    from benchmarks.random_model import make_random_model
    from tests.cli.test_cli import TINY

    return Vocabulary(Tokenizer.load(str(make_random_model(tmp_path_factory.mktemp("bytes"), TINY))))


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


# ---- datasets


@pytest.mark.parametrize("name", ["vocabulary", "byte_vocabulary"])
def test_text_encodes_to_the_length_asked_for(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary = request.getfixturevalue(name)
    for length in (1, 17, 300):
        tokens = vocabulary.random(np.random.default_rng(length), length)
        assert len(vocabulary.encode(vocabulary.text(tokens))) == length
    assert vocabulary.encode(vocabulary.text(vocabulary.tokens[:50])) == vocabulary.tokens[:50].tolist()


def test_synthetic_datasets_repeat_with_their_seed(vocabulary: Vocabulary) -> None:
    for name in ("random", "prefix_repetition", "multi_turn", "fork"):
        options = DatasetOptions(dataset_name=name)  # type: ignore[arg-type]
        contents = [
            [list(request.content) for request in synthetic(options, vocabulary, 12, seed)] for seed in (1, 1, 2)
        ]
        assert contents[0] == contents[1] != contents[2] and len(contents[0]) == 12


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


@pytest.mark.parametrize("given", ["", "[1]", "{}", "{(0, 1, 1): 1}", "{(9, 9, 1): -1}", "{(9, 9, 2): 1}"])
def test_wrong_sizes_of_images_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="random_mm_bucket_config"):
        read_buckets(given)


def test_random_lengths_stay_in_their_range(vocabulary: Vocabulary) -> None:
    options = DatasetOptions(random_input_len=100, random_output_len=10, random_range_ratio=0.3, random_prefix_len=20)
    found = synthetic(options, vocabulary, 200, 0)
    lengths = {len(request.content) for request in found}
    assert lengths <= set(range(90, 151)) and min(lengths) < 95 and max(lengths) > 145
    assert {request.num_output_tokens for request in found} == set(range(7, 14))
    assert len({tuple(request.content[:20]) for request in found}) == 1


def test_prefixes_are_repeated_evenly(vocabulary: Vocabulary) -> None:
    options = DatasetOptions(
        dataset_name="prefix_repetition", prefix_repetition_prefix_len=30, prefix_repetition_num_prefixes=4
    )
    found = synthetic(options, vocabulary, 40, 0)
    prefixes = [tuple(request.content[:30]) for request in found]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10] * 4
    assert len({tuple(request.content) for request in found}) == 40


def test_conversations_and_branches_follow_their_parents(vocabulary: Vocabulary) -> None:
    turns = synthetic(
        DatasetOptions(dataset_name="multi_turn", multi_turn_num_turns=3, multi_turn_think_time=0.5), vocabulary, 7, 0
    )
    assert [request.after for request in turns] == [None, 0, 1, None, 3, 4, None]
    assert [request.think_s for request in turns] == [0, 0.5, 0.5, 0, 0.5, 0.5, 0]
    options = DatasetOptions(dataset_name="fork", fork_num_branches=2, fork_num_turns=2)
    assert [request.after for request in synthetic(options, vocabulary, 7, 0)] == [None, 0, 1, 0, 3, None, 5]


def test_sharegpt_takes_the_first_exchange(vocabulary: Vocabulary, tmp_path: Path) -> None:
    def turns(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    words = [" ".join(f"w{number}" for number in range(count)) for count in (10, 20, 30, 2, 1100)]
    entries = [turns(words[0], words[1], "more"), turns(words[2], words[1]), turns(words[3], words[0]), {"id": 1}]
    entries += [turns(words[4], words[0]), turns("alone")]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    options = DatasetOptions(dataset_name="sharegpt", dataset_path=str(path))
    found = sharegpt_requests(options, vocabulary, 4, 0)
    assert {(request.num_content_tokens, request.num_output_tokens) for request in found} == {(10, 20), (30, 20)}
    assert found[:2] == found[2:]
    path.write_text("\ufeff" + json.dumps(entries))  # as Windows writes it
    assert len(sharegpt_requests(options, vocabulary, 4, 0)) == 4
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not JSON"):
            sharegpt_requests(options, vocabulary, 4, 0)


TRACE = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2000, "input_length": 1030, "output_length": 6, "hash_ids": [0, 2, 3]},
]


def test_a_trace_keeps_its_times_and_what_its_prompts_share(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    options = DatasetOptions(dataset_name="trace", dataset_path=str(path), trace_speed=4.0)
    first, second = trace_requests(options, vocabulary, 10, 0)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    assert (first.num_content_tokens, second.num_content_tokens, second.num_output_tokens) == (700, 1030, 6)
    assert np.array_equal(first.content[:512], second.content[:512])
    tokens: dict[int, int] = {}
    for request, recorded in zip((first, second), read_trace(path).requests, strict=True):
        for name, token in zip(recorded.prompt.array(), request.content, strict=True):
            assert tokens.setdefault(int(name), int(token)) == token
    assert len(set(tokens.values())) > len(vocabulary.tokens) / 2
    assert np.isin(second.content, vocabulary.tokens).all()
    assert len(trace_requests(options, vocabulary, 1, 0)) == 1


def test_a_trace_shrinks_and_takes_sessions_turn_by_turn(vocabulary: Vocabulary, tmp_path: Path) -> None:
    for name in "ab":
        turns = [
            {"t": 0.0, "in": 640 + 128 * turn, "out": 60, "hash_ids": list(range(10 + 2 * turn)), "think_time": 2.0}
            for turn in range(3)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"id": name, "requests": turns}))
    options = DatasetOptions(
        dataset_name="trace", dataset_path=str(tmp_path), trace_shrink=4, trace_num_sessions=2, trace_speed=2.0
    )
    found = trace_requests(options, vocabulary, 5, 0)
    assert [request.after for request in found] == [None, None, 0, 1, 2]
    assert [request.num_content_tokens for request in found] == pytest.approx([160, 160, 192, 192, 224], abs=2)
    assert {request.num_output_tokens for request in found} == {15} and found[2].think_s == 1.0
    shared = len(found[0].content)
    assert np.array_equal(found[2].content[:shared], found[0].content)
    assert not np.array_equal(found[0].content[:shared], found[1].content[:shared])


def test_requests_too_long_are_left_out_of_their_chain() -> None:
    def request(length: int, after: int | None) -> BenchRequest:
        return BenchRequest("x", length, 1, after=after)

    requests = [request(5, None), request(50, 0), request(6, 1), request(60, None), request(7, 3)]
    kept = without_too_long(requests, 20)
    assert [(each.num_content_tokens, each.after) for each in kept] == [(5, None), (6, 0), (7, None)]


# ---- sending


@pytest.fixture
def server(folder: str) -> Any:
    with fake_server() as running:
        running.models[0]["root"] = folder
        yield running


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
