"""Prompts from another engine under the scheduler: answers are those of an uncached run, whatever arrives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forkpoint.cache.peer_offers import FetchReport, PeerFacts
from forkpoint.sched.plan import MoveKind, SubmittedStep
from tests.sched.harness import LAYOUTS, WITH_WINDOWS, Harness, tokens

ASKS = {"do_remote_decode": True}
NAMESPACE = b"n" * 16


def facts(name: str, max_bytes: int = 1 << 40, timeout_s: float = 3600.0) -> PeerFacts:
    """What an engine knows of others. It may fetch and be fetched from."""
    return PeerFacts(NAMESPACE, name, "127.0.0.1", 1, ("loopback",), max_bytes, timeout_s)


def pair(layout: str, num_pages: int = 400, **options: Any) -> tuple[Harness, Harness]:
    """A prefill and a decode engine."""
    first = Harness(WITH_WINDOWS[layout], num_pages=num_pages, peers=facts("p"))
    second = Harness(WITH_WINDOWS[layout], num_pages=num_pages, **{"peers": facts("d"), **options})
    second.runner.peers.offered, second.runner.peers.complete = first.runner.peers.offered, first.runner.peers.complete
    return first, second


def offered(harness: Harness, name: str, prompt: np.ndarray, **options: object) -> dict[str, Any]:
    request = harness.ask(name, prompt, 1, kv_transfer_params=ASKS, **options)
    return dict(request.kv_transfer_params or {})


@pytest.mark.parametrize("layout", WITH_WINDOWS)
def test_only_the_end_is_computed(layout: str) -> None:
    first, second = pair(layout)
    for length in (63, 64, 65, 641):
        params = offered(first, f"{length}", tokens(length, length))
        found = second.ask(f"{length}", tokens(length, length), 3, kv_transfer_params=params).cache
        assert found.num_peer_tokens == found.num_restored_tokens == (length - 1) // 64 * 64
    assert not second.runner.peers.buffers, "nothing is left behind"


LEASE = 2**40  # that a proxy chose


def streaming(layout: str, **options: Any) -> tuple[Harness, Harness, dict[str, Any]]:
    """A prefill engine that computes 128 tokens a step, a decode engine, and what asks for LEASE early."""
    first, second = pair(layout, **options)
    peers = first.runner.peers
    first = Harness(WITH_WINDOWS[layout], num_pages=400, peers=facts("p"), budget=128)
    first.runner.peers = peers
    params = offered(first, "earlier", tokens(7, 200))
    params["forkpoint"] = {**params["forkpoint"], "lease": LEASE, "early": True}
    return first, second, params


@pytest.mark.parametrize("layout", WITH_WINDOWS)
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_is_offered_while_it_is_computed(layout: str, repeats: bool, streams: bool) -> None:
    first, second, params = streaming(layout, host_streams=streams, disk_delay=1)
    prompt = tokens(1, 641)
    if repeats:  # with a state that another request needed
        first.ask("before", prompt[:400], 1)
        first.ask("branch", np.concatenate([prompt, tokens(2, 100)]), 3)
    decode = second.add("d", prompt, 3, kv_transfer_params=params)
    for _ in range(3):
        second.step()
    first.add("p", prompt, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    sizes, landed = list[int](), list[int]()
    while first.step():
        sizes.append(len(first.runner.peers.offered.get(LEASE, ())))
        second.step()
        landed.append(second.runner.peers.num_landed_early)
    if first.layout.has_kv and not repeats:
        assert len(set(sizes)) >= 4, "blocks are offered chunk by chunk"
        assert len(set(landed)) >= 3 and landed[-1] >= 4, "they are in the arena before the last one is computed"
    second.run()
    second.check_output("d")
    assert decode.cache is not None and decode.cache.num_peer_tokens == 640


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
@pytest.mark.parametrize(("lease", "offers"), [(LEASE, True), (LEASE, False), (None, True)])
def test_little_is_left_to_fetch_after_the_last_chunk(lease: int | None, offers: bool, host: str) -> None:
    """The chunks of a prompt that is fetched early get shorter, less so for an engine of the same machine.

    One ends with the last block that can be fetched. Other prompts have as few chunks as possible.
    """
    known = replace(facts("p"), port=int(offers), host=host)
    first = Harness(LAYOUTS["no states"], num_pages=400, peers=known, budget=4096)
    asks = {**ASKS, **({"forkpoint": {"lease": lease}} if lease else {})}
    chunks = list[int]()
    for length in (1024, 7000, 9000):
        first.add(str(length), tokens(length, length), 1, kv_transfer_params=asks)
        chunks.append(0)
        while (plan := first.sched.schedule()) is not None:
            chunks += [plan.num_tokens] if plan.num_tokens else []
            first.sched.apply(first.runner.submit(plan).result())
    assert bool(first.runner.peers.offered) is offers
    if lease is None or not offers:
        assert chunks == [0, 1024, 0, 4096, 2904, 0, 4096, 4096, 808]
    elif host == "127.0.0.1":
        assert chunks == [0, 960, 64, 0, 4096, 2176, 704, 24, 0, 4096, 3648, 1216, 40]
    else:
        assert chunks == [0, 960, 64, 0, 4096, 2176, 704, 24, 0, 4096, 3648, 896, 320, 40]


@pytest.mark.parametrize("layout", ["several blocks a page", "no states"])
@pytest.mark.parametrize("how", ["leaves", "another prompt", "no offer", "fails", "is refused"])
def test_an_early_fetch_ends_with_what_it_waits_for(how: str, layout: str) -> None:
    """The other engine may have found that what it has sent so far is wrong, so nothing of it is reused."""
    first, second, params = streaming(layout)
    prompt = tokens(1, 641)
    decode = second.add("d", prompt, 3, kv_transfer_params=params)
    second.step()
    asked = {"another prompt": tokens(2, 641), "no offer": tokens(3, 30)}.get(how, prompt)
    if how == "is refused":
        first.sched.cache.tiers.peers.end_lease(LEASE)  # type: ignore[union-attr]
    else:
        first.add("p", asked, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    for _ in range(3):
        first.step()
        second.step()
    for _ in range(20):  # what has arrived is copied by now
        second.step()
    assert (second.runner.peers.num_landed_early >= 2) is (how in ("leaves", "fails"))
    if how == "leaves":
        first.sched.abort("p")
    elif how == "fails":
        first.sched.reset_prefix_cache()
    first.run()
    second.run()
    second.check_output("d")
    assert decode.cache is not None and decode.cache.num_peer_tokens == decode.cache.num_cached_tokens == 0
    assert not first.sched.cache.tiers.peers._open  # type: ignore[union-attr]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_state_is_not_reused_before_it_is_known_to_be_right(fails: bool, streams: bool) -> None:
    """It is offered while the step that computes it runs, and confirmed before the prompt's last tokens are."""
    first, second, params = streaming("several blocks a page", host_streams=streams, disk_delay=1)
    prompt, peers = tokens(1, 641), first.runner.peers
    decode = second.add("d", prompt, 3, kv_transfer_params=params)
    first.add("p", prompt, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    for _ in range(4):
        first.step()
    submitted = [first.runner.submit(plan) for _ in range(2) if (plan := first.sched.schedule()) is not None]
    assert any(kind is MoveKind.SLOT for kind, _ in peers.offered[LEASE]) and LEASE not in peers.complete
    for _ in range(30):
        second.step()
    lease = second.sched._requests["d"].lease
    assert second.runner.peers.num_landed_early == 10 + streams, "it may wait in a buffer of the device"
    assert second.sched.cache.lookup(lease, len(prompt)).num_tokens == 0, "the state is not in the arena"
    if fails:
        first.sched.reset_prefix_cache()
    else:
        first.sched.apply(submitted.pop(0).result())
        plan = first.sched.schedule()
        assert plan is not None and not plan.num_tokens
        submitted.append(first.runner.submit(plan))
        second.run()
        assert not first.updates["p"], "the other engine still computes the last token"
    for each in submitted:
        first.sched.apply(each.result())
    first.run()
    second.run()
    second.check_output("d")
    assert decode.cache is not None and decode.cache.num_peer_tokens == (0 if fails else 640)


@pytest.mark.parametrize("layout", WITH_WINDOWS)
@pytest.mark.parametrize("leaves", [False, True])
def test_an_offer_is_not_complete_while_another_request_computes_its_prompt(leaves: bool, layout: str) -> None:
    """The request jumps to what a step in flight computes, and that step may fail.

    A complete offer is neither copied again nor withdrawn.
    """
    first, _, _ = streaming(layout)
    prompt, peers = tokens(1, 641), first.runner.peers
    first.add("p", prompt, 1, priority=1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    first.step()
    first.add("other", prompt, 1)
    while first.sched._requests["other"].lease.num_planned < 512:
        first.step()
    plans = [plan for _ in range(2) if (plan := first.sched.schedule()) is not None]
    assert [plan.num_tokens for plan in plans] == [128, 2], "both requests compute the last token"
    submitted = [first.runner.submit(plan) for plan in plans]
    assert LEASE not in peers.complete
    first.sched.apply(submitted[0].result())
    plan = first.sched.schedule()
    assert plan is not None and not plan.num_tokens
    submitted.append(first.runner.submit(plan))
    assert LEASE in peers.complete
    if leaves:
        first.sched.abort("p")
    first.sched.apply(submitted[1].result())
    assert "p" not in first.sched._requests and not first.sched.cache.tiers.has_unsent
    first.sched.cache.tiers.peers.end_lease(LEASE + 1)  # type: ignore[union-attr]
    assert first.sched.has_copies_alone, "no answer waits for what is in flight"
    first.sched.apply(submitted[2].result())


@pytest.mark.parametrize("layout", WITH_WINDOWS)
def test_a_step_in_flight_is_not_offered_by_a_request_that_ends(layout: str) -> None:
    """The cache was reset, and another request computes the same prompt again. That may fail."""
    first, _ = pair(layout)
    prompt, submitted = tokens(1, 641), list[SubmittedStep]()
    request = first.add("p", prompt, 2, kv_transfer_params=ASKS)
    first.step()
    first.sched.reset_prefix_cache()
    for _ in range(2):
        plan = first.sched.schedule()
        assert plan is not None
        submitted.append(first.runner.submit(plan))
        if len(submitted) == 1:
            first.add("other", prompt, 1)
    first.sched.apply(submitted[0].result())
    assert "p" not in first.sched._requests
    assert request.kv_transfer_params is None and not first.sched.cache.tiers.has_unsent


@pytest.mark.parametrize("layout", ["several blocks a page", "no states"])
@pytest.mark.parametrize("needs", ["a restore", "memory"])
def test_a_prompt_that_has_not_arrived_gives_way(layout: str, needs: str) -> None:
    """Its blocks are in the arena and its request waits first in the queue, but others do not wait for it."""
    first, second, params = streaming(layout)
    chosen, prompt, other = LAYOUTS[layout], tokens(1, 641), tokens(2, 1200)
    options: dict[str, Any] = {"num_pages": chosen.num_pages_for(1300, 3), "num_host_pages": 400}
    peers, second = second.runner.peers, Harness(chosen, peers=facts("d"), **options)
    second.runner.peers = peers
    if needs == "a restore":
        second.ask("before", other, 1)
        second.ask("evicts it", tokens(3, 1200), 1)
    decode = second.add("d", prompt, 3, kv_transfer_params=params)
    first.add("p", prompt, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    for _ in range(4):
        first.step()
    for _ in range(20):
        second.step()
    assert peers.num_landed_early >= 2
    found = second.add("other", other, 2)
    for _ in range(60):
        second.step()
    second.check_output("other")
    assert not second.updates["d"]
    assert (found.cache.num_restored_tokens > 0) is (needs == "a restore")
    first.run()
    second.run()
    second.check_output("d")
    assert decode.cache.num_peer_tokens == 640, "what had to leave the arena is still in the buffers"


@pytest.mark.parametrize("layout", ["several blocks a page", "no states"])
@pytest.mark.parametrize("how", ["early", "early and shorter", "computed", "another engine of the same name"])
def test_prompts_of_one_lease_are_not_mixed_up(layout: str, how: str) -> None:
    """A proxy uses a lease twice, or an engine that was started again with its name counts leases from 1 again."""
    first, second, early = streaming(layout)
    second.runner.peers.most_delay, second.runner.peers.random = 9, random.Random(5)
    prompt, other = tokens(1, 641), tokens(2, 300 if "shorter" in how else 641)
    params = others = early
    if "early" in how:
        first.add("p", prompt, 1, kv_transfer_params={**ASKS, "forkpoint": {"lease": LEASE}})
    else:
        params, third = offered(first, "p", prompt), Harness(WITH_WINDOWS[layout], num_pages=400, peers=facts("p"))
        others = offered(third, "o", other)
        others["forkpoint"] = {**others["forkpoint"], "lease": params["forkpoint"]["lease"]}
        others["remote_port"] += "another" in how
    second.add("busy", tokens(3, 20), 20)
    second.step()
    second.add("d", prompt, 3, kv_transfer_params=params)
    found = second.add("o", other, 3, kv_transfer_params=others, priority=-1)
    for _ in range(3):
        first.step()
        second.step()
    first.run()
    second.run()
    for name in ("busy", "d", "o"):
        second.check_output(name)
    assert found.cache.num_peer_tokens == 0
    again = second.ask("again", other, 3)
    second.check_output("again")
    assert again.cache.num_cached_tokens == (len(other) - 1) // 64 * 64


def test_a_prefix_that_was_not_fetched_is_not_found() -> None:
    """The arena had the first blocks of a prompt when its fetch began, and another request needs only these."""
    layout, prompt = LAYOUTS["no states"], tokens(1, 641)
    first, _ = pair("no states")
    params = offered(first, "p", prompt)
    peers, second = first.runner.peers, Harness(layout, layout.num_pages_for(900, 1), max_num_seqs=1, peers=facts("d"))
    second.runner.peers.offered, second.runner.peers.complete = peers.offered, peers.complete
    second.ask("before", prompt[:200], 1)
    second.add("evicts it", tokens(2, 600), 280)
    second.step()
    second.add("d", prompt, 2, kv_transfer_params=params)
    short = second.add("short", prompt[:150], 2, priority=-1)
    second.run()
    for name in ("evicts it", "d", "short"):
        second.check_output(name)
    assert short.cache.num_cached_tokens == 0


def test_a_fetch_that_does_not_come_is_given_up() -> None:
    first, second = pair("several blocks a page", peers=facts("d", timeout_s=0.01))
    second.runner.peers.is_stuck = True
    params = offered(first, "a", tokens(1, 641))
    fetched = second.sched.cache.tiers.peers.fetched  # type: ignore[union-attr]
    assert fetched is not None
    now = [0.0]
    fetched._clock = lambda: now[0]
    request = second.add("a", tokens(1, 641), 3, kv_transfer_params=params)
    other = second.add("b", tokens(2, 300), 3)
    for _ in range(6):
        second.step()
    assert len(second.updates["b"]) == 3 and not second.updates["a"], "others go on meanwhile"
    now[0] = 10.0
    second.run()
    second.check_output("a")
    assert request.cache.num_cached_tokens == 0 and other.cache.num_cached_tokens == 0
    assert second.sched.stats().cache.peer_failed_fetches == 1


def test_a_silent_peer_holds_no_memory_for_its_other_prompts() -> None:
    """What it has not begun to send is given up with the first fetch that fails, whether it has started or not."""
    first, second = pair("no states")
    prompts = [tokens(seed, 641) for seed in range(3)]
    params = [offered(first, f"{index}", prompt) for index, prompt in enumerate(prompts)]
    room = 2 * 10 * second.layout.block_bytes
    second = Harness(second.layout, num_pages=400, peers=facts("d", max_bytes=room))
    second.runner.peers.is_stuck = True
    for index, prompt in enumerate(prompts):
        second.add(f"{index}", prompt, 3, kv_transfer_params=params[index])
    second.step()
    fetched = second.sched.cache.tiers.peers.fetched  # type: ignore[union-attr]
    assert fetched is not None and fetched._num_bytes == room
    fetched.apply(FetchReport(failed=(1,), unreachable=(1,)))
    assert fetched._num_bytes == 0 and not fetched.is_fetching
    second.run()
    for index in range(3):
        second.check_output(f"{index}")
    assert second.sched.stats().cache.peer_failed_fetches == 3


def test_an_offer_of_wrong_contents_is_withdrawn() -> None:
    first, second = pair("several blocks a page")
    params = offered(first, "a", tokens(1, 641))
    first.run()
    assert first.runner.peers.offered
    cache = first.sched.cache
    cache.tiers.condemn_everywhere([node for node in cache.store.tree.nodes() if node.depth == 3])
    first.run()
    assert not first.runner.peers.offered
    assert second.ask("a", tokens(1, 641), 3, kv_transfer_params=params).cache.num_peer_tokens == 0


def test_the_bytes_on_their_way_are_bounded() -> None:
    layout = LAYOUTS["several blocks a page"]
    room = 10 * layout.block_bytes + layout.slot_bytes
    first, second = pair("several blocks a page", peers=facts("d", max_bytes=room + 1))
    second.runner.peers.most_delay = 3
    fetched = second.sched.cache.tiers.peers.fetched  # type: ignore[union-attr]
    assert fetched is not None
    params = {seed: offered(first, str(seed), tokens(seed, 641)) for seed in range(6)}
    requests = [second.add(str(seed), tokens(seed, 641), 2, kv_transfer_params=params[seed]) for seed in params]
    while second.step():
        assert fetched._num_bytes <= room + 1
    assert [request.cache.num_peer_tokens for request in requests] == [640] * 6
    large = offered(first, "large", tokens(9, 704 + 1))
    assert second.ask("large", tokens(9, 705), 2, kv_transfer_params=large).cache.num_peer_tokens == 0
