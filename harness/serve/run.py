"""A server from its beginning to its end: opened, announced, drained."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from contract.errors import ConfigError
from harness.progress import NullProgress, Progress
from harness.serve.accounts import Accounts
from harness.serve.app import AppOptions, make_app
from harness.serve.gate import HostCheck, is_loopback
from harness.serve.ledger_store import LedgerStore
from harness.serve.listen import HttpServer, ListenOptions
from harness.serve.metrics import Metrics
from harness.serve.model import ModelOptions, ServedModel, open_model
from harness.serve.page import read_page
from harness.serve.service import Service

MAX_BODY_BYTES = 8 << 20
"""Longest body of a request: a context of a million tokens has room in it."""
log = logging.getLogger("zinc_rt.serve")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything about a server; the settings of the same names say what each means. ``replicas``
    answer, under Ray Serve; with 0 this process does."""

    path: Path
    model: ModelOptions
    ledger: Path
    host: str = "127.0.0.1"
    port: int = 0
    tenants: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    replicas: int = 0


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    service: Service
    http: HttpServer
    url: str

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and let those under way end for so long."""
        self.service.draining.set()
        self.service.model.driver.close(seconds)
        self.http.close()


@contextmanager
def running(options: ServeOptions, progress: Progress | None = None) -> Iterator[Running]:
    """A server that answers until the context ends, which cuts what is under way.

    Raises ConfigError for an address without keys that others can reach, and for files and ports
    that cannot be used; and what opening a model raises.
    """
    accounts = Accounts(options.tenants)
    if not accounts.keyed and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines and nobody needs a key; "
            "give --tenants FILE (see `zinc-rt tenants`), or stay on 127.0.0.1"
        )
    with ExitStack() as owned:
        ledger = owned.enter_context(LedgerStore(options.ledger))
        model = _opened(options, accounts, owned, progress or NullProgress())
        service = Service(model, accounts, ledger, Metrics(model.name, model.driver))
        app = make_app(
            service,
            AppOptions(
                host_check=HostCheck((*options.allowed_hosts, options.host)),
                page=read_page(),
                max_body=MAX_BODY_BYTES,
                version=_version(),
            ),
        )
        engines = options.replicas or 1
        at_once = engines * (model.limits.slots + options.model.queue_depth)
        http = HttpServer(app, ListenOptions(options.host, options.port, at_once, MAX_BODY_BYTES))
        http.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        server = Running(service, http, f"http://{host}:{http.port}")
        try:
            yield server
        finally:
            server.drain(0.0)


def _opened(
    options: ServeOptions, accounts: Accounts, owned: ExitStack, progress: Progress
) -> ServedModel:
    if options.replicas:
        from harness.serve.replicas.open import open_replicas

        return open_replicas(options.path, options.model, options.tenants, options.replicas, owned)
    return open_model(options.path, options.model, accounts.tenants, owned, progress)


def run_until_told(server: Running, drain_seconds: float) -> bool:
    """Answer until SIGTERM, which drains, or SIGINT, which does not; a second signal cuts a drain.

    Gives whether it was SIGINT.
    """
    told = threading.Event()
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        told.set()
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        told.wait()
        interrupted = received[0] == signal.SIGINT
        if not interrupted:
            log.info("draining for up to %.0f s; another signal ends it", drain_seconds)
        server.drain(0.0 if interrupted else drain_seconds)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return interrupted


def _version() -> str:
    try:
        return version("zinc-rt")
    except PackageNotFoundError:
        return "0"
