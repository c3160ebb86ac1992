"""What a failed step or a broken request computed is found by nobody."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.errors import NonFiniteLogitsError
from forkpoint.params import FinishReason
from tests.hash_step import InjectedFailure
from tests.sched.harness import LAYOUTS, WITH_WINDOWS, Harness, tokens
from tests.sched.test_handover import ASKS, LEASE, offered, streaming


def reusable(harness: Harness, prompt: np.ndarray) -> int:
    lease = harness.sched.cache.new_lease("probe", "", prompt)
    return harness.sched.cache.lookup(lease, len(prompt)).num_tokens


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_non_finite_logits_spoil_what_the_request_filed(name: str) -> None:
    harness = Harness(layout=LAYOUTS[name])
    trunk = tokens(1, 1000)
    harness.ask("sound", trunk[:300])
    before = reusable(harness, trunk)
    harness.runner.non_finite_requests.add("broken")
    harness.add("broken", trunk, 5)
    harness.add("other", tokens(2, 500), 5)
    harness.run()
    (update,) = [u for u in harness.updates["broken"] if u.finish_reason]
    assert update.finish_reason is FinishReason.ERROR and isinstance(update.error, NonFiniteLogitsError)
    harness.check_output("other")
    assert reusable(harness, trunk) == before <= 256


@pytest.mark.parametrize("name", WITH_WINDOWS)
@pytest.mark.parametrize("is_early", [False, True])
def test_non_finite_logits_spoil_what_the_request_fetched(is_early: bool, name: str) -> None:
    """The other engine completes an offer before it has sampled a token."""
    first, second, params = streaming(name)
    prompt = tokens(1, 641)
    second.ask("sound", prompt[:300])
    if not is_early:
        params = offered(first, "p", prompt)
    second.runner.non_finite_requests.add("broken")
    second.add("broken", prompt, 3, kv_transfer_params=params)
    if is_early:
        second.step()
        first.add("p", prompt, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
        while first.step():
            second.step()
    second.run()
    assert isinstance(second.updates["broken"][-1].error, NonFiniteLogitsError)
    assert second.sched.stats().cache.peer_fetched_bytes
    assert reusable(second, prompt) == 256


def test_a_checkpoint_on_somebody_elses_block_goes_too() -> None:
    """The broken request saves a state at a block that a sound one had filed."""
    harness = Harness()
    trunk = tokens(1, 3000)
    harness.ask("sound", np.concatenate([trunk, tokens(2, 500)]))
    before = reusable(harness, trunk)
    harness.runner.non_finite_requests.add("broken")
    harness.add("broken", np.concatenate([trunk, tokens(3, 500)]))
    harness.run()
    assert harness.sched.stats().cache.checkpoints_saved["junction"] == 1
    assert reusable(harness, trunk) == before == 2560


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failing", range(3, 75, 9))
def test_a_failed_step_is_undone(async_scheduling: bool, failing: int) -> None:
    """Fail each step in turn, boundary crossings of decode among them; the same prompts then run soundly."""
    harness = Harness(async_scheduling=async_scheduling, budget=256)
    prompts = {f"r{i}": np.concatenate([tokens(1, 600), tokens(10 + i, 90)]) for i in range(3)}
    harness.runner.fail_steps.add(failing)
    for name, prompt in prompts.items():
        harness.add(name, prompt, 70)
    harness.run()
    failed = [n for n in prompts if any(u.finish_reason is FinishReason.ERROR for u in harness.updates[n])]
    for name in prompts:
        if name not in failed:
            harness.check_output(name)
    for name, prompt in prompts.items():
        longer = np.concatenate([prompt, np.asarray(harness.output(name), np.int32), tokens(5, 70)])
        harness.ask(f"{name} again", prompt, 3)
        harness.ask(f"{name} longer", longer, 3)


@pytest.mark.parametrize(("async_scheduling", "pages"), [(False, "ample"), (True, "tight")])
@pytest.mark.parametrize("beyond", [0, 1, 100, 299, 300, 301, 330, 384, 398])
def test_what_one_request_does_to_a_step_ends_it_alone(async_scheduling: bool, pages: str, beyond: int) -> None:
    """Whatever of its tokens the steps choke on: it has given what came before, and the others all they have."""
    layout = LAYOUTS["several blocks a page"]
    num_pages = 4000 if pages == "ample" else layout.num_pages_for(900, 4) + 1
    harness = Harness(layout=layout, num_pages=num_pages, budget=256, max_num_seqs=4, async_scheduling=async_scheduling)
    harness.runner.poison["poisonous"] = beyond
    for i in range(6):
        name = "poisonous" if i == 2 else f"r{i}"
        harness.add(name, np.concatenate([tokens(1, 200), tokens(10 + i, 100)]), 100)
    harness.run()
    ends = {name: [u for u in updates if u.finish_reason] for name, updates in harness.updates.items()}
    (end,) = ends.pop("poisonous")
    assert end.finish_reason is FinishReason.ERROR and isinstance(end.error, InjectedFailure)
    assert harness.output("poisonous") == harness.expected("poisonous")[: max(0, beyond - 299)]
    for name in ends:
        harness.check_output(name)
    assert harness.sched.stats().num_preemptions


def test_steps_that_fail_whatever_they_carry_end_every_request() -> None:
    harness = Harness()
    for i in range(4):
        harness.add(f"r{i}", tokens(i, 100), 5)
    harness.runner.fail_steps = set(range(100))
    harness.run()
    assert all(updates[-1].finish_reason is FinishReason.ERROR for updates in harness.updates.values())
    assert harness.sched.stats().num_steps == 5


def test_copies_of_a_step_in_flight_reach_the_runner_before_its_failure_is_known() -> None:
    """A plan that finds no room for a request may evict a state that the step in flight computes, and computes nothing.

    After the failure the runner would take the copies of that plan for sound.
    """
    layout = LAYOUTS["no keys and values"]
    harness = Harness(
        layout=layout,
        num_pages=layout.num_pages_for(322, 6) + 2,
        num_host_pages=layout.num_pages_for(2000, 6) + 1,
        host_streams=True,
        max_num_seqs=6,
        async_scheduling=True,
        most_drafts=1,
    )
    trunk, own = tokens(99, 900), tokens(0, 500)
    prompts = [np.concatenate([trunk[:shared], own[:count]]) for shared, count in ((0, 448), (868, 99), (185, 256))]
    prompts.append(np.concatenate([trunk[:400], own[:208]]))
    prompts.append(np.concatenate([prompts[2], tokens(4, 256)]))
    prompts.append(own[:383])
    prompts.append(np.concatenate([prompts[3], tokens(4, 389)]))
    prompts.append(np.concatenate([prompts[2], tokens(2, 61)]))
    outputs, priorities = (1, 121, 1, 1, 1, 1, 5, 73), (2, 1, 0, 2, 0, 1, 0, 0)
    for i, prompt in enumerate(prompts):
        harness.add(f"r{i}", prompt, outputs[i], priority=priorities[i])
    harness.runner.poison["r1"] = 161
    harness.run()
    for i in (0, *range(2, len(prompts))):
        harness.check_output(f"r{i}")
