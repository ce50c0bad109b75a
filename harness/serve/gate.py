"""Checks of every request before its route runs: host, origin, content type and key."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from harness.serve.errors import ApiError

READY = "/ready"
KEYLESS_PATHS = ("/health", READY)
"""The API paths that need no key: probes and load balancers have none."""
JSON_TYPE = "application/json"
FORM_TYPE = "application/x-www-form-urlencoded"
"""The content type of ``curl -d`` where no header names another, and of forms in pages."""
BROWSER_HEADERS = tuple(
    f"HTTP_{name}" for name in ("ORIGIN", "REFERER", "SEC_FETCH_SITE", "SEC_FETCH_MODE", "COOKIE")
)
"""Browsers send at least one of these headers with every body from a page of another site."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostCheck:
    """Accepts requests by the host name they are sent to. This prevents DNS rebinding: a page of
    another site can make its own name resolve to this machine, but the browser still sends that
    name. IP addresses are always accepted."""

    def __init__(self, names: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """``names``: accepted host names besides localhost and the machine's name. ``origins``:
        other origins whose pages may read answers; "*" is all."""
        self._origins = frozenset(origin.rstrip("/") for origin in origins)
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def check(self, environ: Mapping[str, Any]) -> None:
        """Raises ApiError 403 for an unknown host name, and for a page of another origin. HTTP/1.0
        has no Host header, and browsers do not use it: such a request without a header is
        accepted."""
        host, origin = environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN")
        if host is None and origin is None and environ.get("SERVER_PROTOCOL") == "HTTP/1.0":
            return
        name = hostname_of(f"//{host}") if host else None
        if name is None or not self._accepts(name):
            raise ApiError(
                403,
                "this server does not answer to the name in the Host header; "
                "start it with --allowed-hosts NAME if it should",
                code="host_not_allowed",
            )
        own = origin is None or urlsplit(f"//{host}").netloc == _netloc(origin)
        if not own and not self.shares_with(origin):
            raise ApiError(403, "pages of other origins are not served", code="origin_not_allowed")

    def shares_with(self, origin: str | None) -> bool:
        """Whether pages of another origin may read what this server answers."""
        return origin is not None and ("*" in self._origins or origin in self._origins)

    def _accepts(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def check_body(environ: Mapping[str, Any]) -> None:
    """Raises ApiError 415 for a body that is not plain JSON. A page of another site cannot send
    JSON without a preflight request. A body without a content type, or with the one that curl
    names by itself, is accepted if no browser sent it, which BROWSER_HEADERS tell."""
    kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    encoding = environ.get("HTTP_CONTENT_ENCODING")
    by_program = kind in ("", FORM_TYPE) and not any(name in environ for name in BROWSER_HEADERS)
    if not by_program and kind != JSON_TYPE:
        raise ApiError(
            415, f"send the header Content-Type: {JSON_TYPE}", code="unsupported_media_type"
        )
    if encoding and encoding.lower() != "identity":
        raise ApiError(415, "send the body uncompressed", code="unsupported_encoding")


@lru_cache(maxsize=64)
def hostname_of(url: str) -> str | None:
    """The host of a URL in lower case; None for a URL without a well-formed host."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        if parts.username is not None or parts.path not in ("", "/"):
            return None
        return parts.hostname
    except ValueError:
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None
