"""What holds of a fleet without Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from forkpoint.cli.options import engine_options
from forkpoint.cli.parser import build_parser
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.fleet.config import FleetConfig
from forkpoint.fleet.metrics import joined_metrics
from forkpoint.fleet.server_process import placed
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
    engine, behind = placed(EngineConfig.from_flat(model="m"), alone, (1, 2, 3), "10.0.0.7")
    assert (behind.host, behind.port, engine.kv_events_config.endpoint) == ("127.0.0.1", 1, "tcp://*:2")
    assert engine.kv_events_config.host == "10.0.0.7"
    for config in (alone, behind):
        for host in answers:
            Hosts(config).check(host.encode())
        for host in refuses:
            with pytest.raises(HTTPError):
                Hosts(config).check(host.encode())


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
