"""Rows that confirm several tokens in a step: outputs, checkpoints while decoding, and what is given back."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.cache.lease import Lease
from forkpoint.cache.tree import Origin
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.drafter import Drafter
from forkpoint.sched.plan import TO_DRAFT, StepPlan
from forkpoint.sched.request import Request
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens


class Drafting(Harness, Drafter):
    """Always four drafts: the first `right` of them are right, the others wrong. Keeps its plans."""

    right = 4

    def __post_init__(self) -> None:
        self.most_drafts = 1
        self.plans: list[StepPlan] = []
        super().__post_init__()
        self.sched._drafting._drafter = self

    def draft(self, request: Request, lease: Lease, most: int) -> np.ndarray:
        known = self.runner.expected(request.prompt_token_ids.tolist(), request.max_tokens)
        first = len(request.output_token_ids)
        ids = np.asarray(known[first : first + min(most, 4)], np.int32)
        ids[self.right :] = (ids[self.right :] + 1) % self.runner.vocab_size
        return ids

    def _note(self, plan: StepPlan) -> None:
        super()._note(plan)
        self.plans.append(plan)

    def ask_drafting(self, name: str, prompt: np.ndarray, max_tokens: int) -> Request:
        """Add one request, run to the end, check its outputs."""
        request = self.add(name, prompt, max_tokens)
        self.run()
        self.check_output(name)
        return request


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("right", [0, 2, 4])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_confirm_what_is_right(layout: str, right: int, async_scheduling: bool) -> None:
    harness = Drafting(layout=LAYOUTS[layout], async_scheduling=async_scheduling)
    harness.right = right
    harness.add("a", tokens(1, 100), 100)
    harness.run()
    harness.check_output("a")
    expected = -(-99 // (right + 1))  # after the token that the prefill samples
    assert expected <= harness.runner.num_steps - 1 <= expected + 1
    assert harness.runner.num_confirmed_drafts == 99 - (harness.runner.num_steps - 1)


class GoingAhead(Drafting):
    """The runner makes three drafts for every step, whatever is known."""

    def draft(self, request: Request, lease: Lease, most: int) -> np.ndarray:
        return np.full(min(most, 3), TO_DRAFT, np.int32)

    def plans_early(self, request: Request, lease: Lease) -> bool:
        return True


class Noted(GoingAhead):
    """Notes for each optimistic row whether one block holds all that it may compute, however many drafts in flight are
    accepted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_a_block: list[bool] = []

    def _note(self, plan: StepPlan) -> None:
        super()._note(plan)
        rows = plan.rows
        for i in np.flatnonzero(rows.optimistic).tolist():
            least = self.requests[self.rows[int(rows.row[i])]].num_tokens
            self.in_a_block.append(least // BLOCK_SIZE == int(rows.start[i] + rows.num_tokens[i] - 1) // BLOCK_SIZE)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_are_planned_before_it_is_known_where_they_start(layout: str, deterministic: bool) -> None:
    """All but the last of each row are, and states are kept as ever; in deterministic mode a row waits at the end of a
    block: how its keys are split follows from their number."""
    harness = Noted(layout=LAYOUTS[layout], async_scheduling=True, deterministic=deterministic)
    for i in range(9):
        harness.add(str(i), tokens(i, 50 + 11 * i), 100 + i)
    harness.run()
    assert all(harness.in_a_block) == deterministic
    for name in harness.requests:
        harness.check_output(name)
    num_of_rows = 9 * 104 - harness.runner.num_confirmed_drafts
    assert harness.runner.num_optimistic > (0.5 if deterministic else 0.9) * num_of_rows
    assert harness.runner.num_steps < (1.5 if deterministic else 1.2) * num_of_rows / 9
    histories = [request.all_token_ids() for request in harness.requests.values()]
    kept = [state.origin for history in histories for state in harness.checkpoints(history).values()]
    assert kept.count(Origin.DECODE) >= 9 or deterministic or not harness.layout.has_states  # whose are private


@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_boundary_that_is_jumped_over_becomes_a_checkpoint(layout: str) -> None:
    """Rows go on by five tokens: few of their steps begin on a multiple of 64."""
    harness = Drafting(layout=LAYOUTS[layout])
    prompt = tokens(1, 90)
    first = harness.ask_drafting("a", prompt, 120)
    history = first.all_token_ids()
    found = harness.checkpoints(history)
    decoded = [position for position, state in found.items() if state.origin is Origin.DECODE]
    assert max(decoded) == 192 and all(position % 64 == 0 for position in decoded)
    again = harness.ask_drafting("b", np.concatenate([history, tokens(2, 30)]), 20)
    assert again.cache.num_cached_tokens == 192


@pytest.mark.parametrize("chance", [0.3, 1.0])
def test_boundaries_passed_ahead_of_results_become_checkpoints(chance: float) -> None:
    """Wherever a request stops, with a step in flight that is in vain then, the next turn resumes where it does after
    plain decoding."""
    whole = Harness().runner.expected(tokens(1, 100).tolist(), 180)
    harnesses = [GoingAhead(async_scheduling=True, check=False), Harness(check=False)]
    for num_outputs in [*range(86, 100), *range(152, 160)]:  # to 192 tokens and beyond, and 256
        if whole[num_outputs - 1] in whole[: num_outputs - 1]:
            continue
        found = []
        for harness in harnesses:
            harness.sched.reset_prefix_cache()
            harness.runner.draft_chance = chance
            name, slots = f"{num_outputs}", harness.sched.stats().num_slots_held
            stop = frozenset({whole[num_outputs - 1]})
            request = harness.add(name, tokens(1, 100), 180, stop_token_ids=stop)
            harness.run()
            assert request.output_token_ids == whole[:num_outputs]
            assert harness.sched.stats().num_slots_held == slots
            history = request.all_token_ids()
            found.append(max(harness.checkpoints(history)))
            again = harness.add(f"{name}, next turn", np.concatenate([history, tokens(2, 30)]), 5)
            harness.run()
            harness.check_output(again.id)
            assert again.cache.num_cached_tokens == found[-1]
        assert found[0] >= found[1], f"{num_outputs} outputs"


@pytest.mark.parametrize("layout", HYBRIDS)
def test_where_no_slot_is_spare_a_row_waits(layout: str) -> None:
    """The slot of the request's last checkpoint is given up for the next one only once that is certain."""
    for num_slots in (2, 3):
        chosen, found = LAYOUTS[layout], []
        for kind in (GoingAhead, Harness):
            pages = chosen.num_pages_for(320, 0) + -(-num_slots // chosen.slots_per_page) + 1
            harness = kind(layout=chosen, num_pages=pages, async_scheduling=kind is GoingAhead)
            harness.runner.draft_chance = 1.0
            request = harness.add("a", tokens(1, 100), 200)
            harness.run()
            harness.check_output("a")
            found.append(max(harness.checkpoints(request.all_token_ids())))
        assert found[0] == found[1] == 256


def test_a_cut_by_a_stop_token_leaves_nothing_beyond_it() -> None:
    """The row stops at a token in the middle of those that a step confirms."""
    free = Drafting()
    whole = free.ask_drafting("a", tokens(1, 100), 60).output_token_ids
    for cut in range(30, 36):
        harness = Drafting()
        request = harness.add("a", tokens(1, 100), 60, stop_token_ids=frozenset({whole[cut]}))
        harness.run()
        assert request.output_token_ids == whole[: cut + 1]
        harness.ask_drafting("b", request.all_token_ids(), 40)


def chunks_of_a_long_prompt(harness: Harness) -> list[int]:
    """Return the prompt tokens of each step while a prompt of 20 blocks joins twelve rows that decode."""
    for i in range(12):
        harness.add(str(i), tokens(i, 20 + 31 * i), 150)
    while not all(request.output_token_ids for request in harness.requests.values()):
        harness.step()
    long = harness.add("long", tokens(77, 20 * 64), 2)
    before = harness.computed.get("long", 0)
    chunks = []
    while not long.output_token_ids:
        harness.step()
        chunks.append(harness.computed.get("long", 0) - before)
        before += chunks[-1]
    return chunks


@pytest.mark.parametrize("budget", [12 + 64, 12 + 64 + 7, 256])
def test_drafts_displace_no_prompt_tokens(budget: int) -> None:
    """Each step computes as many prompt tokens as without drafts. Drafts come back once the prompts leave room."""
    harness = Drafting(budget=budget, max_num_seqs=13, check=False)
    plain = Harness(budget=budget, max_num_seqs=13, check=False)
    chunks = chunks_of_a_long_prompt(harness)
    assert chunks == chunks_of_a_long_prompt(plain)
    plans = harness.plans[-len(chunks) :]
    assert all(plan.num_tokens <= budget for plan in plans)
    assert not any(plan.rows.num_drafts.any() for plan in plans[:-1])
    harness.step()
    assert harness.plans[-1].rows.num_drafts.sum() == max(0, min(budget - 13 - 64, 12 * 4))
    harness.run()
    for name in harness.requests:
        harness.check_output(name)
