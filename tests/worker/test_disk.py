"""The size of a disk tier, and engines of several ranks that open one folder at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forkpoint.cache.tier_entries import DiskFacts
from forkpoint.config import EngineConfig
from forkpoint.disk.store import DiskStore
from forkpoint.errors import ConfigError
from forkpoint.worker.disk import open_disk_tier
from tests.disk.stores import LAYOUT, NUM_PAGES
from tests.thread_ranks import ThreadRanks


def test_a_size_that_holds_nothing_is_refused_with_one_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.worker.disk.slab_layout", lambda arena: LAYOUT)
    monkeypatch.setattr("forkpoint.worker.disk.namespace_facts", lambda config, loaded, ranks: {})
    loaded = cast(Any, SimpleNamespace(platform=SimpleNamespace(device="cpu")))
    stores = list[DiskStore]()
    arena = cast(Any, SimpleNamespace(use_disk=stores.append))
    (ranks,) = ThreadRanks.all_of(1, gathers=False)
    config = EngineConfig.from_flat(kv_disk_path=str(tmp_path), kv_disk_size=1e-9)
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GiB") as error:
        open_disk_tier(config, loaded, arena, ranks)
    needed = float(str(error.value).split("needs ")[1].split()[0])
    assert open_disk_tier(EngineConfig.from_flat(kv_disk_path=str(tmp_path), kv_disk_size=needed), loaded, arena, ranks)
    stores[0].close()


def test_one_of_two_engines_that_start_at_once_has_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank comes first to its file: the first ranks decide."""
    monkeypatch.setattr("forkpoint.disk.store.LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("forkpoint.worker.disk.slab_layout", lambda arena: LAYOUT)
    monkeypatch.setattr("forkpoint.worker.disk.namespace_facts", lambda config, loaded, ranks: {"ranks": ranks.rank})
    size = 2 * NUM_PAGES * LAYOUT.page_bytes / 2**30
    config = EngineConfig.from_flat(kv_disk_path=str(tmp_path), kv_disk_size=size)
    loaded = cast(Any, SimpleNamespace(platform=SimpleNamespace(device="cpu")))
    stores = list[DiskStore]()
    arena = cast(Any, SimpleNamespace(use_disk=stores.append))

    def opened(ranks: ThreadRanks) -> DiskFacts | None:
        return open_disk_tier(config, loaded, arena, ranks)

    engines = [ThreadRanks.all_of(2, gathers=False) for _ in range(2)]
    (first, second), (others_first, others_second) = engines
    with ThreadPoolExecutor(4) as threads:
        early = [threads.submit(opened, ranks) for ranks in (first, others_second)]
        time.sleep(0.2)
        late = [threads.submit(opened, ranks) for ranks in (second, others_first)]
        has_tier = [each.result() is not None for each in (early[0], late[0], late[1], early[1])]
    for store in stores:
        store.close()
    assert has_tier == [True, True, False, False]
