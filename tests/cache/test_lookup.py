"""Every reason for a miss, reached through the scheduler and visible on the request."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.config import CacheConfig
from forkpoint.outputs import MissReason
from tests.sched.harness import HYBRIDS, LAYOUTS, Harness, tokens

NAMES = sorted(LAYOUTS)
STATEFUL = [name for name in NAMES if LAYOUTS[name].has_states]


def harness(name: str, num_pages: int = 4000, **cache: object) -> Harness:
    return Harness(layout=LAYOUTS[name], num_pages=num_pages, cache=CacheConfig(**cache))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_hit_has_no_reason(name: str) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300), 2)
    report = served.ask("again", tokens(1, 300)).cache
    assert report.miss is None
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.kv_num_tokens) == (300, 256, 256)


@pytest.mark.parametrize("name", NAMES)
def test_cold(name: str) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300))
    report = served.ask("other", tokens(2, 300)).cache
    assert report.miss is MissReason.COLD and report.num_cached_tokens == report.kv_num_tokens == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 63, 64])
def test_short(name: str, length: int) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300))
    assert served.ask("short", tokens(1, 300)[:length]).cache.miss is MissReason.SHORT


@pytest.mark.parametrize("name", STATEFUL)
def test_no_checkpoint(name: str) -> None:
    """Keys and values reach 192 of 193 tokens; the only state was kept at 384."""
    served = harness(name, checkpoint_interval=0)
    served.ask("first", tokens(1, 400))
    report = served.ask("shorter", np.concatenate([tokens(1, 400)[:192], tokens(2, 200)])).cache
    assert report.miss is MissReason.NO_CHECKPOINT
    assert report.num_cached_tokens == 0 and report.kv_num_tokens == 192
    again = served.ask("third", np.concatenate([tokens(1, 400)[:192], tokens(3, 200)])).cache
    assert again.num_cached_tokens == 192 and again.miss is MissReason.COLD  # what follows the junction is new


@pytest.mark.parametrize("policy", ["cost", "lru"])
@pytest.mark.parametrize("name", NAMES)
def test_evicted(name: str, policy: str) -> None:
    layout = LAYOUTS[name]
    served = harness(name, layout.num_pages_for(900, 3) + 1, eviction_policy=policy)
    served.ask("first", tokens(1, 300))
    for index in range(30):
        served.ask(f"other {index}", tokens(100 + index, 700))
    report = served.ask("again", tokens(1, 300)).cache
    assert report.miss is MissReason.EVICTED and report.num_cached_tokens < 256
    assert served.sched.stats().cache.lost_tokens["evicted"] == 256 - report.num_cached_tokens


@pytest.mark.parametrize("name", HYBRIDS)
def test_evicted_and_forgotten_is_cold(name: str) -> None:
    """Without a table of ghosts nobody remembers."""
    served = harness(name, LAYOUTS[name].num_pages_for(900, 3) + 1, num_ghosts=0)
    served.ask("first", tokens(1, 300))
    for index in range(30):
        served.ask(f"other {index}", tokens(100 + index, 700))
    assert served.ask("again", tokens(1, 300)).cache.miss in (MissReason.COLD, MissReason.NO_CHECKPOINT)


@pytest.mark.parametrize("name", NAMES)
def test_salt(name: str) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300), cache_salt="a")
    report = served.ask("other", tokens(1, 300), cache_salt="b").cache
    assert report.miss is MissReason.COLD and report.num_cached_tokens == 0
    assert served.ask("unsalted", tokens(1, 300)).cache.miss is MissReason.COLD
    assert served.ask("again", tokens(1, 300), cache_salt="a").cache.num_cached_tokens == 256


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("theirs", "mine", "room"), [("a", "b", 900), ("a", "", 900), ("", "b", 100_000)])
def test_nothing_tells_what_another_salt_has(name: str, theirs: str, mine: str, room: int) -> None:
    """Two worlds: others have sent the prompts that are asked for, or prompts of the same lengths."""
    seen = []
    for known in (True, False):
        layout = LAYOUTS[name]
        served = harness(name, layout.num_pages_for(room, 3) + 1)
        lengths = (300, 64, 129, 640)
        for i, length in enumerate(lengths):
            served.ask(f"theirs {i}", tokens(i if known else 100 + i, length), 70, cache_salt=theirs)
        reports = [
            served.ask(f"mine {i} {turn}", tokens(i, length), 3, cache_salt=mine).cache
            for i, length in enumerate(lengths)
            for turn in range(2)
        ]
        seen.append((reports, served.sched.stats()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", NAMES)
def test_bypassed_by_the_request(name: str) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300))
    report = served.ask("asks", tokens(1, 300), prompt_logprobs=0).cache
    assert report.miss is MissReason.BYPASSED and report.num_cached_tokens == 0


@pytest.mark.parametrize("name", NAMES)
def test_bypassed_by_configuration(name: str) -> None:
    served = harness(name, enable_prefix_caching=False)
    served.ask("first", tokens(1, 300))
    assert served.ask("again", tokens(1, 300)).cache.miss is MissReason.BYPASSED


def test_no_state_checkpoints_by_configuration() -> None:
    """'none' is vLLM's word for no states; a model without states goes on as before."""
    for name in NAMES:
        served = harness(name, mamba_cache_mode="none")
        served.ask("first", tokens(1, 300))
        report = served.ask("again", tokens(1, 300)).cache
        assert (report.miss is MissReason.BYPASSED) == LAYOUTS[name].has_states


@pytest.mark.parametrize("name", NAMES)
def test_lost_tokens_are_counted_by_reason(name: str) -> None:
    served = harness(name, checkpoint_interval=0)
    served.ask("first", tokens(1, 400))
    served.ask("again", tokens(1, 400))
    stats = served.sched.stats().cache
    assert stats.query_tokens == 800 and stats.hit_tokens == 384
    served.ask("shorter", np.concatenate([tokens(1, 400)[:192], tokens(2, 200)]))
    lost = served.sched.stats().cache.lost_tokens
    assert lost.get("no_checkpoint", 0) == (192 if LAYOUTS[name].has_states else 0)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_reset_everything_is_cold(name: str) -> None:
    served = harness(name)
    served.ask("first", tokens(1, 300))
    served.sched.reset_prefix_cache()
    report = served.ask("again", tokens(1, 300)).cache
    assert report.miss is MissReason.COLD and report.num_cached_tokens == 0
