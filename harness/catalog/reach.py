"""Limits what a pull may connect to: hosts of the hub, over https, at public addresses.

Names are checked before every request, redirects included. A name is resolved once, and the
connection goes to one of the checked addresses, so a name that resolves differently the next time
gains nothing. The user chose the host in HF_ENDPOINT, so its address may be private."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from urllib.parse import SplitResult
from urllib.request import getproxies

import httpcore2
import httpx2

from contract.errors import CatalogError

HOSTS = ("huggingface.co", "hf.co")
"""The hub's hosts; their subdomains are allowed too."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


Endpoint = Callable[[], SplitResult]
"""Returns the present address of the hub."""


def make_client(endpoint: Endpoint) -> httpx2.Client:
    """An HTTP client that connects to the hub at ``endpoint`` and nothing else.

    A refused connection raises CatalogError. If a proxy is set, the proxy connects, and only names
    can be checked here."""

    def check(request: httpx2.Request) -> None:
        url = request.url
        if url.netloc.decode() != endpoint().netloc:
            check_url(url.scheme, url.host)

    transport = None if getproxies() else _CheckedTransport(endpoint)
    return httpx2.Client(
        follow_redirects=True, timeout=None, transport=transport, event_hooks={"request": [check]}
    )


def check_url(scheme: str, host: str) -> None:
    """Raise CatalogError unless the scheme is https and the host belongs to the hub."""
    if scheme != "https":
        raise CatalogError(f"{scheme}://{host}: refused: only https is used")
    if not is_hub_host(host):
        raise CatalogError(f"{host}: refused: it is no host of the hub")


def is_hub_host(host: str) -> bool:
    """Whether a host is one of HOSTS or a subdomain of one."""
    return any(host == known or host.endswith(f".{known}") for known in HOSTS)


def is_public(address: str) -> bool:
    """Whether an address is public, and so is every address embedded in it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast for each in (parsed, *_inner(parsed)))


def _inner(address: Address) -> Iterable[Address]:
    """The addresses embedded in an IPv6 address, to which its packets are translated on their
    way."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in inner if each is not None]


class _CheckedBackend(httpcore2.SyncBackend):
    """Connects only to public addresses, and to a host set instead of the hub."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        chosen = host == self._endpoint().hostname and not is_hub_host(host)
        target = host if chosen else _public_address(host, port)
        return super().connect_tcp(target, port, timeout, local_address, socket_options)


class _CheckedTransport(httpx2.HTTPTransport):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(), network_backend=_CheckedBackend(endpoint)
        )


def _public_address(host: str, port: int) -> str:
    """The address of ``host`` to connect to; raises CatalogError if any of its addresses is
    private."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore2.ConnectError(f"{host}: {error.strerror or error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise CatalogError(f"{host}: refused: its address is {address}, which is not public")
    return addresses[0]
