"""Answers a router's question before it chooses a replica: which blocks does a request's prompt begin with?"""

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
    """Return the hashes, as in cache events, of the prompt's blocks that the request could reuse from a cache.

    `prepare` reads the body `data`. For several prompts they are those of the first. The list is empty if events
    publish no block that the request could reuse, because it has a salt (`salted`: all requests have one) or goes on
    from a stored response. Runs in a reader's process. Raises what `prepare` raises.
    """
    prepared = prepare(texts, data)
    # Only the replica that stored a response can go on from it, so hashes would not help.
    if isinstance(prepared, Wanted) or salted or prepared.params.cache_salt:
        return {"block_hashes": []}
    prompt = prepared.prompts[0]
    chain = HashChain("", images=prompt.images)
    chain.extend(prompt.token_ids)
    usable = (len(prompt.token_ids) - 1) // BLOCK_SIZE
    return {"block_hashes": [sent_hash(name) for name in chain.hashes[:usable]]}
