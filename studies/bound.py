"""Computes how much any policy could reuse: an upper bound that knows the future.

Requests are served one after another. Between request k and k + 1 a cache of M bytes holds blocks (64 tokens of keys
and values) and states. A hit of p tokens by request i needs every block of the prefix, and the state at p. They must be
held since the last earlier request whose tokens pass there, because no other request could have computed them since.
For any prices lambda_k >= 0 of a byte held between k and k + 1,

    hits <= M * sum_k lambda_k + sum_i max(0, max_p(worth_i(p) - price of what the hit at p has held)),

because a gap of a block or state ends in one request, so that nothing is charged twice, and because the held bytes
never exceed M (weak Lagrangian duality). Every choice of prices gives a bound, and `clairvoyant_bound` looks for a low
one. The bound relaxes three things: entries may be held in fractions, running requests need no room, and states may be
placed with hindsight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.cache.eviction import RecomputeCost
from forkpoint.cache.hashing import BlockHash, HashChain
from forkpoint.sim.tokens import TokenSpans
from forkpoint.sim.trace import Trace, TraceRequest

FloatArray: TypeAlias = npt.NDArray[np.float64]
IndexArray: TypeAlias = npt.NDArray[np.int64]

BLOCK = 64
NUM_BINS = 48  # prices are constant inside a bin of requests
NUM_ROUNDS = 160


def num_prompt_tokens(trace: Trace) -> int:
    return sum(request.prompt.num_tokens for request in trace.requests)


def by_arrival(trace: Trace) -> list[TraceRequest]:
    """Return requests in the order of their arrival if every request took no time."""
    when: dict[str, float] = {}
    for request in trace.requests:
        before = when[request.after] + request.think_s if request.after is not None else 0.0
        when[request.id] = max(request.arrival_s, before)
    return sorted(trace.requests, key=lambda request: when[request.id])


def hashes_of(request: TraceRequest) -> list[BlockHash]:
    """Return the hashes of the blocks that a request leaves in a cache: those of its prompt, and of its output without
    the last token."""
    chain = HashChain("")
    chain.extend(TokenSpans.join([request.prompt, request.output.part(0, request.output.num_tokens - 1)]).array())
    return chain.hashes


@dataclass(frozen=True, slots=True)
class ReuseProblem:
    """For each request, the prefixes that were seen before, and the request that saw each last.

    Segment i, `[first[i], first[i + 1])`, has one element for each reusable block of request i, from the root on.
    `last` is the latest earlier request that passes the end of that block. `worth` is the worth of a hit that ends
    there.
    """

    first: IndexArray  # [num_requests + 1]
    last: IndexArray  # [num_blocks]
    worth: FloatArray  # [num_blocks]

    @property
    def num_requests(self) -> int:
        return len(self.first) - 1

    @property
    def unlimited(self) -> float:
        """The worth of all hits in a cache without limits."""
        ends = self.first[1:][np.diff(self.first) > 0] - 1
        return float(self.worth[ends].sum())

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], cost: RecomputeCost | None = None) -> ReuseProblem:
        """Build the problem from requests in the order of service. Worth counts tokens, or the recompute cost if that
        is given."""
        first, last = [0], []
        passed: dict[BlockHash, int] = {}
        depths: list[IndexArray] = []
        for index, request in enumerate(requests):
            hashes = hashes_of(request)
            usable = (request.prompt.num_tokens - 1) // BLOCK
            reusable = 0
            for block_hash in hashes[:usable]:
                at = passed.get(block_hash)
                if at is None:
                    break
                last.append(at)
                reusable += 1
            passed.update(dict.fromkeys(hashes, index))
            depths.append(np.arange(1, reusable + 1))
            first.append(first[-1] + reusable)
        tokens = np.concatenate(depths) * float(BLOCK) if depths else np.empty(0)
        worth = tokens if cost is None else tokens * cost.per_token + tokens**2 / 2 * cost.per_pair
        return cls(np.asarray(first, np.int64), np.asarray(last, np.int64), np.asarray(worth, np.float64))


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on the worth of all hits, and the prices that prove it (per byte, by bin of requests)."""

    worth: float
    prices: FloatArray


class PricedHits:
    """Evaluates the bound for given prices, and its slope in each price."""

    def __init__(self, problem: ReuseProblem, memory_bytes: int, block_bytes: int, slot_bytes: int, num_bins: int):
        self._problem = problem
        self._memory = memory_bytes
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        n = problem.num_requests
        edges = np.linspace(0, max(n - 1, 1), num_bins + 1)
        self.widths: FloatArray = np.diff(edges)  # intervals between requests, by bin
        at = np.arange(n)[:, None]
        self._held: FloatArray = np.clip(at - edges[:-1], 0, self.widths)  # [request, bin]: intervals before it
        lengths = np.diff(problem.first)
        self._owner: IndexArray = np.repeat(np.arange(n), lengths)
        self._nonempty = np.flatnonzero(lengths)

    def evaluate(self, prices: FloatArray) -> tuple[float, FloatArray]:
        """Return (the bound, its slope) at `prices`, which must not be negative."""
        problem, owner = self._problem, self._owner
        total = self._memory * float(prices @ self.widths)
        slope = self._memory * self.widths
        if not len(owner):
            return total, slope
        clock = self._held @ prices
        gaps = clock[owner] - clock[problem.last]
        along = np.cumsum(gaps)
        starts = problem.first[self._nonempty]
        before = np.zeros(problem.num_requests)
        before[self._nonempty] = along[starts] - gaps[starts]
        kv_price = (along - before[owner]) * self._block_bytes
        gain = problem.worth - kv_price - gaps * self._slot_bytes
        best = np.maximum.reduceat(gain, starts)
        total += float(np.maximum(best, 0).sum())
        return total, slope - self._use(gain, best, starts)

    def _use(self, gain: FloatArray, best: FloatArray, starts: IndexArray) -> FloatArray:
        """Return the byte-intervals that the best choices hold in each bin."""
        problem, owner = self._problem, self._owner
        chosen = np.zeros(problem.num_requests, np.int64) - 1
        best_of = np.full(problem.num_requests, np.inf)
        best_of[self._nonempty] = np.where(best > 0, best, np.inf)
        hits = np.flatnonzero(gain == best_of[owner])
        chosen[owner[hits[::-1]]] = hits[::-1]  # the shallowest of equals
        reaches = chosen[owner]
        inside = np.arange(len(owner)) <= reaches
        num = problem.num_requests
        ends = np.bincount(owner[inside], minlength=num) * self._block_bytes
        begins = np.bincount(problem.last[inside], minlength=num) * self._block_bytes
        taken = chosen[chosen >= 0]
        ends = ends + np.bincount(owner[taken], minlength=num) * self._slot_bytes
        begins = begins + np.bincount(problem.last[taken], minlength=num) * self._slot_bytes
        use: FloatArray = (ends - begins) @ self._held
        return use


def clairvoyant_bound(
    problem: ReuseProblem,
    memory_bytes: int,
    block_bytes: int,
    slot_bytes: int,
    num_bins: int = NUM_BINS,
    num_rounds: int = NUM_ROUNDS,
) -> Bound:
    """Return the lowest bound found. All prices are equal at first, then follow the slope."""
    priced = PricedHits(problem, memory_bytes, block_bytes, slot_bytes, num_bins)
    zero = np.zeros(num_bins)
    best = Bound(min(problem.unlimited, priced.evaluate(zero)[0]), zero)
    if best.worth <= 0:
        return best
    level, ladder = best.worth / (memory_bytes * problem.num_requests), 2.0 ** np.arange(-14, 5)
    values = [(priced.evaluate(np.full(num_bins, level * step))[0], step) for step in ladder]
    logs = np.log(np.full(num_bins, level * min(values)[1]))
    moment, square = np.zeros(num_bins), np.zeros(num_bins)
    for round_number in range(1, num_rounds + 1):
        prices = np.exp(logs)
        worth, slope = priced.evaluate(prices)
        if worth < best.worth:
            best = Bound(worth, prices)
        direction = slope * prices
        moment = 0.8 * moment + 0.2 * direction
        square = 0.95 * square + 0.05 * direction**2
        step = 0.25 * (1 - round_number / (num_rounds + 1))
        scaled = moment / (1 - 0.8**round_number) / (np.sqrt(square / (1 - 0.95**round_number)) + 1e-300)
        logs = logs - step * scaled
    return best
