"""The start-up self-test, the integer remedies, elementary functions, and what must fail."""

import numpy as np
import pytest

from accel.opencl import binding as cl
from accel.opencl import self_check
from accel.opencl.program import BuildOptions
from accel.opencl.runtime import Choices, probe_options
from accel.opencl.self_check import SelfTest, native_arithmetic
from accel.packets.packet import PACKET
from accel.packets.samples import sample_pairs
from contract.errors import TierUnavailable

NASTY = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 3.0, 0.1, 1e-38, 1.1754942e-38, 1e-45, 3e-45, 7e-42),
        *(3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 16777215.0, 16777217.0),
    ],
    np.float32,
)


@pytest.fixture
def self_test_of(device, kernel_cache):
    """``self_test_of(native)`` builds the self-test with or without the remedies."""
    context = cl.Context([device.handle])
    queue = cl.CommandQueue(context)

    def build(native: bool) -> tuple[SelfTest, BuildOptions]:
        choices = Choices(cache=kernel_cache, native_arithmetic=native)
        options = probe_options(context, queue, device, choices)
        return SelfTest(context, queue, device, options, kernel_cache), options

    return build


@pytest.mark.parametrize("native", [True, False])
def test_division_and_root_are_correctly_rounded(self_test_of, native):
    """Natively where the device can, and by the integer remedies always."""
    test, options = self_test_of(native)
    assert native or not (options.native_divide or options.native_sqrt)
    a, b = sample_pairs()
    pairs = np.array(np.meshgrid(NASTY, NASTY)).reshape(2, -1)
    a, b = np.concatenate([a, pairs[0]]), np.concatenate([b, pairs[1]])
    with np.errstate(all="ignore"):
        quotient, root, _ = test.arithmetic(a, b)
        assert np.array_equal(quotient, a / b, equal_nan=True)
        assert np.array_equal(root, np.sqrt(a), equal_nan=True)


class _Fake:
    """A self-test whose device answers as told."""

    def __init__(self, ulp: int = 0, fused: bool = False) -> None:
        self.ulp = ulp
        self.fused = fused

    def arithmetic(self, a, b):
        """a / b, sqrt a, a b + a, with the faults of this device."""
        product = a * b + a
        if self.fused:
            product = (a.astype(np.float64) * b + a).astype(np.float32)
        wrong = (a / b).view(np.int32) + np.int32(self.ulp)
        return wrong.view(np.float32), np.sqrt(a), product


def test_a_division_off_by_one_unit_is_noticed():
    """The negative control: the remedy is chosen, for division only."""
    assert native_arithmetic(_Fake()) == (True, True)
    assert native_arithmetic(_Fake(ulp=1)) == (False, True)


def test_a_device_that_contracts_is_refused():
    """There is no remedy for fused multiply-add, so the tier is not available."""
    with pytest.raises(TierUnavailable, match="fuses"):
        native_arithmetic(_Fake(fused=True))


def test_packet_layout_agrees_with_the_device(self_test_of):
    """sizeof and every offset, as the device's compiler sees them."""
    test, _ = self_test_of(True)
    fields = PACKET.fields
    assert fields is not None
    expected = [PACKET.itemsize, *(fields[name][1] for name in self_check.LAYOUT_FIELDS)]
    assert test.layout() == expected
    assert set(self_check.LAYOUT_FIELDS) | {"reserved"} == set(PACKET.names or ())
