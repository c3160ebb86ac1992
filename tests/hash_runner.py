"""A runner without a model, whose output depends on every block and slot that a plan names.

What a block holds per token is the token's position and the rolling hash of all tokens up to it; a slot holds
the number of tokens and their rolling hash. The next token is a hash of the state and of everything that
attention would read. Contents are garbage until written, and garbage again when a block is handed out anew,
when its page changes from blocks to slots or back, and at the source of a move. `submit` raises PlanViolation
as soon as a plan breaks a rule of docs/internals.md or reads anything but its own tokens' contents.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.images import ImageSpan
from forkpoint.sched.plan import (
    LAST_SAMPLED,
    NO_SLOT,
    PEER_ROUTES,
    TO_DRAFT,
    AddedRow,
    IntArray,
    Move,
    MoveKind,
    MoveRoute,
    StepPlan,
    StepResult,
)
from tests.hash_continuation import HashContinuation
from tests.hash_disk import HashDisk
from tests.hash_grammar import HashGrammar, allowed_ids
from tests.hash_lags import HashLags
from tests.hash_memory import GARBAGE, HashMemory
from tests.hash_peers import HashPeers
from tests.hash_rows import HashRow, HashWork, seen_ids
from tests.hash_rules import check_decode, check_prefill, check_slots, check_tokens
from tests.hash_step import AnsweredStep, InjectedFailure, PlanViolation, require
from tests.rolling_hash import MASK, RollingHash


@dataclass(slots=True)
class HashRunner:
    """Implements `sched.plan.Runner`. Page 0 is reserved and may not be written.

    Knobs for tests: `fail_steps` are steps whose result raises InjectedFailure (what they would have written
    is garbage; steps submitted before that failure is seen fail too), as do steps that compute more tokens of a
    request than `poison` says; `non_finite_requests` are reported in `failed_rows` when they sample;
    `protected_slots` and `protected_blocks` may not be written by the next plan (mark what was cached before it).
    """

    layout: CacheLayout
    num_pages: int
    vocab_size: int
    num_host_pages: int = 0
    num_disk_pages: int = 0
    fail_steps: set[int] = field(default_factory=set)
    poison: dict[str, int] = field(default_factory=dict)
    non_finite_requests: set[str] = field(default_factory=set)
    protected_slots: Collection[int] = ()
    protected_blocks: Collection[int] = ()
    protected_window_blocks: Sequence[Collection[int]] = ()  # of each window
    num_tokens: int = 0  # entered the model so far
    num_steps: int = 0
    num_confirmed_drafts: int = 0
    num_optimistic: int = 0  # rows that were planned before their last result was known
    draft_chance: float = 0.6  # that a draft which a plan leaves to the runner is right
    random: random.Random = field(default_factory=lambda: random.Random(0))
    closed: bool = False
    _rows: dict[int, HashRow] = field(default_factory=dict)
    _failed: bool = False
    _hasher: RollingHash = field(init=False)
    _memory: HashMemory = field(init=False)
    _host: HashMemory = field(init=False)  # of the host tier
    disk: HashDisk = field(init=False)
    peers: HashPeers = field(default_factory=HashPeers)
    lags: HashLags = field(default_factory=HashLags)

    def __post_init__(self) -> None:
        self._hasher = RollingHash(self.vocab_size)
        self._memory = HashMemory(self.layout, self.num_pages)
        self._host = HashMemory(self.layout.in_tiers(), self.num_host_pages)
        self.disk = HashDisk(self.layout.in_tiers(), self.num_disk_pages)

    # -- sched.plan.Runner

    def submit(self, plan: StepPlan) -> AnsweredStep:
        """Execute a plan at once. Raises PlanViolation where the plan is at fault."""
        if self.closed:
            raise PlanViolation(f"step {plan.step} was submitted to a closed runner")
        self._update_rows(plan)
        for fetch in plan.fetches:
            self.peers.start(fetch)
        works = self._works(plan)
        if not self._failed:
            self._check(plan, works)
            self.lags.check(plan, works)
        poisoned = any(w.end > self.poison.get(self._rows[w.row].added.request_id, w.end) for w in works)
        self._failed = self._failed or poisoned or plan.step in self.fail_steps
        if self._failed:
            self._spoil(works)
            self.lags.fail(works)
            return AnsweredStep(None, InjectedFailure(f"step {plan.step} failed as the test asked"), self.failure_seen)
        sampled, allowed = [work for work in works if work.samples], allowed_ids(plan.masks)
        for work in works:
            self._save(work)
            self._write_keys(work)
        positions = np.cumsum([0, *(1 + len(work.drafts) for work in sampled)]).tolist()
        outputs = [self._sample(work, allowed, first) for work, first in zip(sampled, positions, strict=False)]
        confirmed = {work.row: work.start + len(ids) for work, ids in zip(sampled, outputs, strict=True) if work.drafts}
        for work in works:
            self._write_state(work, confirmed.get(work.row, work.end))
        self.lags.advance(plan, works, confirmed)
        broken = self.non_finite_requests
        failed = [work.row for work in sampled if self._rows[work.row].added.request_id in broken]
        self.num_tokens += plan.num_tokens
        self.num_steps += 1
        self.num_optimistic += int(plan.rows.optimistic.sum())
        ids = np.asarray([token for own in outputs for token in own], np.int32)
        counts = np.asarray([len(own) for own in outputs], np.int32) if plan.rows.num_drafts.any() else None
        self.num_confirmed_drafts += sum(len(own) - 1 for own in outputs)
        report = self.disk.next_report(plan.waits_for_tiers)
        fetched = self.peers.next_report(plan.waits_for_tiers)
        result = StepResult(
            plan.step, ids, counts, tuple(failed), num_tokens=plan.num_tokens, tier_report=report, fetch_report=fetched
        )
        return AnsweredStep(result, None, self.failure_seen)

    def close(self) -> None:
        self.closed = True

    def failure_seen(self) -> None:
        self._failed = False

    @property
    def rows(self) -> dict[int, str]:
        """Request ids by occupied row."""
        return {row: state.added.request_id for row, state in self._rows.items()}

    def expected(
        self,
        prompt: Sequence[int],
        num_outputs: int,
        seed: int | None = None,
        grammar: HashGrammar | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> list[int]:
        """The outputs of an uncached run; `seed` is the row's seed where the request is not greedy."""
        rolls = self._hasher.rolls(seen_ids(np.asarray(prompt, np.int32), images, self.vocab_size))
        seen = HashContinuation(self.layout, self._hasher, rolls, len(prompt), 0 if seed is None else seed + 1)
        outputs: list[int] = []
        for _ in range(num_outputs):
            token = seen.next_token()
            if grammar is not None:
                token = grammar.allowed[token % len(grammar.allowed)]
                grammar.accept(token)
            outputs.append(token)
            if grammar is not None and grammar.mask is None:
                break
            seen.append(token)
        return outputs

    # -- rows and moves

    def _update_rows(self, plan: StepPlan) -> None:
        self.lags.remove(plan)
        for row in plan.removed:
            state = self._rows.pop(row, None)
            require(state is not None, plan.step, f"removes row {row}, which is empty")
            assert state is not None
            self._memory.release(state.blocks[: state.num_blocks])
        for replaced in plan.replaced:
            state = self._row(plan.step, replaced.row)
            self._memory.release(state.blocks[: state.num_blocks])
            state.num_blocks, state.windows = 0, [[] for _ in self.layout.windows]
        for move in plan.moves:
            self.lags.move(plan.step, move, sound=not self._failed)
            self._move(plan.step, move)
        for added in plan.added:
            self._add(plan.step, added)
        for replaced in plan.replaced:
            self._attach(self._row(plan.step, replaced.row), replaced.block_ids, replaced.more_block_ids)

    def _add(self, step: int, added: AddedRow) -> None:
        require(added.row not in self._rows, step, f"adds row {added.row}, which is occupied")
        ids = np.asarray(added.token_ids, np.int32)
        known = 0 < added.num_prompt_tokens <= len(ids)
        require(known, step, f"adds row {added.row} with {len(ids)} ids, prompt {added.num_prompt_tokens}")
        in_range = bool((ids >= 0).all() and (ids < self.vocab_size).all())
        require(in_range, step, f"adds row {added.row} with token ids outside the vocabulary")
        rolls = self._hasher.rolls(seen_ids(ids, added.images, self.vocab_size))
        state = HashRow(added, ids.tolist(), rolls, np.empty(0, np.int32), 0, [[] for _ in self.layout.windows])
        self._rows[added.row] = state
        self._attach(state, added.block_ids, added.more_block_ids)

    def _attach(self, state: HashRow, block_ids: IntArray, more: Sequence[IntArray]) -> None:
        block_ids, windows = self._by_kind(block_ids, more)
        state.append_blocks(block_ids)
        self._memory.use(block_ids)
        for table, ids in zip(state.windows, windows, strict=True):
            table += ids.tolist()

    def _by_kind(self, first: IntArray, more: Sequence[IntArray]) -> tuple[IntArray, list[IntArray]]:
        """Blocks that are kept, and those of each window, from those of each group."""
        if self.layout.has_kv or not self.layout.windows:
            return first, list(more)
        return first[:0], [first, *more]

    def _row(self, step: int, row: int) -> HashRow:
        require(row in self._rows, step, f"names row {row}, which is empty")
        return self._rows[row]

    def _move(self, step: int, move: Move) -> None:
        if move.route is MoveRoute.STORE:
            self._host.copy_from(self._memory, step, move, self._failed)
            if move.ticket:
                self.disk.wait(move.ticket)
        elif move.route is MoveRoute.LOAD:
            self._memory.copy_from(self._host, step, move, self._failed)
        elif move.route is MoveRoute.HOST:
            self._host.move(step, move.kind, move.src, move.dst)
        elif move.route is MoveRoute.STAGE:
            self.disk.hold(move.ticket, *self.peers.entry(step, move.dst, move.src), self.peers.loses())
        elif move.route in PEER_ROUTES:
            self.peers.move(step, move, self._memory, sound=not self._failed)
        elif move.route is not MoveRoute.ARENA:
            rooms = {MoveRoute.LAND: self._memory, MoveRoute.ARENA_TO_DISK: self._memory}
            rooms |= {MoveRoute.HOST_TO_DISK: self._host, MoveRoute.LOAD_TO_BUFFER: self._host}
            self.disk.move(step, move, rooms, sound=not self._failed)
        else:
            self._memory.move(step, move.kind, move.src, move.dst, move.group)
            window = self._memory.window_of(move.kind, move.group)
            if window is not None:
                for state in self._rows.values():
                    table = state.windows[window]
                    table[:] = [move.dst if block == move.src else block for block in table]
                return
            for state in self._rows.values() if move.kind is MoveKind.BLOCK else ():
                used = state.blocks[: state.num_blocks]
                used[used == move.src] = move.dst

    # -- rows' work

    def _works(self, plan: StepPlan) -> list[HashWork]:
        """Give rows their new blocks; one by one what they compute."""
        rows, works, first = plan.rows, list[HashWork](), 0
        positions, slots = rows.save_positions.tolist(), rows.save_slots.tolist()
        new_blocks, new_windows = self._by_kind(rows.new_blocks, rows.more_blocks)
        blocks = new_blocks.tolist()
        extents = (rows.row, rows.start, rows.num_tokens, rows.num_drafts, rows.optimistic)
        columns = (column.tolist() for column in (*extents, rows.read_slot, rows.write_slot, rows.samples))
        for i, (row, start, count, drafts, optimistic, read, write, samples) in enumerate(zip(*columns, strict=True)):
            state = self._row(plan.step, row)
            latest, start = start, start - state.num_rejected if optimistic else start
            own = slice(*rows.block_ptr[i : i + 2].tolist())
            self._append_blocks(plan.step, row, blocks[own])
            for window, ids in enumerate(new_windows):
                self._append_window_blocks(plan.step, row, window, ids[own].tolist())
            own = slice(*rows.save_ptr[i : i + 2].tolist())
            saves, end = tuple(zip(positions[own], slots[own], strict=True)), start + count
            tokens = self._tokens(plan.step, state, start, rows.tokens[first : first + count].tolist())
            works.append(HashWork(row, start, latest, end, end - drafts, read, write, tokens, saves, samples))
            first += count
        require(first == plan.num_tokens, plan.step, f"says {plan.num_tokens} tokens and has {first}")
        sampled = rows.row[rows.samples].tolist() == plan.sampled_rows.tolist()
        require(sampled, plan.step, f"says that it samples rows {plan.sampled_rows}")
        return works

    def _guess(self, state: HashRow, count: int) -> list[int]:
        """What a row will put out next, each token right with `draft_chance`."""
        seen = HashContinuation(self.layout, self._hasher, state.rolls, len(state.ids), state.seed)
        guesses: list[int] = []
        for _ in range(count):
            token = seen.next_token()
            seen.append(token)
            wrong = self.random.random() >= self.draft_chance
            guesses.append((token + 1) % self.vocab_size if wrong else token)
        return guesses

    def _tokens(self, step: int, state: HashRow, start: int, tokens: list[int]) -> list[int]:
        """The ids that a row computes; the last id that it sampled is not named."""
        if tokens[:1] == [LAST_SAMPLED] and not self._failed:
            last = state.has_sampled and start == len(state.ids) - 1
            where = f"computes token {start} of a row from its last sampled id"
            require(last, step, f"{where}, which is at {len(state.ids) - 1} or unsampled")
            drafts = tokens[1:]
            return [state.ids[start], *(self._guess(state, len(drafts)) if TO_DRAFT in drafts else drafts)]
        return tokens

    def _check(self, plan: StepPlan, works: list[HashWork]) -> None:
        rows = [work.row for work in works]
        require(len(set(rows)) == len(rows), plan.step, f"schedules a row twice: {rows}")
        for i, work in enumerate(works):
            state = self._rows[work.row]
            check_tokens(plan.step, work, state)
            if i < plan.num_decodes:
                check_decode(plan.step, work, state, self.vocab_size)
            else:
                check_prefill(plan.step, work, state)
        for work in works:
            self._check_work(plan.step, work)
        check_slots(plan.step, works, self.protected_slots)
        for work in works:
            self._read(work)

    def _check_work(self, step: int, work: HashWork) -> None:
        state = self._rows[work.row]
        where = f"row {work.row}, tokens [{work.start}, {work.end})"
        if work.samples:
            known = len(state.ids)
            require(work.known == known, step, f"{where} samples, but {known} tokens are known already")
        if not self.layout.has_states:
            none = work.read_slot == NO_SLOT and not work.written_slots
            require(none, step, f"{where} names slots {work.read_slot}, {work.written_slots}; the layout has no states")
        for window, table in enumerate(state.windows):
            require(len(table) * BLOCK_SIZE >= work.end, step, f"{where}: its window has {len(table)} blocks")
            for block in table[work.start // BLOCK_SIZE : -(-work.end // BLOCK_SIZE)]:
                cached = block in self.protected_window_blocks[window] if self.protected_window_blocks else False
                require(not cached, step, f"{where} writes cached block {block} of window {window}")
                self._memory.claim(step, MoveKind.BLOCK, block, window + self.layout.has_kv)
        if not self.layout.has_kv:
            require(state.num_blocks == 0, step, f"{where} has blocks; the layout has no attention")
            return
        room = state.num_blocks * BLOCK_SIZE
        require(room >= work.end, step, f"{where}: its blocks hold {room} tokens")
        for block in self._rows[work.row].blocks_of(work.start, work.end).tolist():
            users = self._memory.num_users(block)
            require(users == 1, step, f"{where} writes block {block}, which {users} rows use")
            require(block not in self.protected_blocks, step, f"{where} writes cached block {block}")
            self._memory.claim(step, MoveKind.BLOCK, block)

    def _append_blocks(self, step: int, row: int, block_ids: list[int]) -> None:
        for block in block_ids:
            self._memory.claim(step, MoveKind.BLOCK, block)
            users = self._memory.num_users(block)
            require(users == 0, step, f"gives row {row} block {block} as new; {users} rows use it")
            require(block not in self.protected_blocks, step, f"gives row {row} cached block {block} as new")
            self._memory.hand_out(block)
        self._rows[row].append_blocks(block_ids)

    def _append_window_blocks(self, step: int, row: int, window: int, block_ids: list[int]) -> None:
        for block in block_ids:
            if block:
                cached = block in self.protected_window_blocks[window] if self.protected_window_blocks else False
                require(not cached, step, f"gives row {row} cached block {block} of window {window} as new")
                self._memory.hand_out_window_block(step, window, block)
        self._rows[row].windows[window] += block_ids

    def _read(self, work: HashWork) -> None:
        """Check that what the row would read are the contents for its own tokens."""
        state = self._rows[work.row]
        where = f"row {work.row} ({state.added.request_id}) at {work.start}"
        if self.layout.has_states and work.read_slot == NO_SLOT:
            require(work.start == 0, None, f"{where} reads the zero state")
        elif self.layout.has_states:
            position, roll = self._memory.state(work.read_slot)
            held = "garbage" if position == GARBAGE else f"the state after {position} tokens"
            require(position == work.start, None, f"{where} reads slot {work.read_slot}, which holds {held}")
            right = roll == int(state.rolls[work.start])
            require(right, None, f"{where} reads slot {work.read_slot}: the state of other tokens")
        if self.layout.has_kv and work.start:
            positions, rolls = self._memory.keys(state.blocks, work.start)
            own = (positions == np.arange(work.start)) & (rolls == state.rolls[1 : work.start + 1])
            if not own.all():
                token = int(np.argmin(own))
                block, position = int(state.blocks[token // BLOCK_SIZE]), int(positions[token])
                held = {GARBAGE: "garbage", token: "the keys of other tokens"}.get(position, f"position {position}")
                raise PlanViolation(f"{where} attends to token {token} in block {block}, which holds {held}")
        for window, table in enumerate(state.windows):
            first, positions, rolls = self._memory.window_keys(window, table, work.start)
            own = (positions == np.arange(first, work.start)) & (rolls == state.rolls[first + 1 : work.start + 1])
            bad = [] if own.all() else [first + int(np.argmin(own)), int(positions[np.argmin(own)])]
            require(not bad, None, f"{where} attends in window {window} to token, which holds {bad}")

    def _write_keys(self, work: HashWork) -> None:
        """Keys and values of all tokens, those of drafts too, whatever becomes of them."""
        if not self.layout.kv:
            return
        state = self._rows[work.row]
        rolls = state.rolls[work.start + 1 : work.known + 1].tolist()
        for draft in work.drafts:
            rolls.append(self._hasher.extend(rolls[-1], draft))
        if self.layout.has_kv:
            self._memory.write_keys(state.blocks, work.start, rolls)
        for window, table in enumerate(state.windows):
            self._memory.write_window_keys(window, table, work.start, rolls)

    def _save(self, work: HashWork) -> None:
        """An optimistic row may not come as far as the state that it was to save: nothing is in the slot."""
        for position, slot in work.saves:
            if work.start < position <= work.latest:
                self._memory.spoil_slot(slot)
            else:
                self._store(work, position, slot)

    def _write_state(self, work: HashWork, end: int) -> None:
        """The state after the confirmed tokens."""
        self._store(work, end, work.write_slot)
        self._rows[work.row].last_start = work.start

    def _store(self, work: HashWork, position: int, slot: int) -> None:
        if slot != NO_SLOT:
            self._memory.store(slot, position, int(self._rows[work.row].rolls[position]))

    def _spoil(self, works: list[HashWork]) -> None:
        """Make garbage of what a failed step would have written, as if it had rejected all of its drafts.

        The row's next step may be in flight already: it then writes as far before its planned start as it can.
        """
        for work in works:
            self._rows[work.row].num_rejected = len(work.drafts)
            if self.layout.has_kv:
                self._memory.spoil_blocks(self._rows[work.row].blocks_of(work.start, work.end))
            for window, table in enumerate(self._rows[work.row].windows):
                written = table[work.start // BLOCK_SIZE : -(-work.end // BLOCK_SIZE)]
                self._memory.spoil_window_blocks(window, written)
            for slot in work.written_slots:
                self._memory.spoil_slot(slot)

    def _sample(self, work: HashWork, allowed: dict[int, list[int]], first: int) -> list[int]:
        """The next token, from the hash that `_read` found in the slot and the blocks as stored; and those after the
        drafts that it, and they, confirm. `allowed` is by position, of which the row's begin at `first`."""
        state, tokens = self._rows[work.row], list[int]()
        for i, draft in enumerate([*work.drafts, None]):
            end = work.known + i
            roll, digest = 0, 0
            if self.layout.has_states:
                roll = int(state.rolls[end])
            if self.layout.has_kv:
                _, rolls = self._memory.keys(state.blocks, end)
                digest = int((rolls * self._hasher.weights[:end]).sum(dtype=np.uint64))
            for window, table in enumerate(state.windows):
                first_key, _, rolls = self._memory.window_keys(window, table, end)
                own_keys = (rolls * self._hasher.weights[first_key:end]).sum(dtype=np.uint64)
                digest = (digest + int(own_keys)) & MASK
            token = self._hasher.next_token(roll, digest, state.seed)
            own = allowed.get(first + i)
            token = own[token % len(own)] if own is not None else token
            state.append_token(token, self._hasher)
            tokens.append(token)
            if token != draft:
                break
        state.has_sampled = True
        state.num_rejected = 1 + len(work.drafts) - len(tokens)
        return tokens
