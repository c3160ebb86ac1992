"""Prompts that other engines have computed, on their way here for requests that wait."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Final, TypeAlias

from forkpoint.cache.arena import Move, MoveKind, MoveRoute
from forkpoint.cache.counters import CacheCounters
from forkpoint.cache.disk_tier import name_of
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.layout import NO_BLOCK, NO_SLOT, CacheLayout
from forkpoint.cache.lease import Lease
from forkpoint.cache.peer_offers import Fetch, FetchReport, Offer, PeerFacts
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.tier import unit_of
from forkpoint.cache.tier_entries import BUFFERED_AT_ONCE, EntryName, TierReport
from forkpoint.cache.tier_reads import TierReads
from forkpoint.cache.tree import Checkpoint, Entry, Node
from forkpoint.cache.windows import WindowRuns, ids_of
from forkpoint.checks import is_loopback
from forkpoint.config import BLOCK_SIZE

AVOIDED_S: Final = 30.0  # seconds for which a peer that did not answer is not asked again
COMPUTING_S: Final = 50.0  # seconds that a request waits longer while the other engine computes its prompt
LATE_S: Final = 1.0  # seconds after the worker's own deadline for which its report is still awaited
LOGGER: Final = logging.getLogger("forkpoint")
_Key: TypeAlias = tuple[str, int, str, int, bytes]


def _key(offer: Offer) -> _Key:
    """Return what requests have to agree in to share a fetch.

    An engine and a lease do not suffice: proxies choose them, or an engine was started again with its old name.
    """
    return offer.host, offer.port, offer.engine_id, offer.lease, offer.last_hash


@dataclass(slots=True, eq=False)
class FetchedPrompt:
    """An offer that is taken up for the requests of `leases`. `end` is the last node of its path.

    `places` numbers the entries that are fetched: those that the arena lacked. Entries at places below `num_arrived`
    have arrived. Some may be copied to the arena before the others arrive: `landed` are their nodes in the arena, and
    `num_tokens_before` is what a lookup found before they were copied, by lease.
    """

    offer: Offer
    end: Node
    places: dict[Entry, int]
    num_bytes: int
    until_s: float
    leases: set[Lease] = field(default_factory=set)
    ticket: int = 0  # 0: not started, because others take the memory
    has_arrived: bool = False
    num_arrived: int = 0
    landed: list[Node] = field(default_factory=list)
    num_tokens_before: dict[Lease, int] = field(default_factory=dict)

    def has(self, entry: Entry) -> bool:
        """Return whether an entry was fetched and has arrived."""
        place = self.places.get(entry)
        return place is not None and (self.has_arrived or place < self.num_arrived)


class FetchedPrompts(RestoreSource):
    """Fetches the prompts of offers, at most `facts.max_bytes` at a time, and lets `Restoring` copy them to the arena.

    `layout` is that of tiers. `orders` are for the next plan, which carries the moves too. A request waits until its
    fetch has ended or its time is up. Then it computes what it does not find. Blocks may be copied to the arena while
    others are still to come. If the others do not come, `give_up_late` returns the copied ones, because the other
    engine may have found that they are wrong.

    On a device with streams for copies, entries come to a buffer of the device first, as those of the host tier.
    """

    name = "peer"

    def __init__(
        self,
        layout: CacheLayout,
        facts: PeerFacts,
        moves: list[Move],
        counters: CacheCounters,
        clock: Callable[[], float],
        tickets: Iterator[int] | None,
    ) -> None:
        """`tickets` are those of all tiers, for copies that end later than their plan; None: all end with it."""
        self._reader: TierReads | None = None
        if tickets is not None:
            self._reader = TierReads(layout, moves, tickets, BUFFERED_AT_ONCE, clock, self._stage)
        self._layout, self._facts, self._moves, self._counters, self._clock = layout, facts, moves, counters, clock
        self.orders: list[Fetch] = []
        self._prompts: dict[_Key, FetchedPrompt] = {}  # in the order of arrival
        self._by_ticket: dict[int, FetchedPrompt] = {}
        self._of: dict[Lease, FetchedPrompt] = {}
        self._avoided: dict[tuple[str, int], float] = {}  # peer -> until when it is not asked
        self._tickets = itertools.count(1)
        self._num_bytes = 0  # bytes of the prompts whose fetch has started
        self._held: FetchedPrompt | None = None  # the prompt that is being restored
        self._doubtful: list[Node] = []  # nodes of the arena that came from prompts that were not completed

    # --- requests

    def take_up(self, lease: Lease, offer: Offer, num_usable: int, num_in_arena: int) -> None:
        """Fetch an offer for a waiting request, or warn and count why that is not possible.

        The request can use `num_usable` tokens. The arena has the keys and values of `num_in_arena` of them.
        """
        why = self._refusal(lease.chain, offer, num_usable)
        if why:
            self._counters.peer_failed_fetches += 1
            LOGGER.warning("a prompt at %s port %d is not fetched: %s", offer.host, offer.port, why)
            return
        prompt = self._prompts.get(_key(offer))
        if prompt is None:
            prompt = self._prompts[_key(offer)] = self._new(lease.chain, offer, num_in_arena // BLOCK_SIZE)
            self._start_next()
        prompt.leases.add(lease)
        self._of[lease] = prompt

    def decline(self, offer: Offer) -> None:
        """Let the other engine end its lease: nothing of it is needed."""
        if self._is_allowed(offer.host) and len(offer.ports) == self._facts.num_ranks:
            self._order(offer, 0, (), self._facts.timeout_s)

    def _refusal(self, chain: HashChain, offer: Offer, num_usable: int) -> str:
        """Return why an offer cannot be used; "" if it can."""
        index = offer.num_tokens // BLOCK_SIZE - 1
        if not self._is_allowed(offer.host):
            return f"remote_hosts of kv_connector_extra_config does not name {offer.host}; add it there"
        num_ranks = len(offer.ports)
        if num_ranks != self._facts.num_ranks:
            return (
                f"it has tensor_parallel_size={num_ranks} and this engine {self._facts.num_ranks}, so that their ranks "
                "hold other shares; give both the same"
            )
        if offer.namespace != self._facts.namespace:
            return "it runs another model, or options that give other numbers"
        if offer.num_tokens > num_usable or chain.hashes[index] != offer.last_hash:
            return "it computed another prompt, or the same one with another cache_salt"
        if self._bytes(index + 1) > self._facts.max_bytes:
            return f"it is larger than kv_buffer_size={self._facts.max_bytes}"
        if self._avoided.get((offer.host, offer.port), 0.0) > self._clock():
            return f"it has not answered in the last {AVOIDED_S:g} s"
        return ""

    def _is_allowed(self, host: str) -> bool:
        for each in self._facts.allowed_hosts:
            if host == each or (each == "loopback" and is_loopback(host)):
                return True
            try:
                if ip_address(host) in ip_network(each, strict=False):
                    return True
            except ValueError:  # one of them is a name
                continue
        return False

    def _bytes(self, num_blocks: int) -> int:
        return num_blocks * self._layout.block_bytes * self._layout.has_kv + self._layout.slot_bytes

    def _new(self, chain: HashChain, offer: Offer, num_held: int) -> FetchedPrompt:
        """Return the fetch of an offer, not started. Its first `num_held` blocks are in the arena and are left out."""
        count, places = offer.num_tokens // BLOCK_SIZE, dict[Entry, int]()
        node = Node(None, chain.root, b"", 0, NO_BLOCK)
        for depth, block_hash in enumerate(chain.hashes[:count], 1):
            node = Node(node, block_hash, b"", depth, NO_BLOCK)
            if self._layout.has_kv and depth > num_held:
                places[node] = len(places)
        num_bytes = len(places) * self._layout.block_bytes
        if self._layout.has_states:
            node.checkpoint = Checkpoint(node, NO_SLOT, offer.num_tokens, offer.origin, offer.decoded)
            places[node.checkpoint] = len(places)
            num_bytes += self._layout.slot_bytes
        wait_s = self._facts.timeout_s + COMPUTING_S * offer.is_early
        return FetchedPrompt(offer, node, places, num_bytes, self._clock() + wait_s)

    def is_waiting(self, lease: Lease) -> bool:
        """Return whether the prompt that a request waits for may still arrive."""
        prompt = self._of.get(lease)
        return prompt is not None and not prompt.has_arrived

    def begin_landing(self, lease: Lease, num_tokens: int) -> None:
        """Note the tokens that a lookup found for a request before blocks of its prompt were copied to the arena."""
        self._of[lease].num_tokens_before.setdefault(lease, num_tokens)

    def num_tokens_before(self, lease: Lease) -> int | None:
        """Return the tokens that a lookup found before blocks of a request's prompt were copied; None if none were."""
        prompt = self._of.get(lease)
        return None if prompt is None else prompt.num_tokens_before.get(lease)

    def arriving(self, lease: Lease) -> Node | None:
        """Return the last node of a request's prompt if its first blocks, but not all, have arrived; otherwise None."""
        prompt = self._of.get(lease)
        if prompt is None or prompt.has_arrived or not prompt.num_arrived or not self._layout.has_kv:
            return None
        return prompt.end

    def give_up_late(self) -> list[Node]:
        """Give up the fetches whose time is up. Their requests compute their prompts.

        Returns, once, the nodes of the arena with blocks of prompts that did not arrive as a whole.
        """
        now = self._clock()
        for prompt in list(self._prompts.values()):
            late_s = LATE_S if prompt.ticket else 0.0
            if not prompt.has_arrived and now >= prompt.until_s + late_s:
                LOGGER.warning("a prompt at %s port %d is late and is computed", prompt.offer.host, prompt.offer.port)
                self._counters.peer_failed_fetches += 1
                self._end(prompt)
        found, self._doubtful = self._doubtful, []
        return found

    def leave(self, lease: Lease) -> None:
        """Note that a request waits no longer: it runs or has ended. A fetch that nobody waits for ends."""
        prompt = self._of.pop(lease, None)
        if prompt is not None:
            prompt.leases.discard(lease)
            if not prompt.leases:
                self._end(prompt)

    def reset(self) -> None:
        """Give up everything that is on its way."""
        for prompt in list(self._prompts.values()):
            self._end(prompt)

    @property
    def is_fetching(self) -> bool:
        """Whether a request waits for something."""
        return any(not prompt.has_arrived for prompt in self._prompts.values())

    # --- fetches

    def drain_orders(self) -> tuple[Fetch, ...]:
        """Return the orders for the plan under construction, once."""
        orders, self.orders = tuple(self.orders), []
        return orders

    def _start_next(self) -> None:
        """Start prompts in their order while they fit in `facts.max_bytes`."""
        for prompt in self._prompts.values():
            if prompt.ticket:
                continue
            if self._num_bytes and self._num_bytes + prompt.num_bytes > self._facts.max_bytes:
                return
            prompt.ticket = next(self._tickets)
            self._by_ticket[prompt.ticket] = prompt
            self._num_bytes += prompt.num_bytes
            names = tuple(map(name_of, prompt.places))
            self._order(prompt.offer, prompt.ticket, names, max(0.0, prompt.until_s - self._clock()))

    def _order(self, offer: Offer, ticket: int, names: tuple[EntryName, ...], timeout_s: float) -> None:
        self.orders.append(Fetch(ticket, offer.host, offer.ports, offer.engine_id, offer.lease, names, timeout_s))

    def _end(self, prompt: FetchedPrompt) -> None:
        """Give up a prompt, or what is left of it."""
        del self._prompts[_key(prompt.offer)]
        if not prompt.has_arrived:
            self._doubtful += prompt.landed
        for lease in prompt.leases:
            self._of.pop(lease, None)
        if prompt.ticket:
            del self._by_ticket[prompt.ticket]
            self._num_bytes -= prompt.num_bytes
            others = [order for order in self.orders if order.ticket != prompt.ticket]
            is_sent, self.orders = len(others) == len(self.orders), others
            if is_sent:
                self._moves.append(Move(MoveKind.BLOCK, 0, 0, MoveRoute.FORGET, prompt.ticket))
        self._start_next()

    def apply(self, report: FetchReport) -> None:
        """Take in which fetches have ended, and how far others have come.

        Failed ones are given up. Unreachable peers are avoided for a while.
        """
        for ticket, count in report.arrived:
            if ticket in self._by_ticket:
                self._by_ticket[ticket].num_arrived = count
        for ticket in report.done:
            if ticket in self._by_ticket:
                prompt = self._by_ticket[ticket]
                prompt.has_arrived = True
                self._counters.peer_fetched_bytes += prompt.num_bytes
        for ticket in report.failed:
            if ticket in self._by_ticket:
                prompt = self._by_ticket[ticket]
                self._counters.peer_failed_fetches += 1
                self._end(prompt)  # some ranks may have got their share
                if ticket in report.unreachable:
                    self._avoid(prompt.offer.host, prompt.offer.port)

    def _avoid(self, host: str, port: int) -> None:
        """Do not ask a peer for a while, and give up what it has not begun to send: others may need the memory."""
        self._avoided[host, port] = self._clock() + AVOIDED_S
        for prompt in list(self._prompts.values()):
            is_of_peer = (prompt.offer.host, prompt.offer.port) == (host, port)
            if is_of_peer and not (prompt.has_arrived or prompt.num_arrived):
                LOGGER.warning("a prompt at %s port %d is computed: an earlier one has not come from there", host, port)
                self._counters.peer_failed_fetches += 1
                self._end(prompt)

    # --- restoring

    def find(self, chain: HashChain, max_blocks: int) -> Node | None:
        found: Node | None = None
        for prompt in self._prompts.values():
            if not prompt.has_arrived:
                continue
            node = prompt.end
            while not self._layout.has_states and node.depth > max_blocks and node.parent is not None:
                node = node.parent
            is_named = 0 < node.depth <= max_blocks and chain.hashes[node.depth - 1] == node.hash
            # The arena had the first blocks when the fetch began, and may have lost them.
            is_there = prompt.has(node.checkpoint or node)
            if is_named and is_there and (found is None or node.depth > found.depth):
                found = node
        return found

    def hold(self, node: Node) -> None:
        self._held = self._prompt_of(node)

    def release(self, node: Node, checkpoint: Checkpoint | None) -> None:
        self._held = None
        if self._reader is not None:
            self._reader.end()

    @property
    def is_reading(self) -> bool:
        return self.gives_way or (self._reader is not None and self._reader.is_waiting)

    @property
    def gives_way(self) -> bool:
        return self._held is not None and not self._held.has_arrived and not self.has_lost(self._held.end)

    def has_lost(self, end: Node) -> bool:
        return self._prompt_of(end) is None

    def note_loaded(self, end: Node, nodes: Sequence[Node]) -> None:
        if self._held is not None and not self._held.has_arrived:
            self._held.landed += nodes

    def count_use(self, entry: Entry) -> None:
        """Do nothing: the other engine has its own counts."""

    def _prompt_of(self, entry: Entry) -> FetchedPrompt | None:
        return next((each for each in self._prompts.values() if entry in each.places or entry is each.end), None)

    def num_ready(self, entries: Sequence[Entry], *, is_busy: bool) -> int:
        prompt = self._prompt_of(entries[-1]) if entries else None
        if prompt is None:
            return 0
        count = sum(1 for _ in itertools.takewhile(prompt.has, entries))
        if self._reader is not None:
            count = self._reader.num_ready(entries[:count], is_busy=is_busy)
        if not prompt.has_arrived and count and isinstance(entries[count - 1], Checkpoint):
            count -= 1  # others could use a state that the other engine may still find to be wrong
        return count

    def _stage(self, entry: Entry, ticket: int) -> Move:
        """Return the copy of an entry that has arrived to a buffer of the device."""
        assert self._held is not None
        kind, _, _ = unit_of(self._layout, entry)
        return Move(kind, self._held.places[entry], self._held.ticket, MoveRoute.STAGE, ticket)

    def apply_staged(self, report: TierReport) -> None:
        """Take in which copies to buffers of the device have ended. Tickets of tiers are among them.

        A prompt is given up if the other engine wrote over an entry while it was copied from there.
        """
        if self._reader is None:
            return
        for ticket in report.done:
            self._reader.arrive(ticket)
        for ticket in report.failed:
            entry = self._reader.entry_of(ticket)
            prompt = None if entry is None else self._prompt_of(entry)
            if prompt is not None:
                host, port = prompt.offer.host, prompt.offer.port
                LOGGER.warning("a prompt at %s port %d is computed: it was written over before it came", host, port)
                self._counters.peer_failed_fetches += 1
                self._end(prompt)

    def load(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        if self._reader is not None:
            return self._reader.land(entry, unit, windows)
        prompt = self._prompt_of(entry)
        assert prompt is not None
        kind, _, _ = unit_of(self._layout, entry)
        return Move(kind, prompt.places[entry], unit, MoveRoute.FETCHED, prompt.ticket, windows=ids_of(windows))
