"""Prefill and decode replicas: which requests are split between them, and the body of each half."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from forkpoint.cache.peer_offers import LEAST_ASKED_LEASE, MAX_LEASE, OWN_FIELD
from forkpoint.checks import json_value, member
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.transfer_options import LINKS, KVTransferConfig

SPLIT: Final = frozenset({"/v1/chat/completions", "/v1/completions"})  # paths whose bodies take kv_transfer_params
PARAMS: Final = "kv_transfer_params"
# Fields of a body that is not split: a proxy's own parameters, and fields that need the prompt's logits.
UNSPLIT: Final = frozenset({PARAMS, "prompt_logprobs", "echo"})
# Fields of a body that only concern the answer, of which a prefill replica samples one token that nobody reads.
OF_ANSWER: Final = ("min_tokens", "stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs")
MAX_TOKENS: Final = ("max_tokens", "max_completion_tokens")


def with_role(engine: EngineConfig, role: Literal["kv_producer", "kv_consumer"]) -> EngineConfig:
    """Return the options of an engine with this kv_role. Raises ConfigError for another connector."""
    link = engine.kv_transfer_config
    if link is None:
        link = KVTransferConfig(kv_connector=LINKS)
    elif not link.links_peers:
        raise ConfigError(
            f"kv_transfer_config with {link.kv_connector} is not possible with num_prefill_replicas, whose replicas "
            f"use {LINKS}; give kv_offloading_size for a tier in the host's memory"
        )
    return replace(engine, kv_transfer_config=replace(link, kv_role=role))


def with_addresses(engine: EngineConfig, address: str, nodes: tuple[str, ...]) -> EngineConfig:
    """Return the options with the address at which other replicas fetch, and those from which this one fetches.

    Options that the user gave stay. `nodes` are the addresses of the cluster; none: it has one machine.
    """
    link = engine.kv_transfer_config
    if link is None or not link.links_peers:
        return engine
    extra: dict[str, Any] = {"side_channel_host": address}
    if nodes:
        extra["remote_hosts"] = [*nodes]
    extra |= link.kv_connector_extra_config
    return replace(engine, kv_transfer_config=replace(link, kv_connector_extra_config=extra))


def new_lease() -> int:
    """Return a lease under which both halves of a request find each other."""
    return LEAST_ASKED_LEASE + secrets.randbelow(MAX_LEASE - LEAST_ASKED_LEASE)


def prefill_half(body: bytes, lease: int) -> bytes | None:
    """Return the body with which a prefill replica computes a request's prompt, and offers it under this lease.

    None: the request is not split, because it is malformed, has several prompts or parameters of a proxy's own, or asks
    for the log-probabilities of its prompt.
    """
    given = json_value(body)
    if not isinstance(given, dict):
        return None
    asked = {name for name, value in given.items() if value is not None and value is not False}
    if asked & UNSPLIT:
        return None
    prompt = given.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        return None
    half = {name: value for name, value in given.items() if name not in OF_ANSWER}
    half.update({name: 1 for name in MAX_TOKENS if name in half})
    if not any(name in half for name in MAX_TOKENS):
        half[MAX_TOKENS[0]] = 1
    half[PARAMS] = {"do_remote_decode": True, "do_remote_prefill": False, OWN_FIELD: {"lease": lease}}
    return json.dumps(half).encode()


def offer_of(answer: bytes) -> dict[str, Any] | None:
    """Return the parameters in a prefill replica's answer with which another replica goes on; None without them."""
    params = member(json_value(answer), PARAMS)
    return params if isinstance(params, dict) and isinstance(params.get(OWN_FIELD), dict) else None


def early_offer(earlier: Mapping[str, Any], lease: int) -> dict[str, Any]:
    """Return the parameters for a prompt that a prefill replica computes now. `earlier` are those of another answer."""
    return {**earlier, OWN_FIELD: {**earlier[OWN_FIELD], "lease": lease, "early": True}}


def decode_half(body: bytes, offer: Mapping[str, Any] | None) -> bytes:
    """Return a request's body with the parameters of an offer; as it is without an offer."""
    if offer is None:
        return body
    return json.dumps({**json.loads(body), PARAMS: offer}).encode()
