"""The first model of a newcomer, fetched from a hub on loopback by the shipped wheel and by
``ci/demo``: whole, cut off, damaged, and onto a full disk."""

import os
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

from tests.harness.hub_server import Hub, send_file, serving_hub
from tests.paths import ROOT
from tests.walk.conftest import MODEL, Newcomer

pytestmark = pytest.mark.walk
NAME = "hf.co/org/first"
FILE = "first.gguf"
ASK = ("run", "--model", NAME, "Why?", "-n", "8")
BESIDE = 1 << 20
"""Bytes by which a test's file exceeds one piece of a download."""
DEMO_READS = ("accel/native", "accel/packets", "accel/opencl/kernels", "contract", "ci")
"""What ci/demo compares with what it installed last."""
INSTALLED = ". ci/environment.sh; pip_install() { :; }; install_project server"


@pytest.fixture
def hub(newcomer) -> Iterator[Hub]:
    """A hub that has the newcomer's model, of which nothing is fetched yet."""
    with serving_hub() as server:
        server.files["org/first"] = {FILE: (newcomer.home / MODEL).read_bytes()}
        yield server
    newcomer.run("zinc-rt", "model", "rm", NAME)


@pytest.fixture(scope="module")
def answer(newcomer) -> str:
    """What the model answers, as a file of the newcomer's."""
    return newcomer.zinc("run", "--model", f"./{MODEL}", "Why?", "-n", "8")


def partial_files(newcomer: Newcomer) -> list[str]:
    """What is left of downloads that did not end."""
    cache = newcomer.home / ".cache" / "zinc-rt"
    return [path.name for path in cache.glob("partial/**/*") if path.is_file()]


def test_the_first_demo_fetches_its_model(newcomer, hub, answer):
    """``ci/demo`` downloads the model once; the second time it needs no network, and installs
    nothing where it did so before."""
    checkout = newcomer.home / "checkout"
    for name in DEMO_READS:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    (checkout / ".venv").symlink_to(newcomer.python.parents[1])
    stamp = newcomer.python.parents[1] / "installed"
    if newcomer.user is not None:
        stamp.touch()
        os.chown(stamp, newcomer.user, newcomer.user)
    subject = ("bash", "-c", f'cd checkout && sh -c "{INSTALLED}" ci/demo')
    assert newcomer.run(*subject).returncode == 0
    said = {"ZINC_RT_MODEL": NAME, "ZINC_RT_MAX_TOKENS": "8"}
    for more in ({"HF_ENDPOINT": hub.address}, {}):
        done = newcomer.run("checkout/ci/demo", "Why?", **said, **more)
        assert (done.returncode, done.stdout) == (0, answer), done.stderr
        assert "installing" not in done.stderr
    assert len(hub.gets(FILE)) == 1


def test_a_download_that_is_cut_off_goes_on(newcomer, hub, answer):
    content = hub.files["org/first"][FILE]
    content += bytes(DOWNLOAD_CHUNK_SIZE + BESIDE - len(content))
    hub.files["org/first"][FILE] = content
    cuts = [DOWNLOAD_CHUNK_SIZE + 1000]

    def cut(handler: BaseHTTPRequestHandler) -> None:
        send_file(handler, content, cuts.pop() if cuts else None)

    hub.body[FILE] = cut
    done = newcomer.run("zinc-rt", *ASK, HF_ENDPOINT=hub.address)
    assert (done.returncode, done.stdout) == (0, answer), done.stderr
    assert hub.gets(FILE) == [None, f"bytes={DOWNLOAD_CHUNK_SIZE}-"]


def test_wrong_bytes_are_discarded(newcomer, hub):
    hub.digests[FILE] = "0" * 64
    done = newcomer.run("zinc-rt", *ASK, HF_ENDPOINT=hub.address)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {NAME}: {FILE}: sha256 is ")
    assert done.stderr.endswith("the file was discarded\n")
    assert done.stderr.count("\n") == 1
    assert partial_files(newcomer) == []


def test_a_disk_that_fills_up_is_named(newcomer, hub):
    """A file that may not grow stands for a disk that another program fills meanwhile."""
    line = f"ulimit -f 300; zinc-rt model pull {NAME}"
    done = newcomer.run("bash", "-c", line, HF_ENDPOINT=hub.address)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("partial/hf.co--org--first--first: File too large\n")
    assert done.stderr.count("\n") == 1
    assert partial_files(newcomer) == []
