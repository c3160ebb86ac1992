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
    kind = type(policy)
    return ConfigError(f"{method} {kind.__module__}:{kind.__qualname__} {said}; {do}")


def checked_key(policy: EvictionPolicy, facts: EntryFacts) -> float:
    """Return the policy's key of an entry. Raises ConfigError if it is NaN or no number, which cannot be ordered."""
    key = policy.key(facts)
    if not isinstance(key, NUMBERS) or key != key:
        raise _wrong(policy, "key", key, "return a float that is not NaN")
    return key


def checked_next_change(policy: EvictionPolicy, age: float) -> float:
    """Return the policy's next age at which keys fall. Raises ConfigError if it is not a number above `age`."""
    following = policy.next_change(age)
    if not isinstance(following, NUMBERS) or not following > age:
        raise _wrong(policy, "next_change", following, f"return a number above the age, here {age}, or math.inf")
    return following


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
