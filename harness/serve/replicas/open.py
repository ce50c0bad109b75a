"""A model on several replicas, each an engine in its own process.

Ray Serve starts the replicas, replaces dead ones, and routes by ``PrefixRouter``. This process has
the tokenizer, the template and the HTTP server, and computes nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from contract.errors import ZincError, system_words
from harness.extras import optional_libraries
from harness.host.hosted import HostedModel, Placement
from harness.host.open import prepare_session
from harness.serve.model import ModelOptions, ServedModel, served_session
from harness.startup import python_path

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from harness.host.stream_driver import SharedDriver

APPLICATION = "zinc-rt"
HEALTH_SECONDS = 5.0
"""Seconds between two questions whether a replica is well; three bad answers end it."""
OBJECT_STORE_BYTES = 128 << 20
"""Ray's default is a third of the memory, but messages here are small."""


class RayUnavailable(ZincError):
    """Ray does not start."""

    exit_code = 1


def open_replicas(
    path: Path, options: ModelOptions, tenants: Path | None, count: int, owned: ExitStack
) -> ServedModel:
    """Start ``count`` replicas, which end when ``owned`` closes. RAY_ADDRESS names a cluster to
    use; without it one is started here. ``tenants`` is the tenants file. Raises ConfigError if Ray
    is not installed, RayUnavailable, and what opening a session raises."""
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
    # One whose engine hangs ends nothing in time.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    with optional_libraries():
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    from harness.serve.replicas.replica import Replica

    environment = {"PYTHONPATH": python_path()}
    here = {
        "num_cpus": count + 1,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    with _own_signals():
        try:
            ray.init(
                log_to_driver=False,
                runtime_env={"env_vars": environment},
                **({} if "RAY_ADDRESS" in os.environ else here),
            )
        except Exception as error:  # Ray raises whatever it meets.
            words = system_words(error).strip().rstrip(".")
            raise RayUnavailable(f"--ray: Ray does not start: {words}; start it again") from error
        owned.callback(ray.shutdown)
        serve.start(proxy_location="Disabled")
        owned.callback(serve.shutdown)
    deployment = serve.deployment(
        Replica,
        name="replica",
        num_replicas=count,
        max_ongoing_requests=options.session.slots + options.session.queue_depth + 1,
        ray_actor_options={"num_cpus": 1},
        health_check_period_s=HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="harness.serve.replicas.router.PrefixRouter"
        ),
    )
    return serve.run(
        deployment.bind(path.resolve(), options, tenants and tenants.resolve()),
        name=APPLICATION,
        route_prefix=None,
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers: Ray's end it at once, and its running answers with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
