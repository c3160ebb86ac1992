from __future__ import annotations

import pytest

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.config import GIB, EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.worker.sizing import choose_num_host_pages, choose_num_pages
from tests.cache.shapes import layout_of, state

LAYOUT = layout_of([KVSpec.of(2, 64, 64, "bfloat16")] * 2 + [state((3, 512), (8, 64, 64))] * 6)
PLENTY = 2**50


def test_the_default_holds_four_requests_of_full_length() -> None:
    pages = choose_num_pages(LAYOUT, 32768, None, PLENTY)
    assert pages >= 1 + 4 * LAYOUT.num_pages_for(32768, 1)


def test_the_default_takes_a_quarter_of_free_memory_at_most() -> None:
    free = 400 * LAYOUT.page_bytes
    assert choose_num_pages(LAYOUT, 2**20, None, free) == 100


def test_a_given_size_is_kept_to_the_page() -> None:
    assert choose_num_pages(LAYOUT, 4096, 50 * LAYOUT.page_bytes + 7, 0) == 50


def test_too_small_names_the_least() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_num_pages(LAYOUT, 4096, LAYOUT.page_bytes, PLENTY)
    least = int(str(caught.value).split("needs ")[1].split()[0])
    choose_num_pages(LAYOUT, 4096, least, PLENTY)
    with pytest.raises(ConfigError):
        choose_num_pages(LAYOUT, 4096, least - 1, PLENTY)


def test_a_share_of_device_memory_replaces_the_default() -> None:
    share = 300 * LAYOUT.page_bytes + 5
    assert choose_num_pages(LAYOUT, 2**20, None, PLENTY, share) == 300
    assert choose_num_pages(LAYOUT, 2**20, 50 * LAYOUT.page_bytes, PLENTY, share) == 50
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        choose_num_pages(LAYOUT, 2**20, None, PLENTY, 0)
    with pytest.raises(ConfigError, match="after 7 bytes for ring_bytes"):
        choose_num_pages(LAYOUT, 2**20, None, PLENTY, 0, 7)


@pytest.mark.parametrize("share", [0.0, 1.1, "half"])
def test_shares_that_are_none(share: object) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig.from_flat(model="m", gpu_memory_utilization=share)


def test_the_host_tier_is_shared_out_to_the_ranks() -> None:
    page = LAYOUT.page_bytes
    assert choose_num_host_pages(LAYOUT, 0, 1, 0) == 0
    assert choose_num_host_pages(LAYOUT, 100 * page + 5, 1, PLENTY) == 100
    assert choose_num_host_pages(LAYOUT, 100 * page + 5, 2, PLENTY) == 50
    with pytest.raises(ConfigError, match=r"holds nothing.*needs [\d.]+ GiB") as error:
        choose_num_host_pages(LAYOUT, page, 1, PLENTY)
    needed = float(str(error.value).split("needs ")[1].split()[0])
    assert choose_num_host_pages(LAYOUT, int(needed * GIB), 1, PLENTY), "what it asks for is enough"
    with pytest.raises(ConfigError, match="more than 80% of the"):
        choose_num_host_pages(LAYOUT, 100 * page, 1, 120 * page)
