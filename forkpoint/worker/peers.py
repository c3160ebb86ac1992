"""Opens a worker's link to other engines, in the namespace of its model and options."""

from __future__ import annotations

import uuid

from forkpoint.cache.disk_entries import BLOCK, SLOT
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.config import EngineConfig
from forkpoint.disk.namespace import namespace_of
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import LOGGER
from forkpoint.ops.ranks import ALONE
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.runner import Loaded
from forkpoint.sched.plan import MoveKind
from forkpoint.worker.disk import namespace_facts


def open_peer_link(config: EngineConfig, loaded: Loaded, arena: ArenaBuffer) -> PeerFacts:
    """Open the link of the only rank, give it to `arena` and return its facts.

    Raises ConfigError if its port cannot be had.
    """
    options = config.kv_transfer_config
    assert options is not None
    host, port = options.side_channel
    namespace = namespace_of(namespace_facts(config, loaded, ALONE))
    allowed_hosts = options.remote_hosts if options.kv_role != "kv_producer" else ()
    engine_id = options.engine_id or uuid.uuid4().hex
    facts = PeerFacts(
        namespace, engine_id, host, port, allowed_hosts, int(options.kv_buffer_size), options.fetch_timeout_s
    )
    unit_bytes = {BLOCK: arena.unit_bytes(MoveKind.BLOCK), SLOT: arena.unit_bytes(MoveKind.SLOT)}
    try:
        link: PeerLink = open_link(facts, unit_bytes, options.lease_s, listens=options.kv_role != "kv_consumer")
    except OSError as error:
        raise ConfigError(
            f"kv_transfer_config: other engines cannot be served at {host} port {port}: {error}; give another "
            "side_channel_host or side_channel_port in kv_connector_extra_config; port 0 takes a free one"
        ) from error
    arena.peers = link
    if link.facts.port:
        LOGGER.info("peers: computed prompts can be fetched at %s port %d, over plain sockets", host, link.facts.port)
    if link.facts.allowed_hosts:
        LOGGER.info("peers: prompts are fetched from %s", ", ".join(link.facts.allowed_hosts))
    return link.facts
