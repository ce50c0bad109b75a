"""A client's request while it is answered."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from harness.serve.caller import CALLER, Caller
from harness.serve.errors import ApiError
from harness.serve.gate import check_body
from harness.serve.model import ServedModel
from harness.serve.pulls import Pulls
from harness.serve.random_pool import random_bytes
from harness.serve.route import Route
from harness.serve.server_models import Lease, ServerModels
from harness.serve.service import Service
from harness.tenants import Account

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What routes use of the server. ``cache_dir``: folder of pulled models."""

    models: ServerModels
    pulls: Pulls
    version: str
    cache_dir: Path


class HttpRequest:
    """A request of a client to a server. ``environ`` is WSGI's, ``path`` has no slash at its end.

    The application sets: ``route``, None for what is no route, and ``arguments``, the parts of the
    path that the route names; ``methods`` of the path; ``thing``, for a path that names one of
    several things, the route that gets it and its arguments; ``account``, who asks, unless no key
    is needed; ``lease``, which keeps the model that answers in memory; ``generates``, whether a
    refusal is counted. ``ignored``: names of ignored fields; None if they are refused."""

    route: Route | None = None
    methods: set[str]
    thing: tuple[Route, dict[str, str]] | None = None
    account: Account
    lease: Lease | None = None
    generates = False

    def __init__(
        self, server: ServerParts, environ: dict[str, Any], ignored: list[str] | None
    ) -> None:
        self.server, self.environ, self.ignored = server, environ, ignored
        self.began = time.monotonic()
        self.method: str = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"].encode("latin-1").decode(errors="replace")
        self.path: str = path.removesuffix("/") or "/"
        sent_id = environ.get("HTTP_X_REQUEST_ID", "")
        sound = REQUEST_ID.fullmatch(sent_id) is not None
        self.id: str = sent_id if sound else "req_" + random_bytes(12).hex()
        self.arguments: dict[str, str] = {}

    @property
    def known_account(self) -> Account | None:
        """Who asks; None before the key was checked, or if no key is needed."""
        return vars(self).get("account")

    @property
    def service(self) -> Service:
        """The service of the model that answers."""
        assert self.lease is not None
        return self.lease.service

    @property
    def model(self) -> ServedModel:
        """The model that answers."""
        return self.service.model

    @property
    def query(self) -> dict[str, str]:
        """The arguments behind the path; of several with one name the first."""
        return dict(parse_qsl(self.environ.get("QUERY_STRING", ""), keep_blank_values=True)[::-1])

    @property
    def caller(self) -> Caller:
        """The client. Without a server it counts as connected."""
        known: Caller = self.environ.get(CALLER, Caller())
        ignored = [] if self.ignored is None else self.ignored
        return Caller(known.gone, known.begin, known.send_at_once, ignored)

    def body(self, max_bytes: int) -> bytes:
        """The JSON body, which has arrived: the server in front reads it before it calls. Raises
        ApiError."""
        check_body(self.environ)
        raw: bytes = self.environ["wsgi.input"].read(max_bytes + 1)
        if len(raw) > max_bytes:
            problem = f"{self.method} {self.path[:256]}: Request Entity Too Large"
            raise ApiError(413, problem, code="request_entity_too_large")
        return raw

    def release(self) -> None:
        """End the lease, if it has not passed to a stream."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
