"""`benchmarks.latency` and `benchmarks.throughput` on a tiny model, from the command line to the files they write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import latency, throughput
from benchmarks.latency import LatencyResult
from benchmarks.offline_options import LatencyOptions, ThroughputOptions
from benchmarks.throughput import draw_requests
from forkpoint.bench.options import DatasetOptions
from forkpoint.cli.main import main
from forkpoint.errors import ConfigError


@pytest.fixture
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    name, *flags = arguments
    parser = {"latency": latency, "throughput": throughput}[name].build_parser
    code = main([*flags, "--log-level", "error", "--cpu-ops", "torch"], parser)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_latency_has_vllms_lines_and_names(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    flags = "--input-len 70 --output-len 3 --batch-size 2 --n 2 --num-iters-warmup 1 --num-iters 3 --disable-detokenize"
    code, out, _ = run(capsys, "latency", "--model", model, *flags.split(), "--output-json", str(path))
    written = json.loads(path.read_text())
    assert code == 0 and sorted(written) == ["avg_latency", "latencies", "percentiles"]
    assert len(written["latencies"]) == 3 and list(written["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    lines = out.splitlines()
    assert lines[0] == f"Avg latency: {written['avg_latency']} seconds"
    assert lines[3] == f"50% percentile latency: {written['percentiles']['50']} seconds"
    assert len(lines) == 7


def test_latency_percentiles() -> None:
    result = LatencyResult(tuple(float(i) for i in range(101)))
    assert result.mean == 50 and result.percentiles == {rank: float(rank) for rank in (10, 25, 50, 75, 90, 99)}


def test_a_profile_of_one_batch(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--output-len 2 --batch-size 1 --num-iters-warmup 0 --profile"
    code, out, _ = run(capsys, "latency", "--model", model, *flags.split())
    assert code == 0 and out.startswith("one batch: ") and "schedule" in out


def test_throughput_has_vllms_lines_and_names(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    flags = "--num-prompts 6 --input-len 20 --prefix-len 330 --output-len 5 --n 2"
    code, out, _ = run(capsys, "throughput", "--model", model, *flags.split(), "--output-json", str(path))
    written = json.loads(path.read_text())
    assert code == 0 and written["num_requests"] == 6
    assert written["total_num_tokens"] == 6 * 350 + 6 * 2 * 5
    assert written["tokens_per_second"] == pytest.approx(written["total_num_tokens"] / written["elapsed_time"])
    assert written["requests_per_second"] == pytest.approx(6 / written["elapsed_time"])
    lines = out.splitlines()
    assert lines[0].startswith("Throughput: ") and lines[0].endswith(" output tokens/s")
    assert lines[1:3] == ["Total num prompt tokens:  2100", "Total num output tokens:  60"]
    assert written["num_cached_tokens"] >= 4 * 320 and f"cached tokens:  {written['num_cached_tokens']} (" in lines[3]


def test_throughput_of_recorded_conversations(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"from": "human", "value": "What is a fork?"}, {"from": "gpt", "value": "A place where paths part."}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "3"]
    code, out, _ = run(capsys, "throughput", "--model", model, *flags)
    assert code == 0
    assert f"Total num output tokens:  {3 * len(turns[1]['value'])}" in out  # the tokenizer's tokens are bytes


def test_lengths_given_here_replace_the_datasets(model: str) -> None:
    options = ThroughputOptions(num_prompts=4, input_len=9, output_len=7, prefix_len=3)
    drawn = draw_requests(options, DatasetOptions(), {"model": model})
    assert {request.num_content_tokens for request in drawn} == {12}
    assert {request.num_output_tokens for request in drawn} == {7}
    first, second = (np.asarray(request.content) for request in drawn[:2])
    assert (first[:3] == second[:3]).all() and (first[3:] != second[3:]).any()
    repeated = DatasetOptions(dataset_name="prefix_repetition", prefix_repetition_num_prefixes=2)
    drawn = draw_requests(ThroughputOptions(num_prompts=6), repeated, {"model": model})
    assert len({tuple(np.asarray(request.content)[:256].tolist()) for request in drawn}) == 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("latency --batch-size 0", "batch_size=0"),
        ("latency --num-iters-warmup -1", "num_iters_warmup=-1"),
        ("throughput --num-prompts 0", "num_prompts=0"),
        ("throughput --dataset-name fork", "needs a server"),
        ("throughput --dataset-name sharegpt", "needs a file; give dataset_path"),
        ("throughput --input-len 3000 --num-prompts 1", "3000 tokens"),
        ("latency --output-len 3000", "together exceed max_model_len=2048"),
        ("latency --output-json /nowhere/x.json", "/nowhere is not a folder"),
        ("throughput --output-json /", "is a folder"),
    ],
)
def test_errors_are_one_line(model: str, flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = flags.split()
    code, _, error = run(capsys, name, "--model", model, *rest)
    assert code == 2 and error.startswith("error: ") and text in error


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="output_len=0"):
        LatencyOptions(output_len=0)
