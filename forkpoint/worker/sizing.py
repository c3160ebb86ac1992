"""The size of the arena."""

from __future__ import annotations

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ConfigError

DEFAULT_REQUESTS = 4  # the default arena has room for so many requests of max_model_len
DEFAULT_SLOTS_PER_REQUEST = 8  # one running, one being written, the rest checkpoints
MEMORY_SHARE = 4  # the default arena takes at most 1 / 4 of the free memory
RESERVED_PAGES = 1  # page 0 is for padded rows
MIN_SLOTS = 2  # a request that crosses a boundary while decoding holds two


def choose_num_pages(
    layout: CacheLayout, max_model_len: int, memory_bytes: int | None, free_bytes: int, share_bytes: int | None = None
) -> int:
    """Return the pages of the arena, including page 0.

    `memory_bytes` is the user's choice. If that is None, the arena takes `share_bytes`, which the user's share of the
    device's memory leaves; if that is None too, the size follows from the model. Raises ConfigError if not even one
    short request fits.
    """
    wanted = share_bytes if memory_bytes is None else memory_bytes
    if wanted is None:
        per_request = layout.num_pages_for(max_model_len, DEFAULT_SLOTS_PER_REQUEST)
        pages = RESERVED_PAGES + DEFAULT_REQUESTS * per_request
        wanted = min(pages * layout.page_bytes, free_bytes // MEMORY_SHARE)
    pages = wanted // layout.page_bytes
    least = RESERVED_PAGES + layout.num_pages_for(BLOCK_SIZE, MIN_SLOTS)
    if pages < least:
        given = f"{free_bytes} free bytes"
        if memory_bytes is not None:
            given = f"kv_cache_memory_bytes={memory_bytes}"
        elif share_bytes is not None:
            given = f"the {share_bytes} bytes that gpu_memory_utilization leaves beside weights and activations"
        raise ConfigError(
            f"{given}: that leaves no room for a single request; one of {BLOCK_SIZE} tokens needs "
            f"{least * layout.page_bytes} bytes ({least} pages of {layout.page_bytes})"
        )
    return pages
