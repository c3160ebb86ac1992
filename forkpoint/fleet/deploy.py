"""The application on Ray Serve: a gateway and replicas."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig

import forkpoint
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError, EngineStoppedError
from forkpoint.fleet.config import FleetConfig
from forkpoint.fleet.gateway import Gateway
from forkpoint.fleet.handover import with_role
from forkpoint.fleet.replica import Replica
from forkpoint.fleet.router import RestorableRouter
from forkpoint.obs.logs import LOGGER
from forkpoint.server.config import ServerConfig
from forkpoint.server.listener import listen

NAME: Final = "forkpoint"
MAX_WAITING: Final = 1 << 16  # most requests that a gateway holds at once
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0


def application(engine: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> Any:
    """Return the application for `serve.run`. Ray must be connected."""
    count: dict[str, Any] = {"num_replicas": fleet.num_replicas}
    if fleet.autoscaling_config:
        count = {"autoscaling_config": dict(fleet.autoscaling_config)}
    prefill: Any = None
    if fleet.num_prefill_replicas:
        first, engine = with_role(engine, "kv_producer"), with_role(engine, "kv_consumer")
        prefill = _replicas("PrefillReplica", first, server, fleet, num_replicas=fleet.num_prefill_replicas)
    replicas = _replicas("Replica", engine, server, fleet, **count)
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_WAITING,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=server.shutdown_timeout_s,
    )
    return gateway.bind(replicas, fleet.router == "prefix-aware", prefill, fleet.prefill_min_tokens)


def _replicas(name: str, engine: EngineConfig, server: ServerConfig, fleet: FleetConfig, **count: Any) -> Any:
    """Return a deployment of replicas, bound to their options."""
    deployment = serve.deployment(
        Replica,
        name=name,
        ray_actor_options=dict(fleet.ray_actor_options) or _devices(engine.tensor_parallel_size),
        max_ongoing_requests=fleet.max_ongoing_requests,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=server.shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class=RestorableRouter, request_router_kwargs={"router": fleet.router}
        ),
        **count,
    )
    return deployment.bind(engine, server, fleet.ray_address is None)


def deploy(engine: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> int:
    """Start the application. On a local cluster, serve until Ctrl-C or SIGTERM. Returns the exit code, 0.

    On a running cluster the application stays. Deploying again replaces its replicas one after another. Raises
    ConfigError, and EngineStoppedError if a replica cannot start.
    """
    check_rays_options(fleet)
    root = str(Path(forkpoint.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    own, more = fleet.ray_address is None, dict[str, Any]()
    if own:
        more = {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
        with listen(server):  # Ray takes seconds to find out, and explains it with tracebacks
            pass
    # Without an address Ray would join a cluster that runs here, or that RAY_ADDRESS names.
    ray.init(fleet.ray_address or "local", **more)
    try:
        serve.start(http_options=HTTPOptions(host=server.host, port=server.port))
        _run(application(engine, server, fleet), server.root_path or "/")
        LOGGER.info("ready: replicas of %s on http://%s:%d", engine.model, server.host, server.port)
        if own:
            _wait_for_signal()
            limit = server.shutdown_timeout_s
            LOGGER.info("stopping: open requests may take %g s to end; Ctrl-C again ends them at once", limit)
            _delete_application()
    finally:
        ray.shutdown()
    return 0


def check_rays_options(fleet: FleetConfig) -> None:
    """Raise ConfigError for options that Ray Serve would refuse or ignore."""
    known = sorted(AutoscalingConfig.model_fields)
    for name in fleet.autoscaling_config:
        if name not in known:
            raise ConfigError(f"autoscaling_config: {name!r} is unknown; fields are {', '.join(known)}")
    for option in ("autoscaling_config", "ray_actor_options"):
        given = dict(getattr(fleet, option))
        if not given:
            continue
        try:
            serve.deployment(Replica, **{option: given})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{option}: {' '.join(str(error).split())}") from None


def _devices(count: int) -> dict[str, Any]:
    """Return the resources of a replica: a GPU for each of `count` ranks, or a CPU if the cluster has no GPU."""
    return {"num_gpus": count} if ray.cluster_resources().get("GPU") else {"num_cpus": count}


def _run(app: Any, path: str) -> None:
    """Start the application, and wait until all replicas are ready. Raises EngineStoppedError if one cannot start."""
    try:
        serve.run(app, name=NAME, route_prefix=path)
    except RuntimeError as error:
        raise EngineStoppedError(f"{error} The lines of its replicas above say why") from error


def _delete_application() -> None:
    """Delete the application, and wait until its open requests have ended or their time is over.

    Ray's `serve.shutdown` would end clients' connections at once.
    """
    while NAME in serve.status().applications:
        with contextlib.suppress(TimeoutError):  # after 60 s, which may be less than the requests have
            serve.delete(NAME)


def _wait_for_signal() -> None:
    """Wait for Ctrl-C or SIGTERM. A second one has its effect again."""
    asked = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: asked.set()) for number in numbers]
    while not asked.wait(1.0):  # with a timeout, because signals are not handled during a wait without one
        pass
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
