"""The first lines of docs/receipts.md, from a server to a sample that verifies, as a newcomer types
them."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterator

import pytest

from tests.needs import machine_lacks
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS
from tests.walk.conftest import MODEL

pytestmark = pytest.mark.walk
BLOCK = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
SAMPLED = (
    r"identical: cmpl-\w+: 4 of 16 steps; one wrong step would have been seen with probability "
    r"25\.0%, 2 with 45\.0%\n"
)


def lines_of_the_page() -> list[str]:
    """The commands of the page's first block; a command may go on in a second line."""
    page = (ROOT / "docs" / "receipts.md").read_text("utf-8")
    found = BLOCK.search(page)
    assert found is not None
    return textwrap.dedent(found[0]).replace("\\\n", "").splitlines()


@pytest.fixture
def port(newcomer) -> Iterator[str]:
    """The server of the second line, at a port that is free; it is stopped at the end."""
    if shutil.which("curl") is None:
        machine_lacks("curl")
    newcomer.zinc("model", "use", f"./{MODEL}")
    words = lines_of_the_page()[1].partition("&")[0].split()
    sink = os.open(os.devnull, os.O_WRONLY)
    server = newcomer.start(*words, "--port", "0", "--context", "256", stdout=sink)
    assert server.stderr is not None
    try:
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, "the server ended"
            found = LISTENING.search(line)
        yield found[1]
    finally:
        server.terminate()
        server.stderr.close()
        server.wait(PATIENCE_SECONDS)
        os.close(sink)


def test_the_page_has_five_lines():
    install, serve, ask, fetch, verify = lines_of_the_page()
    assert install.startswith("pip install ")
    assert serve.startswith("zinc-rt serve --receipts receipts/ &")
    assert (ask[:5], fetch[:5]) == ("curl ", "curl ")
    assert verify.startswith("zinc-rt verify receipt.json --sample 4")


def test_a_newcomer_gets_from_a_server_to_a_verified_sample(newcomer, port):
    """The lines behind the server's, unchanged but for its port; then a token of the receipt is
    changed, which the last line names."""
    *_, ask, fetch, verify = lines_of_the_page()
    for line in (ask, fetch):
        assert line.count(":8080/") == 1
        done = newcomer.run("bash", "-euo", "pipefail", "-c", line.replace(":8080/", f":{port}/"))
        assert done.returncode == 0, done.stderr
    done = newcomer.run("bash", "-euo", "pipefail", "-c", verify)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SAMPLED, done.stdout), done.stdout
    change = (
        "import json; r = json.load(open('receipt.json')); t = r['payload']['choices'][0]['tokens']"
    )
    change += "; t[3] += 1; json.dump(r, open('receipt.json', 'w'))"
    assert newcomer.run(str(newcomer.python), "-c", change).returncode == 0
    done = newcomer.run("bash", "-euo", "pipefail", "-c", verify)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("different: cmpl-")
    assert "signature: " in done.stdout
