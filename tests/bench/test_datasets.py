"""What `bench serve` asks: datasets, images, and replayed traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint.bench.datasets import sharegpt_requests, synthetic, trace_requests
from forkpoint.bench.images import read_buckets
from forkpoint.bench.options import DatasetOptions
from forkpoint.bench.request import BenchRequest
from forkpoint.bench.run import without_too_long
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.errors import ConfigError
from forkpoint.sim.readers import read_trace


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
