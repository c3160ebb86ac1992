"""The arena's accounting: pages that hold blocks or slots, their owners, and compaction.

Only ids are kept here; `runtime.buffers` has the bytes. Page 0 is reserved for padded rows.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.tier_entries import EntryName
from forkpoint.errors import ConfigError


@enum.unique
class MoveKind(enum.StrEnum):
    BLOCK = "block"
    SLOT = "slot"


@enum.unique
class MoveRoute(enum.StrEnum):
    """The rooms between which a unit is copied: the arena, the host tier's memory, the disk tier, other engines.

    A unit comes from the disk in two moves: a read into a buffer of the worker, named by its ticket, and a copy from
    the buffer. The same holds for a host tier whose copies run next to the steps. Units of another engine come to such
    a buffer by `StepPlan.fetches`.
    """

    ARENA = "arena"  # within the arena
    HOST = "host"  # within the host tier
    DISK = "disk"  # within the disk tier
    STORE = "store"  # from the arena to the host tier
    LOAD = "load"  # from the host tier to the arena
    LOAD_TO_BUFFER = "load_to_buffer"  # from the host tier to the buffer of the move's ticket
    ARENA_TO_DISK = "arena_to_disk"
    HOST_TO_DISK = "host_to_disk"
    READ = "read"  # from the disk tier to the buffer of the move's ticket
    LAND = "land"  # from that buffer to the arena
    DISCARD = "discard"  # no copy: free the buffer, which nobody wants
    REMOVE = "remove"  # no copy: remove the disk's entries of the name's hash, or all if there is no name
    # From the arena to the memory that other engines fetch from. The ticket is that of the lease. A move without a name
    # completes the lease.
    OFFER = "offer"
    # No copy: stop offering the entries of the name's hash, or else those of the ticket's lease, or else all.
    WITHDRAW = "withdraw"
    FETCHED = "fetched"  # from the buffer of a fetch, named by its ticket, to the arena; `src` is the entry's place
    # From the buffer of the fetch with the ticket `dst` to a buffer of the device, that of the move's ticket; `src` is
    # the entry's place.
    STAGE = "stage"
    FORGET = "forget"  # no copy: stop a fetch that nobody wants


# Routes to and from other engines.
PEER_ROUTES: Final = frozenset(
    {MoveRoute.OFFER, MoveRoute.WITHDRAW, MoveRoute.FETCHED, MoveRoute.STAGE, MoveRoute.FORGET}
)


class Move(NamedTuple):
    """The copy of one unit from `src` to `dst`.

    A move within a room is a part of its compaction: every table that names `src` has to name `dst` afterwards. A move
    between rooms leaves the contents of `src` in place. Moves with a `ticket` end later than the plan: the worker then
    reports the ticket. `name` says what they write, or what they must find. `group` is the place of a
    block's group in `layout.groups`. A state that leaves the arena or comes there brings along the blocks of the arena
    in `windows`, for each of `layout.windows`. In other rooms they are a part of the slot.
    """

    kind: MoveKind
    src: int
    dst: int
    route: MoveRoute = MoveRoute.ARENA
    ticket: int = 0
    name: EntryName | None = None
    group: int = 0
    windows: tuple[tuple[int, ...], ...] = ()


class UnitOwner(Protocol):
    """The holder of a block or a slot. The arena calls `rebind` when compaction moves that unit."""

    def rebind(self, move: Move) -> None: ...


class UnitPool:
    """The units of one kind (slots, or blocks of one group) on the pages that the pool was given, and their owners."""

    def __init__(self, kind: MoveKind, per_page: int, stride_bytes: int, route: MoveRoute, group: int = 0) -> None:
        """`route` goes into the moves of a compaction, `group` too: the place in `layout.groups`."""
        self.kind, self.group = kind, group
        self.route = route
        self.per_page = per_page
        self.stride_bytes = stride_bytes
        self.owners: dict[int, UnitOwner] = {}
        self._free: dict[int, list[int]] = {}  # partly used page -> its free units
        self._by_free: list[dict[int, None]] = [{} for _ in range(per_page + 1)]  # number free -> pages
        self._nonempty = 0  # bit n is set where _by_free[n] has pages
        self.num_free_in_partial = 0

    @property
    def num_used(self) -> int:
        return len(self.owners)

    def take(self, owner: UnitOwner, count: int) -> list[int]:
        """Take up to `count` units for `owner` from the fullest partly used pages; fewer if these have no more."""
        units: list[int] = []
        while self._nonempty and len(units) < count:
            units += self._pop(count - len(units))
        self.owners.update(dict.fromkeys(units, owner))
        return units

    def occupy(self, pages: Iterable[int], owners: Mapping[int, UnitOwner]) -> None:
        """Add pages that are new to the pool. Units in `owners` belong to these owners; the others are free."""
        self.owners.update(owners)
        for page in pages:
            first = page * self.per_page
            free = [unit for unit in range(first + self.per_page - 1, first - 1, -1) if unit not in owners]
            if free:
                self.num_free_in_partial += len(free)
                self._free[page] = free
                self._add_partial(page, len(free))

    def transfer(self, units: Sequence[int], owners: Iterable[UnitOwner]) -> None:
        """Give units in use to other owners, one for each. AssertionError if a unit had no owner."""
        num_used = self.num_used
        self.owners.update(zip(units, owners, strict=True))
        assert self.num_used == num_used, f"a {self.kind.value} that nobody held"

    def give(self, units: Sequence[int]) -> list[int]:
        """Free units. Returns the pages that are now wholly free; they no longer belong to the pool."""
        emptied = []
        for page, group in itertools.groupby(units, lambda unit: unit // self.per_page):
            free = self._free.setdefault(page, [])
            self._remove_partial(page, len(free))
            for unit in group:
                del self.owners[unit]
                free.append(unit)
                self.num_free_in_partial += 1
            if len(free) < self.per_page:
                self._add_partial(page, len(free))
                continue
            del self._free[page]
            self.num_free_in_partial -= self.per_page
            emptied.append(page)
        return emptied

    def empty_one_page(self) -> tuple[int, list[Move]] | None:
        """Move the units of the emptiest partly used page into the others, and take it out of the pool.

        Their owners are rebound. Returns the page and the moves, or None if the free units do not add up to a page.
        """
        if self.num_free_in_partial < self.per_page:
            return None
        page = next(iter(self._by_free[self._nonempty.bit_length() - 1]))
        free = self._free.pop(page)
        self._remove_partial(page, len(free))
        self.num_free_in_partial -= len(free)
        first, gone, moves = page * self.per_page, set(free), list[Move]()
        for old in range(first, first + self.per_page):
            if old in gone:
                continue
            (new,) = self._pop(1)
            owner = self.owners.pop(old)
            self.owners[new] = owner
            moves.append(Move(self.kind, old, new, self.route, group=self.group))
            owner.rebind(moves[-1])
        return page, moves

    def free_units(self) -> dict[int, list[int]]:
        """Return the free units of each partly used page, by page."""
        return {page: list(units) for page, units in self._free.items() if units}

    def _pop(self, most: int) -> list[int]:
        """Take up to `most` units of the fullest partly used page, which must exist. The caller sets their owner."""
        page = next(iter(self._by_free[(self._nonempty & -self._nonempty).bit_length() - 1]))
        free = self._free[page]
        self._remove_partial(page, len(free))
        units = free[: -most - 1 : -1]
        del free[-most:]
        self.num_free_in_partial -= len(units)
        if free:
            self._add_partial(page, len(free))
        else:
            del self._free[page]
        return units

    def _add_partial(self, page: int, num_free: int) -> None:
        """Enter a partly used page under the number of its free units."""
        self._by_free[num_free][page] = None
        self._nonempty |= 1 << num_free

    def _remove_partial(self, page: int, num_free: int) -> None:
        """Undo `_add_partial`. Does nothing for a full page, which was not entered."""
        if num_free:
            bucket = self._by_free[num_free]
            del bucket[page]
            if not bucket:
                self._nonempty &= ~(1 << num_free)


class Arena:
    """`num_pages` pages of one room, of which page 0 is reserved. The others hold units of one kind each, as needed.

    A new unit comes from the fullest partly used page of its kind, or else from a free page. If there is none, and
    another kind's free units add up to a page, compaction frees one, which moves at most one page's bytes. If there is
    still no room, the caller has to evict. `moves` lists the copies that the next plan has to carry, in order. Rooms
    whose copies depend on each other share one list. `windows[i]` are the blocks of `layout.windows[i]`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        route: MoveRoute = MoveRoute.ARENA,
        moves: list[Move] | None = None,
    ) -> None:
        if num_pages < 2:
            raise ConfigError(f"an arena needs 2 pages or more (page 0 is reserved), not {num_pages}")
        self.num_pages = num_pages
        # A layout without blocks, or without slots, never takes a unit of that kind.
        self.blocks = UnitPool(MoveKind.BLOCK, layout.blocks_per_page or 1, layout.block_stride_bytes, route)
        self.slots = UnitPool(MoveKind.SLOT, layout.slots_per_page or 1, layout.slot_stride_bytes, route)
        first = int(layout.has_kv)
        self.windows = [
            UnitPool(MoveKind.BLOCK, group.blocks_per_page, group.stride_bytes, route, number)
            for number, group in enumerate(layout.windows, first)
        ]
        self._pools = [self.slots, self.blocks, *self.windows]
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self.moves = [] if moves is None else moves
        self._given_bytes = 0  # bytes handed out since the start
        self._num_bytes = layout.page_bytes * num_pages

    @property
    def turnover(self) -> float:
        """Bytes handed out since the start, in arenas: the time by which entries age."""
        return self._given_bytes / self._num_bytes

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def take_blocks(self, owner: UnitOwner, count: int) -> list[int]:
        """Take up to `count` blocks, compacting if that helps; fewer if there is no room for more."""
        return self._take(self.blocks, owner, count)

    def take_slot(self, owner: UnitOwner, compact: bool = True) -> int | None:
        return next(iter(self._take(self.slots, owner, 1, compact)), None)

    def take_window_block(self, window: int, owner: UnitOwner) -> int | None:
        """Take a block of `layout.windows[window]`, compacting if that helps; None if there is no room."""
        return next(iter(self._take(self.windows[window], owner, 1)), None)

    def occupy(self, kind: MoveKind, owners: Mapping[int, UnitOwner]) -> None:
        """Take these units for their owners, before any other unit is taken. No page may get blocks and slots."""
        pool = self.blocks if kind is MoveKind.BLOCK else self.slots
        pages = {unit // pool.per_page for unit in owners}
        self._free_pages = [page for page in self._free_pages if page not in pages]
        pool.occupy(pages, owners)
        self._given_bytes += len(owners) * pool.stride_bytes

    def give_blocks(self, blocks: Sequence[int]) -> None:
        self._free_pages += self.blocks.give(blocks)

    def give_slot(self, slot: int) -> None:
        self._free_pages += self.slots.give([slot])

    def give_window_block(self, window: int, block: int) -> None:
        self._free_pages += self.windows[window].give([block])

    def reissue_blocks(self, blocks: Sequence[int], owner: UnitOwner) -> None:
        """Give blocks in use to another owner. They count as handed out."""
        self.blocks.transfer(blocks, [owner] * len(blocks))
        self._given_bytes += len(blocks) * self.blocks.stride_bytes

    @property
    def num_blocks_until_page(self) -> int:
        """How many more blocks have to become free before a unit of another kind finds room in a full arena."""
        return self.blocks.per_page - self.blocks.num_free_in_partial

    def issued_slot(self, slot: int) -> int:
        """Return where a slot's contents are until the moves of the next plan have run."""
        for move in reversed(self.moves):
            if move.kind is MoveKind.SLOT and move.route is MoveRoute.ARENA and move.dst == slot:
                slot = move.src
        return slot

    def drain_moves(self) -> tuple[Move, ...]:
        """Return the moves since the last call, in order, and forget them; the next plan must carry them."""
        moves = tuple(self.moves)
        self.moves.clear()
        return moves

    def _take(self, pool: UnitPool, owner: UnitOwner, count: int, compact: bool = True) -> list[int]:
        units = pool.take(owner, count)
        while len(units) < count and (self._free_pages or (compact and self._compact(pool))):
            pool.occupy([self._free_pages.pop()], {})
            units += pool.take(owner, count - len(units))
        self._given_bytes += len(units) * pool.stride_bytes
        return units

    def _compact(self, wanted: UnitPool) -> bool:
        """Empty a page of another pool than `wanted` into that pool's other pages. False: no pool can spare a page."""
        for pool in self._pools:
            emptied = pool.empty_one_page() if pool is not wanted else None
            if emptied is not None:
                page, moves = emptied
                self.moves += moves
                self._free_pages.append(page)
                return True
        return False

    def check_integrity(self) -> None:
        """Raise AssertionError unless each page is free or of one kind of units, and each unit is free or owned."""
        seen: dict[int, str] = {0: "reserved"} | dict.fromkeys(self._free_pages, "free")
        assert len(seen) == 1 + len(self._free_pages), "a page is twice on the free list"
        windows = ((f"blocks of window {number}", pool) for number, pool in enumerate(self.windows))
        for name, pool in (("blocks", self.blocks), ("slots", self.slots), *windows):
            free = pool.free_units()
            num_units: dict[int, int] = {page: len(units) for page, units in free.items()}
            assert sum(num_units.values()) == pool.num_free_in_partial, f"{name}: free count is off"
            for page, units in free.items():
                assert not pool.owners.keys() & set(units), f"{name}: a unit of page {page} is free and owned"
            for unit in pool.owners:
                num_units[unit // pool.per_page] = num_units.get(unit // pool.per_page, 0) + 1
            for page, count in num_units.items():
                assert page not in seen, f"page {page} holds {name} and is {seen.get(page)}"
                assert count == pool.per_page, f"{name}: page {page} has {count} of {pool.per_page} units"
                seen[page] = name
        assert len(seen) == self.num_pages, f"{self.num_pages - len(seen)} pages are lost"
