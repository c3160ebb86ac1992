"""Latest outputs of requests, found by their tokens: a ring of ids, chained through equal runs of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from forkpoint.json_options import LEAST_MATCH
from forkpoint.sched.plan import IntArray

MOST_PLACES = 64  # occurrences that are looked at, the latest first; bounds the time of a lookup
MOST_TOKENS = 1 << 20  # ids that are kept, at 28 bytes each; a power of two
END = -1  # instead of an id: the output ended

_MIXER = np.uint64(0x9E3779B97F4A7C15)
Places = npt.NDArray[np.int64]


class PastOutputs:
    """The latest `max_requests` outputs, as far as they are among the latest MOST_TOKENS ids.

    Ids are numbered from 1 in the order of arrival; that number is an id's place. Outputs under one salt are not found
    under another.
    """

    def __init__(self, max_requests: int) -> None:
        self._size = MOST_TOKENS
        self._shift = np.uint64(64 - (self._size.bit_length() - 1))
        self._ids = np.zeros(self._size, np.int32)
        self._salts = np.zeros(self._size, np.uint64)
        # The last place before each place whose run has the same hash; 0: none.
        self._previous = np.zeros(self._size, np.int64)
        self._latest = np.zeros(self._size, np.int64)  # by hash: the last place of its latest run
        self._starts: deque[int] = deque(maxlen=max_requests)
        self._end = 1

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a request's output, in place of the oldest ids. An output of few tokens is not kept."""
        ids = np.asarray([*token_ids[1 - self._size :], END], np.int32)
        if not self._starts.maxlen or len(ids) <= LEAST_MATCH:
            return
        number, places = _number(salt), np.arange(self._end, self._end + len(ids))
        self._ids[places % self._size], self._salts[places % self._size] = ids, number
        self._link(self._hashes(ids[:-1], number), places[LEAST_MATCH - 1 : -1])
        self._starts.append(self._end)
        self._end += len(ids)

    def find(self, salt: str, tail: IntArray, num_following: int) -> tuple[IntArray, int]:
        """Return what followed the longest matches of the end of `tail`, and their length in tokens.

        A match has LEAST_MATCH tokens or more; without one the length is 0. The ids that followed are
        `[occurrences, num_following]`, the latest first, with END after the end of an output.
        """
        ends = self._occurrences(self._hashes(tail[-LEAST_MATCH:], number := _number(salt))[0])
        before = ends[:, None] - np.arange(len(tail))
        agree = (before >= self._oldest) & (self._salts[ends % self._size] == number)[:, None]
        agree &= self._ids[before % self._size] == tail[::-1]
        lengths = np.logical_and.accumulate(agree, axis=1).sum(axis=1)
        most = int(lengths.max(initial=0))
        if most < LEAST_MATCH:
            return np.empty((0, num_following), np.int32), 0
        after = ends[lengths == most, None] + np.arange(1, num_following + 1)
        following = np.where(after < self._end, self._ids[after % self._size], END)
        ended = np.logical_or.accumulate(following == END, axis=1)
        return np.where(ended, END, following).astype(np.int32), most

    @property
    def _oldest(self) -> int:
        return max(self._starts[0], self._end - self._size) if self._starts else self._end

    def _occurrences(self, key: int) -> Places:
        """Return the last places of runs with this hash."""
        found: list[int] = []
        place, oldest = int(self._latest[key]), self._oldest
        while place >= oldest and len(found) < MOST_PLACES:
            found.append(place)
            place = int(self._previous[place % self._size])
        return np.asarray(found, np.int64)

    def _link(self, keys: Places, places: Places) -> None:
        """Chain each place to the last one before it with the same hash. `keys[i]` is the hash at `places[i]`."""
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))  # the first place of each hash
        previous = np.roll(places, 1)
        previous[first] = self._latest[keys[first]]
        self._previous[places % self._size] = previous
        last = np.append(first[1:], len(keys)) - 1
        self._latest[keys[last]] = places[last]

    def _hashes(self, ids: IntArray, number: np.uint64) -> Places:
        """Return the hash of each run of LEAST_MATCH ids under a salt's number."""
        columns = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), LEAST_MATCH).T
        mixed = np.full(columns.shape[1], number)
        for column in columns:
            mixed = (mixed ^ column) * _MIXER
        return (mixed >> self._shift).astype(np.int64)


def _number(salt: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little"))
