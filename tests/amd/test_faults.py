"""Every single system call fails once: the error is the contract's, nothing is left behind."""

import errno
from contextlib import suppress
from itertools import count

import numpy as np
import pytest

from accel.amd import uapi_drm as drm
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.tier import AmdTier
from accel.amd.uapi import Request
from contract.errors import OutOfMemory, TierError, TierUnavailable
from harness.parity.execute import compare
from tests.amd.test_tier import DEPENDENT

GIVING_BACK = {
    *("UNMAP_MEMORY_FROM_GPU", "FREE_MEMORY_OF_GPU", "DESTROY_QUEUE", "DESTROY_EVENT"),
    *("GEM_CLOSE", "SYNCOBJ_DESTROY"),
}
"""Calls after whose failure nobody could give anything back."""


class Failing(FakeKernel):
    """The call ``number`` from now on fails with ENOMEM or EINVAL; ``failed`` is its name."""

    def __init__(self) -> None:
        super().__init__()
        self.number = -1
        self.error = errno.EINVAL
        self.failed = ""

    def _met(self, what: str) -> None:
        if self.number == 0:
            self.failed = what
        self.number -= 1
        if self.number == -1:
            raise OSError(self.error, what)

    def open(self, path: str) -> int:
        self._met(path)
        return super().open(path)

    def map(self, address: int, nbytes: int, file: int, offset: int) -> int:
        self._met("mmap")
        return super().map(address, nbytes, file, offset)

    def reserve(self, nbytes: int) -> int:
        self._met("reserve")
        return super().reserve(nbytes)

    def ioctl(self, file: int, request: Request, argument: np.ndarray) -> None:
        freed = request in (drm.CTX, drm.USERQ) and int(argument["op"][0]) == drm.USERQ_FREE
        if request.name not in GIVING_BACK and not freed:
            self._met(request.name)
        super().ioctl(file, request, argument)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM], ids=["invalid", "memory"])
def test_opening(name, error):
    """The tier says that it is unavailable, or opens where the call does not matter."""
    met = set()
    # A third of the calls with either error.
    for number in count(error == errno.ENOMEM, 3):
        kernel = Failing()
        kernel.number, kernel.error = number, error
        with suppress(TierUnavailable):
            AmdTier(kernel=kernel, tier=name).close()
        assert kernel.leaked == [], kernel.failed
        if not kernel.failed:
            break
        met.add(kernel.failed)
    assert len(met) > 5


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM], ids=["invalid", "memory"])
def test_a_step(name, error):
    """Buffers, packets, recordings: whatever fails, the tier can be used again, or closed."""
    failed = set()
    for number in count(0, 5):
        kernel = Failing()
        tier = AmdTier(kernel=kernel, tier=name)
        kernel.number, kernel.error = number, error
        with suppress(OutOfMemory if error == errno.ENOMEM else TierError):
            assert compare(tier, DEPENDENT) == {}
        kernel.number = -1
        if number % 4 == 0:
            assert compare(tier, DEPENDENT) == {}
        tier.close()
        assert kernel.leaked == [], kernel.failed
        if not kernel.failed:
            break
        failed.add(kernel.failed)
    assert failed
