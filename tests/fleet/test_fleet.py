"""What holds of a fleet without Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from forkpoint.cache.peer_offers import Offer, chosen_lease
from forkpoint.cache.tree import Origin
from forkpoint.cli.options import engine_options
from forkpoint.cli.parser import build_parser
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.fleet.config import FleetConfig
from forkpoint.fleet.handover import (
    decode_half,
    early_offer,
    new_lease,
    offer_of,
    prefill_half,
    with_addresses,
    with_role,
)
from forkpoint.fleet.metrics import joined_metrics
from forkpoint.fleet.server_process import with_ports
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.middleware import Hosts

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
METRICS = """# HELP requests_total Answers.
# TYPE requests_total counter
requests_total{method="GET",path="a\\"}b"} 3.0
# HELP wait_s Waiting.
# TYPE wait_s histogram
wait_s_bucket{le="1.0"} 1.0
wait_s_bucket{le="+Inf"} 2.0
wait_s_count 2.0
wait_s_sum 4.5
# HELP open Now open.
# TYPE open gauge
open 7.0
"""


def test_metrics_of_replicas_are_told_together() -> None:
    """What a scraper reads: the samples of each, with the replica's name."""
    joined = joined_metrics({"a": METRICS, "b": METRICS.replace("7.0", "8.0")})
    found = list(text_string_to_metric_families(joined))
    assert [family.name for family in found] == ["requests", "wait_s", "open"]
    for replica, text in (("a", METRICS), ("b", METRICS.replace("7.0", "8.0"))):
        own = [
            (sample.name, {k: v for k, v in sample.labels.items() if k != "replica"}, sample.value)
            for family in found
            for sample in family.samples
            if sample.labels["replica"] == replica
        ]
        alone = text_string_to_metric_families(text)
        assert own == [(sample.name, sample.labels, sample.value) for family in alone for sample in family.samples]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests=0"),
        ({"autoscaling_config": "[1]"}, "autoscaling_config"),
        ({"autoscaling_config": '{"max_replicas": 3}', "num_replicas": 2}, "num_replicas=2"),
        ({"ray_actor_options": "gpu"}, "ray_actor_options"),
    ],
)
def test_wrong_options_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FleetConfig(**given)


@pytest.mark.parametrize(
    ("options", "answers", "refuses"),
    [
        ({}, ["127.0.0.1:8000", "localhost"], ["example.org"]),
        ({"host": "0.0.0.0"}, ["example.org", "10.0.0.1:8000"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("example.org",)}, ["example.org:8000"], ["other.org"]),
        ({"api_key": ("secret",)}, ["example.org"], []),
    ],
)
def test_the_servers_answer_for_the_hosts_that_a_gateway_answers_for(
    options: dict[str, Any], answers: list[str], refuses: list[str]
) -> None:
    alone = ServerConfig(**options)
    engine, behind = with_ports(EngineConfig.from_flat(model="m"), alone, (1, 2, 3), "10.0.0.7")
    assert (behind.host, behind.port, engine.kv_events_config.endpoint) == ("127.0.0.1", 1, "tcp://*:2")
    assert engine.kv_events_config.host == "10.0.0.7"
    for config in (alone, behind):
        for host in answers:
            Hosts(config).check(host.encode())
        for host in refuses:
            with pytest.raises(HTTPError):
                Hosts(config).check(host.encode())


def test_the_halves_of_a_request() -> None:
    """The prefill replica samples one token that nobody reads; the decode replica gets the request as it is."""
    asked = {"prompt": [1, 2, 3], "max_tokens": 50, "min_tokens": 9, "n": 2, "stream": True, "temperature": 0.3}
    lease = new_lease()
    half = json.loads(prefill_half(json.dumps(asked).encode(), lease) or b"")
    assert chosen_lease(half["kv_transfer_params"]) == lease
    assert half.pop("kv_transfer_params")["do_remote_prefill"] is False
    assert half == {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.3}
    chat = json.loads(prefill_half(json.dumps({"messages": [], "max_completion_tokens": 9}).encode(), lease) or b"")
    assert chat["max_completion_tokens"] == 1 and "max_tokens" not in chat
    assert json.loads(prefill_half(b'{"messages": []}', lease) or b"")["max_tokens"] == 1
    offer = {"remote_host": "127.0.0.1", "forkpoint": {"lease": 1}}
    body = json.dumps(asked).encode()
    assert offer_of(json.dumps({"kv_transfer_params": offer}).encode()) == offer
    assert json.loads(decode_half(body, offer)) == {**asked, "kv_transfer_params": offer}
    assert decode_half(body, None) == body
    for answer in (b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {"forkpoint": 1}}'):
        assert offer_of(answer) is None


def test_both_halves_are_sent_at_once() -> None:
    """The decode replica finds the prompt by the lease of the prefill half and the place in an earlier answer."""
    place = ("engine", "10.0.0.7", 5600, bytes(16), 3, 640, bytes(16), Origin.JUNCTION, True, (5601,))
    earlier = json.loads(json.dumps(Offer(*place).params("r")))
    lease, hashes = new_lease(), [bytes([number]) * 16 for number in range(20)]
    found = Offer.read(early_offer(earlier, lease), hashes, 1280)
    assert (found.engine_id, found.host, found.ports) == ("engine", "10.0.0.7", (5600, 5601))
    assert (found.lease, found.is_early, found.num_tokens, found.last_hash) == (lease, True, 1280, hashes[-1])
    assert earlier["forkpoint"]["lease"] == 3 and new_lease() != lease


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"prompt": ["a", "b"]}',
        b'{"prompt": [[1], [2]]}',
        b'{"prompt": "a", "prompt_logprobs": 0}',
        b'{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}}',
    ],
)
def test_requests_that_are_not_split(body: bytes) -> None:
    assert prefill_half(body, new_lease()) is None


def test_replicas_of_a_pair_reach_each_other() -> None:
    engine = with_role(EngineConfig.from_flat(model="m"), "kv_producer")
    link = with_addresses(engine, "127.0.0.1", ()).kv_transfer_config
    assert link is not None and link.kv_role == "kv_producer"
    assert link.side_channel == ("127.0.0.1", 0) and link.remote_hosts == ("loopback",)
    link = with_addresses(engine, "10.0.0.1", ("10.0.0.1", "10.0.0.2")).kv_transfer_config
    assert link is not None and link.remote_hosts == ("10.0.0.1", "10.0.0.2") and link.side_channel[0] == "10.0.0.1"
    given = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"remote_hosts": ["10.0.0.0/8"]}}
    chosen = with_role(EngineConfig.from_flat(model="m", kv_transfer_config=given), "kv_consumer")
    link = with_addresses(chosen, "10.0.0.1", ("10.0.0.2",)).kv_transfer_config
    assert link is not None and link.remote_hosts == ("10.0.0.0/8",)
    other = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    with pytest.raises(ConfigError, match="OffloadingConnector is not possible with num_prefill_replicas"):
        with_role(EngineConfig.from_flat(model="m", kv_transfer_config=other), "kv_producer")


def test_without_ray_the_command_says_what_to_install() -> None:
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'ray' else f(n, *a)"
    code = f"{hide}\nimport sys; from forkpoint.cli.main import main; sys.exit(main(['deploy']))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 2 and "pip install 'forkpoint[ray]'" in shown.stderr


def test_each_replica_has_events_of_its_own() -> None:
    options = build_parser().parse_args(["deploy", "--kv-events-config", '{"enable_kv_cache_events": true}'])
    with pytest.raises(ConfigError, match="kv_events_config is not allowed, because each replica"):
        options.command(options)


def test_the_pod_of_the_page_starts_with_flags_that_there_are() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    options = build_parser().parse_args(container["args"])
    assert options.metrics_prefix == "vllm:"
    assert EngineConfig.from_flat(**engine_options(options)).kv_events_config.replay_endpoint == "tcp://*:5558"
