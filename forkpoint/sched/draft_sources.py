"""Sources of drafts: the row's own tokens, past outputs of other requests, and the prefix tree."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from forkpoint.cache.hashing import BLOCK_BYTES
from forkpoint.cache.lease import Lease
from forkpoint.cache.tree import Node
from forkpoint.checks import MAX_POSITIONS
from forkpoint.config import BLOCK_SIZE
from forkpoint.json_options import LEAST_MATCH
from forkpoint.sched.past_outputs import END, PastOutputs
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request

MOST_CHILDREN = 64  # children of a node that are looked at, the newest first; bounds the time of a lookup
SPARE_IDS = 256  # ids beyond the prompt that a history's first array holds


class Guess(NamedTuple):
    """Ids that may follow a request's newest token: they followed an earlier copy of its last `num_matched` tokens."""

    token_ids: IntArray
    num_matched: int


class DraftSource(Protocol):
    """Guesses what follows a request's newest token, from at most `most_matched` tokens up to it."""

    most_matched: int

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        """Return a guess of 1 to `most` ids; None: there is no match."""

    def forget(self, request: Request) -> None:
        """Learn that the request has ended."""


class _History:
    """All ids of one request in one array that grows."""

    def __init__(self, request: Request) -> None:
        self._ids = np.empty(request.num_tokens + SPARE_IDS, np.int32)
        self._ids[: request.num_prompt_tokens] = request.prompt_token_ids
        self._num_prompt, self._length = request.num_prompt_tokens, request.num_prompt_tokens

    def of(self, request: Request) -> IntArray:
        fresh = request.output_token_ids[self._length - self._num_prompt :]
        end = self._length + len(fresh)
        if end > len(self._ids):
            self._ids = np.resize(self._ids, 2 * end)
        self._ids[self._length : end] = fresh
        self._length = end
        return self._ids[:end]


class NgramSource:
    """Prompt lookup: the last tokens came before in the same sequence, and what followed them then follows again.

    The longest match wins, of `least_match` to `most_match` tokens; of equally long ones the latest. The copied ids may
    run into the draft itself, so that a loop goes on.
    """

    def __init__(self, least_match: int, most_match: int) -> None:
        self._least, self.most_matched = least_match, most_match
        self._histories: dict[str, _History] = {}

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        history = self._histories.get(request.id)
        if history is None:
            history = self._histories[request.id] = _History(request)
        ids = history.of(request)
        start, length = self._match(ids)
        return Guess(np.resize(ids[start:], most), length) if length >= self._least else None

    def forget(self, request: Request) -> None:
        self._histories.pop(request.id, None)

    def _match(self, ids: IntArray) -> tuple[int, int]:
        """Return (position after the best earlier match of the last tokens, its length); (0, 0) without one."""
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # positions of the last token
        length, found = min(1, len(ends)), ends
        while len(ends) and length < self.most_matched:
            ends = ends[ends >= length]
            ends = ends[ids[ends - length] == ids[-1 - length]] if length < len(ids) else ends[:0]
            if len(ends):
                length, found = length + 1, ends
        return (int(found[-1]) + 1 if length else 0), length


class SuffixSource:
    """Suffix decoding: what mostly followed where the last tokens occur in outputs of earlier requests.

    A match and its drafts together have at most `depth` tokens, and the drafts at most `factor` times as many as the
    match. Each draft followed in at least `least_share` of the matches.
    """

    def __init__(self, past: PastOutputs, depth: int, factor: float, least_share: float) -> None:
        self._past, self._depth, self.most_matched = past, depth, depth - 1
        self._factor, self._least_share = factor, least_share

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        count = max(LEAST_MATCH, self._depth - min(most, self._depth // 2))
        tail = request.token_ids(max(0, request.num_tokens - count), request.num_tokens)
        if len(tail) < LEAST_MATCH:
            return None
        following, num_matched = self._past.find(request.params.cache_salt, tail, most)
        count = min(self._depth - num_matched, int(self._factor * num_matched))
        ids = _usual(following[:, :count], self._least_share)
        return Guess(np.asarray(ids, np.int32), num_matched) if ids else None

    def forget(self, request: Request) -> None:
        self._past.add(request.params.cache_salt, request.output_token_ids)


def _usual(following: IntArray, least_share: float) -> list[int]:
    """Return the commonest id of each position, among the rows that have the ids chosen before it.

    `following` is `[matches, positions]`. The list ends before END, and where fewer than `least_share` of all rows
    agree.
    """
    ids: list[int] = []
    left = following
    for column in range(following.shape[1]):
        ((token, count),) = Counter(left[:, column].tolist()).most_common(1)
        if token == END or count < least_share * len(following):
            break
        ids.append(token)
        left = left[left[:, column] == token]
    return ids


class CacheSource:
    """The prefix tree: what other requests with the same tokens so far continued with.

    It serves prompts that are sent again, regenerated turns, and siblings among `n` completions.
    """

    most_matched = MAX_POSITIONS

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        node = lease.node
        if node is None:
            return None
        rest = request.token_ids(node.depth * BLOCK_SIZE, request.num_tokens)
        begun, drafts = rest.astype(np.int32).tobytes(), b""
        while len(drafts) < most * rest.itemsize:
            child = _latest(node, begun)
            if child is None:
                break
            drafts, begun, node = drafts + child.tokens[len(begun) : BLOCK_BYTES], begun[BLOCK_BYTES:], child
        return Guess(np.frombuffer(drafts, np.int32)[:most], request.num_tokens) if drafts else None

    def forget(self, request: Request) -> None:
        """Do nothing, because the source keeps nothing of a request."""


def _latest(node: Node, begun: bytes) -> Node | None:
    """Return the last used child of `node` whose tokens start with `begun`, int32 bytes; None if none does."""
    children = islice(reversed(node.children), MOST_CHILDREN)
    fitting = [child for child in children if child.tokens.startswith(begun[:BLOCK_BYTES])]
    return max(fitting, key=lambda child: child.last_used, default=None)
