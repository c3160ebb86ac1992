"""The vision tower's budget per step: large images one at a time, everybody advances, others go on decoding."""

from __future__ import annotations

import numpy as np
import pytest

from forkpoint.config import CacheConfig
from forkpoint.images import ImageSpan
from tests.sched.harness import Harness, image_span, tokens

NO_CACHE = CacheConfig(enable_prefix_caching=False)


def runs(harness: Harness) -> list[list[int]]:
    """The tokens of the images that each step encoded; steps without any are left out."""
    steps = ([each.num_tokens for each in step] for step in harness.encoder.steps)
    return [step for step in steps if step]


def spans(*sizes: int, gap: int = 10) -> tuple[ImageSpan, ...]:
    """Images of so many tokens, with text between them."""
    starts = np.cumsum([gap, *(size + gap for size in sizes)])
    return tuple(image_span(int(at), 1, size, i) for i, (at, size) in enumerate(zip(starts, sizes, strict=False)))


def test_a_request_with_many_images_has_a_budget_of_them_in_each_step() -> None:
    harness = Harness(encoder_budget=220, cache=NO_CACHE)
    harness.add("r", tokens(1, 1200), images=spans(*[100] * 8))
    harness.run()
    assert runs(harness) == [[100, 100]] * 4
    harness.check_output("r")


@pytest.mark.parametrize("gap", [10, 64, 100])
def test_an_image_larger_than_the_budget_is_encoded_alone(gap: int) -> None:
    """Also several in one block, none of which starts where a chunk may end."""
    harness = Harness(encoder_budget=50, cache=NO_CACHE)
    harness.add("r", tokens(1, 1200), images=spans(200, 5, 200, 200, gap=gap))
    harness.run()
    assert sorted(size for step in runs(harness) for size in step) == [5, 200, 200, 200]
    assert max(len(step) for step in runs(harness)) <= 2
    harness.check_output("r")


def test_others_decode_while_images_come_in() -> None:
    """Every step of the images has one token of the other request, and no more than a budget of images."""
    harness = Harness(encoder_budget=100, cache=NO_CACHE)
    harness.add("text", tokens(1, 30), 40)
    harness.step()
    for number in range(16):
        harness.add(f"image{number}", tokens(number, 300), images=(image_span(20, 1, 90, number),))
    before = len(harness.output("text"))
    for step in range(1, 17):
        harness.step()
        assert len(harness.output("text")) == before + step
        assert runs(harness) == [[90]] * step
    harness.run()
    assert all(harness.output(name) == harness.expected(name) for name in harness.requests)


def test_small_images_do_not_overtake_a_large_one() -> None:
    """Requests that came later get the tower only once the large image had it; a text does not have to wait."""
    harness = Harness(encoder_budget=100, cache=NO_CACHE)
    harness.add("first", tokens(1, 300), images=(image_span(20, 1, 60, 1),))
    harness.add("large", tokens(2, 300), images=(image_span(20, 1, 90, 2),))
    harness.add("small", tokens(3, 300), images=(image_span(20, 1, 10, 3),))
    harness.add("text", tokens(4, 300))
    harness.step()
    assert runs(harness) == [[60]] and harness.output("text")
    harness.step()
    assert runs(harness) == [[60], [90, 10]]
    harness.run()


def test_an_image_of_several_requests_is_encoded_once() -> None:
    harness = Harness(encoder_budget=100, cache=NO_CACHE)
    for number in range(4):
        harness.add(f"r{number}", tokens(number, 300), images=(image_span(20, 1, 90, 7),))
    harness.run()
    assert runs(harness) == [[90]]


def test_the_least_recently_used_embeddings_are_dropped() -> None:
    harness = Harness(encoder_cache_size=200, cache=NO_CACHE)
    for number, image in enumerate([1, 2, 1, 3, 1, 2]):
        harness.add(f"r{number}", tokens(number, 300), images=(image_span(20, 1, 90, image),))
        harness.run()
    assert [len(step) for step in harness.encoder.steps] == [1, 1, 0, 1, 0, 1]


def test_failures_and_resets_drop_embeddings() -> None:
    """The runner may have kept none, or wrong ones, of a step that failed."""
    harness = Harness(cache=NO_CACHE)

    def num_runs(name: str) -> int:
        before = len(runs(harness))
        harness.add(name, tokens(1, 300), images=(image_span(20, 1, 90, 1),))
        harness.run()
        return len(runs(harness)) - before

    assert [num_runs("first"), num_runs("again")] == [1, 0]
    harness.sched.reset_prefix_cache()
    assert [num_runs("after a reset"), num_runs("and again")] == [1, 0]
    harness.fail_next = True
    assert [num_runs("failed"), num_runs("after a failure")] == [0, 1]
    harness.runner.non_finite_requests.add("not finite")
    assert [num_runs("not finite"), num_runs("after it")] == [0, 1]
