"""KV cache events in the format of vLLM 0.33: msgpack, with batches as arrays and events as maps tagged by class
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from forkpoint.cache.disk_tier import DiskTier
from forkpoint.cache.hashing import BLOCK_BYTES, BlockHash
from forkpoint.cache.restorable import ARENA, AllCleared, BlocksRemoved, BlocksStored, Change
from forkpoint.cache.tier import HostTier
from forkpoint.config import BLOCK_SIZE

# vLLM's names for the rooms; the arena is called so on whatever device
MEDIA: Final = {ARENA: "GPU", HostTier.name: "CPU", DiskTier.name: "STORAGE"}
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES: Final = 8  # bytes of a batch number, big-endian


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(Event):
    """Blocks that were added under `parent_block_hash`.

    Those of a disk have no `token_ids`: their hashes alone name them. vLLM leaves them out for all tiers.

    `resumable_hashes` is an extension of forkpoint. It lists those of `block_hashes` at whose end a request can resume.
    Events of other engines have None, which means every block.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    resumable_hashes: list[int | bytes] | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that are published together. `ts` is the time in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def sent_hash(block_hash: BlockHash) -> int:
    """Return the hash in published form: its last 64 bits, as vLLM does by default."""
    return int.from_bytes(block_hash[-8:], "big")


def batch_of(changes: Iterable[Change], now_s: float) -> EventBatch:
    return EventBatch(now_s, [_event(change) for change in changes], 0)


def _event(change: Change) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match change:
        case BlocksStored(room, nodes, ends):
            parent = nodes[0].parent
            return BlockStored(
                block_hashes=[sent_hash(node.hash) for node in nodes],
                parent_block_hash=sent_hash(parent.hash) if parent is not None and parent.depth else None,
                token_ids=np.frombuffer(b"".join([node.tokens[:BLOCK_BYTES] for node in nodes]), np.int32).tolist(),
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium=MEDIA[room],
                lora_name=None,
                resumable_hashes=[sent_hash(name) for name in ends],
            )
        case BlocksRemoved(room, hashes):
            return BlockRemoved([sent_hash(name) for name in hashes], MEDIA[room])
        case AllCleared():
            return AllBlocksCleared()


def encode(batch: EventBatch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode(data: bytes) -> EventBatch:
    """Decode a batch. Raises msgspec.DecodeError for bytes that are not a batch."""
    return msgspec.msgpack.decode(data, type=EventBatch)


def sequence_bytes(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
