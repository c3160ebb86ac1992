"""Rules that each row of a plan has to follow, whatever is in the memory that it names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.plan import NO_SLOT
from tests.hash_rows import HashRow, HashWork
from tests.hash_step import require


def check_tokens(step: int, work: HashWork, state: HashRow) -> None:
    where = f"tokens [{work.start}, {work.known}) of row {work.row}"
    known = 0 <= work.start < work.known <= len(state.ids)
    require(known, step, f"{where}: {len(state.ids)} tokens are known")
    own = state.ids[work.start : work.known]
    given = work.tokens[: len(own)]
    require(given == own, step, f"{where} are {own} and the plan has {given}")


def check_decode(step: int, work: HashWork, state: HashRow, vocab_size: int) -> None:
    """Check a row of the decode kernels: an output, known or just sampled, and drafts."""
    where = f"decodes row {work.row} at {work.start}"
    require(work.start >= state.added.num_prompt_tokens, step, f"{where}, inside its prompt")
    require(work.known == work.start + 1, step, f"{where} and has {work.known - work.start} tokens")
    drafts = work.tokens[1:]
    in_range = all(0 <= token < vocab_size for token in drafts)
    require(in_range and (work.samples or not drafts), step, f"{where} with drafts {drafts}")
    for position, _ in work.saves:
        last = -1 if state.last_start is None else state.last_start
        recent = last >= 0 and last < position <= work.latest and position % BLOCK_SIZE == 0
        require(recent, step, f"{where}: save at {position}; its last step began at {last}")


def check_prefill(step: int, work: HashWork, state: HashRow) -> None:
    """Check a row of the prefill kernels: no drafts, and ends and saves on the grid of blocks."""
    where = f"tokens [{work.start}, {work.end}) of row {work.row}"
    require(work.known == work.end, step, f"{where}: drafts go through the decode kernels")
    ends = work.end % BLOCK_SIZE == 0 or work.end in (state.added.num_prompt_tokens, len(state.ids))
    require(ends, step, f"{where} end neither on the grid nor with its prompt")
    positions = [num_tokens for num_tokens, _ in work.saves]
    require(positions == sorted(set(positions)), step, f"{where}: saves {positions} do not ascend")
    for position in positions:
        inside = work.start < position <= work.end and position % BLOCK_SIZE == 0
        require(inside, step, f"{where}: save at {position} is outside of it or off the grid")
        from_start = (position - work.start) % BLOCK_SIZE == 0 or position == work.end
        require(from_start, step, f"{where}: save at {position} is between the kernel's chunks")


def check_slots(step: int, works: Sequence[HashWork], protected: Collection[int]) -> None:
    """Check that no slot is written twice, and that no other row and no save writes a slot that a row reads."""
    writer: dict[int, int] = {}
    for work in works:
        for slot in work.written_slots:
            require(slot not in writer, step, f"writes slot {slot} twice (rows {writer.get(slot)}, {work.row})")
            require(slot not in protected, step, f"row {work.row} writes checkpoint {slot}")
            writer[slot] = work.row
    for work in works:
        reader = writer.get(work.read_slot, work.row)
        saved = any(slot == work.read_slot for _, slot in work.saves)
        alone = work.read_slot == NO_SLOT or (reader == work.row and not saved)
        require(alone, step, f"row {work.row} reads slot {work.read_slot}, which row {reader} writes")
