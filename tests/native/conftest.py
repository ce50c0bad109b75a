"""Native tiers as tests open them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.native.tier import Choices, NativeTier
from tests.needs import need_device

OpenNative = Callable[..., NativeTier]


@pytest.fixture
def open_native(kernel_cache: Path) -> Iterator[OpenNative]:
    """Opens a tier with the choices that a test names; closed when the test ends."""
    with ExitStack() as stack:

        def give(**chosen: Any) -> NativeTier:
            choices = Choices(**{"cache": kernel_cache, **chosen})
            return stack.enter_context(need_device(lambda: NativeTier(choices=choices)))

        yield give
