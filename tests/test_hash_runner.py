"""The hash runner accepts right plans, computes what an uncached run computes, and names faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import AddedRow, IntArray, Move, MoveKind, StepPlan
from tests.cache.shapes import layout_of, state
from tests.hash_runner import HashRunner
from tests.hash_step import InjectedFailure, PlanViolation
from tests.plans import Row, decode, plan_of

VOCAB = 50
KV = KVSpec.of(1, 8, 8, "float32")
STATE = state((3, 16), (2, 8, 8), "float32")
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 150)]


def ints(*values: int) -> IntArray:
    return np.asarray(values, np.int32)


def make_runner(kv: bool = True, states: bool = True) -> HashRunner:
    return HashRunner(layout_of([KV] * kv + [STATE] * states), 200, VOCAB)


def first_block(runner: HashRunner) -> int:
    return runner.layout.blocks_per_page * 2


def first_slot(runner: HashRunner) -> int:
    return runner.layout.slots_per_page * 100 if runner.layout.has_states else -1


def added(row: int, ids: list[int], blocks: IntArray | None = None, num_prompt: int | None = None) -> AddedRow:
    hit = ints() if blocks is None else blocks
    params = SamplingParams(temperature=0.0)
    return AddedRow(row, f"r{row}", ints(*ids), num_prompt or len(ids), params, 0, (), hit)


def prefill_plan(runner: HashRunner) -> StepPlan:
    block, slot = first_block(runner), first_slot(runner)
    blocks = ints(block, block + 1, block + 2) if runner.layout.has_kv else ints()
    saves = ((64, slot + 1), (128, slot + 2)) if runner.layout.has_states else ()
    return plan_of(0, [Row(0, 0, PROMPT, -1, slot, blocks, saves)], added=(added(0, PROMPT),))


@pytest.mark.parametrize(("kv", "states"), [(True, True), (True, False), (False, True)])
def test_outputs_are_those_of_an_uncached_run(kv: bool, states: bool) -> None:
    runner = make_runner(kv, states)
    outputs = runner.submit(prefill_plan(runner)).result().token_ids.tolist()
    for step in range(5):
        slot = first_slot(runner)
        plan = plan_of(step + 1, [decode(0, 150 + step, slot, slot)])
        outputs += runner.submit(plan).result().token_ids.tolist()
    assert outputs == runner.expected(PROMPT, 6)
    assert runner.num_tokens == 155


def test_a_hit_continues_from_a_checkpoint_after_a_move() -> None:
    runner = make_runner()
    runner.submit(prefill_plan(runner))
    block, slot = first_block(runner), first_slot(runner)
    moves = (Move(MoveKind.SLOT, slot + 2, slot + 9), Move(MoveKind.BLOCK, block + 1, block + 40))
    other = [*PROMPT[:128], 1, 2, 3]
    chunk = Row(1, 128, [1, 2, 3], slot + 9, slot + 10, [block + 50])
    plan = plan_of(1, [chunk], moves=moves, added=(added(1, other, ints(block, block + 40)),))
    assert runner.submit(plan).result().token_ids.tolist() == runner.expected(other, 1)
    chunk = replace(chunk, row=2, new_blocks=[block + 60], write_slot=slot + 11)
    with pytest.raises(PlanViolation, match="garbage"):
        runner.submit(plan_of(2, [chunk], added=(added(2, other, ints(block, block + 1)),)))


def second_request(runner: HashRunner, *others: Row, **changes: object) -> StepPlan:
    block, slot = first_block(runner), first_slot(runner)
    ids = [*PROMPT[:128], *PROMPT[:64]]
    chunk = Row(1, 128, ids[128:], slot + 2, slot + 10, [block + 50])
    chunk = replace(chunk, **changes)  # type: ignore[arg-type]
    chunk = replace(chunk, tokens=ids[chunk.start :])
    return plan_of(1, [chunk, *others], added=(added(1, ids, ints(block, block + 1)),))


def test_wrong_plans_are_named() -> None:
    def outcome(message: str, **changes: object) -> None:
        runner = make_runner()
        runner.submit(prefill_plan(runner))
        with pytest.raises(PlanViolation, match=message):
            runner.submit(second_request(runner, **changes))

    runner = make_runner()
    block, slot = first_block(runner), first_slot(runner)
    outcome("the state after 64 tokens", read_slot=slot + 1)
    outcome("holds garbage", read_slot=slot + 5)
    outcome("zero state", read_slot=-1)
    outcome("rows use it", new_blocks=ints(block + 2))
    outcome("its blocks hold", new_blocks=ints())
    outcome("is not in pages", write_slot=0)
    outcome("which row 1 writes", saves=[(192, slot + 2)])
    outcome("off the grid", saves=[(130, slot + 20)])
    outcome("writes block", start=64, read_slot=slot + 1)


def test_two_writers_of_one_slot_and_what_is_protected() -> None:
    runner = make_runner()
    runner.submit(prefill_plan(runner))
    slot = first_slot(runner)
    plan = second_request(runner, decode(0, 150, slot, slot + 10))
    with pytest.raises(PlanViolation, match="twice"):
        runner.submit(plan)
    runner = make_runner()
    runner.submit(prefill_plan(runner))
    runner.protected_slots = {slot + 10}
    with pytest.raises(PlanViolation, match="checkpoint"):
        runner.submit(second_request(runner))
    runner = make_runner()
    runner.submit(prefill_plan(runner))
    runner.protected_blocks = {first_block(runner) + 2}  # in whose middle the row goes on
    with pytest.raises(PlanViolation, match="cached block"):
        runner.submit(plan_of(1, [decode(0, 150, slot, slot)]))


def test_a_failed_step_fails_what_was_submitted_before_it_was_seen() -> None:
    runner = make_runner()
    runner.fail_steps = {0}
    first = runner.submit(prefill_plan(runner))
    second = runner.submit(plan_of(1, [decode(0, 150, first_slot(runner), first_slot(runner))]))
    for pending in (first, second):
        with pytest.raises(InjectedFailure):
            pending.result()
    again = replace(prefill_plan(runner), step=2, removed=(0,))
    assert runner.submit(again).result().token_ids.tolist() == runner.expected(PROMPT, 1)


def test_a_resumed_row_replays_its_output() -> None:
    runner = make_runner()
    outputs = runner.expected(PROMPT, 3)
    block, slot = first_block(runner), first_slot(runner)
    chunk = Row(0, 0, PROMPT, -1, slot, [block, block + 1, block + 2], samples=False)
    row = added(0, [*PROMPT, *outputs[:2]], num_prompt=150)
    assert len(runner.submit(plan_of(0, [chunk], added=(row,))).result().token_ids) == 0
    runner.submit(plan_of(1, [replace(decode(0, 150, slot, slot, outputs[0]), samples=False)]))
    last = runner.submit(plan_of(2, [decode(0, 151, slot, slot, outputs[1])]))
    assert last.result().token_ids.tolist() == outputs[2:]
