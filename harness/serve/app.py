"""The WSGI application: what every request must be, the routes, and one shape for every refusal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import msgspec
from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response as BaseResponse

from contract.errors import TemplateError, TemplateRefused
from harness.serve.embeddings import EmbeddingHandlers
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.faults import log_fault
from harness.serve.gate import OPEN_PATH, HostCheck, check_body
from harness.serve.model_routes import ModelHandlers
from harness.serve.openapi import Route
from harness.serve.page import HEADERS, PageFile, add_page
from harness.serve.pulls import Pulls
from harness.serve.responses import ResponsesHandlers
from harness.serve.routes import ROUTES, Handlers
from harness.serve.service import Began
from harness.serve.serving import Lease, Serving
from harness.serve.tenant_routes import TenantHandlers
from harness.serve.wire import model_named
from harness.tenants import Account

log = logging.getLogger("zinc_rt.serve")
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class AppOptions:
    """``page`` are the files of the pages by path, which need no key: a page asks for one itself.
    ``max_body`` is the longest body in bytes; models are pulled into ``cache_dir``."""

    host_check: HostCheck
    page: Mapping[str, PageFile]
    max_body: int
    version: str
    cache_dir: Path


def make_app(serving: Serving, pulls: Pulls, options: AppOptions) -> Flask:
    """The application of a server."""
    app = Flask("zinc_rt", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = options.max_body
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = False
    general = Handlers(options.version)
    models = ModelHandlers(serving, options.cache_dir, pulls)
    texts = (general, ResponsesHandlers(), EmbeddingHandlers())
    handlers = (*texts, models, TenantHandlers(serving))

    _add_hooks(app, serving, options)
    app.register_error_handler(Exception, _refused)

    def choose(name: str | None) -> None:
        before = g.lease
        g.lease = serving.lease(name)
        g.service = g.lease.service
        before.release()

    for route in ROUTES:
        by_name = serving.by_name and any(hasattr(each, route.name) for each in texts)
        app.add_url_rule(
            route.path,
            route.name,
            _view(
                route,
                _handler(handlers, route.name),
                choose if by_name else None,
            ),
            methods=[route.method],
            provide_automatic_options=False,
        )
    add_page(app, options.page)
    return app


def _add_hooks(app: Flask, serving: Serving, options: AppOptions) -> None:
    """What is done around every request: who asks, which model answers, what is logged."""

    @app.before_request
    def admit() -> None:
        g.began = time.monotonic()
        options.host_check.check(request.environ.get("HTTP_HOST"), request.headers.get("Origin"))
        g.lease = serving.lease()
        g.service = g.lease.service
        if request.path == OPEN_PATH or request.path in options.page:
            return
        serving.refresh()
        g.account = serving.accounts.of(request.headers.get("Authorization"))

    @app.teardown_request
    def release(_: BaseException | None) -> None:
        if "lease" in g:
            g.pop("lease").release()

    @app.after_request
    def note(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if not response.is_streamed:
            _log_access(response.status_code)
        return response


def _refused(error: Exception) -> Response:
    """The answer to a request that failed."""
    began = isinstance(error, Began)
    if isinstance(error, Began):
        error = error.error
    told = _told(error)
    if not isinstance(error, ApiError) and told.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log_fault(f"{request.method} failed", error)
    if isinstance(error, TemplateError) and not isinstance(error, TemplateRefused):
        log.error("%s", error.summary)
    account: Account | None = g.get("account")
    if account is not None and g.get("generates") and not began:
        g.service.reject(account.tenant, told)
    return Response(told.encoded(), told.status, headers=told.headers, mimetype="application/json")


class _Body:
    """The body of a stream, passed on as it is; a ``lease`` lasts as long."""

    def __init__(self, parts: Iterator[bytes], lease: Lease) -> None:
        self._parts = parts
        self._lease = lease

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        """Ends it, whether or not all of it was taken."""
        try:
            if isinstance(self._parts, Generator):
                self._parts.close()
        finally:
            self._lease.release()


def _view(
    route: Route, handle: Callable[..., Any], choose: Callable[[str | None], None] | None
) -> Callable[..., BaseResponse]:
    """What answers a route; ``choose`` lets the model that a body names answer it."""

    def view(**arguments: str) -> BaseResponse:
        if route.body is not None:
            check_body(request.content_type, request.headers.get("Content-Encoding"))
            raw = request.get_data(cache=False)
            arguments["raw"] = raw  # type: ignore[assignment]
            if choose is not None:
                choose(model_named(raw))
        answered = handle(**arguments)
        if isinstance(answered, Response):
            return answered
        if isinstance(answered, dict):
            return Response(msgspec.json.encode(answered), mimetype="application/json")
        if isinstance(answered, bytes):
            return Response(answered, mimetype=route.produces)
        # Streams outlive the request that Flask knows of.
        body = _Body(answered, g.pop("lease"))
        kind = "text/event-stream"
        return Response(body, mimetype=kind, headers=STREAM_HEADERS, direct_passthrough=True)

    return view


def _handler(handlers: Iterable[object], name: str) -> Callable[..., Any]:
    """The method called so, of the one object that has it."""
    (handler,) = (getattr(each, name) for each in handlers if hasattr(each, name))
    return cast(Callable[..., Any], handler)


def _told(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        status = error.code or HTTPStatus.INTERNAL_SERVER_ERROR
        code = HTTPStatus(status).name.lower()
        return ApiError(status, f"{request.method} {request.path[:256]}: {error.name}", code=code)
    return as_api_error(error) or internal_error()


def _log_access(status: int) -> None:
    """One line for each answer, without anything a user wrote."""
    rule = request.url_rule.rule if request.url_rule is not None else "(no such route)"
    account: Account | None = g.get("account")
    tenant = "-" if account is None else account.tenant.name
    took = (time.monotonic() - g.get("began", time.monotonic())) * 1000
    log.info("%s %s %d %s %.0f ms", request.method, rule, status, tenant, took)
