"""Where drafts come from: what the row itself has said, what others have, and what the prefix tree holds."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from forkpoint.cache.lease import Lease
from forkpoint.cache.tree import Node
from forkpoint.config import BLOCK_SIZE, LEAST_MATCH, MAX_POSITIONS
from forkpoint.sched.past_outputs import END, PastOutputs
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request

MOST_CHILDREN = 64  # of a node that are looked at
FIRST_ROOM = 256


class Guess(NamedTuple):
    """Ids that may follow a request's newest token: they did where its last `num_matched` tokens came before."""

    token_ids: IntArray
    num_matched: int


class DraftSource(Protocol):
    """One way to guess what follows a request's newest token. It looks at `most_matched` tokens before it at most."""

    most_matched: int

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        """Of 1 to `most` ids; None: it knows nothing."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class _History:
    """All ids of one request in one array that grows."""

    def __init__(self, request: Request) -> None:
        self._ids = np.empty(request.num_tokens + FIRST_ROOM, np.int32)
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
    """Prompt lookup: the last tokens have come before, and what followed them then follows again. The longest match of
    `most_match` tokens, down to `least_match`, wins; of several the latest. What it copies may run into what it
    drafts: a loop goes on."""

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
        """The position after the best earlier occurrence of the last tokens, and how many agree there; 0: none."""
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # of occurrences of the last token
        length, found = min(1, len(ends)), ends
        while len(ends) and length < self.most_matched:
            ends = ends[ends >= length]
            ends = ends[ids[ends - length] == ids[-1 - length]] if length < len(ids) else ends[:0]
            if len(ends):
                length, found = length + 1, ends
        return (int(found[-1]) + 1 if length else 0), length


class SuffixSource:
    """Suffix decoding: where the last tokens came before in what earlier requests put out, what mostly followed. A
    match and its drafts are `depth` tokens at most, and the drafts `factor` times the match; each draft followed in a
    share of the matches that is at least `least_share`."""

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
    """Down the rows, after each token the one that most of the rows so far go on with, of equals the first."""
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
    """The prefix tree: where others have been at the same tokens, what they went on with. That is how prompts that are
    sent again, turns that are made anew and siblings of `n` completions go."""

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
            drafts, begun, node = drafts + child.tokens[len(begun) :], begun[len(child.tokens) :], child
        return Guess(np.frombuffer(drafts, np.int32)[:most], request.num_tokens) if drafts else None

    def forget(self, request: Request) -> None:
        """Nothing is kept of it."""


def _latest(node: Node, begun: bytes) -> Node | None:
    """Of the children of `node` that go on as `begun` does, the one used last."""
    children = islice(reversed(node.children), MOST_CHILDREN)
    fitting = [child for child in children if child.tokens.startswith(begun[: len(child.tokens)])]
    return max(fitting, key=lambda child: child.last_used, default=None)
