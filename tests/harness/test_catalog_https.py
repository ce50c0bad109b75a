"""Downloading over https: redirects, hosts and addresses, sizes, broken transfers, TLS."""

from __future__ import annotations

import functools
import ipaddress
import shutil
import socket
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import CatalogError
from harness.catalog import HttpsSource, Network, pull
from harness.catalog.https import (
    CHUNK_BYTES,
    FAILURES_MAX,
    REDIRECTS_MAX,
    checked_url,
    connect_tls,
    download,
    is_public,
)
from tests.harness.catalog_tools import (
    HOST,
    Answer,
    Recorder,
    entry_for,
    file_answer,
    random_bytes,
    send,
    serving,
)
from tests.needs import missing

CONTENT = random_bytes(2_500_000)
SIZE = len(CONTENT)
URL = f"https://{HOST}/model.gguf"


def redirect(location: str, status: int = 302) -> Answer:
    return lambda handler: send(handler, b"", status, Location=location)


def fetch(answers: dict[str, Answer], size: int = SIZE) -> bytes:
    with serving(answers) as server:
        return b"".join(download(URL, size, server.network()))


def test_pull_gives_the_exact_file(tmp_path: Path) -> None:
    entry, progress = entry_for(CONTENT, HttpsSource(URL)), Recorder()
    with serving({"/model.gguf": file_answer(CONTENT)}) as server:
        path = pull(entry, tmp_path, progress, server.network())
    assert path.read_bytes() == CONTENT
    assert progress.jobs == [("downloading tiny", SIZE, "B")]
    assert progress.counts == [SIZE]
    assert sorted(path.parent.iterdir()) == [path]


def test_wrong_digest_leaves_nothing(tmp_path: Path) -> None:
    entry = entry_for(CONTENT, HttpsSource(URL))
    with serving({"/model.gguf": file_answer(random_bytes(SIZE, seed=2))}) as server:
        with pytest.raises(CatalogError, match="the file was discarded"):
            pull(entry, tmp_path, network=server.network())
        assert list((tmp_path / "models" / "tiny").iterdir()) == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int) -> None:
    """Relative and absolute ones, to the host itself and below it, query included."""
    answers = {
        "/model.gguf": redirect("/b?x=1", status),
        "/b?x=1": redirect(f"https://cdn.{HOST}:443/c"),
        "/c": file_answer(CONTENT),
    }
    assert fetch(answers) == CONTENT


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (f"http://{HOST}/x", "only https"),
        ("file:///etc/passwd", "only https"),
        ("ftp://hub.test/x", "only https"),
        ("//localhost/x", "not one of"),
        ("https://169.254.169.254/latest/meta-data", "not one of"),
        ("https://127.0.0.1/x", "not one of"),
        ("https://[::1]/x", "not one of"),
        (f"https://evil{HOST}/x", "not one of"),
        (f"https://{HOST}.evil/x", "not one of"),
        (f"https://{HOST}@evil.test/x", "user name"),
        (f"https://{HOST}:8443/x", "port 8443"),
        (f"https://{HOST}:99999/x", "not a usable address"),
        ("https://[::1/x", "not a usable address"),
    ],
)
def test_redirect_elsewhere_is_refused(location: str, message: str) -> None:
    """The second hop is judged like the first, and is not contacted."""
    with serving({"/model.gguf": redirect("/b"), "/b": redirect(location)}) as server:
        with pytest.raises(CatalogError, match=message):
            list(download(URL, SIZE, server.network()))
        assert [path for path, _ in server.requests] == ["/model.gguf", "/b"]


def test_redirect_loop_ends() -> None:
    with serving({"/model.gguf": redirect("/model.gguf")}) as server:
        with pytest.raises(CatalogError, match="more than 5 redirects"):
            list(download(URL, SIZE, server.network()))
        assert len(server.requests) == REDIRECTS_MAX + 1


def test_redirect_without_address() -> None:
    with pytest.raises(CatalogError, match="redirect without an address"):
        fetch({"/model.gguf": lambda handler: send(handler, b"", 302)})


@pytest.mark.parametrize("status", [401, 403, 404, 206, 204])
def test_other_status_is_an_error(status: int) -> None:
    with pytest.raises(CatalogError, match=f"answered {status}"):
        fetch({"/model.gguf": lambda handler: send(handler, b"", status)})


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_announced_length_must_be_the_declared_size(size: int) -> None:
    with pytest.raises(CatalogError, match="announces 2500000 bytes"):
        fetch({"/model.gguf": file_answer(CONTENT)}, size)


def test_endless_file_is_cut(tmp_path: Path) -> None:
    """A server that never stops is read up to the declared size, not one byte further."""
    sent = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"", Content_Length="")
        while True:
            handler.wfile.write(bytes(1 << 16))
            sent.append(1 << 16)

    entry = entry_for(CONTENT, HttpsSource(URL))
    with serving({"/model.gguf": endless}) as server:
        assert sum(map(len, download(URL, SIZE, server.network()))) == SIZE
        with pytest.raises(CatalogError, match="sha256"):
            pull(entry, tmp_path, network=server.network())
    assert sum(sent) < 100 * SIZE
    assert list((tmp_path / "models" / "tiny").iterdir()) == []


def breaking(cuts: list[int]) -> Answer:
    """Closes the connection at each offset of ``cuts`` in turn, then answers to the end."""
    left = list(cuts)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if not left:
            file_answer(CONTENT)(handler)
            return
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        span = {"Content_Range": f"bytes {start}-{SIZE - 1}/{SIZE}"} if asked else {}
        body = CONTENT[start : left.pop(0)]
        send(handler, body, 206 if asked else 200, Content_Length=str(SIZE - start), **span)

    return answer


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=4).map(sorted))
def test_broken_transfer_continues_where_it_stopped(cuts: list[int]) -> None:
    with serving({"/model.gguf": breaking(cuts)}) as server:
        assert b"".join(download(URL, SIZE, server.network())) == CONTENT
        ranges = [asked for _, asked in server.requests]
    assert ranges[0] is None
    assert ranges[1:] == [f"bytes={cut}-" for cut in cuts]


def test_transfer_that_gains_nothing_is_given_up() -> None:
    with serving({"/model.gguf": breaking([10] * 100)}) as server:
        with pytest.raises(CatalogError, match="stopped at 10 of 2,500,000 bytes"):
            list(download(URL, SIZE, server.network()))
        assert len(server.requests) == FAILURES_MAX


def test_steady_gains_reset_the_count() -> None:
    """More breaks than are allowed in a row are survived when each brings a piece."""
    content = random_bytes((FAILURES_MAX + 3) * CHUNK_BYTES, seed=3)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        span = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        send(
            handler, content[start : start + CHUNK_BYTES], 206 if asked else 200,
            Content_Length=str(len(content) - start), **(span if asked else {}),
        )  # fmt: skip

    assert fetch({"/model.gguf": answer}, len(content)) == content


def test_server_that_ignores_the_range_is_refused() -> None:
    """Bytes from the start must not be appended to bytes from the middle."""
    answers = iter([breaking([100]), lambda handler: send(handler, CONTENT)])
    with pytest.raises(CatalogError, match="answered 200"):
        fetch({"/model.gguf": lambda handler: next(answers)(handler)})


def test_server_that_continues_elsewhere_is_refused() -> None:
    wrong = f"bytes 99-{SIZE - 1}/{SIZE}"
    answers = iter(
        [breaking([100]), lambda handler: send(handler, CONTENT[99:], 206, Content_Range=wrong)]
    )
    with pytest.raises(CatalogError, match="another place"):
        fetch({"/model.gguf": lambda handler: next(answers)(handler)})


def test_first_failure_is_reported_at_once() -> None:
    def refuse(host: str, port: int) -> socket.socket:
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(CatalogError, match=r"stopped at 0 of .*nobody there"):
        list(download(URL, SIZE, Network(hosts=(HOST,), connect=refuse)))


@pytest.mark.parametrize(
    "url",
    ["", "https://", "huggingface.co/x", "https://huggingface.co.evil/x", "https://hf.co:80/"],
)
def test_addresses_outside_the_real_network(url: str) -> None:
    with pytest.raises(CatalogError):
        checked_url(url, Network())


def test_default_network_is_the_hub_and_its_stores() -> None:
    for host in ("huggingface.co", "hf.co", "cdn-lfs.hf.co", "cas-bridge.xethub.hf.co"):
        assert checked_url(f"https://{host}/x?y", Network()).hostname == host


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_embedding_an_address_does_not_make_it_public(address: ipaddress.IPv4Address) -> None:
    public = is_public(str(address))
    nat64 = ipaddress.IPv6Address(0x64FF9B << 96 | int(address))
    for embedded in (f"::ffff:{address}", str(nat64)):
        assert is_public(embedded) <= public


def test_name_that_resolves_to_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed name is not enough; one private address among public ones is refused too."""
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443))
        for address in ("8.8.8.8", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **keywords: answers)
    with pytest.raises(CatalogError, match=r"resolves to 127\.0\.0\.1, which is not a public"):
        list(download("https://huggingface.co/x", 1, Network()))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        missing("there is no openssl program to make a certificate", "apt install openssl")
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-out", certificate, "-keyout", key],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.mark.parametrize("trusted", [True, False])
def test_tls_certificates_are_verified(certificate: tuple[Path, Path], trusted: bool) -> None:
    """The same server is read when its certificate is trusted and refused when it is not."""
    serve_with = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serve_with.load_cert_chain(*certificate)
    trust = ssl.create_default_context(cafile=certificate[0]) if trusted else None
    with serving({"/x": file_answer(CONTENT)}) as server:
        server.wrap(serve_with)
        connect = functools.partial(connect_tls, context=trust, allowed=lambda address: True)
        network = Network(hosts=("localhost",), port=server.port, connect=connect)
        pieces = download(f"https://localhost:{server.port}/x", SIZE, network)
        if trusted:
            assert b"".join(pieces) == CONTENT
        else:
            with pytest.raises(CatalogError, match="certificate not trusted: self-signed"):
                list(pieces)
