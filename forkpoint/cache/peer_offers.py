"""Prefill/decode disaggregation in values: what a prefill engine offers and what a decode engine fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from forkpoint.cache.hashing import HASH_BYTES
from forkpoint.cache.tier_entries import EntryName
from forkpoint.cache.tree import Origin
from forkpoint.config import BLOCK_SIZE

WANTS_OFFER: Final = "do_remote_decode"  # field of kv_transfer_params: another engine will continue this prompt
OWN_FIELD: Final = "forkpoint"  # field of kv_transfer_params: what vLLM's fields cannot say
MAX_PORT: Final = 2**16 - 1
MAX_HOST_CHARS: Final = 253
MAX_LEASE: Final = 2**53
LEAST_ASKED_LEASE: Final = 2**32  # the lowest number that a proxy may choose; engines count their own from 1
MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """How a worker exchanges prompts with other engines.

    Engines exchange only within one `namespace`, a digest of the model and the cache's layout. Others fetch from this
    one at `host` and `port`; port 0: it offers nothing. `engine_id` is new with every start. It asks only
    `allowed_hosts`: host names, addresses and networks. Without any it fetches nothing. At most `max_bytes` of a rank
    are on their way to it at a time. A request waits at most `timeout_s` for them. Each of `num_ranks` has its own
    share of an entry. The shares after the first are fetched at `more_ports`.
    """

    namespace: bytes
    engine_id: str
    host: str
    port: int
    allowed_hosts: tuple[str, ...]
    max_bytes: int
    timeout_s: float
    num_ranks: int = 1
    more_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt's first `num_tokens` tokens, which another engine has computed and holds for a while under `lease`.

    `last_hash` is the hash of their last block. `origin` and `decoded` are those of the checkpoint at their end.
    """

    engine_id: str
    host: str
    port: int
    namespace: bytes
    lease: int
    num_tokens: int
    last_hash: bytes
    origin: Origin
    decoded: bool
    more_ports: tuple[int, ...] = ()  # ports of the ranks after the first
    is_early: bool = False  # the prompt may still be computed

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each rank's share."""
        return (self.port, *self.more_ports)

    def params(self, request_id: str) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the answer. Names are vLLM's; proxies pass them on unread."""
        own = {
            "namespace": self.namespace.hex(),
            "lease": self.lease,
            "last_hash": self.last_hash.hex(),
            "origin": self.origin.value,
            "decoded": self.decoded,
            "more_ports": list(self.more_ports),
        }
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [],
            "remote_num_tokens": self.num_tokens,
            "tp_size": len(self.ports),
            OWN_FIELD: own,
        }

    @classmethod
    def read(cls, params: Mapping[str, Any], hashes: Sequence[bytes] = (), num_usable: int = 0) -> Self:
        """Read an answer's `kv_transfer_params`, or those of a proxy that asks both engines at once.

        The latter have `early`, and offer the first `num_usable` tokens of the prompt, whose blocks have these hashes.
        Raises ValueError, which says what is wrong with them.
        """
        own = params.get(OWN_FIELD)
        if not isinstance(own, Mapping):
            raise ValueError(f"they have no {OWN_FIELD!r} field, so another kind of engine wrote them")
        host = _text(params, "remote_host", MAX_HOST_CHARS)
        is_early = own.get("early") is True
        num_tokens = num_usable if is_early else _integer(params, "remote_num_tokens", 2**31)
        if num_tokens % BLOCK_SIZE:
            raise ValueError(f"remote_num_tokens={num_tokens} is not a multiple of {BLOCK_SIZE}")
        more_ports = own.get("more_ports", [])
        if not isinstance(more_ports, list) or len(more_ports) > MAX_RANKS:
            raise ValueError(f"more_ports is not a list of at most {MAX_RANKS} ports")
        if is_early and num_usable:
            end = hashes[num_usable // BLOCK_SIZE - 1], Origin.PROMPT_END, False
        else:
            origin = Origin(_text(own, "origin", MAX_HOST_CHARS))
            end = _bytes(own, "last_hash"), origin, own.get("decoded") is True
        return cls(
            _text(params, "remote_engine_id", MAX_HOST_CHARS),
            host,
            _integer(params, "remote_port", MAX_PORT),
            _bytes(own, "namespace"),
            _integer(own, "lease", MAX_LEASE),
            num_tokens,
            *end,
            tuple(_integer({"more_ports": each}, "more_ports", MAX_PORT) for each in more_ports),
            is_early,
        )


def asked_lease(params: Mapping[str, Any]) -> int | None:
    """Return the lease under which a proxy wants a prompt to be offered; None if it leaves that to the engine.

    Raises ValueError.
    """
    own = params.get(OWN_FIELD)
    if not isinstance(own, Mapping) or "lease" not in own:
        return None
    lease = _integer(own, "lease", MAX_LEASE)
    if lease < LEAST_ASKED_LEASE:
        raise ValueError(f"lease={lease} is below {LEAST_ASKED_LEASE}, and may be one of the engine's own")
    return lease


def chosen_lease(params: object) -> int | None:
    """Return the lease that a proxy chose in the `kv_transfer_params` of a request for an offer.

    None if it chose none, or they are malformed. A proxy that chooses a lease may ask the other engine early.
    """
    if not isinstance(params, Mapping) or params.get(WANTS_OFFER) is not True:
        return None
    try:
        return asked_lease(params)
    except ValueError:  # nobody can ask for this lease
        return None


def _text(given: Mapping[str, Any], name: str, most: int) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise ValueError(f"{name} is not a text of at most {most} characters")
    return value


def _integer(given: Mapping[str, Any], name: str, most: int) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} is not an integer from 1 to {most}")
    return value


def _bytes(given: Mapping[str, Any], name: str) -> bytes:
    value = bytes.fromhex(_text(given, name, 2 * HASH_BYTES))
    if len(value) != HASH_BYTES:
        raise ValueError(f"{name} does not have {HASH_BYTES} bytes")
    return value


@dataclass(frozen=True, slots=True)
class Fetch:
    """An order to the worker: get these entries, in their order, within `timeout_s`. Rank r gets them at `ports[r]`.

    Without names it only ends the other engine's lease, and nothing is reported.
    """

    ticket: int
    host: str
    ports: tuple[int, ...]
    engine_id: str
    lease: int
    names: tuple[EntryName, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The tickets of fetches that have ended since the last report, and how far others have come.

    `unreachable` are failed ones whose peer sent nothing in time, stopped, or did not answer as a peer does. `arrived`
    has the tickets of fetches that go on, each with the number of its first entries that have arrived. These entries
    stay in the worker's buffers until the scheduler forgets the fetch, even if the fetch fails later.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()
    arrived: tuple[tuple[int, int], ...] = ()
