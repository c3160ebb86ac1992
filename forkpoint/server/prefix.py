"""What a router asks before it chooses a replica: the blocks that a request's prompt begins with."""

from __future__ import annotations

from typing import TypeAlias

from forkpoint.cache.hashing import HashChain
from forkpoint.config import BLOCK_SIZE
from forkpoint.routing.wire import sent_hash
from forkpoint.server.responses.body import Wanted
from forkpoint.server.sampling import PreparedRequest
from forkpoint.server.texts import Prepare, Texts

PromptReader: TypeAlias = Prepare[PreparedRequest | Wanted]


def read_prefix(prepare: PromptReader, salted: bool, texts: Texts, data: bytes) -> dict[str, list[int]]:
    """Hashes of the blocks of a prompt that the request could take from a cache, as events name them; of a request
    with several prompts those of the first. None where nothing is published of what it could take.

    Runs in a reader's process.
    """
    prepared = prepare(texts, data)
    # A request that wants stored responses goes to the replica that has stored them.
    if isinstance(prepared, Wanted) or salted or prepared.params.cache_salt:
        return {"block_hashes": []}
    prompt = prepared.prompts[0]
    chain = HashChain("", images=prompt.images)
    chain.extend(prompt.token_ids)
    usable = (len(prompt.token_ids) - 1) // BLOCK_SIZE
    return {"block_hashes": [sent_hash(name) for name in chain.hashes[:usable]]}
