"""The sizes of requests against the size of the arena."""

from __future__ import annotations

from forkpoint.cache.manager import CacheManager
from forkpoint.errors import RequestTooLargeError
from forkpoint.sched.request import Request


def longest_answer(request: Request, cache: CacheManager) -> int:
    """Return how many outputs the caller asked for, or else what an otherwise empty arena holds, at least 1."""
    layout = cache.layout
    if request.params.max_tokens is not None or not layout.has_kv:
        return request.max_tokens
    longest = layout.longest_request(cache.arena.num_pages) - request.num_prompt_tokens
    return max(1, min(request.max_tokens, longest))


def check_size(request: Request, cache: CacheManager) -> None:
    """Raise RequestTooLargeError if even an otherwise empty arena cannot hold the request with all its outputs."""
    num_outputs = longest_answer(request, cache)
    total = request.num_prompt_tokens + num_outputs
    if not cache.room.ever_fits(total):
        need = cache.layout.num_pages_for(total, 1) * cache.layout.page_bytes
        have = (cache.arena.num_pages - 1) * cache.layout.page_bytes
        raise RequestTooLargeError(
            f"request {request.id}: {request.num_prompt_tokens} prompt + {num_outputs} output tokens need "
            f"{need} bytes of cache and the arena has {have}; shorten it or raise kv_cache_memory_bytes"
        )
