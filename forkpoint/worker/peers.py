"""Opens a worker's link to other engines, in the namespace of its model and options."""

from __future__ import annotations

from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.tier_entries import BLOCK, SLOT
from forkpoint.config import EngineConfig
from forkpoint.disk.namespace import namespace_of
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import LOGGER
from forkpoint.ops.ranks import Ranks
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.runtime.buffers import ArenaBuffer
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.units import unit_bytes
from forkpoint.sched.plan import MoveKind
from forkpoint.shared_arrays import CAN_SHARE
from forkpoint.worker.disk import namespace_facts


def open_peer_link(config: EngineConfig, loaded: Loaded, arena: ArenaBuffer, ranks: Ranks) -> PeerFacts:
    """Open the rank's link, give it to `arena` and return its facts. Rank r listens at the given port + r.

    Raises ConfigError if its port cannot be had.
    """
    options = config.kv_transfer_config
    assert options is not None and options.engine_id is not None
    host, port = options.side_channel
    if port:
        port += ranks.rank
    namespace = namespace_of(namespace_facts(config, loaded, ranks))
    allowed_hosts = options.remote_hosts if options.kv_role != "kv_producer" else ()
    max_bytes = int(options.kv_buffer_size) // ranks.size
    facts = PeerFacts(
        namespace, options.engine_id, host, port, allowed_hosts, max_bytes, options.fetch_timeout_s, ranks.size
    )
    sizes = {BLOCK: unit_bytes(arena.stored, MoveKind.BLOCK), SLOT: unit_bytes(arena.stored, MoveKind.SLOT)}
    try:
        link: PeerLink = open_link(
            facts,
            sizes,
            options.lease_s,
            listens=options.kv_role != "kv_consumer",
            rank=ranks.rank,
            fetches_apart=CAN_SHARE and bool(allowed_hosts),
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"kv_transfer_config: other engines cannot be served at {host} port {port}: {error}; give another "
            "side_channel_host or side_channel_port in kv_connector_extra_config; port 0 takes a free one"
        ) from error
    arena.use_peers(link, options.ring_bytes // ranks.size)
    if link.facts.port:
        LOGGER.info("peers: computed prompts can be fetched at %s port %d", host, link.facts.port)
    if link.facts.allowed_hosts:
        LOGGER.info("peers: prompts are fetched from %s", ", ".join(link.facts.allowed_hosts))
    return link.facts
