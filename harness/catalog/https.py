"""Downloading one file over https from a short list of hosts.

The host list is checked for the first address and after every redirect; the connection is made
to an address that was itself checked, so a name that resolves to this machine or to a private
network is refused even if it changes between the check and the connection.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from contract.errors import CatalogError

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30.0
REDIRECTS_MAX = 5
FAILURES_MAX = 5
REDIRECT_STATUS = (301, 302, 303, 307, 308)
RETRY_STATUS = (429, 500, 502, 503, 504)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class _TryAgain(Exception):
    """The transfer broke in a way that a new request may mend."""


def is_public(address: str) -> bool:
    """Whether ``address`` is a host on the internet: not loopback, private, link-local, shared,
    reserved or multicast, also when written as an IPv6 address that embeds such an IPv4 one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in NAT64:
            embedded = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if embedded is not None:
            parsed = embedded
    return parsed.is_global and not parsed.is_multicast


def connect_tls(
    host: str,
    port: int,
    context: ssl.SSLContext | None = None,
    allowed: Callable[[str], bool] = is_public,
) -> socket.socket:
    """A verified TLS connection to ``host``. Every address the name has must be ``allowed``, and
    one of exactly those is used. Raises CatalogError for a refused address, OSError otherwise."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in found:
        if not allowed(str(address[0])):
            raise CatalogError(f"{host}: resolves to {address[0]}, which is not a public address")
    context = ssl.create_default_context() if context is None else context
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        raw = socket.socket(family, kind, protocol)
        try:
            raw.settimeout(TIMEOUT_SECONDS)
            raw.connect(address)
            return context.wrap_socket(raw, server_hostname=host)
        except OSError as error:
            raw.close()
            failure = error
    raise failure or OSError(f"{host} has no address")


@dataclass(frozen=True, slots=True)
class Network:
    """What a download may talk to. A host is allowed if it is, or ends in a dot and, a listed one.

    ``connect(host, port)`` gives a connected stream; ``retry_seconds`` is the first pause after a
    broken transfer, doubled each time.
    """

    hosts: tuple[str, ...] = ("huggingface.co", "hf.co")
    port: int = 443
    connect: Callable[[str, int], socket.socket] = connect_tls
    retry_seconds: float = 1.0


def checked_url(url: str, network: Network) -> SplitResult:
    """``url`` in parts; raises CatalogError unless ``network`` allows it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
    except ValueError:
        raise CatalogError(f"{url!r}: not a usable address") from None
    shown = f"{parts.scheme}://{host}"
    if parts.scheme != "https":
        raise CatalogError(f"{shown}: refused: only https is allowed")
    if parts.username is not None or parts.password is not None:
        raise CatalogError(f"{shown}: refused: the address carries a user name")
    if not any(host == allowed or host.endswith(f".{allowed}") for allowed in network.hosts):
        raise CatalogError(f"{shown}: refused: not one of {', '.join(network.hosts)}")
    if port != network.port:
        raise CatalogError(f"{shown}: refused: port {port} instead of {network.port}")
    return parts


def download(url: str, size: int, network: Network) -> Iterator[bytes]:
    """The ``size`` bytes behind ``url`` in pieces, never more.

    A transfer that breaks midway is continued from where it stopped until it fails five times
    with less than a piece gained; what a server sends beyond ``size`` is not read. Raises
    CatalogError.
    """
    received = failures = 0
    while True:
        before = received
        try:
            for piece in _transfer(url, received, size, network):
                received += len(piece)
                yield piece
            return
        except ssl.SSLCertVerificationError as error:
            problem = f"certificate not trusted: {error.verify_message}"
            raise CatalogError(f"{url}: {problem}") from None
        except (_TryAgain, http.client.HTTPException, OSError) as error:
            failures = 1 if received - before >= CHUNK_BYTES else failures + 1
            if received == 0 or failures == FAILURES_MAX:
                raise CatalogError(
                    f"{url}: stopped at {received:,} of {size:,} bytes: {error or type(error)}"
                ) from None
        time.sleep(network.retry_seconds * 2 ** (failures - 1))


def _transfer(url: str, start: int, size: int, network: Network) -> Iterator[bytes]:
    """One request for the bytes from ``start`` on."""
    connection, response = _final_response(url, start, network)
    try:
        _check_answer(url, response, start, size)
        left = size - start
        while left:
            piece = response.read(min(CHUNK_BYTES, left))
            if not piece:
                raise _TryAgain(f"the server stopped {left:,} bytes short")
            left -= len(piece)
            yield piece
    finally:
        response.close()
        connection.close()


def _final_response(
    url: str, start: int, network: Network
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """The answer at the end of the redirects, each of which is checked before it is followed."""
    for _ in range(REDIRECTS_MAX + 1):
        parts = checked_url(url, network)
        connection, response = _request(parts, start, network)
        if response.status not in REDIRECT_STATUS:
            return connection, response
        location = response.getheader("Location")
        response.close()
        connection.close()
        if not location:
            raise CatalogError(f"{url}: redirect without an address")
        try:
            url = urljoin(url, location)
        except ValueError:
            raise CatalogError(f"{url}: redirect to {location!r}: not a usable address") from None
    raise CatalogError(f"{url}: more than {REDIRECTS_MAX} redirects")


def _request(
    parts: SplitResult, start: int, network: Network
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    host = parts.hostname or ""
    connection = http.client.HTTPSConnection(host, network.port, timeout=TIMEOUT_SECONDS)
    connection.sock = network.connect(host, network.port)
    headers = {"User-Agent": "zinc-rt", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", target, headers=headers)
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _check_answer(url: str, response: http.client.HTTPResponse, start: int, size: int) -> None:
    """Raise unless ``response`` is the file, or its part from ``start`` on."""
    if response.status in RETRY_STATUS:
        raise _TryAgain(f"status {response.status} {response.reason}")
    if response.status != (206 if start else 200):
        raise CatalogError(f"{url}: the server answered {response.status} {response.reason}")
    if start and response.getheader("Content-Range") != f"bytes {start}-{size - 1}/{size}":
        raise CatalogError(f"{url}: the server continued at another place than asked")
    length = response.getheader("Content-Length")
    if length is not None and length != str(size - start):
        raise CatalogError(f"{url}: announces {length} bytes, not {size - start:,}")
