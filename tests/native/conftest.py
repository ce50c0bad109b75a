"""Native tiers as tests open them, and a small model whose arranged weights are stored."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.native import weight_cache
from accel.native.tier import Choices, NativeTier
from tests.model_runs import Outcome
from tests.native.weight_starts import Open, outcome
from tests.needs import machine_lacks, need_device

OpenNative = Callable[..., NativeTier]


@pytest.fixture
def open_native(kernel_cache: Path) -> Iterator[OpenNative]:
    """Opens a tier with the choices that a test names; closed when the test ends."""
    with ExitStack() as stack:

        def give(**chosen: Any) -> NativeTier:
            choices = Choices(**{"cache": kernel_cache, **chosen})
            return stack.enter_context(need_device(lambda: NativeTier(choices=choices)))

        yield give


@pytest.fixture
def model_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A model file of its own, which has not changed for a while."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model_path, path)
    os.utime(path, (1e9, 1e9))
    time.sleep(0.05)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for arranged weights, which does not exist; the smallest models count."""
    if not weight_cache.CAN_ALLOCATE:
        machine_lacks("way to reserve disk space for a file")
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def open_one(open_native: OpenNative, folder: Path) -> Open:
    """Opens a tier that stores its weights in the folder."""
    return lambda: open_native(threads=2, weights=folder)


@pytest.fixture
def expected(model_path: Path, open_native: OpenNative) -> Outcome:
    """What the model computes where nothing is stored."""
    return outcome(model_path, open_native(threads=2))
