"""A long prefill in flight delays running requests by no more than one budget-sized step."""

from __future__ import annotations

import pytest

from forkpoint.sched.plan import StepPlan
from tests.sched.harness import LAYOUTS, Harness, tokens

BUDGET = 2048
LONG = 40_000


class Planned(Harness):
    """Keeps the plans in which the long prompt is computed, with the requests that were decoding just before."""

    def _note(self, plan: StepPlan) -> None:
        super()._note(plan)
        self.plans.append(plan)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plans: list[StepPlan] = []


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_step_of_a_long_prefill_carries_every_decode_row(name: str, async_scheduling: bool) -> None:
    layout = LAYOUTS[name]
    pages = layout.num_pages_for(LONG + 5000, 400) + 8
    harness = Planned(layout=layout, num_pages=pages, budget=BUDGET, async_scheduling=async_scheduling, check=False)
    names = [f"r{index}" for index in range(12)]
    for index, request in enumerate(names):
        harness.add(request, tokens(index, 20 + 31 * index), 200)
    while not all(len(harness.requests[request].output_token_ids) > 3 for request in names):
        harness.step()
    harness.add("long", tokens(77, LONG), 2)
    harness.plans.clear()
    while not harness.requests["long"].output_token_ids:
        harness.step()
    during = [plan for plan in harness.plans if plan.num_decodes < len(plan.rows)]
    assert len(during) == -(-LONG // ((BUDGET - 12) // 64 * 64))
    rows = {row for row, request in harness.rows.items() if request in names}
    for plan in during:
        assert set(plan.rows.row[: plan.num_decodes].tolist()) == rows, "a step of the prefill left a decode row out"
        assert plan.num_tokens <= BUDGET
    harness.run()
    for request in [*names, "long"]:
        harness.check_output(request)
