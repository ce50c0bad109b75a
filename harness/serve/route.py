"""A route of the server: a method of a path, the body it takes, and the function that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from contract.errors import RequestError
from contract.types import Tenant
from harness.serve.caller import Caller
from harness.serve.errors import ApiError, with_client_name
from harness.serve.wire import Prepare, decode

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, and the ``function`` that answers. In the path ``<name>`` is a part
    without a slash, ``<path:name>`` all that is left.

    ``function`` gets an ``HttpRequest``, of a route with a body also the body, and the parts of the
    path by their names. If it ``generates``, it answers a body without HTTP: it gets a service, the
    body, a tenant and a caller, and a refused request is counted. ``body``: the type that validates
    bodies, which ``prepare`` rewrites first; with ``may_be_empty`` no bytes are an empty object.
    ``produces``: content type of the answer. ``errors``: makes the body of an error, of the
    schema ``error_schema``. ``streams``: content type of a stream. ``strict``: unknown fields are
    refused. ``admin``: for admins only. ``sent_name``: maps a rewritten field to the field that the
    client sent. ``client_name``: maps a field of the request that ``function`` translates a body to
    to its name in the client's API."""

    method: str
    path: str
    function: Callable[..., Any]
    summary: str
    body: type[Any] | None = None
    generates: bool = False
    produces: str = "application/json"
    errors: Callable[[ApiError], bytes] = ApiError.encoded
    streams: str = EVENT_STREAM
    error_schema: str = "Error"
    strict: bool = False
    admin: bool = False
    may_be_empty: bool = False
    prepare: Prepare | None = None
    sent_name: Callable[[bytes, str], str] | None = None
    client_name: Callable[[str], str] | None = None

    @property
    def name(self) -> str:
        """The name of its function, by which OpenAPI documents know it."""
        return self.function.__name__

    def decoded(self, raw: bytes, ignored: list[str] | None) -> Any:
        """The bytes of a body as ``body``. Its ignored fields are added to ``ignored``; with None
        they are refused. Raises ApiError."""
        assert self.body is not None
        raw = raw or b"{}" if self.may_be_empty else raw
        return decode(raw, self.body, None if self.strict else ignored, self.prepare)

    def answer_to(
        self, server: Any, raw: bytes, tenant: Tenant, caller: Caller, ignored: list[str] | None
    ) -> Any:
        """What a function that generates answers to the bytes of a body, see ``decoded``. Raises
        ApiError, and what the function raises."""
        names = caller.client_name if self.sent_name is None else partial(self.sent_name, raw)
        try:
            body = self.decoded(raw, ignored)
            names = self.client_name or names
            return self.function(server, body, tenant, caller.naming(names))
        except (ApiError, RequestError) as error:
            raise with_client_name(error, names) from None
