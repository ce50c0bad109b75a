"""Where a pull may go: the hub's hosts, at public addresses, whatever a redirect or a name says."""

import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2
import pytest

from contract.errors import CatalogError
from harness.catalog import reach
from harness.catalog.reach import check_url, is_public, make_client
from tests.harness.hub_server import Hub, send, serving_hub

PUBLIC = "93.184.215.14"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as server:
        server.files["org/moved"] = {"model.gguf": b"GGUF"}
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """Name to addresses, with spaces between those of one answer, one for every time it is asked
    for; other names as they are."""
    known: dict[str, list[str]] = {}
    real: Callable[..., list[Any]] = socket.getaddrinfo

    def resolve(host: str, port: int, *rest: Any, **options: Any) -> list[Any]:
        if host not in known:
            return real(host, port, *rest, **options)
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            (families[":" in address], socket.SOCK_STREAM, 6, "", (address, port))
            for address in known[host].pop(0).split()
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_hosts_that_may_be_reached():
    for host in ("huggingface.co", "hf.co", "cdn-lfs.huggingface.co", "cas-bridge.xethub.hf.co"):
        check_url("https", host)
    for scheme, host in (
        ("http", "huggingface.co"),
        ("ftp", "hf.co"),
        ("file", ""),
        ("https", "evilhf.co"),
        ("https", "hf.co.evil.test"),
        ("https", "127.0.0.1"),
        ("https", "169.254.169.254"),
        ("https", "localhost"),
        ("https", ""),
    ):
        with pytest.raises(CatalogError, match="refused"):
            check_url(scheme, host)


def test_public_addresses():
    assert is_public(PUBLIC)
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public(f"64:ff9b::{PUBLIC}")
    for address in (
        "127.0.0.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "192.0.2.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0",
        "fd00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "ff02::1", "localhost", "",
    ):  # fmt: skip
        assert not is_public(address), address


@pytest.mark.parametrize(
    "target",
    [
        *("https://evil.test/x", "https://169.254.169.254/latest/meta-data"),
        *("https://localhost/x", "https://[::1]/x", "http://huggingface.co/x"),
        "ftp://huggingface.co/x",
    ],
)
def test_no_redirect_leads_elsewhere(hub, target):
    hub.body["model.gguf"] = lambda handler: send(handler, b"", 302, Location=target)
    url = f"{hub.address}/org/moved/resolve/main/model.gguf"
    with (
        make_client(lambda: urlsplit(hub.address)) as client,
        pytest.raises((CatalogError, httpx2.UnsupportedProtocol), match=r"refused|unsupported"),
    ):
        client.get(url)


def test_a_name_at_a_private_address_is_refused(names):
    """Also the hub's own: it is not chosen by whoever runs this."""
    endpoint = urlsplit("https://huggingface.co")
    for host in ("huggingface.co", "cdn-lfs.hf.co"):
        for address in ("127.0.0.1", "10.1.2.3", "::ffff:127.0.0.1", f"{PUBLIC} 127.0.0.1"):
            names[host] = [address]
            with (
                make_client(lambda: endpoint) as client,
                pytest.raises(CatalogError, match="which is not public"),
            ):
                client.get(f"https://{host}/x")


def test_the_address_that_was_checked_is_connected_to(names, monkeypatch):
    """A name that means another machine the next time it is asked for (DNS rebinding)."""
    connected = []

    def connect(self: object, host: str, *rest: object) -> httpcore2.NetworkStream:
        connected.append(host)
        raise httpcore2.ConnectError("far enough")

    monkeypatch.setattr(httpcore2.SyncBackend, "connect_tcp", connect)
    names["cdn-lfs.hf.co"] = [PUBLIC, "127.0.0.1"]
    with (
        make_client(lambda: urlsplit("https://huggingface.co")) as client,
        pytest.raises(httpx2.ConnectError),
    ):
        client.get("https://cdn-lfs.hf.co/x")
    assert connected == [PUBLIC]


def test_a_hub_of_ones_own_may_be_anywhere(hub):
    """The control of the tests above: without the check of addresses a private one is reached."""
    with make_client(lambda: urlsplit(hub.address)) as client:
        assert client.get(f"{hub.address}/org/moved/resolve/main/model.gguf").content == b"GGUF"
    assert not reach.is_public("127.0.0.1")
