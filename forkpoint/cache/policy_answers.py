"""Checks what policies return. They may come from outside, and a wrong value would fail far from its cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Final

import numpy as np

from forkpoint.cache.capture import Candidate, CaptureContext, CapturePolicy
from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.hashing import BlockHash
from forkpoint.cache.tree import Origin
from forkpoint.checks import shown
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ConfigError, ForkpointError

PAIRS: Final = "give pairs of an Origin and its positions, such as (Origin.BREAKPOINT, (128, 256))"
INTEGERS: Final = "give integers, in tokens; they are rounded down to multiples of 64"
NUMBERS: Final = (float, int, np.floating, np.integer)


def checked_key(policy: EvictionPolicy, facts: EntryFacts) -> float:
    """Return the policy's key of an entry. Raises ConfigError if it is NaN or no number, which cannot be ordered."""
    try:
        key = policy.key(facts)
    except Exception as error:
        error.add_note(f"raised by {_named(policy, 'key')}")
        raise
    if not isinstance(key, NUMBERS) or key != key:
        raise _refusal(policy, "key", f"returned {shown(key)}", "return a float that is not NaN")
    return key


def checked_next_change(policy: EvictionPolicy, age: float) -> float:
    """Return the policy's next age at which keys fall. Raises ConfigError if it is not a number above `age`."""
    change = policy.next_change(age)
    if not isinstance(change, NUMBERS) or not change > age:
        advice = f"return a number above the age, here {age}, or math.inf"
        raise _refusal(policy, "next_change", f"returned {shown(change)}", advice)
    return change


def checked_missed(
    policy: EvictionPolicy, blocks: Sequence[BlockHash], note: object, now: float
) -> tuple[object, BlockHash | None]:
    """Return the policy's answer to `missed`. Raises ConfigError if it has another form."""
    answer = policy.missed(blocks, note, now)
    if isinstance(answer, tuple) and len(answer) == 2 and (answer[1] is None or answer[1] in blocks):
        return answer
    advice = "return the request's note, and one of the blocks or None"
    raise _refusal(policy, "missed", f"returned {shown(answer)}", advice)


def checked_candidates(policy: CapturePolicy, context: CaptureContext) -> list[Candidate]:
    """Return the positions that the policy names, rounded down to whole blocks: each once, with its first reason.

    Positions outside `(start, end]` are left out. Raises ConfigError if the policy gave something else than reasons and
    integers.
    """
    try:
        return _candidates(policy, context)
    except ForkpointError:
        raise
    except Exception as error:
        error.add_note(f"raised by {_named(policy, 'positions')}")
        raise


def _candidates(policy: CapturePolicy, context: CaptureContext) -> list[Candidate]:
    chosen: dict[int, Candidate] = {}
    for pair in _each(policy, policy.positions(context), "returned"):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Origin)):
            raise _refusal(policy, "positions", f"gave {shown(pair)}", PAIRS)
        origin, positions = pair
        for position in _each(policy, positions, "gave"):
            try:
                floored = index(position) // BLOCK_SIZE * BLOCK_SIZE
            except TypeError:
                raise _refusal(policy, "positions", f"gave the position {shown(position)}", INTEGERS) from None
            if context.start < floored <= context.end and floored not in chosen:
                chosen[floored] = Candidate(floored, origin, policy.may_evict(origin))
    return list(chosen.values())


def _each(policy: CapturePolicy, given: Any, verb: str) -> Iterator[Any]:
    try:
        return iter(given)
    except TypeError:
        raise _refusal(policy, "positions", f"{verb} {shown(given)}", PAIRS) from None


def _refusal(policy: EvictionPolicy | CapturePolicy, method: str, problem: str, advice: str) -> ConfigError:
    """Return the error for an answer that is not allowed."""
    return ConfigError(f"{_named(policy, method)} {problem}; {advice}")


def _named(policy: EvictionPolicy | CapturePolicy, method: str) -> str:
    """Return a policy's method as errors name it."""
    kind = "eviction" if isinstance(policy, EvictionPolicy) else "capture"
    return f"{method}() of the {kind} policy {type(policy).__module__}:{type(policy).__qualname__}"
