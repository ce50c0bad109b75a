"""A tiny model in this process, through the Python API."""

import threading
from collections.abc import Iterator

import pytest

from zinc_rt import LLM

CONTEXT = 128


def engine_threads() -> set[threading.Thread]:
    """Threads of engines that are alive. Those of earlier tests may end at any time: who wants to
    know of its own leaves them out."""
    return {thread for thread in threading.enumerate() if thread.name == "engine"}


@pytest.fixture(scope="module", autouse=True)
def most_is_around_steps(native_is_quick) -> None:
    """These tests are of what Python does."""


@pytest.fixture(scope="session")
def llm(tiny_model_path) -> Iterator[LLM]:
    with LLM(tiny_model_path, tier="native", context=CONTEXT, slots=3, progress=False) as opened:
        yield opened
