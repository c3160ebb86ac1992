"""Opens the disk tier of a worker, in the namespace of its model and options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forkpoint.cache.tier_entries import DiskFacts
from forkpoint.cache.tree import Origin
from forkpoint.config import EngineConfig
from forkpoint.disk.folder import namespace_folder, remove_old_namespaces
from forkpoint.disk.namespace import namespace_of, weights_digest
from forkpoint.disk.slab import SlabLayout
from forkpoint.disk.store import open_store
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import counted
from forkpoint.ops.ranks import Ranks
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.units import unit_bytes
from forkpoint.sched.plan import MoveKind
from forkpoint.version import installed_version
from forkpoint.worker.sizing import gib_up

LEAST_PAGES = 3  # page 0, which stays empty, a page of blocks and one of slots


def open_disk_tier(config: EngineConfig, loaded: Loaded, arena: ArenaBuffer, ranks: Ranks) -> DiskFacts | None:
    """Open the rank's disk tier and give it to `arena`. None: some rank cannot use one, which the log explains.

    Raises ConfigError for a size that holds nothing.
    """
    assert config.kv_disk_path is not None
    slab = slab_layout(arena)
    if config.disk_tier_bytes // ranks.size < LEAST_PAGES * slab.page_bytes:
        raise ConfigError(
            f"kv_disk_size={config.kv_disk_size} holds nothing: on {counted(ranks.size, 'rank')} it needs "
            f"{gib_up(LEAST_PAGES * slab.page_bytes * ranks.size)} GiB or more"
        )
    facts = namespace_facts(config, loaded, ranks)
    folder = namespace_folder(Path(config.kv_disk_path), namespace_of({**facts, "ranks": ranks.size}))
    open_own = partial(open_store, folder, slab, config.disk_tier_bytes, namespace_of(facts), ranks.rank, ranks.size)
    device, store = loaded.platform.device, None
    # The first ranks decide which of two engines that start at once has the folder, and whether it is in use.
    if not ranks.rank:
        remove_old_namespaces(folder)
        store = open_own()
    if not ranks.least(int(store is not None or ranks.rank > 0), device):
        return None
    if ranks.rank:
        store = open_own()
    has_all = ranks.least(int(store is not None), device)
    if store is None or not has_all:
        if store is not None:
            store.close()
        return None
    arena.use_disk(store)
    return store.facts


def slab_layout(arena: ArenaBuffer) -> SlabLayout:
    """Return the places of the arena's units on a disk."""
    layout = arena.stored
    sizes = unit_bytes(layout, MoveKind.BLOCK), unit_bytes(layout, MoveKind.SLOT)
    return SlabLayout(layout.blocks_per_page, layout.slots_per_page, *sizes)


def namespace_facts(config: EngineConfig, loaded: Loaded, ranks: Ranks) -> dict[str, Any]:
    """Return all that the bytes of an entry depend on, besides its tokens."""
    weights = f"dummy {config.seed}"
    if config.load_format != "dummy":
        weights = weights_digest(Path(config.model)) or "none"
    model = loaded.model.config
    facts: dict[str, Any] = {
        "weights": weights,
        "model": replace(model, unknown_fields=(), eos_token_ids=()),
        "layout": loaded.layout,
        "origins": [origin.value for origin in Origin],
        "ranks": (ranks.rank, ranks.size),
        "tokens of a rank": (config.decode_context_parallel_size, config.interleave),
        "deterministic": config.deterministic,
    }
    if config.deterministic:
        facts["kernels"] = {
            "version": installed_version(),
            "operators": loaded.ops.backends,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": loaded.platform.hardware,
        }
    return facts
