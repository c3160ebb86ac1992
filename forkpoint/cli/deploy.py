"""`forkpoint deploy`."""

from __future__ import annotations

import argparse
import importlib.util
import os

from forkpoint.cli.model import announce, with_model
from forkpoint.cli.options import engine_options, option_values
from forkpoint.cli.serve import server_config
from forkpoint.config import EngineConfig, KVEventsConfig
from forkpoint.demo.model import MODEL_NAME
from forkpoint.errors import ConfigError
from forkpoint.fleet.config import FleetConfig


def deploy(options: argparse.Namespace) -> int:
    """Serve replicas of the model on Ray Serve. Raises ConfigError where ray is not installed."""
    fleet = FleetConfig(**option_values(options, FleetConfig))
    engine = engine_options(options)
    server = server_config(options, options.model_tag or engine.get("model") or MODEL_NAME)
    config = EngineConfig.from_flat(**with_model(engine, options.model_tag))
    if config.kv_events_config != KVEventsConfig():
        raise ConfigError("kv_events_config: each replica publishes events at an address of its own; leave it out")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("replicas run on Ray Serve, which is not installed: pip install 'forkpoint[ray]'")
    if server.uds is not None or server.ssl_certfile is not None:
        raise ConfigError("replicas are served over plain HTTP on a port; leave --uds and --ssl-certfile out")
    announce(config.model, config.log_level)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from forkpoint.fleet.deploy import deploy as run

    return run(config, server, fleet)
