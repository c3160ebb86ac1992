"""Tests where requests go, given what replicas publish."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from forkpoint.routing import wire
from forkpoint.routing.feed import EventFeed, RestorableIndex
from forkpoint.routing.router import Router
from tests.cache.published import sent_hashes
from tests.engine.test_events import publishing, serve, wait_for
from tests.sched.harness import Harness, tokens

SIZE = 64


def choose(router: Router, hashes: list[int], *replicas: tuple[RestorableIndex, int]) -> int:
    """Among replicas by their events and the numbers of their requests."""
    return router.choose([load for _, load in replicas], lambda place: replicas[place][0].restorable(hashes) * SIZE)


def stored(hashes: list[int], ends: list[int] | None, parent: int | None = None) -> wire.EventBatch:
    return wire.EventBatch(
        0.0, [wire.BlockStored(list(hashes), parent, [], SIZE, None, "GPU", None, ends and list(ends))]
    )


def test_the_prompt_goes_where_most_of_it_can_be_restored_unless_many_wait_there() -> None:
    hashes = list(range(1, 101))
    short, long = RestorableIndex(), RestorableIndex()
    short.apply(stored(hashes[:40], [hashes[39]]))
    long.apply(stored(hashes[:90], [hashes[89]]))
    router, none = Router("prefix-aware"), RestorableIndex()
    assert choose(router, hashes, (short, 0), (long, 0), (none, 0)) == 1
    assert choose(router, hashes, (short, 0), (long, 2), (none, 0)) == 0
    assert choose(router, hashes[:39], (short, 1), (long, 1), (none, 0)) == 2
    assert choose(router, [7], (none, 3), (none, 1)) == 1
    assert {choose(router, [number], (none, 0), (none, 0), (none, 0)) for number in range(3)} == {0, 1, 2}


def test_an_engine_that_tells_no_states_can_resume_after_any_block() -> None:
    index = RestorableIndex()
    index.apply(stored([1, 2, 3], None))
    assert index.restorable([1, 2]) == 2
    index.apply(wire.EventBatch(0.0, [wire.BlockRemoved([3], "GPU")]))
    assert index.restorable([1, 2, 3]) == 2
    index.apply(wire.EventBatch(0.0, [wire.AllBlocksCleared()]))
    assert index.restorable([1, 2]) == 0


def test_blocks_that_leave_one_medium_may_be_restored_from_another() -> None:
    index = RestorableIndex()
    for medium, hashes, ends in (("GPU", [1, 2, 3, 4], [2, 4]), ("CPU", [1, 2, 3], [3])):
        index.apply(wire.EventBatch(0.0, [wire.BlockStored(hashes, None, [], SIZE, None, medium, None, ends)]))
    assert index.restorable([1, 2, 3, 4]) == 4
    index.apply(wire.EventBatch(0.0, [wire.BlockRemoved([4, 3], "GPU")]))
    assert index.restorable([1, 2, 3, 4]) == 3
    index.apply(wire.EventBatch(0.0, [wire.BlockRemoved([3, 2, 1], "CPU")]))
    assert index.restorable([1, 2, 3, 4]) == 2


def test_a_decision_takes_little_whatever_is_published() -> None:
    """1,000 times the blocks: looks are by hash, and few. Times are the least of several, in one run."""

    def seconds(num_prompts: int) -> float:
        replicas = [RestorableIndex() for _ in range(4)]
        for prompt in range(num_prompts):
            hashes = [prompt * 1000 + block for block in range(1, 101)]
            replicas[prompt % 4].apply(stored(hashes, [hashes[-1]]))
        asked = list(range(1, 101))
        router, best = Router("prefix-aware"), 1.0
        for _ in range(200):
            start = time.perf_counter()
            assert choose(router, asked, *((index, 0) for index in replicas)) == 0
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(1000) < 20 * seconds(1) + 0.0003


def test_a_feed_knows_what_was_there_before_it_came(tmp_path: Path) -> None:
    harness = Harness()
    with publishing(harness, tmp_path) as (publisher, _, _):
        prompts = serve(harness, publisher, range(3))
        feed = EventFeed(f"ipc://{tmp_path}/endpoint", f"ipc://{tmp_path}/replay_endpoint")
        try:
            wait_for(lambda: knows(feed, prompts))
            more = serve(harness, publisher, range(3, 6))
            wait_for(lambda: knows(feed, prompts + more))
            harness.sched.reset_prefix_cache()
            publisher.publish()
            wait_for(lambda: not feed.index._resumable)
        finally:
            feed.close()


def knows(feed: EventFeed, prompts: list[np.ndarray]) -> bool:
    return all(feed.index.restorable(sent_hashes(prompt)) == 3 for prompt in prompts)


def test_a_gap_is_asked_for_again_and_nonsense_is_passed_over(tmp_path: Path) -> None:
    batches = [wire.encode(stored([block], [block], block - 1 or None)) for block in range(1, 7)]
    endpoints = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    with zmq.Context() as context, context.socket(zmq.XPUB) as out, context.socket(zmq.ROUTER) as replay:
        for socket, endpoint in zip((out, replay), endpoints, strict=True):
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
        feed = EventFeed(*endpoints)
        try:
            out.recv()  # the subscription
            assert answer(replay, batches[:2]) == 0
            for number, data in ((2, batches[2]), (2, batches[5]), (3, b"nonsense"), (5, batches[5])):
                out.send_multipart((b"topic", wire.sequence_bytes(number), data))
            assert answer(replay, batches[:5]) == 3
            wait_for(lambda: feed.index.restorable([1, 2, 3, 4, 5, 6]) == 6)
        finally:
            feed.close()


def answer(replay: Any, batches: list[bytes]) -> int:
    """Replay what was asked for; the number of the first one."""
    client, _, start = replay.recv_multipart()
    first = int.from_bytes(start, "big")
    for number in range(first, len(batches)):
        replay.send_multipart((client, b"", wire.sequence_bytes(number), batches[number]))
    replay.send_multipart((client, b"", wire.END_OF_REPLAY, b""))
    return first


def test_the_prompts_of_the_tests_hash_as_the_engine_hashes_them() -> None:
    harness = Harness()
    lease = harness.sched.cache.new_lease("a", "", tokens(1, 200))
    assert sent_hashes(tokens(1, 200)) == [wire.sent_hash(name) for name in lease.chain.hashes]
