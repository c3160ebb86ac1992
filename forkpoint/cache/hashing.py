"""Chained block hashes: a block's hash stands for all tokens and images up to its end, and the salt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NewType, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from forkpoint.config import BLOCK_SIZE
from forkpoint.images import ImageSpan, block_marks

BlockHash = NewType("BlockHash", bytes)
TokenIds: TypeAlias = npt.NDArray[np.int32]
BlockHasher: TypeAlias = Callable[[BlockHash, Sequence[bytes]], list[BlockHash]]

HASH_BYTES = 16  # the parent fits in BLAKE2b's salt field, which saves a third compression
TOKEN_BYTES = 4  # int32
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
_BLOCK = np.dtype((np.void, BLOCK_BYTES))


def root_hash(salt: str) -> BlockHash:
    """Return the hash that a first block takes as its parent's. Prompts with different salts share nothing."""
    return BlockHash(blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"forkpoint-root").digest())


def private_hash(parent: BlockHash, owner: str) -> BlockHash:
    """Return a parent hash that only `owner` computes for what follows `parent`."""
    return BlockHash(blake2b(parent + owner.encode(), digest_size=HASH_BYTES, person=b"forkpoint-own").digest())


def block_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of a block after `parent`. `tokens` are its int32 ids, then the marks of its images."""
    return BlockHash(blake2b(tokens, digest_size=HASH_BYTES, salt=parent).digest())


def chained_hashes(parent: BlockHash, blocks: Iterable[bytes]) -> list[BlockHash]:
    """Return the hashes of blocks that follow `parent` one after the other."""
    last: bytes = parent
    hashes: list[bytes] = []
    for block in blocks:
        last = blake2b(block, digest_size=HASH_BYTES, salt=last).digest()
        hashes.append(last)
    return cast(list[BlockHash], hashes)


class HashChain:
    """The tokens of one request and the hashes of its full blocks. It only grows.

    A block with a token at or after `private_from` (None: none is) is hashed under `owner`: only that owner finds it.
    """

    __slots__ = ("_images", "_owner", "_private_from", "_rest", "blocks", "hashes", "root")

    def __init__(
        self, salt: str, owner: str = "", private_from: int | None = None, images: Sequence[ImageSpan] = ()
    ) -> None:
        self.root = root_hash(salt)
        self.hashes: list[BlockHash] = []
        self.blocks: list[bytes] = []  # the int32 token ids of each full block, then the marks of its images
        self._images = tuple(images)
        self._rest = b""  # the tokens after the last full block
        self._owner = owner
        self._private_from = None if private_from is None else private_from // BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        return (len(self.blocks) * BLOCK_BYTES + len(self._rest)) // TOKEN_BYTES

    def extend(self, token_ids: TokenIds, hash_public: BlockHasher = chained_hashes) -> None:
        """Append tokens, and hash the blocks that they fill. Tokens after the last full block wait.

        `hash_public` hashes the blocks without private tokens, as `chained_hashes` does.
        """
        data = self._rest + token_ids.astype(np.int32, copy=False).tobytes()
        num_full = len(data) // BLOCK_BYTES
        self.blocks += np.frombuffer(data, _BLOCK, num_full).tolist()  # bytes, three times as fast as slices
        self._rest = data[num_full * BLOCK_BYTES :]
        if self._images:
            self._mark_images()
        start, end = len(self.hashes), len(self.blocks)
        private = end if self._private_from is None else min(max(self._private_from, start), end)
        self.hashes += hash_public(self._last_hash, self.blocks[start:private])
        if private < end:
            parent = self._last_hash
            if private == self._private_from:
                parent = private_hash(parent, self._owner)
            self.hashes += chained_hashes(parent, self.blocks[private:end])

    def _mark_images(self) -> None:
        """Append the marks of images to the blocks that are not hashed yet."""
        last = min(len(self.blocks), -(-self._images[-1].end // BLOCK_SIZE))
        for index in range(len(self.hashes), last):
            self.blocks[index] += block_marks(self._images, index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)

    @property
    def _last_hash(self) -> BlockHash:
        return self.hashes[-1] if self.hashes else self.root
