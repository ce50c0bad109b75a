"""CUDA tiers on the double of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nvrtc import FakeNvrtc

OpenTier = Callable[..., CudaTier]


@pytest.fixture
def driver() -> FakeDriver:
    """The driver a test's tiers are on."""
    return FakeDriver()


@pytest.fixture
def open_cuda(driver: FakeDriver) -> Iterator[OpenTier]:
    """``open_cuda(**choices)`` opens a tier that is closed after the test."""
    with ExitStack() as opened:

        def open_it(**choices: object) -> CudaTier:
            compiler = Compiler(FakeNvrtc())
            tier = CudaTier(choices=Choices(**choices), binding=driver, compiler=compiler)
            return opened.enter_context(tier)

        yield open_it


@pytest.fixture
def tier(open_cuda: OpenTier) -> CudaTier:
    """A tier as a user gets it."""
    return open_cuda()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated kernels are built: once for all tests."""
    return tmp_path_factory.mktemp("emulated")
