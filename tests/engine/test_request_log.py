"""The request log: every request once, nothing of its text, and a trace that shares what the prompts shared."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError
from forkpoint.params import SamplingParams
from forkpoint.sim.readers import read_trace

PROMPT = "the catalogue lists every map of the town, by year and by shelf. " * 3  # 195 tokens of one byte


def serve(model: Path, log: Path, **options: bool) -> list[dict[str, object]]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(str(model), max_model_len=512, log_level="warning", log_requests=str(log), **options) as llm:
        llm.generate([PROMPT, PROMPT + "more"], params, use_tqdm=False)
        llm.generate(PROMPT + "something else", SamplingParams(temperature=0.0, max_tokens=7), use_tqdm=False)
        llm.generate("a", SamplingParams(temperature=0.0, max_tokens=60, stop=["\n", " ", "e"]), use_tqdm=False)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_line_for_every_request(tiny_model: Path, tmp_path: Path) -> None:
    records = serve(tiny_model, tmp_path / "log.jsonl")
    assert [record["num_prompt_tokens"] for record in records] == [195, 199, 209, 1]
    assert [record["num_output_tokens"] for record in records][:2] == [5, 5]
    assert {str(record["finish_reason"]) for record in records} <= {"length", "stop"}
    assert records[2]["num_cached_tokens"] == 192
    ended = [datetime.fromisoformat(str(record["ended_at"])) for record in records]
    assert ended == sorted(ended) and abs(datetime.now(UTC) - ended[-1]) < timedelta(minutes=5)
    assert not any("map" in json.dumps(record) for record in records)


def test_it_replays(tiny_model: Path, tmp_path: Path) -> None:
    serve(tiny_model, tmp_path / "log.jsonl")
    first, longer, other, short = read_trace(tmp_path / "log.jsonl").requests
    a, b, c = (request.prompt.array().tolist() for request in (first, longer, other))
    assert a[:192] == b[:192] == c[:192] and a[192:] != c[192:195]
    assert short.prompt.num_tokens == 1 and first.arrival_s == 0.0


def test_token_ids_instead_of_hashes(tiny_model: Path, tmp_path: Path) -> None:
    records = serve(tiny_model, tmp_path / "log.jsonl", log_request_tokens=True)
    assert records[0]["token_ids"][:195] == list(PROMPT.encode())  # type: ignore[index]
    a, b = (request.prompt.array().tolist() for request in read_trace(tmp_path / "log.jsonl").requests[:2])
    assert a == b[:195]


def test_a_key_of_its_own_at_every_start(tiny_model: Path, tmp_path: Path) -> None:
    one, two = (serve(tiny_model, tmp_path / f"{name}.jsonl") for name in "ab")
    assert one[0]["block_hashes"] != two[0]["block_hashes"]


def test_where_it_cannot_be_written(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.engine.build.build_worker", None)  # it is told before a model is loaded
    with pytest.raises(ConfigError, match="log_requests"):
        LLM(str(tiny_model), max_model_len=256, log_level="warning", log_requests=str(tmp_path / "no" / "log.jsonl"))
