"""The life of a server: it opens models, listens, answers, and drains."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contract.errors import CatalogError, ConfigError, RequestError, ZincError, system_errors_as
from harness import catalog
from harness.host.disk import forgetting
from harness.host.engine_thread import EngineThread
from harness.host.options import Recording
from harness.host.remote.process import EngineProcess
from harness.progress import SILENT, Progress
from harness.serve.accounts import Accounts
from harness.serve.app import App, AppOptions
from harness.serve.gate import HostCheck, is_loopback
from harness.serve.ledger_store import LedgerStore
from harness.serve.listen import HttpServer, ListenOptions
from harness.serve.llama_cpp.slot_files import SlotFolder
from harness.serve.llama_cpp.slots import SlotTable
from harness.serve.model import Engines, ModelOptions, ServedModel, open_model
from harness.serve.page import read_page
from harness.serve.pulls import Pulls
from harness.serve.receipts.store import ReceiptStore
from harness.serve.responses.store import ResponseStore
from harness.serve.server_models import Opener, ServerModels
from harness.serve.service import Service
from reference.model.open import open_model as open_gguf_model

LEFT: list[ExitStack] = []
"""What a thread that hangs may use until the process ends."""
MAX_BODY_BYTES = 8 << 20
"""Longest body of a request. It has room for a context of a million tokens."""
log = logging.getLogger("zinc_rt.serve")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All options of a server; the settings of the same names explain them.

    ``beside``: models loaded when a request names them, by name. ``record``: folder for a trace of
    each loaded model. ``replicas``: number of Ray Serve replicas, 0 for this process.
    ``engine_process``: engines run in a child process.
    ``reject_unknown``: refuse unknown fields. ``cors``: origins whose pages may send requests, "*"
    for all. ``receipts``: folder of receipts. ``slot_save_path``: folder for saved slots.
    ``state``: file of stored responses."""

    path: Path
    model: ModelOptions
    ledger: Path
    cache_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    tenants: Path | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)
    allowed_hosts: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    replicas: int = 0
    engine_process: bool = False
    record: Path | None = None
    reject_unknown: bool = False
    cors: tuple[str, ...] = ()
    receipts: Path | None = None
    slot_save_path: Path | None = None
    state: Path | None = None


@dataclass(frozen=True)
class Running:
    """A running server."""

    models: ServerModels
    http: HttpServer
    url: str

    @property
    def service(self) -> Service:
        """The service of the active model."""
        return self.models.service

    def drain(self, seconds: float) -> None:
        """Refuse new requests and let running ones end for up to ``seconds``."""
        deadline = time.monotonic() + seconds
        self.models.close(seconds)
        self.http.close(deadline - time.monotonic())


@contextmanager
def running(
    options: ServeOptions,
    progress: Progress = SILENT,
    about_to_listen: Callable[[], None] = lambda: None,
) -> Iterator[Running]:
    """A server that answers until the context ends; then running requests are cancelled. Calls
    ``about_to_listen`` when it is ready to accept connections. If the engine hangs at the end, its
    files are closed, and the rest is left until the process ends, for which ``os._exit`` is needed.

    Raises ConfigError for unusable files and ports, and for an address that other machines can
    reach while no API keys are needed; and what opening a model raises."""
    accounts = Accounts(options.tenants)
    if options.slot_save_path is not None and options.model.session.prefix_cache == 0:
        raise ConfigError("--slot-save-path saves what is cached, and --prefix-cache is 0")
    if not accounts.keyed and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines and nobody needs a key; "
            "give --tenants FILE (see `zinc-rt tenants add`), or stay on 127.0.0.1"
        )
    with ExitStack() as files, ExitStack() as owned:
        ledger = files.enter_context(LedgerStore(options.ledger))
        slots = responses = None
        if options.slot_save_path is not None:
            slots = SlotTable(SlotFolder(options.slot_save_path))
        if options.state is not None:
            responses = files.enter_context(ResponseStore(options.state))
        _check_model_headers(options.beside)
        models = owned.enter_context(
            _open_models(options, accounts, ledger, progress, owned, files)
        )
        if slots is not None:
            models.service.slots = slots
        if responses is not None:
            models.service.responses = responses
        pulls = owned.enter_context(closing(Pulls(options.cache_dir)))
        app = App(models, pulls, _app_options(options))
        engines = options.replicas or 1
        at_once = engines * (models.service.model.limits.slots + options.model.session.queue_depth)
        listen = ListenOptions(options.host, options.port, at_once, MAX_BODY_BYTES)
        http = HttpServer(app, listen)
        about_to_listen()
        http.start()
        host = reachable_host(options.host)
        server = Running(models, http, f"http://{host}:{http.port}")
        try:
            yield server
        finally:
            server.drain(0.0)
            if models.hangs:
                LEFT.append(owned.pop_all())


def _app_options(options: ServeOptions) -> AppOptions:
    return AppOptions(
        host_check=HostCheck((*options.allowed_hosts, options.host), options.cors),
        page=read_page(),
        max_body=MAX_BODY_BYTES,
        version=_version(),
        cache_dir=options.cache_dir,
        reject_unknown=options.reject_unknown,
    )


def _check_model_headers(models: Mapping[str, Path]) -> None:
    """Read the headers of models that are loaded on demand. Raises ConfigError."""
    for name, path in models.items():
        try:
            open_gguf_model(path).close()
        except ZincError as error:
            raise ConfigError(f"--beside: {name} could not be loaded: {error}") from None


def _open_models(
    options: ServeOptions,
    accounts: Accounts,
    ledger: LedgerStore,
    progress: Progress,
    owned: ExitStack,
    files: ExitStack,
) -> ServerModels:
    receipts = None
    if options.receipts is not None:
        receipts = files.enter_context(ReceiptStore(options.receipts))
    if options.replicas:
        open_them, first = _replicas(options), options.model.name
        return ServerModels(options.path, first, open_them, accounts, ledger, receipts=receipts)
    cached = options.model.session.disk_cache
    thread: Engines
    if options.engine_process:
        if sys.platform == "win32":
            raise ConfigError("--engine-process does not work on Windows")
        thread = EngineProcess(lambda: accounts.tenants, cached)
    else:
        thread = EngineThread(accounts.tenants, forget=forgetting(cached))
    owned.enter_context(thread)

    def open_it(path: Path, name: str, owned: ExitStack, taken: int) -> ServedModel:
        recording = Recording(None if options.record is None else _new_trace(options.record, name))
        session = replace(
            options.model.session,
            recording=recording,
            digests=options.receipts is not None,
            saves_slots=options.slot_save_path is not None,
        )
        if session.memory_budget is not None:
            session = replace(session, memory_budget=max(0, session.memory_budget - taken))
        if path != options.path:
            # The adapters belong to the model that the server was started with.
            session = replace(session, lora=())
        named = replace(options.model, name=name, session=session)
        return open_model(path, named, thread, owned, progress)

    def opened(path: Path, name: str) -> ServerModels:
        began_with = options.model.name, options.path
        beside = options.beside
        return ServerModels(
            path, name, open_it, accounts, ledger, began_with, beside, thread, receipts
        )

    activated = ledger.activated(options.path)
    if activated is not None:
        try:
            return opened(_installed(activated, options.cache_dir), activated)
        except ZincError as error:
            log.warning("%s was activated and cannot answer now: %s", activated, error)
    return opened(options.path, options.model.name)


def _installed(name: str, cache_dir: Path) -> Path:
    """The file of a model that was pulled. Raises CatalogError."""
    found = catalog.find_pulled(name, cache_dir)
    if found is None:
        raise CatalogError("it is not installed any more")
    return found.path


def _replicas(options: ServeOptions) -> Opener:
    from harness.serve.replicas.open import open_replicas

    for flag, given, lack in (
        ("--record", options.record, "leave no trace"),
        ("--slot-save-path", options.slot_save_path, "save no slots"),
        ("--beside", options.beside, "have one model"),
        ("--lora", options.model.session.lora, "have no adapters"),
        ("--engine-process", options.engine_process, "are processes of their own"),
    ):
        if given:
            raise ConfigError(f"{flag} is for a server without --ray: replicas {lack}")

    def open_them(path: Path, name: str, owned: ExitStack, taken: int) -> ServedModel:
        if path != options.path:
            raise RequestError("model", "is not changed while replicas answer; restart the server")
        session = replace(options.model.session, digests=options.receipts is not None)
        named = replace(options.model, name=name, session=session)
        return open_replicas(path, named, options.tenants, options.replicas, owned)

    return open_them


def _new_trace(folder: Path, name: str) -> Path:
    """The path of a new trace file of a model. Raises ConfigError."""
    with system_errors_as(f"{folder}: cannot record there"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[-80:]
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return folder / f"{began}-{os.getpid()}-{time.monotonic_ns()}-{stem}.trace"


def _version() -> str:
    try:
        return version("zinc-rt")
    except PackageNotFoundError:
        return "0"


ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation. Connecting a UDP socket to them sends nothing."""


def reachable_host(host: str) -> str:
    """The host for a link to a server that listens on ``host``. For 0.0.0.0 and :: this is the
    machine's own address, or loopback without a network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address(_own_address(address.version == 6))
    return f"[{address}]" if address.version == 6 else str(address)


def _own_address(six: bool) -> str:
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE[family], 9))
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return "::1" if six else "127.0.0.1"
