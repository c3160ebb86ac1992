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

POSITIONS_OF: Final = "positions() of the capture policy"
PAIRS: Final = "give pairs of an Origin and its positions, such as (Origin.BREAKPOINT, (128, 256))"
INTEGERS: Final = "give integers, in tokens; they are rounded down to multiples of 64"
NUMBERS: Final = (float, int, np.floating, np.integer)


def checked_key(policy: EvictionPolicy, facts: EntryFacts) -> float:
    """Return the policy's key of an entry. Raises ConfigError if it is NaN or no number, which cannot be ordered."""
    try:
        key = policy.key(facts)
    except Exception as error:
        _note_policy(error, policy, "key() of the eviction policy")
        raise
    if not isinstance(key, NUMBERS) or key != key:
        raise _wrong(policy, "key", key, "return a float that is not NaN")
    return key


def checked_next_change(policy: EvictionPolicy, age: float) -> float:
    """Return the policy's next age at which keys fall. Raises ConfigError if it is not a number above `age`."""
    change = policy.next_change(age)
    if not isinstance(change, NUMBERS) or not change > age:
        raise _wrong(policy, "next_change", change, f"return a number above the age, here {age}, or math.inf")
    return change


def checked_missed(
    policy: EvictionPolicy, gone: Sequence[BlockHash], note: object, now: float
) -> tuple[object, BlockHash | None]:
    """Return the policy's answer to `missed`. Raises ConfigError if it has another form."""
    answer = policy.missed(gone, note, now)
    if isinstance(answer, tuple) and len(answer) == 2 and (answer[1] is None or answer[1] in gone):
        return answer
    raise _wrong(policy, "missed", answer, "return the request's note, and a block of `gone` or None")


def _wrong(policy: EvictionPolicy, method: str, returned: object, do: str) -> ConfigError:
    return _wrong_answer(policy, f"{method}() of the eviction policy", f"returned {shown(returned)}", do)


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
        _note_policy(error, policy, POSITIONS_OF)
        raise


def _candidates(policy: CapturePolicy, context: CaptureContext) -> list[Candidate]:
    chosen: dict[int, Candidate] = {}
    for reason in _each(policy, policy.positions(context), "returned"):
        if not (isinstance(reason, tuple) and len(reason) == 2 and isinstance(reason[0], Origin)):
            raise _wrong_answer(policy, POSITIONS_OF, f"gave {shown(reason)}", PAIRS)
        origin, positions = reason
        for position in _each(policy, positions, "gave"):
            try:
                floored = index(position) // BLOCK_SIZE * BLOCK_SIZE
            except TypeError:
                said = f"gave the position {shown(position)}"
                raise _wrong_answer(policy, POSITIONS_OF, said, INTEGERS) from None
            if context.start < floored <= context.end and floored not in chosen:
                chosen[floored] = Candidate(floored, origin, policy.may_evict(origin))
    return list(chosen.values())


def _each(policy: CapturePolicy, given: Any, how: str) -> Iterator[Any]:
    try:
        return iter(given)
    except TypeError:
        raise _wrong_answer(policy, POSITIONS_OF, f"{how} {shown(given)}", PAIRS) from None


def _wrong_answer(policy: object, method: str, said: str, do: str) -> ConfigError:
    """Return the error for a policy's `method` that `said` something that is not allowed; `do` is the advice."""
    return ConfigError(f"{_named(policy, method)} {said}; {do}")


def _note_policy(error: Exception, policy: object, method: str) -> None:
    """Add to an error that a policy's `method` has raised where it comes from."""
    error.add_note(f"raised by {_named(policy, method)}")


def _named(policy: object, method: str) -> str:
    return f"{method} {type(policy).__module__}:{type(policy).__qualname__}"
