"""Native tiers as tests open them, and a small model whose arranged weights are stored."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.native import weight_cache
from accel.native.c_library import find_c_library
from accel.native.tier import Choices, NativeTier
from tests.model_runs import Outcome
from tests.native.c_plan import CPlan, compiled, exported, sanitized
from tests.native.weight_starts import Open, outcome
from tests.needs import machine_lacks, need_device
from tests.paths import ROOT

OpenNative = Callable[..., NativeTier]


@pytest.fixture
def open_native(kernel_cache) -> Iterator[OpenNative]:
    """Opens a tier with the choices that a test names; closed when the test ends."""
    with ExitStack() as stack:

        def give(**chosen: Any) -> NativeTier:
            choices = Choices(**{"cache": kernel_cache, **chosen})
            return stack.enter_context(need_device(lambda: NativeTier(choices=choices)))

        yield give


@pytest.fixture
def model_path(tiny_model_path, tmp_path) -> Path:
    """A model file of its own, which has not changed for a while."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model_path, path)
    os.utime(path, (1e9, 1e9))
    time.sleep(0.05)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder for arranged weights, which does not exist; the smallest models count."""
    if not weight_cache.CAN_ALLOCATE:
        machine_lacks("way to reserve disk space for a file")
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def open_one(open_native, folder) -> Open:
    """Opens a tier that stores its weights in the folder."""
    return lambda: open_native(threads=2, weights=folder)


@pytest.fixture
def expected(model_path, open_native) -> Outcome:
    """What the model computes where nothing is stored."""
    return outcome(model_path, open_native(threads=2))


@pytest.fixture(scope="session")
def c_library(kernel_cache) -> Path:
    """The library that programs in C use, beside the kernels."""
    return need_device(lambda: find_c_library(kernel_cache))


@pytest.fixture(scope="session")
def plan(tiny_model_path, c_library, tmp_path_factory) -> Path:
    """The plan of the tiny model; tests change copies of it."""
    return exported(tiny_model_path, tmp_path_factory.mktemp("plan"))


@pytest.fixture
def c_plan(c_library) -> Iterator[CPlan]:
    """A plan that a test opens."""
    plan = CPlan(c_library)
    yield plan
    plan.close()


@pytest.fixture(scope="session")
def decode(c_library, tmp_path_factory) -> Path:
    """The C program of docs/examples, linked with the library."""
    output = tmp_path_factory.mktemp("decode") / "decode"
    return compiled(output, [ROOT / "docs/examples/decode.c"], str(c_library))


@pytest.fixture
def files(plan, tmp_path) -> Path:
    """A plan with weights of its own, which a test may damage."""
    for suffix in ("", ".weights"):
        shutil.copyfile(plan.with_name(plan.name + suffix), tmp_path / f"{plan.name}{suffix}")
    return tmp_path / plan.name


@pytest.fixture(scope="session")
def decode_sanitized(tmp_path_factory) -> Path:
    """The C program and the library, with sanitizers."""
    return sanitized(tmp_path_factory.mktemp("sanitized"), ROOT / "docs/examples/decode.c")


@pytest.fixture(scope="session")
def open_plans(tmp_path_factory) -> Path:
    """A program that opens plans, with sanitizers."""
    return sanitized(tmp_path_factory.mktemp("sanitized"), Path(__file__).with_name("open_plans.c"))
