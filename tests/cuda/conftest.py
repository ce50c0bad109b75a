"""CUDA tiers on the double of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from accel.cuda import upload
from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from tests.cuda.emulator import keep_kernels
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nvrtc import FakeNvrtc

OpenTier = Callable[..., CudaTier]
SLOT_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def small_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the double of the driver is the host's: six slots of 16 MiB a tier are slow to
    fill, and those of a device that hangs are never freed."""
    if request.node.get_closest_marker("device") is None:
        monkeypatch.setattr(upload, "SLOT_BYTES", SLOT_BYTES)


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
def folder(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A folder for models, with the emulated kernels, which are built once for all tests."""
    folder = tmp_path_factory.mktemp("emulated")
    keep_kernels(folder, kernel_cache)
    return folder
