"""The peer, one process for all tests."""

from collections.abc import Iterator

import pytest

from tests.needs import need_installed
from tests.peer.llama_cpp_peer import Peer


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    """llama.cpp in a child process."""
    need_installed("llama_cpp", "peer")
    opened = Peer()
    yield opened
    opened.close()
