"""Which parts the OpenCL programs of a test hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accel.opencl import contents
from accel.opencl.contents import RECURRENT, Parts
from accel.opencl.launcher import Mode
from accel.opencl.runtime import Choices

SOME: Parts = frozenset(
    {"F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", RECURRENT}
)
"""What models in Q4_K_M need, with experts and delta nets, and formats of every sort beside."""


@contextmanager
def holding(parts: Parts, really: bool = True) -> Iterator[None]:
    """Programs hold ``parts`` and what graphs need; by themselves tests build everything."""
    with pytest.MonkeyPatch.context() as patch:
        if really:
            patch.setattr(contents, "ALWAYS", parts)
        yield


def is_usual(choices: Choices) -> bool:
    """Whether a tier runs as users have it. Each other way takes programs of its own, which SOME
    parts are enough for."""
    kept = choices.shared_addresses is not False and choices.native_arithmetic is not False
    return kept and choices.mode is not Mode.LAUNCH
