"""Checks what policies return. They may come from outside, and a wrong value would fail far from its cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from forkpoint.cache.eviction import EntryFacts, EvictionPolicy
from forkpoint.cache.hashing import BlockHash
from forkpoint.checks import shown
from forkpoint.errors import ConfigError

NUMBERS: Final = (float, int, np.floating, np.integer)


def wrong_answer(policy: object, method: str, said: str, do: str) -> ConfigError:
    """Return the error for a policy's `method` that `said` something that is not allowed; `do` is the advice."""
    return ConfigError(f"{_named(policy, method)} {said}; {do}")


def note_policy(error: Exception, policy: object, method: str) -> None:
    """Add to an error that a policy's `method` has raised where it comes from."""
    error.add_note(f"raised by {_named(policy, method)}")


def _named(policy: object, method: str) -> str:
    return f"{method} {type(policy).__module__}:{type(policy).__qualname__}"


def checked_key(policy: EvictionPolicy, facts: EntryFacts) -> float:
    """Return the policy's key of an entry. Raises ConfigError if it is NaN or no number, which cannot be ordered."""
    try:
        key = policy.key(facts)
    except Exception as error:
        note_policy(error, policy, "key() of the eviction policy")
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
    return wrong_answer(policy, f"{method}() of the eviction policy", f"returned {shown(returned)}", do)
