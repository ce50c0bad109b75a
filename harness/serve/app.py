"""The WSGI application: checks every request, calls its route, and writes errors in one form."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
from flask import Flask, Request, Response, g, request
from flask.globals import request_ctx
from flask.sessions import NullSession, SessionInterface
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge
from werkzeug.routing import MapAdapter, Rule
from werkzeug.utils import get_content_type

from contract.errors import TemplateError, TemplateRefused
from harness.host.faults import log_fault
from harness.serve.anthropic.routes import AnthropicHandlers
from harness.serve.errors import ApiError, as_api_error, internal_error, naming_fields
from harness.serve.gate import KEYLESS_PATH, HostCheck, caller_of_request, check_body
from harness.serve.llama_cpp.routes import LlamaCppHandlers
from harness.serve.model_routes import ModelHandlers
from harness.serve.ollama.routes import OllamaHandlers
from harness.serve.openapi import Route
from harness.serve.page import HEADERS, PageFile, add_page
from harness.serve.pulls import Pulls
from harness.serve.random_pool import random_bytes
from harness.serve.receipts.routes import ReceiptHandlers
from harness.serve.responses.routes import RESPONSES_ROUTES, ResponsesHandlers
from harness.serve.routes import ROUTES, Handlers
from harness.serve.server_models import Lease, ServerModels
from harness.serve.service import FailedWhileRunning
from harness.serve.tenant_routes import TenantHandlers
from harness.serve.wire import decode, model_named
from harness.tenants import Account

log = logging.getLogger("zinc_rt.serve")
IGNORED_HEADER = "X-Zinc-Ignored"
"""Response header that lists the ignored fields of a request."""
MAX_LISTED = 2048
"""Most characters of that header."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
VERSION = "/v1"
SHORT = (
    *("chat", "complete", "embed", "rerank", "models", "one_model"),
    *("message", "count_message"),
    *(route.name for route in RESPONSES_ROUTES),
)
"""Routes that are also served without ``/v1``, which some clients leave out."""
ERRORS = {route.name: route.errors for route in ROUTES}
DIALECTS = {
    begin: route.errors
    for begin in ("/api/", "/v1/messages")
    for route in ROUTES
    if route.path.startswith(begin)
}
"""The error format for unknown paths with these prefixes."""
STREAM_HEADERS = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))
ALWAYS = tuple(HEADERS.items())
ALWAYS_NAMES = frozenset(name.lower() for name in (*HEADERS, "Request-Id", "X-Request-Id"))
NO_SESSION = NullSession()


@dataclass(frozen=True, slots=True)
class AppOptions:
    """``page``: the files of the web pages by path; they need no key. ``max_body``: longest body in
    bytes. ``cache_dir``: folder of pulled models. ``reject_unknown``: refuse unknown fields instead
    of ignoring them."""

    host_check: HostCheck
    page: Mapping[str, PageFile]
    max_body: int
    version: str
    cache_dir: Path
    reject_unknown: bool = False


class _NoSessions(SessionInterface):
    """Flask's sessions, of which no route has any."""

    def open_session(self, app: Flask, request: Request) -> NullSession:
        return NO_SESSION


class _App(Flask):
    """Checks before every request, headers and the access log after it. Skips what Flask does for
    sessions, signals, blueprints and coroutines, since no route has any."""

    def __init__(self, models: ServerModels, options: AppOptions) -> None:
        super().__init__("zinc_rt", static_folder=None)
        self._models, self._options = models, options
        self.config["MAX_CONTENT_LENGTH"] = options.max_body
        self.session_interface = _NoSessions()
        self.url_map.merge_slashes = False
        self.url_map.strict_slashes = False

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return func

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        if request is None:
            return None
        # No rule depends on the host, and HostCheck has checked it.
        where = ("localhost", "/", "", "http", request.path, request.method)
        return MapAdapter(self.url_map, *where)

    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            request_id = g.request_id
            always = (*ALWAYS, ("Request-Id", request_id), ("X-Request-Id", request_id))
            given = {name.lower() for name, _ in headers}
            if not given.isdisjoint(ALWAYS_NAMES):
                always = tuple(pair for pair in always if pair[0].lower() not in given)
            return start_response(status, [*headers, *always], *more)

        return super().wsgi_app(environ, start)

    def full_dispatch_request(self) -> Response:
        here, asked = g._get_current_object(), request_ctx.request
        try:
            answer = self._admit(here, asked)
            if answer is None:
                answer = cast(Response, self.dispatch_request())
        except Exception as error:
            answer = _refused(error)
        return self._noted(answer, here, asked)

    def do_teardown_request(self, exc: BaseException | None = None) -> None:
        if "lease" in g:
            g.pop("lease").release()

    def _admit(self, here: Any, asked: Request) -> Response | None:
        """Check a request, and set the fields of ``g`` that routes read."""
        here.began = time.monotonic()
        header, options, models = asked.environ.get, self._options, self._models
        asked_id = header("HTTP_X_REQUEST_ID", "")
        sound = REQUEST_ID.fullmatch(asked_id) is not None
        here.request_id = asked_id if sound else "req_" + random_bytes(12).hex()
        here.ignored = None if options.reject_unknown else []
        options.host_check.check_request(asked)
        here.lease = models.lease()
        here.service = here.lease.service
        if asked.method == "OPTIONS" and header("HTTP_ACCESS_CONTROL_REQUEST_METHOD"):
            # A browser asks before it sends a page's request, and without its key.
            return Response(status=HTTPStatus.NO_CONTENT)
        if asked.path.rstrip("/") == KEYLESS_PATH or asked.path in options.page:
            return None
        models.refresh()
        keys = header("HTTP_AUTHORIZATION"), header("HTTP_X_API_KEY")
        here.account = models.accounts.of(*keys)
        return None

    def _noted(self, response: Response, here: Any, asked: Request) -> Response:
        """``response`` with the headers that depend on the request; a whole one is logged."""
        origin = asked.environ.get("HTTP_ORIGIN")
        if origin is not None and self._options.host_check.shares_with(origin):
            response.headers.extend([*_shared(origin).items()])
        if here.ignored:
            response.headers.extend([(IGNORED_HEADER, _listed(here.ignored))])
        if not response.is_streamed:
            _log_access(response.status_code, here, asked)
        return response


def make_app(models: ServerModels, pulls: Pulls, options: AppOptions) -> Flask:
    """The application of a server."""
    app = _App(models, options)
    general = Handlers(options.version)
    model_routes = ModelHandlers(models, options.cache_dir, pulls)
    ollama = OllamaHandlers(models, pulls, options.version)
    accounts, slots = models.accounts, models.service.slots
    responses = models.service.responses

    def only_these(_: object = None) -> None:
        slots.only(accounts.tenants)
        responses.forget_others(accounts.tenants, accounts.path)

    only_these()
    accounts.on_change.append(only_these)
    dialects = (ResponsesHandlers(), AnthropicHandlers(), ollama)
    texts = (general, LlamaCppHandlers(), *dialects)
    handlers = (*texts, model_routes, TenantHandlers(models), ReceiptHandlers())

    app.register_error_handler(Exception, _refused)

    def choose(body: bytes) -> None:
        if not (models.names.files or g.account.models):
            return
        name, lora = model_named(body)
        allowed, active = g.account.models, models.service.model
        name = models.names.permitted(name, allowed, active, lora)
        if not models.names.files:
            return
        before = g.lease
        g.lease = models.lease(name)
        g.service = g.lease.service
        before.release()

    for route in ROUTES:
        reads_text = route.answer is not None or any(hasattr(each, route.name) for each in texts)
        view = _view(route, _handler(handlers, route), choose if reads_text else None)
        paths = {route.name: route.path}
        if route.name in SHORT:
            paths[f"{route.name}:short"] = route.path.removeprefix(VERSION)
        for name, path in paths.items():
            app.add_url_rule(
                path, name, view, methods=[route.method], provide_automatic_options=False
            )
    add_page(app, options.page)
    return app


def _shared(origin: str) -> dict[str, str]:
    """CORS headers: pages of ``origin`` may send requests and read the answers."""
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Expose-Headers": f"Retry-After, X-Request-Id, {IGNORED_HEADER}",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }


def _listed(names: Iterable[str]) -> str:
    """Field names as one header value. Clients choose the names, so they are percent-encoded."""
    return ", ".join(quote(name, safe="[]().") for name in names)[:MAX_LISTED]


def _encoder(rule: Rule | None, path: str) -> Callable[[ApiError], bytes]:
    """The function that writes an error for a route, or for a path that is no route."""
    if rule is not None:
        return ERRORS.get(rule.endpoint.partition(":")[0], ApiError.encoded)
    begin = next((begin for begin in DIALECTS if path.startswith(begin)), None)
    return ApiError.encoded if begin is None else DIALECTS[begin]


def _refused(error: Exception) -> Response:
    """The answer to a request that failed."""
    began = isinstance(error, FailedWhileRunning)
    if isinstance(error, FailedWhileRunning):
        error = error.error
    refusal = _refusal_of(error)
    if not isinstance(error, ApiError) and refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log_fault(f"{request.method} failed", error)
    if isinstance(error, TemplateError) and not isinstance(error, TemplateRefused):
        log.error("%s", error.summary)
    account: Account | None = g.get("account")
    if account is not None and g.get("generates") and not began:
        g.service.reject(account.tenant, refusal)
    encode = _encoder(request.url_rule, request.path)
    return Response(
        encode(refusal), refusal.status, headers=refusal.headers, mimetype="application/json"
    )


class _Answer:
    """An answer with status 200, lighter than Flask's ``Response``. Not for routes that answer
    HEAD."""

    status_code = 200

    def __init__(
        self, body: Iterable[bytes], kind: str, *headers: tuple[str, str], is_streamed: bool = False
    ) -> None:
        self.headers = [("Content-Type", kind), *headers]
        self.is_streamed = is_streamed
        self._body = body

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", self.headers)
        return self._body


def _full_body(body: bytes, kind: str) -> _Answer:
    return _Answer([body], kind, ("Content-Length", str(len(body))))


class _Body:
    """The body of a stream. It holds ``lease`` until it is closed."""

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
    route: Route, handle: Callable[..., Any], choose: Callable[[bytes], None] | None
) -> Callable[..., Response | _Answer]:
    """The Flask view of a route. ``choose`` selects the model that a body names."""
    events, posted = get_content_type(route.streams, "utf-8"), route.method == "POST"

    def view(**arguments: str) -> Response | _Answer:
        if route.body is not None:
            asked = request_ctx.request
            check_body(asked.environ)
            raw = _body_of(asked)
            arguments["raw"] = raw  # type: ignore[assignment]
            if choose is not None:
                choose(raw)
        answered = handle(**arguments)
        if isinstance(answered, Response):
            return answered
        if isinstance(answered, dict | list):
            answered = msgspec.json.encode(answered)
            if posted:
                return _full_body(answered, "application/json")
            return Response(answered, mimetype="application/json")
        if isinstance(answered, bytes):
            return Response(answered, mimetype=route.produces)
        # Streams outlive the request that Flask knows of.
        body = _Body(answered, g.pop("lease"))
        if posted:
            return _Answer(body, events, *STREAM_HEADERS, is_streamed=True)
        kind, headers = route.streams, Headers(STREAM_HEADERS)
        return Response(body, mimetype=kind, headers=headers, direct_passthrough=True)

    return view


def _body_of(asked: Request) -> bytes:
    """The body of a request. Raises RequestEntityTooLarge."""
    most = asked.max_content_length
    if most is None or not asked.environ.get("wsgi.input_terminated"):
        return asked.get_data(cache=False)
    # It has arrived: the server in front reads it before it calls.
    raw: bytes = asked.environ["wsgi.input"].read(most + 1)
    if len(raw) > most:
        raise RequestEntityTooLarge
    return raw


def _handler(handlers: Iterable[object], route: Route) -> Callable[..., Any]:
    """The function that handles a route: its ``answer``, or the method of its name in one of
    ``handlers``."""
    answer, kind, prepare, sent_name = route.answer, route.body, route.prepare, route.sent_name
    if answer is None or kind is None:
        name = route.name
        (handler,) = (getattr(each, name) for each in handlers if hasattr(each, name))
        return cast(Callable[..., Any], handler)

    def handle(raw: bytes) -> Any:
        here = g._get_current_object()
        here.generates = True
        caller = caller_of_request()
        if sent_name is not None:
            caller = replace(caller, client_name=partial(sent_name, raw))
        with naming_fields(caller.client_name):
            body = decode(raw, kind, here.ignored, prepare)
            return answer(here.service, body, here.account.tenant, caller)

    return handle


def _refusal_of(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        status = error.code or HTTPStatus.INTERNAL_SERVER_ERROR
        code = HTTPStatus(status).name.lower()
        text = f"{request.method} {request.path[:256]}: {error.name}"
        methods = error.valid_methods if isinstance(error, MethodNotAllowed) else None
        return ApiError(status, text, code=code, allow=tuple(sorted(methods or ())))
    return as_api_error(error) or internal_error()


def _log_access(status: int, here: Any, asked: Request) -> None:
    """Log one line for each answer, without any text of a user."""
    rule = asked.url_rule.rule if asked.url_rule is not None else "(no such route)"
    account: Account | None = here.get("account")
    tenant = "-" if account is None else account.tenant.name
    took = (time.monotonic() - here.began) * 1000
    log.info("%s %s %d %s %.0f ms", asked.method, rule, status, tenant, took)
