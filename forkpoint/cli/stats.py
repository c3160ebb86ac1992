"""One line on what the cache did for a request and how fast it was."""

from __future__ import annotations

from forkpoint.outputs import RequestOutput


def cache_line(output: RequestOutput) -> str:
    """Cached tokens, the reason where more was not cached, time to first token, decode speed."""
    report, timings = output.cache, output.metrics
    parts = [f"{report.num_cached_tokens:,} of {len(output.prompt_token_ids):,} prompt tokens cached"]
    if report.miss is not None:
        parts[0] += f" ({report.miss.value})"
    first = timings.time_to_first_token_s
    if first is not None:
        parts.append(f"first token after {first * 1000:.0f} ms")
    if timings.first_token_s is not None and timings.finished_s is not None:
        later = sum(max(0, len(completion.token_ids) - 1) for completion in output.outputs)
        elapsed = timings.finished_s - timings.first_token_s
        if later and elapsed > 0:
            parts.append(f"{later / elapsed:.1f} tokens/s")
    return f"[{', '.join(parts)}]"
