"""Which parts the OpenCL programs of a test hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accel.opencl import contents


@contextmanager
def needed_only(really: bool = True) -> Iterator[None]:
    """Programs hold what graphs need, as users have them; by themselves tests build everything."""
    with pytest.MonkeyPatch.context() as patch:
        if really:
            patch.setattr(contents, "WHOLE", False)
        yield
