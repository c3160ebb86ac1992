"""The size of the arena."""

from __future__ import annotations

import math

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE, GIB
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import counted

DEFAULT_REQUESTS = 4  # the default arena has room for so many requests of max_model_len
DEFAULT_SLOTS_PER_REQUEST = 8  # one running, one being written, the rest checkpoints
MEMORY_SHARE = 4  # the default arena takes at most 1 / 4 of the free memory
RESERVED_PAGES = 1  # page 0 is for padded rows
HOST_SHARE = 0.8  # of the host's free memory: the host tier may take at most so much
MIN_SLOTS = 2  # a request that crosses a boundary while decoding holds two


def choose_num_pages(
    layout: CacheLayout,
    max_model_len: int,
    memory_bytes: int | None,
    free_bytes: int,
    share_bytes: int | None = None,
    ring_bytes: int = 0,
) -> int:
    """Return the pages of the arena, including page 0.

    `memory_bytes` is the user's choice. If that is None, the arena takes `share_bytes`, which the user's share of the
    device's memory leaves; if that is None too, the size follows from the model. A ring has taken `ring_bytes` of the
    share. Raises ConfigError if not even one short request fits.
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
            if ring_bytes:
                given += f", after {ring_bytes} bytes for ring_bytes of kv_connector_extra_config"
        raise ConfigError(
            f"{given}: that leaves no room for a single request; one of {BLOCK_SIZE} tokens needs "
            f"{least * layout.page_bytes} bytes ({least} pages of {layout.page_bytes})"
        )
    return pages


def gib_up(num_bytes: int) -> float:
    """Return bytes in GiB, rounded up to a thousandth, so that it is enough when it is given as an option."""
    return math.ceil(num_bytes * 1000 / GIB) / 1000


def choose_num_host_pages(layout: CacheLayout, tier_bytes: int, num_ranks: int, free_bytes: int) -> int:
    """Return the pages of one rank's host tier, including its page 0; 0 if there is no such tier.

    `tier_bytes` is for all ranks together, `free_bytes` the host's free memory. Raises ConfigError if the tier cannot
    hold the shortest prefix, or would take more than HOST_SHARE of the free memory.
    """
    if not tier_bytes:
        return 0
    pages = tier_bytes // num_ranks // layout.page_bytes
    least = RESERVED_PAGES + layout.num_pages_for(BLOCK_SIZE, 1)
    if pages < least:
        raise ConfigError(
            f"a host tier of {tier_bytes / GIB:.3g} GiB holds nothing: on {counted(num_ranks, 'rank')} a prefix of "
            f"{BLOCK_SIZE} tokens needs {gib_up(least * layout.page_bytes * num_ranks)} GiB; raise kv_offloading_size"
        )
    if tier_bytes > HOST_SHARE * free_bytes:
        raise ConfigError(
            f"a host tier of {tier_bytes / GIB:g} GiB is more than {HOST_SHARE:.0%} of the host's free memory, which "
            f"is {free_bytes / GIB:.1f} GiB; lower kv_offloading_size"
        )
    return pages
