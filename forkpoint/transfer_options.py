"""The option kv_transfer_config: where evicted cache entries go, and which engines exchange prompts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from forkpoint.checks import MAX_INTEGER, Bounds, Checker, option
from forkpoint.errors import ConfigError
from forkpoint.json_options import JsonConfig, json_object

OFFLOADS: Final = "OffloadingConnector"
LINKS: Final = "NixlConnector"
MOST_RING_BYTES: Final = 2**30  # unless `ring_bytes` says otherwise
EXAMPLE_OF_TRANSFER: Final = (
    '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592}}'
)
# Keys of kv_connector_extra_config, by connector. The last two of NixlConnector's choose libraries of vLLM's.
KEYS: Final = {
    OFFLOADS: ("cpu_bytes_to_use",),
    LINKS: (
        "side_channel_host",
        "side_channel_port",
        "remote_hosts",
        "kv_lease_duration",
        "fetch_timeout_s",
        "ring_bytes",
        "backends",
        "num_threads",
    ),
}
HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
LOOPBACK: Final = "127.0.0.1"
ONLY_THIS_MACHINE: Final = ("loopback",)  # hosts from which prompts are fetched unless `remote_hosts` names others
MAX_HOSTS: Final = 1024
MAX_HOST_CHARS: Final = 253
MAX_NAME_CHARS: Final = 200  # characters that are kept of the given `engine_id`; what follows is new with every start
MAX_PORT: Final = 65535
LEASE_S: Final = 30.0
FETCH_TIMEOUT_S: Final = 10.0
SECONDS: Final = Bounds(0, 3600, above=True)

_CHECK: Final = Checker(ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig(JsonConfig):
    """Options for keeping evicted cache entries, or for exchanging prompts with other engines. Names are vLLM's.

    OffloadingConnector keeps evicted entries in the host's memory. NixlConnector splits requests between prefill and
    decode engines: it takes vLLM's requests, and moves blocks and states over shared memory or TCP. A producer computes
    prompts and lets others fetch them, a consumer fetches them.
    """

    option_name = "kv_transfer_config"
    kv_connector: Literal["OffloadingConnector", "NixlConnector"]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_buffer_size: float = option(1e9, bounds=Bounds(1, MAX_INTEGER))  # bytes of prompts that wait to be fetched
    kv_buffer_device: str | None = None  # changes nothing: see `ring_bytes` of NixlConnector
    engine_id: str | None = option(None, bounds=Bounds(0, MAX_HOST_CHARS))
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(KVTransferConfig, self).__post_init__()  # dataclass slots replace the class, so a bare super() fails
        name = f"{self.option_name}: kv_connector_extra_config"
        extra = json_object(name, self.kv_connector_extra_config, KEYS[self.kv_connector])
        object.__setattr__(self, "kv_connector_extra_config", extra)
        if self.kv_connector == OFFLOADS:
            self._check_offloading(name, extra)
        else:
            _check_link(name, extra)
            self.side_channel  # noqa: B018  # reads the environment, whose values may be wrong

    def _check_offloading(self, name: str, extra: Mapping[str, Any]) -> None:
        if self.kv_role != "kv_both":
            raise ConfigError(
                f"{self.option_name}: kv_role={self.kv_role!r} is not allowed with {OFFLOADS}; give 'kv_both', or "
                f"{LINKS} for prefill and decode engines"
            )
        if "cpu_bytes_to_use" not in extra:
            raise ConfigError(f"{name} needs 'cpu_bytes_to_use', as in {EXAMPLE_OF_TRANSFER}")
        _CHECK.integer(f"{name}: cpu_bytes_to_use", extra["cpu_bytes_to_use"], 1, MAX_INTEGER)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        if "kv_connector" not in given:
            raise ConfigError(f"{cls.option_name}={given!r} needs 'kv_connector', as in {EXAMPLE_OF_TRANSFER}")
        return super(KVTransferConfig, cls).read(given)

    def of_this_start(self) -> Self:
        """Return these options with an `engine_id` that no other engine has, and no other start of this one."""
        name = (self.engine_id or "forkpoint")[:MAX_NAME_CHARS]
        return replace(self, engine_id=f"{name}-{uuid.uuid4().hex}")

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the host's memory for evicted entries, of all ranks together."""
        return int(self.kv_connector_extra_config.get("cpu_bytes_to_use", 0))

    @property
    def links_peers(self) -> bool:
        """Whether the engine exchanges prompts with others."""
        return self.kv_connector == LINKS

    @property
    def ring_bytes(self) -> int:
        """Bytes of the device's memory in which the latest computed prompts also wait, of all ranks together."""
        if not self.links_peers or self.kv_role == "kv_consumer":
            return 0
        return int(self.kv_connector_extra_config.get("ring_bytes", min(MOST_RING_BYTES, self.kv_buffer_size)))

    @property
    def side_channel(self) -> tuple[str, int]:
        """The address and port at which other engines fetch prompts. Port 0: any free one.

        Options come before the environment variables of vLLM. Raises ConfigError for a port that is none.
        """
        host = self.kv_connector_extra_config.get("side_channel_host") or os.environ.get(HOST_VARIABLE) or LOOPBACK
        port = self.kv_connector_extra_config.get("side_channel_port")
        if port is None:
            given = os.environ.get(PORT_VARIABLE, "0")
            port = int(given) if given.isdecimal() else given
        return str(host), _CHECK.integer(PORT_VARIABLE, port, 0, MAX_PORT)

    @property
    def remote_hosts(self) -> tuple[str, ...]:
        """The host names, addresses and networks from which prompts are fetched."""
        return tuple(self.kv_connector_extra_config.get("remote_hosts", ONLY_THIS_MACHINE))

    @property
    def lease_s(self) -> float:
        """For how long a computed prompt waits to be fetched."""
        return float(self.kv_connector_extra_config.get("kv_lease_duration", LEASE_S))

    @property
    def fetch_timeout_s(self) -> float:
        """For how long a request waits for a prompt to be fetched."""
        return float(self.kv_connector_extra_config.get("fetch_timeout_s", FETCH_TIMEOUT_S))


def _check_link(name: str, extra: Mapping[str, Any]) -> None:
    """Check the keys of NixlConnector. Raises ConfigError."""
    if "side_channel_host" in extra:
        _CHECK.text(f"{name}: side_channel_host", extra["side_channel_host"], MAX_HOST_CHARS, empty=False)
    if "side_channel_port" in extra:
        _CHECK.integer(f"{name}: side_channel_port", extra["side_channel_port"], 0, MAX_PORT)
    if "ring_bytes" in extra:
        _CHECK.integer(f"{name}: ring_bytes", extra["ring_bytes"], 0, MAX_INTEGER)
    for key in ("kv_lease_duration", "fetch_timeout_s"):
        if key in extra:
            _CHECK.number(f"{name}: {key}", extra[key], SECONDS)
    for host in _CHECK.items(f"{name}: remote_hosts", extra.get("remote_hosts"), MAX_HOSTS):
        _CHECK.text(f"{name}: remote_hosts", host, MAX_HOST_CHARS, empty=False)
