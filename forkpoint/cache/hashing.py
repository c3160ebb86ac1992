"""Chained block hashes: the hash of a block names all tokens up to its end, and the salt."""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType, cast

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16  # also the size of the salt field of BLAKE2b, which carries the parent: no third compression
TOKEN_BYTES = 4  # int32


def root_hash(salt: str) -> BlockHash:
    """The parent hash of a first block. Different salts share nothing."""
    return BlockHash(blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"forkpoint-root").digest())


def private_hash(parent: BlockHash, owner: str) -> BlockHash:
    """A parent hash under which only `owner` finds what follows `parent`."""
    return BlockHash(blake2b(parent + owner.encode(), digest_size=HASH_BYTES, person=b"forkpoint-own").digest())


class HashChain:
    """The tokens of one request and the hashes of its full blocks; it only grows.

    Tokens at or after `private_from` (if given) are hashed under `owner`: a block that holds one of them is
    found by that owner alone.
    """

    __slots__ = ("_owner", "_private_from", "block_bytes", "data", "hashes", "root")

    def __init__(self, salt: str, block_size: int, owner: str = "", private_from: int | None = None) -> None:
        self.root = root_hash(salt)
        self.hashes: list[BlockHash] = []
        self.data = b""  # int32 token ids
        self.block_bytes = block_size * TOKEN_BYTES
        self._owner = owner
        self._private_from = None if private_from is None else private_from // block_size

    @property
    def num_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Append tokens and hash the blocks that they fill."""
        self.data += token_ids.astype(np.int32, copy=False).tobytes()
        hashes, size = self.hashes, self.block_bytes
        view = memoryview(self.data)[len(hashes) * size :]
        full = len(hashes) + len(view) // size
        public = full if self._private_from is None else min(full, self._private_from)
        parent: bytes = hashes[-1] if hashes else self.root
        offset = 0
        append = cast(list[bytes], hashes).append
        for end in (public, full):
            if end > len(hashes) and len(hashes) == self._private_from:
                parent = private_hash(BlockHash(parent), self._owner)
            for _ in range(len(hashes), end):
                parent = blake2b(view[offset : offset + size], digest_size=HASH_BYTES, salt=parent).digest()
                append(parent)
                offset += size

    def block_tokens(self, index: int) -> bytes:
        """The token ids of block `index`, as bytes."""
        return self.data[index * self.block_bytes : (index + 1) * self.block_bytes]
