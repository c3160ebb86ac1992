"""Prompts from another engine under the scheduler: answers are those of an uncached run, whatever arrives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.sched.request import Request
from tests.sched.harness import LAYOUTS, Harness, tokens

ASKS = {"do_remote_decode": True}
NAMESPACE = b"n" * 16


def facts(name: str, max_bytes: int = 1 << 40, timeout_s: float = 3600.0) -> PeerFacts:
    """What an engine knows of others. It may fetch and be fetched from."""
    return PeerFacts(NAMESPACE, name, "127.0.0.1", 1, ("loopback",), max_bytes, timeout_s)


def pair(layout: str, num_pages: int = 400, **options: Any) -> tuple[Harness, Harness]:
    """A prefill and a decode engine."""
    first = Harness(LAYOUTS[layout], num_pages=num_pages, peers=facts("p"))
    second = Harness(LAYOUTS[layout], num_pages=num_pages, **{"peers": facts("d"), **options})
    second.runner.peers.offered = first.runner.peers.offered
    return first, second


def offered(harness: Harness, name: str, prompt: np.ndarray, **options: object) -> dict[str, Any]:
    request = harness.ask(name, prompt, 1, kv_transfer_params=ASKS, **options)
    return dict(request.kv_transfer_params or {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_end_is_computed(layout: str) -> None:
    first, second = pair(layout)
    for length in (63, 64, 65, 641):
        params = offered(first, f"{length}", tokens(length, length))
        found = second.ask(f"{length}", tokens(length, length), 3, kv_transfer_params=params).cache
        assert found.num_peer_tokens == found.num_restored_tokens == (length - 1) // 64 * 64
    assert not second.runner.peers.buffers, "nothing is left behind"


def test_a_fetch_that_does_not_come_is_given_up() -> None:
    first, second = pair("several blocks a page", peers=facts("d", timeout_s=0.01))
    second.runner.peers.is_stuck = True
    params = offered(first, "a", tokens(1, 641))
    fetched = second.sched.cache.peers.fetched  # type: ignore[union-attr]
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


def test_the_bytes_on_their_way_are_bounded() -> None:
    layout = LAYOUTS["several blocks a page"]
    room = 10 * layout.block_bytes + layout.slot_bytes
    first, second = pair("several blocks a page", peers=facts("d", max_bytes=room + 1))
    second.runner.peers.most_delay = 3
    fetched = second.sched.cache.peers.fetched  # type: ignore[union-attr]
    assert fetched is not None
    params = {seed: offered(first, str(seed), tokens(seed, 641)) for seed in range(6)}
    requests = [second.add(str(seed), tokens(seed, 641), 2, kv_transfer_params=params[seed]) for seed in params]
    while second.step():
        assert fetched._num_bytes <= room + 1
    assert [request.cache.num_peer_tokens for request in requests] == [640] * 6
    large = offered(first, "large", tokens(9, 704 + 1))
    assert second.ask("large", tokens(9, 705), 2, kv_transfer_params=large).cache.num_peer_tokens == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_loads(layout: str, seed: int) -> None:
    """Both arenas are tight; fetches fail, come late, and requests leave."""
    rng = random.Random(f"{layout} {seed}")
    chosen = LAYOUTS[layout]
    num_pages = chosen.num_pages_for(900, 3) + rng.randint(1, 8)
    first, second = pair(
        layout, num_pages, async_scheduling=rng.random() < 0.5, deterministic=False, max_num_seqs=rng.choice([2, 8])
    )
    peers = second.runner.peers
    peers.most_delay, peers.fail_chance, peers.random = rng.choice([0, 2, 9]), rng.choice([0.0, 0.3]), rng
    stems, asked = [tokens(number, 600) for number in range(3)], list[Request]()
    for number in range(40):
        prompt = np.concatenate([rng.choice(stems)[: rng.randint(1, 600)], tokens(100 + number, rng.randint(1, 200))])
        params = offered(first, f"p{number}", prompt)
        if rng.random() < 0.1:
            first.sched.reset_prefix_cache()
            first.run()
        asked.append(second.add(f"d{number}", prompt, rng.randint(1, 5), kv_transfer_params=params))
        for _ in range(rng.randint(0, 6)):
            second.fail_next = rng.random() < 0.02
            second.step()
        if rng.random() < 0.1:
            second.sched.abort(rng.choice(asked).id)
        if rng.random() < 0.05:
            second.sched.reset_prefix_cache()
    second.run()
    fetched = second.sched.cache.peers.fetched  # type: ignore[union-attr]
    assert fetched is not None and not fetched._prompts and not fetched._of and fetched._num_bytes == 0
    assert not peers.buffers
    assert second.sched.stats().cache.peer_hit_tokens > 0
