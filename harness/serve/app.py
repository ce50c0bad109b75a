"""The WSGI application: checks every request, calls its route, and writes errors in one form."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from flask import Flask, Request, Response, g, request
from flask.globals import request_ctx
from flask.sessions import NullSession, SessionInterface
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import MapAdapter, Rule

from contract.errors import TemplateError, TemplateRefused
from harness.host.faults import log_fault
from harness.serve.anthropic.routes import AnthropicHandlers
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.gate import KEYLESS_PATHS, HostCheck, caller_of
from harness.serve.light_answers import LightAnswer, LightContext, LightRequest, as_answer, body_of
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
from harness.serve.server_models import ServerModels
from harness.serve.service import FailedWhileRunning
from harness.serve.tenant_routes import TenantHandlers
from harness.serve.wire import model_named
from harness.tenants import Account

log = logging.getLogger("zinc_rt.serve")
IGNORED_HEADER = "X-Zinc-Ignored"
"""Response header that lists the ignored fields of a request."""
MAX_LISTED = 2048
"""Most characters of that header."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
VERSION = "/v1"
NOT_SERVED = ("/v1/files", "/v1/batches")
LONGEST_PATH, LIKENESS = 64, 0.88
"""A path of at most that many characters is compared with the routes, and how alike it must be."""
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
ALWAYS = tuple(HEADERS.items())
ALWAYS_NAMES = frozenset(name.lower() for name in (*HEADERS, "Request-Id", "X-Request-Id"))
NO_SESSION = NullSession()
Answering = Callable[[Any, Request], "Response | LightAnswer"]
"""Answers a request. Its first argument has the fields that ``_App._admit`` sets."""


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
        self.direct: dict[str, tuple[Answering, Rule]] = {}
        """Routes that are answered without Flask, by path."""

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return func

    def create_url_adapter(self, request: Request | None) -> MapAdapter | None:
        if request is None:
            return None
        # No rule depends on the host, and HostCheck has checked it.
        where = ("localhost", "/", "", "http", request.path, request.method)
        return MapAdapter(self.url_map, *where)

    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        found = self.direct.get(environ["PATH_INFO"])
        posted = environ["REQUEST_METHOD"] == "POST" and "wsgi.input_terminated" in environ
        if found is not None and posted and "HTTP_ORIGIN" not in environ:
            return self._directly(environ, start_response, *found)

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_response(status, [*headers, *_always(headers, g.request_id)], *more)

        return super().wsgi_app(environ, start)

    def _directly(self, environ: Any, start_response: Any, answer: Answering, rule: Rule) -> Any:
        """Answer a request without Flask, which takes longer than all other checks."""
        here = LightContext()
        incoming: Any = LightRequest(environ, rule, self._options.max_body)
        try:
            try:
                self._admit(here, incoming)
                answered = answer(here, incoming)
            except Exception as error:
                answered = _refused(error, here, incoming)
            self._note(answered, here, incoming)
            if isinstance(answered, LightAnswer):
                answered.headers += _of_every_answer(here.request_id)
            else:
                answered.headers.extend(_always([*answered.headers], here.request_id))
            return answered(environ, start_response)
        finally:
            self._release(here)

    def full_dispatch_request(self) -> Response:
        here, incoming = g._get_current_object(), request_ctx.request
        try:
            answer = self._admit(here, incoming)
            if answer is None:
                answer = cast(Response, self.dispatch_request())
        except Exception as error:
            answer = _refused(error, here, incoming)
        self._note(answer, here, incoming)
        return answer

    def do_teardown_request(self, exc: BaseException | None = None) -> None:
        self._release(g)

    @staticmethod
    def _release(here: Any) -> None:
        lease = here.pop("lease", None)
        if lease is not None:
            lease.release()

    def _admit(self, here: Any, incoming: Request) -> Response | None:
        """Check a request, and set the fields of ``g`` that routes read."""
        here.began = time.monotonic()
        header, options, models = incoming.environ.get, self._options, self._models
        asked_id = header("HTTP_X_REQUEST_ID", "")
        sound = REQUEST_ID.fullmatch(asked_id) is not None
        here.request_id = asked_id if sound else "req_" + random_bytes(12).hex()
        here.ignored = None if options.reject_unknown else []
        options.host_check.check_request(incoming)
        here.lease = models.lease()
        here.service = here.lease.service
        if incoming.method == "OPTIONS" and header("HTTP_ACCESS_CONTROL_REQUEST_METHOD"):
            # A browser asks before it sends a page's request, and without its key.
            return Response(status=HTTPStatus.NO_CONTENT)
        if incoming.path.rstrip("/") in KEYLESS_PATHS or incoming.path in options.page:
            return None
        models.refresh()
        keys = header("HTTP_AUTHORIZATION"), header("HTTP_X_API_KEY")
        here.account = models.accounts.of(*keys)
        return None

    def _note(self, response: Response | LightAnswer, here: Any, incoming: Request) -> None:
        """Add the headers that depend on the request, and log an answer that is not streamed."""
        origin = incoming.environ.get("HTTP_ORIGIN")
        if origin is not None and self._options.host_check.shares_with(origin):
            response.headers.extend([*_shared(origin).items()])
        if here.ignored:
            response.headers.extend([(IGNORED_HEADER, _listed(here.ignored))])
        if not response.is_streamed:
            _log_access(response.status_code, here, incoming)


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

    def failed(error: Exception) -> Response:
        return _refused(error, g._get_current_object(), request_ctx.request)

    app.register_error_handler(Exception, failed)

    def choose(here: Any, body: bytes) -> None:
        if not (models.names.files or here.account.models):
            return
        name, lora = model_named(body)
        allowed, active = here.account.models, models.service.model
        name = models.names.permitted(name, allowed, active, lora)
        if not models.names.files:
            return
        before = here.lease
        here.lease = models.lease(name)
        here.service = here.lease.service
        before.release()

    for route in ROUTES:
        answer, reads_text = None, any(hasattr(each, route.name) for each in texts)
        if route.answer is not None:
            answer = _answering(route, choose)
            view = _answer_view(answer)
        else:
            view = _view(route, _handler(handlers, route.name), choose if reads_text else None)
        paths = {route.name: route.path}
        if route.name in SHORT:
            paths[f"{route.name}:short"] = route.path.removeprefix(VERSION)
        for name, path in paths.items():
            app.add_url_rule(
                path, name, view, methods=[route.method], provide_automatic_options=False
            )
            if answer is not None:
                app.direct[path] = answer, Rule(path, endpoint=name)
    add_page(app, options.page)
    return app


def _always(headers: Iterable[tuple[str, str]], request_id: str) -> list[tuple[str, str]]:
    """The headers of every answer, without those that it has."""
    always = _of_every_answer(request_id)
    given = {name.lower() for name, _ in headers}
    if given.isdisjoint(ALWAYS_NAMES):
        return always
    return [pair for pair in always if pair[0].lower() not in given]


def _of_every_answer(request_id: str) -> list[tuple[str, str]]:
    return [*ALWAYS, ("Request-Id", request_id), ("X-Request-Id", request_id)]


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


def _refused(error: Exception, here: Any, incoming: Request) -> Response:
    """The answer to a request that failed."""
    began = isinstance(error, FailedWhileRunning)
    if isinstance(error, FailedWhileRunning):
        error = error.error
    refusal = _refusal_of(error, incoming)
    if not isinstance(error, ApiError) and refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log_fault(f"{incoming.method} failed", error)
    if isinstance(error, TemplateError) and not isinstance(error, TemplateRefused):
        log.error("%s", error.summary)
    account: Account | None = here.get("account")
    if account is not None and here.get("generates") and not began:
        here.service.reject(account.tenant, refusal)
    encode = _encoder(incoming.url_rule, incoming.path)
    return Response(
        encode(refusal), refusal.status, headers=refusal.headers, mimetype="application/json"
    )


def _view(
    route: Route, handle: Callable[..., Any], choose: Callable[[Any, bytes], None] | None
) -> Callable[..., Response | LightAnswer]:
    """The Flask view of a route. ``choose`` selects the model that a body names."""

    def view(**arguments: str) -> Response | LightAnswer:
        here = g._get_current_object()
        if route.body is not None:
            raw = body_of(request_ctx.request)
            arguments["raw"] = raw  # type: ignore[assignment]
            if choose is not None:
                choose(here, raw)
        return as_answer(handle(**arguments), route, here)

    return view


def _answering(route: Route, choose: Callable[[Any, bytes], None]) -> Answering:
    """A function that answers the requests of a route by its ``answer``, without Flask."""

    def answering(here: Any, incoming: Request) -> Response | LightAnswer:
        raw = body_of(incoming)
        choose(here, raw)
        here.generates = True
        caller = caller_of(incoming.environ, here.ignored)
        answered = route.answer_to(here.service, raw, here.account.tenant, caller, here.ignored)
        return as_answer(answered, route, here)

    return answering


def _answer_view(answer: Answering) -> Callable[[], Response | LightAnswer]:
    return lambda: answer(g._get_current_object(), request_ctx.request)


def _handler(handlers: Iterable[object], name: str) -> Callable[..., Any]:
    """The method of a route's name in one of ``handlers``."""
    (handler,) = (getattr(each, name) for each in handlers if hasattr(each, name))
    return cast(Callable[..., Any], handler)


def _refusal_of(error: Exception, incoming: Request) -> ApiError:
    if isinstance(error, HTTPException):
        status = error.code or HTTPStatus.INTERNAL_SERVER_ERROR
        code = HTTPStatus(status).name.lower()
        text = f"{incoming.method} {incoming.path[:256]}: {error.name}"
        if status == HTTPStatus.NOT_FOUND:
            text += f"; {_advice(incoming.path)}"
        methods = error.valid_methods if isinstance(error, MethodNotAllowed) else None
        if methods:
            text += f"; it takes {' and '.join(sorted({*methods} - {'HEAD', 'OPTIONS'}))}"
        return ApiError(status, text, code=code, allow=tuple(sorted(methods or ())))
    return as_api_error(error) or internal_error()


def _advice(path: str) -> str:
    """What to ask instead of a path that is no route."""
    if path.startswith(NOT_SERVED):
        return "files and batches are not served; zinc-rt run-batch answers a file of requests"
    if len(path) <= LONGEST_PATH:
        near = get_close_matches(path, [route.path for route in ROUTES], n=1, cutoff=LIKENESS)
        if near:
            return f"did you mean {near[0]}?"
    return "GET /openapi.json lists the routes"


def _log_access(status: int, here: Any, incoming: Request) -> None:
    """Log one line for each answer, without any text of a user."""
    rule = incoming.url_rule.rule if incoming.url_rule is not None else "(no such route)"
    account: Account | None = here.get("account")
    tenant = "-" if account is None else account.tenant.name
    took = (time.monotonic() - here.began) * 1000
    log.info("%s %s %d %s %.0f ms", incoming.method, rule, status, tenant, took)
