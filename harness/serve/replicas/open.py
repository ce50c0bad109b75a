"""A model on several replicas, each an engine in its own process.

Ray Serve starts the replicas, replaces dead ones, and routes by ``PrefixRouter``. This process has
the tokenizer, the template and the HTTP server, and computes nothing."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from harness.extras import optional_libraries
from harness.host.hosted import HostedModel, Placement
from harness.host.open import prepare_session
from harness.serve.model import ModelOptions, ServedModel, served_session
from harness.startup import python_path

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from harness.host.stream_driver import SharedDriver

APPLICATION = "zinc-rt"
OBJECT_STORE_BYTES = 128 << 20
"""Ray's default is a third of the memory, but messages here are small."""


def open_replicas(
    path: Path, options: ModelOptions, tenants: Path | None, count: int, owned: ExitStack
) -> ServedModel:
    """Start ``count`` replicas, which end when ``owned`` closes. RAY_ADDRESS names a cluster to
    use; without it one is started here. ``tenants`` is the tenants file. Raises ConfigError if Ray
    is not installed, and what opening a session raises."""
    prepared = prepare_session(path, served_session(options.session), owned)
    handle = _deployed(path, options, tenants, count, owned)
    from harness.serve.replicas.driver import ReplicatedDriver

    driver = cast("SharedDriver", ReplicatedDriver(handle))
    placed = Placement.of(prepared)
    hosted = HostedModel.behind(
        driver, prepared.model, prepared.template, placed, options.session, owned
    )
    device = f"{count} replicas of {hosted.device}"
    return ServedModel.named(replace(hosted, device=device), path, options)


def _deployed(
    path: Path, options: ModelOptions, tenants: Path | None, count: int, owned: ExitStack
) -> DeploymentHandle:
    # No usage statistics are sent unless the operator asks for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with optional_libraries():
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    from harness.serve.replicas.replica import Replica

    environment = {"PYTHONPATH": python_path()}
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, runtime_env={"env_vars": environment})
    else:
        ray.init(
            num_cpus=count + 1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
    owned.callback(ray.shutdown)
    serve.start(proxy_location="Disabled")
    owned.callback(serve.shutdown)
    deployment = serve.deployment(
        Replica,
        name="replica",
        num_replicas=count,
        max_ongoing_requests=options.session.slots + options.session.queue_depth + 1,
        ray_actor_options={"num_cpus": 1},
        request_router_config=RequestRouterConfig(
            request_router_class="harness.serve.replicas.router.PrefixRouter"
        ),
    )
    return serve.run(
        deployment.bind(path.resolve(), options, tenants and tenants.resolve()),
        name=APPLICATION,
        route_prefix=None,
    )
