"""The files of the pages: what is sent with them, and that vendored ones are what NOTICE says."""

import hashlib
import re

import pytest
from flask import Flask
from flask.testing import FlaskClient

from harness.serve.page import FOLDER, read_page
from tests.page.fake_server import add_page


@pytest.fixture
def client() -> FlaskClient:
    app = Flask("page", static_folder=None)
    add_page(app)
    return app.test_client()


def test_pages_let_in_nothing_from_elsewhere(client):
    for path in ("/", "/page/js/chat.js", "/page/icon.svg"):
        response = client.get(path)
        policy = response.headers["Content-Security-Policy"]
        assert response.status_code == 200
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_files_are_kept_by_the_browser_and_checked(client):
    first = client.get("/page/js/chat.js")
    assert first.content_type == "text/javascript; charset=utf-8"
    assert first.cache_control.no_cache
    again = client.get("/page/js/chat.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    other = client.get("/page/js/chat.js", headers={"If-None-Match": '"another"'})
    assert other.data == first.data


@pytest.mark.parametrize("path", ["/page/../page.py", "/page/%2e%2e/page.py", "/page/", "/page"])
def test_nothing_else_is_served(client, path):
    assert client.get(path).status_code == 404


def test_links_are_not_followed(tmp_path):
    (tmp_path / "index.html").write_text("here")
    (tmp_path / "secret.txt").symlink_to("/etc/hostname")
    assert list(read_page(tmp_path)) == ["/"]


def test_vendored_files_are_listed_in_the_notice():
    listed = dict(
        reversed(line.split())
        for line in (FOLDER / "vendor" / "NOTICE").read_text().splitlines()
        if re.match(r"\s+[0-9a-f]{64}  ", line)
    )
    vendor = FOLDER / "vendor"
    here = {
        path.relative_to(vendor).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*.js")
    }
    assert here == listed
