"""Prints one line on a request's cache hits and speed."""

from __future__ import annotations

from typing import Final

from forkpoint.client.answer import Answer
from forkpoint.outputs import RequestOutput

LEAST_DECODE_S: Final = 0.1  # the speed of a shorter time is chance: several tokens may arrive at once


def cache_line(output: RequestOutput) -> str:
    """Return a line with cached tokens, the reason for a miss, time to first token and decode speed."""
    report, timings = output.cache, output.metrics
    rate = None
    if timings.first_token_s is not None and timings.finished_s is not None:
        later = sum(max(0, len(completion.token_ids) - 1) for completion in output.outputs)
        rate = _rate(later, timings.finished_s - timings.first_token_s)
    cached = _cached(report.num_cached_tokens, len(output.prompt_token_ids), report.miss)
    return _line(cached, timings.time_to_first_token_s, rate)


def answer_line(answer: Answer) -> str:
    """Return the line of `cache_line` for a server's answer, with times measured by this client."""
    usage, rate = answer.usage, None
    if answer.first_token_s is not None:
        rate = _rate(answer.num_completion_tokens - 1, answer.last_s - answer.first_token_s)
    cached = None
    if usage is not None and usage.num_cached_tokens is not None:
        cached = _cached(usage.num_cached_tokens, usage.num_prompt_tokens, answer.miss)
    return _line(cached, answer.time_to_first_token_s, rate)


def _cached(num_cached: int, num_prompt: int, miss: str | None) -> str:
    line = f"{num_cached:,} of {num_prompt:,} prompt tokens cached"
    if miss is not None:
        line += f" ({miss})"
    return line


def _rate(num_later_tokens: int, elapsed_s: float) -> float | None:
    if num_later_tokens <= 0 or elapsed_s < LEAST_DECODE_S:
        return None
    return num_later_tokens / elapsed_s


def _line(cached: str | None, first_token_s: float | None, rate: float | None) -> str:
    parts = []
    if cached is not None:
        parts.append(cached)
    if first_token_s is not None:
        parts.append(f"first token after {first_token_s * 1000:.0f} ms")
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    return f"[{', '.join(parts)}]"
