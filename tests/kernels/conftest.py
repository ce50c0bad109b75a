"""What products on matrix units are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.kernels.product_check import product_of
from contract.arrays import Floats
from contract.dtypes import DType
from tests.kernels.test_tiles import result


@pytest.fixture(scope="module")
def right(kernel_cache: Path) -> Callable[[DType], Floats]:
    """What packed dots give, with as many tokens as a module has."""
    return functools.cache(lambda dtype: result(product_of(dtype), "matmul", kernel_cache))
