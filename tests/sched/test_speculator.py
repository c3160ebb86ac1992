"""Tests where drafts come from, and how many of them are worth their time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from forkpoint.cache.lease import Lease
from forkpoint.json_options import SpeculativeConfig
from forkpoint.params import SamplingParams
from forkpoint.sched import past_outputs
from forkpoint.sched.draft_length import DraftLength, StepTimes
from forkpoint.sched.draft_sources import CacheSource, DraftSource, Guess, NgramSource, SuffixSource
from forkpoint.sched.past_outputs import END, PastOutputs
from forkpoint.sched.plan import TO_DRAFT
from forkpoint.sched.request import Request
from forkpoint.sched.speculator import Speculator
from tests.sched.harness import VOCAB, Harness, tokens


def request_of(ids: list[int], outputs: list[int] | None = None) -> Request:
    prompt = np.asarray(ids, np.int32)
    return Request("r", prompt, SamplingParams(max_tokens=50), 50, seed=0, output_token_ids=list(outputs or []))


def lookup(least: int, most: int, ids: list[int], outputs: list[int] | None = None, count: int = 3) -> list[int] | None:
    lease = Harness().sched.cache.new_lease("r", "", np.asarray(ids, np.int32))
    found = NgramSource(least, most).draft(request_of(ids, outputs), lease, count)
    return None if found is None else found.token_ids.tolist()


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 2]),  # two tokens agree there, one later on
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest of equals
        ([5, 6, 5, 6], [5, 6, 5]),  # goes on in what it drafts
        ([3, 3], None),  # one token agrees
        ([1, 2, 3], None),
        ([1], None),
    ],
)
def test_prompt_lookup(given: list[int], drafts: list[int] | None) -> None:
    assert lookup(2, 4, given) == drafts
    assert lookup(2, 4, given[:1], given[1:]) == drafts  # outputs count as the prompt does


def test_prompt_lookup_follows_a_row() -> None:
    source, request = NgramSource(1, 3), request_of([1, 2, 3])
    lease = Harness().sched.cache.new_lease("r", "", request.prompt_token_ids)
    assert source.draft(request, lease, 4) is None
    for i in range(2000):
        request.output_token_ids.append(i % 50 + 10)
    found = source.draft(request, lease, 4)
    assert found is not None and found.token_ids.tolist() == [10, 11, 12, 13] and found.num_matched == 3
    source.forget(request)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_tree_drafts_what_was_said_before(deterministic: bool) -> None:
    """A prompt that is sent again: all of its answer up to the last whole block comes out of the tree."""
    harness = Harness(deterministic=deterministic, most_drafts=1)
    harness.sched._drafting._drafter = speculator = Speculator([CacheSource()], 7)
    speculator._length.choose = lambda name, most: most  # type: ignore[method-assign]
    first = harness.add("first", tokens(1, 150), 200)
    harness.run()
    assert first.num_draft_tokens == 0
    again = harness.add("again", tokens(1, 150), 200)
    other = harness.add("other", np.concatenate([tokens(1, 150), first.output_token_ids[:30]]), 100)
    harness.run()
    for name in ("first", "again", "other"):
        harness.check_output(name)
    if deterministic:  # what decoding made is private, and went with its request
        return
    assert again.num_accepted_tokens == again.num_draft_tokens > 140
    assert other.num_accepted_tokens == other.num_draft_tokens > 60


def test_siblings_draft_for_each_other() -> None:
    """One is half a block behind the other at the same tokens."""
    harness = Harness(most_drafts=1)
    harness.sched._drafting._drafter = speculator = Speculator([CacheSource()], 3)
    speculator._length.choose = lambda name, most: most  # type: ignore[method-assign]
    harness.add("ahead", tokens(2, 100), 150)
    for _ in range(70):
        harness.step()
    behind = harness.add("behind", tokens(2, 100), 150)
    harness.run()
    harness.check_output("ahead")
    harness.check_output("behind")
    assert behind.num_accepted_tokens > 20


class Recalling:
    """Knows every answer, but for one token in `wrong_every`."""

    most_matched = 99

    def __init__(self, harness: Harness, wrong_every: int) -> None:
        self._harness, self._wrong_every = harness, wrong_every
        self._answers: dict[str, list[int]] = {}

    def draft(self, request: Request, lease: Lease, most: int) -> Guess | None:
        if request.id not in self._answers:
            answer = self._harness.runner.expected(request.prompt_token_ids.tolist(), request.max_tokens)
            wrong = [(token + (i % self._wrong_every == 0)) % VOCAB for i, token in enumerate(answer)]
            self._answers[request.id] = wrong
        ids = np.asarray(self._answers[request.id][len(request.output_token_ids) :][:most], np.int32)
        return Guess(ids, 50) if len(ids) else None

    def forget(self, request: Request) -> None:
        """Nothing is kept of it."""


@pytest.mark.parametrize("wrong_every", [1000, 25])
def test_what_is_looked_up_is_planned_early(wrong_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts follow those in flight as long as they are right, and find their place again after a wrong one."""
    monkeypatch.setattr(StepTimes, "price", 0.0)
    steps, ahead = list[int](), list[int]()
    for async_scheduling in (False, True):
        harness = Harness(async_scheduling=async_scheduling, check=False, most_drafts=1)
        harness.sched._drafting._drafter = Speculator([Recalling(harness, wrong_every)], 3)
        for i in range(4):
            harness.add(str(i), tokens(i, 150), 200)
        harness.run()
        for name in harness.requests:
            harness.check_output(name)
        steps.append(harness.runner.num_steps)
        ahead.append(harness.runner.num_optimistic)
    assert steps[1] <= steps[0] * (1.05 if wrong_every > 200 else 1.4)
    assert not ahead[0] and ahead[1] > 4 * steps[1] * (0.8 if wrong_every > 200 else 0.3)


def test_what_is_often_wrong_waits_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the model's drafts never do: they are asked for instead."""
    monkeypatch.setattr(StepTimes, "price", 0.0)
    harness, request = Harness(), Request("r", tokens(1, 70), SamplingParams(max_tokens=50), 50, seed=0)
    lease = harness.sched.cache.new_lease("r", "", request.prompt_token_ids)
    lease.num_planned = 70  # a step in flight samples a first token
    lookups: list[DraftSource] = [Recalling(harness, 1000)]
    for goes in (False, True):
        speculator = Speculator(lookups, 3, by_model=goes)
        right = speculator.draft(request, lease, 3)
        assert speculator.plans_early(request, lease)
        assert right is not None and right.tolist() == harness.runner.expected(request.prompt_token_ids.tolist(), 4)[1:]
        for _ in range(9):
            speculator.judged(request, 3, 0)
        assert speculator.plans_early(request, lease) is goes
        drafts = speculator.draft(request, lease, 3)
        assert drafts is not None and drafts.tolist() == [TO_DRAFT] * 3 * goes


class Clocked:
    """A row whose steps take 1 for the first token and `price` for each draft, which is right with `chance`."""

    def __init__(self, price: float, most: int = 3, held_up: float = 0.0) -> None:
        self.length, self.price, self.most, self.held_up = DraftLength(), price, most, held_up
        self.rng, self.num_outputs, self.time = np.random.default_rng(0), 0, 0.0

    def run(self, num_outputs: int, chance: float) -> tuple[float, float]:
        """(tokens a unit of time, mean number of drafts a step)."""
        end, begun, drafted, steps, first = self.num_outputs + num_outputs, self.time, 0, 0, self.num_outputs
        while self.num_outputs < end:
            count = self.length.choose("r", self.most)
            accepted = int(np.cumprod(self.rng.random(count) < chance).sum())
            elapsed = 1 + self.price * count
            if count:
                self.length.judged("r", count, accepted)
            late = 8 if self.rng.random() < self.held_up else 1  # something else had the machine
            self.length.stepped(1 + count, 1 + accepted, elapsed * late)
            self.num_outputs += 1 + accepted
            self.time, drafted, steps = self.time + elapsed, drafted + count, steps + 1
        return (self.num_outputs - first) / (self.time - begun), drafted / steps


def test_drafts_are_as_long_as_they_pay() -> None:
    row = Clocked(price=0.15)
    assert row.run(300, 0.95)[1] > 2.5
    row.run(64, 0.0)
    speed, drafted = row.run(300, 0.0)
    assert speed >= 0.97 and drafted < 0.15, "wrong drafts cost next to nothing"
    row.run(96, 0.95)
    assert row.run(100, 0.95)[1] > 2.5, "and are taken up again once they are right"


def test_drafts_that_cost_more_than_they_bring_are_left_out() -> None:
    row = Clocked(price=0.9)
    row.run(128, 0.6)
    speed, drafted = row.run(600, 0.6)
    assert drafted < 0.3 and speed > 0.93


def test_steps_that_are_held_up_say_little() -> None:
    row = Clocked(price=0.15, held_up=0.05)
    assert row.run(600, 0.95)[1] > 1.8
    row.run(64, 0.0)
    assert row.run(600, 0.0)[1] < 0.3


def test_a_row_begins_with_what_became_of_others_drafts() -> None:
    length = DraftLength()
    for chance, most in ((0.0, 1), (0.9, 3)):
        rng = np.random.default_rng(0)
        for _ in range(300):
            counts = [length.choose(f"{chance} {i}", 3) for i in range(8)]
            accepted = [int(np.cumprod(rng.random(count) < chance).sum()) for count in counts]
            for i, count in enumerate(counts):
                if count:
                    length.judged(f"{chance} {i}", count, accepted[i])
            num_tokens = 8 + sum(counts)
            length.stepped(num_tokens, 8 + sum(accepted), 1 + 0.02 * num_tokens)
        given = [length.choose(f"another {chance} {i}", 3) for i in range(4)]
        assert (max(given) <= 1) if most == 1 else (min(given) == 3), (chance, given)


def test_rows_try_in_the_same_steps() -> None:
    """However long each has been there."""
    length, tries = DraftLength(), [list[int](), list[int]()]
    for step in range(400):
        num_drafts = 0
        for name, own in enumerate(tries):
            count = length.choose(str(name), 3) if step >= 37 * name else 0
            num_drafts += count
            if count:
                length.judged(str(name), count, 0)
                own.append(step)
        length.stepped(2 + num_drafts, 2, 1.0 + num_drafts)
    assert len(tries[0]) < 40 and all(later - earlier == 64 for own in tries for earlier, later in pairwise(own[-3:]))
    assert tries[0][-3:] == tries[1][-3:]


def test_a_request_that_ended_with_drafts_in_flight_is_forgotten() -> None:
    length = DraftLength()
    assert length.choose("r", 3) == 3
    length.forget("r")
    length.judged("r", 3, 1)
    assert not length._rows


SAID = [10, 11, 12, 13, 14, 15, 16, 17]


def say(source: SuffixSource | Speculator, *outputs: list[int], salt: str = "") -> None:
    """Requests come to their ends with these outputs."""
    for ids in outputs:
        source.forget(replace(request_of([1], ids), params=SamplingParams(cache_salt=salt)))


def suffixes(
    ids: list[int], most: int = 5, *, salt: str = "", depth: int = 10, share: float = 0.1, said: tuple[list[int], ...]
) -> tuple[list[int], int] | None:
    source = SuffixSource(PastOutputs(100), depth, 1.0, share)
    say(source, *said)
    request = replace(request_of(ids), params=SamplingParams(cache_salt=salt))
    found = source.draft(request, Harness().sched.cache.new_lease("r", "", request.prompt_token_ids), most)
    return None if found is None else (found.token_ids.tolist(), found.num_matched)


def test_what_mostly_followed_in_past_outputs() -> None:
    def after(ids: list[int], *said: list[int], **options: Any) -> tuple[list[int], int] | None:
        return suffixes(ids, said=said, **options)

    assert after([7, 10, 11, 12], SAID) == ([13, 14, 15], 3), "as many drafts as tokens agree"
    assert after([7, 10, 11, 12], SAID, most=2) == ([13, 14], 3)
    assert after([10, 11, 12, 13, 14], SAID) == ([15, 16, 17], 5), "up to the output's end"
    assert after([11, 12], SAID) is None and after([1, 2, 3], SAID) is None and after([15, 16, 17], SAID) is None
    assert after([7, 10, 11, 12], SAID, salt="another") is None
    many = [10, 11, 12, 20, 21], [9, 11, 12, 20, 23], [10, 11, 12, 20, 22], [10, 11, 12, 13, 13]
    assert after([10, 11, 12], *many) == ([20, 22], 3), "the most, of equals the latest"
    assert after([10, 11, 12], *many, share=0.5) == ([20], 3)
    assert after([10, 11, 12], *many, share=0.7) is None
    assert after([9, 10, 11, 12], *many, [9, 10, 11, 12, 50]) == ([50], 4), "the longest match"
    assert after(SAID[:5], SAID, depth=6) == ([15, 16, 17], 3), "match and drafts within the depth"


def test_past_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few outputs, then as many ids as there is room for; what is the longest ago goes, and nothing runs into it."""
    monkeypatch.setattr(past_outputs, "MOST_TOKENS", 256)
    past = PastOutputs(2)
    tail = np.asarray([1, 2, 3], np.int32)
    for third in ([1, 2, 3, 4], [1, 2, 3, 5], [9, 9, 9, 9]):
        past.add("", third)
    assert past.find("", tail, 2)[0].tolist() == [[5, END]]
    none = PastOutputs(0)
    none.add("", SAID)
    assert none.find("", np.asarray(SAID[:3], np.int32), 1)[1] == 0
    rng, past, kept = np.random.default_rng(0), PastOutputs(1000), list[list[int]]()
    for _ in range(300):
        ids = rng.integers(0, 4, rng.integers(0, 60)).tolist()
        past.add("", ids)
        kept += [ids] if len(ids) >= 3 else []
        stream = [token for own in kept for token in (*own, END)][-256:]
        tail = rng.integers(0, 4, 6).astype(np.int32)
        following, length = past.find("", tail, 4)
        wanted = slow_find(stream, tail.tolist(), 4)
        assert length == wanted[1] and following.tolist() == wanted[0]
    past.add("", list(range(1000)))
    assert past.find("", np.asarray([996, 997, 998], np.int32), 1)[0].tolist() == [[999]]
    assert past.find("", np.asarray([500, 501, 502], np.int32), 1)[1] == 0


def slow_find(stream: list[int], tail: list[int], count: int) -> tuple[list[list[int]], int]:
    """What PastOutputs finds, by looking at everything."""
    for length in range(len(tail), 2, -1):
        ends = [end for end in range(length, len(stream)) if stream[end - length : end] == tail[-length:]]
        if ends:
            rows = [[*stream[end : end + count], *[END] * count][:count] for end in reversed(ends)]
            cut = [row[: row.index(END)] if END in row else row for row in rows]
            return [row + [END] * (count - len(row)) for row in cut], length
    return [], 0


@pytest.mark.parametrize(
    ("prompt", "drafts"),
    [
        ([40, 10, 11, 12, 30, 31, 32, 10, 11, 12], [13, 14, 15]),  # three each: many are asked before the row itself
        ([40, 9, 10, 11, 12, 30, 9, 10, 11, 12], [30, 9, 10, 11]),  # four of its own
        ([11, 12, 13, 30, 8, 10, 11, 12, 13], [14, 15, 16, 17]),  # three of its own, four of the past's
    ],
)
def test_the_longest_match_is_taken(prompt: list[int], drafts: list[int]) -> None:
    config = SpeculativeConfig.of({"method": "suffix", "num_speculative_tokens": 4})
    speculator = Speculator.of(config)
    speculator._length.choose = lambda name, most: 4  # type: ignore[method-assign]
    say(speculator, SAID)
    request = request_of(prompt)
    lease = Harness().sched.cache.new_lease("r", "", request.prompt_token_ids)
    lease.num_planned = len(prompt) - 1
    found = speculator.draft(request, lease, 9)
    assert found is not None and found.tolist() == drafts
    speculator.forget(request)


def test_where_the_tree_knows_nothing_the_row_itself_may() -> None:
    config = SpeculativeConfig.of({"method": "cache", "num_speculative_tokens": 4, "prompt_lookup_max": 2})
    speculator = Speculator.of(config)
    request = request_of([1, 2, 3, 1, 2])
    lease = Harness().sched.cache.new_lease("r", "", request.prompt_token_ids)
    lease.num_planned = 4
    found = speculator.draft(request, lease, 9)
    assert found is not None and found.tolist() == [3, 1, 2, 3]
