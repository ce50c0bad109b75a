"""Tiers for the tests of all of them: one opened for a module, or opened by a test."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from contract.tier import Tier
from tests.tiers.ways import BY_NAME, SOAKING, WAYS, OpenTier, Way


def each(*names: str) -> list[object]:
    """Parameters of ``way``: those names, or all of WAYS."""
    return [
        pytest.param(name, marks=[pytest.mark.soak] if name in SOAKING else [])
        for name in names or WAYS
    ]


@pytest.fixture(scope="module", params=each())
def way(request) -> Way:
    """One of the ways, those of WAYS where a test does not name others."""
    return BY_NAME[request.param]


@pytest.fixture(scope="module")
def open_way(way, kernel_cache) -> Iterator[OpenTier]:
    """``open_way(memory_bytes=None)`` opens a tier that is closed after the module."""
    with way.opening(kernel_cache) as opening, ExitStack() as opened:
        yield lambda **limits: opened.enter_context(opening(**limits))


@pytest.fixture(scope="module")
def tier(open_way) -> Tier:
    """A tier as a user gets it, for tests that leave it as they found it."""
    return open_way()
