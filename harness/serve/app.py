"""The WSGI application: checks every request, calls its route, and writes errors in one form."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from contract.errors import TemplateError, TemplateRefused
from harness.host.faults import log_fault
from harness.host.structured.grammars import GrammarsUnavailable
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.gate import KEYLESS_PATHS, READY, HostCheck
from harness.serve.http_answer import HttpAnswer, as_answer
from harness.serve.http_request import HttpRequest, ServerParts
from harness.serve.page import HEADERS, PageFile
from harness.serve.pulls import Pulls
from harness.serve.responses.routes import RESPONSES_ROUTES
from harness.serve.route import Route
from harness.serve.routes import ROUTES
from harness.serve.server_models import ServerModels
from harness.serve.service import FailedWhileRunning
from harness.serve.wire import model_named

log = logging.getLogger("zinc_rt.serve")
IGNORED_HEADER = "X-Zinc-Ignored"
"""Response header that lists the ignored fields of a request."""
MAX_LISTED = 2048
"""Most characters of that header."""
VERSION = "/v1"
NOT_SERVED = ("/v1/files", "/v1/batches")
LONGEST_PATH, LIKENESS = 64, 0.88
"""A path of at most that many characters is compared with the routes, and how alike it must be."""
WITHOUT_VERSION = (
    *("chat", "complete", "embed", "rerank", "models", "one_model"),
    *("message", "count_message"),
    *(route.name for route in RESPONSES_ROUTES),
)
"""Routes that are also served without ``/v1``, which some clients leave out."""
DIALECTS = {
    begin: route.errors
    for begin in ("/api/", "/v1/messages")
    for route in ROUTES
    if route.path.startswith(begin)
}
"""The error format for unknown paths with these prefixes."""
PART = re.compile(r"<(path:)?(\w+)>")
"""A part of the path of a route that stands for a text."""
PLAIN: dict[str, dict[str, Route]] = {}
PATTERNS: list[tuple[re.Pattern[str], Route]] = []
"""The routes by their path and method, and those whose paths have parts that stand for texts."""


def _paths() -> Iterator[tuple[str, Route]]:
    for route in ROUTES:
        yield route.path, route
        if route.name in WITHOUT_VERSION:
            yield route.path.removeprefix(VERSION), route


for _path, _route in _paths():
    if PART.search(_path):
        _text = PART.sub(lambda part: f"(?P<{part[2]}>{'.' if part[1] else '[^/]'}+)", _path)
        PATTERNS.append((re.compile(_text), _route))
    else:
        PLAIN.setdefault(_path, {})[_route.method] = _route


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


class App:
    """The application of a server: call it with WSGI's environment."""

    def __init__(self, models: ServerModels, pulls: Pulls, options: AppOptions) -> None:
        self._models, self._options = models, options
        self._server = ServerParts(models, pulls, options.version, options.cache_dir)
        pages = {path: {"GET": _page_route(path, file)} for path, file in options.page.items()}
        self._plain = PLAIN | pages
        accounts, service = models.accounts, models.service
        slots, responses = service.slots, service.responses

        def forget_slots(_: object = None) -> None:
            slots.only(accounts.tenants)

        def forget_responses(_: object = None) -> None:
            responses.forget_others(accounts.tenants, accounts.path)

        for forget in (forget_slots, forget_responses):
            forget()
            accounts.on_change.append(forget)

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        incoming = HttpRequest(self._server, environ, None if self._options.reject_unknown else [])
        try:
            try:
                self._find_route(incoming)
                answer = self._admit(incoming) or self._answer(incoming)
            except Exception as error:
                answer = _refused(error, incoming)
            self._finish(answer, incoming)
            return answer(environ, start_response)
        finally:
            incoming.release()

    def _find_route(self, incoming: HttpRequest) -> None:
        """Set the route of a request and the parts of its path, or the methods of its path."""
        path, method = incoming.path, "GET" if incoming.method == "HEAD" else incoming.method
        plain = self._plain.get(path, {})
        incoming.route, incoming.methods = plain.get(method), set(plain)
        for pattern, route in () if incoming.route is not None else PATTERNS:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if route.method == method:
                incoming.route, incoming.arguments = route, found.groupdict()
                return
            incoming.methods.add(route.method)
            if route.method == "GET" and route.path.endswith(">"):
                incoming.thing = route, found.groupdict()

    def _admit(self, incoming: HttpRequest) -> HttpAnswer | None:
        """Check the host and the key of a request. Returns the answer of one that only asks what
        a page may send. Raises ApiError."""
        header, models = incoming.environ.get, self._models
        self._options.host_check.check(incoming.environ)
        incoming.lease = models.lease()
        if incoming.method == "OPTIONS" and header("HTTP_ACCESS_CONTROL_REQUEST_METHOD"):
            # A browser asks before it sends a page's request, and without its key.
            return HttpAnswer(b"", "", HTTPStatus.NO_CONTENT)
        page = header("PATH_INFO") in self._options.page
        if not page and incoming.path not in KEYLESS_PATHS:
            models.refresh()
            keys = header("HTTP_AUTHORIZATION"), header("HTTP_X_API_KEY")
            incoming.account = models.accounts.of(*keys)
        return None

    def _answer(self, incoming: HttpRequest) -> HttpAnswer:
        """Call the route. Raises ApiError, and what the route raises."""
        route = incoming.route
        if route is None:
            raise _no_route(incoming)
        if route.admin and not incoming.account.admin:
            raise ApiError(403, "this is for admins; ask with the key of one", code="admin_only")
        if route.generates or incoming.path == READY:
            self._reopen(incoming)
        given: tuple[Any, ...] = ()
        if route.body is not None:
            raw = incoming.body(self._options.max_body)
            if not route.strict:
                self._choose_model(incoming, raw)
            if route.generates:
                incoming.generates = True
                who = incoming.account.tenant, incoming.caller
                answered = route.answer_to(incoming.service, raw, *who, incoming.ignored)
                return as_answer(answered, route, incoming)
            given = (route.decoded(raw, incoming.ignored),)
        return as_answer(route.function(incoming, *given, **incoming.arguments), route, incoming)

    def _reopen(self, incoming: HttpRequest) -> None:
        """Open the model again for this request if the process of its engine ended."""
        failed = incoming.service.model.driver.failure is not None
        if failed and self._models.reopen():
            before, incoming.lease = incoming.lease, self._models.lease()
            if before is not None:
                before.release()

    def _choose_model(self, incoming: HttpRequest, raw: bytes) -> None:
        """Let the model answer that a body names. Raises ApiError."""
        names, allowed = self._models.names, incoming.account.models
        if not (names.files or allowed):
            return
        name, lora = model_named(raw)
        name = names.permitted(name, allowed, self._models.service.model, lora)
        if names.files:
            before, incoming.lease = incoming.lease, self._models.lease(name)
            if before is not None:
                before.release()

    def _finish(self, answer: HttpAnswer, incoming: HttpRequest) -> None:
        """Add the headers that depend on the request, and log an answer that is not streamed."""
        ids = {"Request-Id": incoming.id, "X-Request-Id": incoming.id}
        answer.headers = HEADERS | ids | answer.headers
        origin = incoming.environ.get("HTTP_ORIGIN")
        if origin is not None and self._options.host_check.shares_with(origin):
            answer.headers |= _shared(origin, incoming.environ)
        if incoming.ignored:
            answer.headers[IGNORED_HEADER] = _listed(incoming.ignored)
        if not answer.is_streamed:
            _log_access(answer.status, incoming)


def _page_route(path: str, file: PageFile) -> Route:
    return Route("GET", path, lambda asked: file.answer(asked.environ), "A page.")


def _no_route(incoming: HttpRequest) -> ApiError:
    """The refusal of a path that is no route, or of a method that the path does not have."""
    methods = incoming.methods if _is_there(incoming) else set(PLAIN.get(incoming.path, ()))
    asked = f"{incoming.method} {incoming.path[:256]}"
    if not methods:
        problem = f"{asked}: Not Found; {_advice(incoming.path)}"
        return ApiError(HTTPStatus.NOT_FOUND, problem, code="not_found")
    problem = f"{asked}: Method Not Allowed; it takes {' and '.join(sorted(methods))}"
    allow = tuple(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
    return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, problem, code="method_not_allowed", allow=allow)


def _is_there(incoming: HttpRequest) -> bool:
    """False if the last part of the path was taken for the name of a thing, and there is none of
    that name: it may be an action that other servers have."""
    if incoming.thing is None:
        return True
    route, arguments = incoming.thing
    try:
        route.function(incoming, **arguments)
    except ApiError as error:
        return error.status != HTTPStatus.NOT_FOUND
    return True


def _advice(path: str) -> str:
    """What to ask instead of a path that is no route."""
    if path.startswith(NOT_SERVED):
        return "files and batches are not served; zinc-rt run-batch answers a file of requests"
    if len(path) <= LONGEST_PATH:
        # Imported here, because hardly any request needs it.
        from difflib import get_close_matches

        near = get_close_matches(path, [route.path for route in ROUTES], n=1, cutoff=LIKENESS)
        if near:
            return f"did you mean {near[0]}?"
    return "GET /openapi.json lists the routes"


def _shared(origin: str, environ: Mapping[str, Any]) -> dict[str, str]:
    """CORS headers: pages of ``origin`` may send requests and read the answers."""
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS", "*"),
        "Access-Control-Expose-Headers": f"Retry-After, X-Request-Id, {IGNORED_HEADER}",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }


def _listed(names: Iterable[str]) -> str:
    """Field names as one header value. Clients choose the names, so they are percent-encoded."""
    return ", ".join(quote(name, safe="[]().") for name in names)[:MAX_LISTED]


def _refused(error: Exception, incoming: HttpRequest) -> HttpAnswer:
    """The answer to a request that failed."""
    began = isinstance(error, FailedWhileRunning)
    if isinstance(error, FailedWhileRunning):
        error = error.error
    refusal = as_api_error(error) or internal_error()
    if not isinstance(error, ApiError) and refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log_fault(f"{incoming.method} failed", error)
    if isinstance(error, TemplateError) and not isinstance(error, TemplateRefused):
        log.error("%s", error.summary)
    if isinstance(error, GrammarsUnavailable):
        log.error("%s", error)
    if incoming.generates and not began:
        incoming.service.reject(incoming.account.tenant, refusal)
    if incoming.route is not None:
        encode = incoming.route.errors
    else:
        formats = (DIALECTS[begin] for begin in DIALECTS if incoming.path.startswith(begin))
        encode = next(formats, ApiError.encoded)
    return HttpAnswer(encode(refusal), status=refusal.status, headers=refusal.headers)


def _log_access(status: int, incoming: HttpRequest) -> None:
    """Log one line for each answer, without any text of a user."""
    path = "(no such route)" if incoming.route is None else incoming.route.path
    account = incoming.known_account
    tenant = "-" if account is None else account.tenant.name
    took = (time.monotonic() - incoming.began) * 1000
    log.info("%s %s %d %s %.0f ms", incoming.method, path, status, tenant, took)
