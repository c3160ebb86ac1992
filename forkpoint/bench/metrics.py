"""Computes the figures of a benchmark from outcomes, with the definitions of `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forkpoint.bench.load import Outcome
from forkpoint.bench.options import METRICS


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    limits_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures of a run of `duration_s` seconds under vLLM's names, and figures of the prefix cache.

    Failed requests count only as such. `metrics` and `percentiles` (0 to 100) choose the distributions. `limits_ms` are
    the limits of goodput (None: goodput is None). Cached tokens are None if no answer reported any.
    """
    requests = [outcome for outcome in outcomes if outcome.error is None]
    num_input = sum(request.num_prompt_tokens for request in requests)
    num_output = sum(request.answer.num_completion_tokens for request in requests)
    cached = [num for request in requests if (num := request.num_cached_tokens) is not None]
    misses = [request.answer.miss for request in requests]
    values: dict[str, list[float]] = {
        "ttft": [request.ttft_s for request in requests],
        "tpot": [time for request in requests if (time := request.tpot_s) is not None],
        "itl": [gap for request in requests for gap in request.answer.gaps_s],
        "e2el": [request.answer.latency_s for request in requests],
    }
    most_tokens, most_requests = _peaks(requests)

    def per_s(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return {
        "duration": duration_s,
        "completed": len(requests),
        "failed": len(outcomes) - len(requests),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": per_s(len(requests)),
        "request_goodput": per_s(sum(request.meets(limits_ms) for request in requests)) if limits_ms else None,
        "output_throughput": per_s(num_output),
        "total_token_throughput": per_s(num_input + num_output),
        "max_output_tokens_per_s": most_tokens,
        "max_concurrent_requests": most_requests,
        **{key: value for name in metrics for key, value in _distribution(name, values[name], percentiles).items()},
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_token_share": sum(cached) / max(1, num_input) if cached else None,
        "requests_by_miss": dict(Counter(miss for miss in misses if miss is not None).most_common()),
    }


def _distribution(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, deviation and percentiles in milliseconds, by name; all 0 if nothing was measured."""
    times = np.asarray(values_s or [0.0]) * 1000
    found = {"mean": times.mean(), "median": np.median(times), "std": times.std()}
    found |= {f"p{rank:g}": np.percentile(times, rank) for rank in percentiles}
    return {f"{key}_{name}_ms": float(value) for key, value in found.items()}


def _peaks(requests: Sequence[Outcome]) -> tuple[float, int]:
    """Return the most chunks that arrived, and the most requests that were open, in any one second since the start."""
    if not requests:
        return 0.0, 0
    start = min(request.answer.start_s for request in requests)
    seconds = math.ceil(max(request.answer.last_s for request in requests) - start) + 1
    tokens, opened = np.zeros(seconds), np.zeros(seconds + 1, np.int64)
    for request in requests:
        begin = request.answer.start_s - start
        times = begin + request.ttft_s + np.concatenate([[0.0], np.cumsum(request.answer.gaps_s)])
        np.add.at(tokens, np.minimum(times.astype(np.int64), seconds - 1), 1)
        opened[int(begin)] += 1
        opened[int(begin + request.answer.latency_s) + 1] -= 1
    return float(tokens.max()), int(np.cumsum(opened).max())
