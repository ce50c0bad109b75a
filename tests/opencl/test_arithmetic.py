"""The start-up self-test, the integer remedies, elementary functions, and what must fail."""

from __future__ import annotations

import numpy as np
import pytest

from accel.opencl import binding as cl
from accel.opencl import self_check
from accel.opencl.program import BuildOptions, build_program, op_files
from accel.opencl.runtime import Choices, probe_options
from accel.opencl.self_check import SelfTest, native_arithmetic
from accel.packets.packet import PACKET
from accel.packets.samples import sample_pairs
from contract.errors import TierUnavailable
from reference.exact.elementary import log, softplus
from tests.kernels.processor import cpu_device

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
def test_division_and_root_are_correctly_rounded(self_test_of, native: bool) -> None:
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


def test_a_division_off_by_one_unit_is_noticed() -> None:
    """The negative control: the remedy is chosen, for division only."""
    assert native_arithmetic(_Fake()) == (True, True)
    assert native_arithmetic(_Fake(ulp=1)) == (False, True)


def test_a_device_that_contracts_is_refused() -> None:
    """There is no remedy for fused multiply-add, so the tier is not available."""
    with pytest.raises(TierUnavailable, match="fuses"):
        native_arithmetic(_Fake(fused=True))


def test_packet_layout_agrees_with_the_device(self_test_of) -> None:
    """sizeof and every offset, as the device's compiler sees them."""
    test, _ = self_test_of(True)
    fields = PACKET.fields
    assert fields is not None
    expected = [PACKET.itemsize, *(fields[name][1] for name in self_check.LAYOUT_FIELDS)]
    assert test.layout() == expected
    assert set(self_check.LAYOUT_FIELDS) | {"reserved"} == set(PACKET.names or ())


ENTRY = """
__kernel void logarithms(__global const float *x, __global float *one, __global float *sixteen,
                         __global float *plus) {
    const uint i = get_global_id(0);
    one[i] = log1(x[i]);
    plus[i] = softplus1(x[i]);
    if (i % 16 == 0) vstore16(log16(vload16(0, x + i)), 0, sixteen + i);
}
"""


class CoreLogarithms:
    """Elementary functions as cores compute them."""

    def __init__(self) -> None:
        device = cpu_device()
        self._context = cl.Context([device.handle])
        self._queue = cl.CommandQueue(self._context)
        options = (
            "-cl-std=CL1.2 -DSHARED_ADDRESSES=1 -DNATIVE_DIVIDE=1 -DNATIVE_SQRT=1 -DDOT_VNNI=0"
        )
        files = {**op_files(("scale",), frozenset()), "logarithms.cl": ENTRY}
        program = build_program(self._context, device, files, options, None)
        self._kernel = cl.Kernel(program, "logarithms")

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        """log of one, log of sixteen, softplus."""
        source = cl.Buffer(self._context, cl.READ_ONLY | cl.COPY_HOST_PTR, hostbuf=x)
        targets = [cl.Buffer(self._context, cl.WRITE_ONLY, x.nbytes) for _ in range(3)]
        self._kernel.set_args(source, *targets)
        cl.enqueue_nd_range_kernel(self._queue, self._kernel, x.shape, None)
        results = [np.empty_like(x) for _ in range(3)]
        for result, target in zip(results, targets, strict=True):
            cl.enqueue_copy(self._queue, result, target)
        return results


@pytest.fixture(scope="module")
def logarithms() -> CoreLogarithms:
    return CoreLogarithms()


def test_logarithms_equal_the_definition(logarithms: CoreLogarithms) -> None:
    """Positive numbers of every exponent, subnormals and the neighbours of 1 and sqrt(1/2)."""
    rng = np.random.default_rng(4)
    anything = rng.integers(1, 0x7F800000, 1 << 14, np.uint32).view(np.float32)
    tiny = rng.integers(1, 0x00800000, 1 << 10, np.uint32).view(np.float32)
    near = (np.array([1.0, np.sqrt(0.5)], np.float32).view(np.uint32)[:, None]).astype(np.int64)
    near = (near + np.arange(-8, 8)).astype(np.uint32).reshape(-1).view(np.float32)
    x = np.concatenate([anything, tiny, near, np.float32(1.0) + rng.random(1024, np.float32)])
    one, sixteen, _ = logarithms(x)
    assert (one == log(x)).all()
    assert (sixteen == log(x)).all()


def test_softplus_equals_the_definition(logarithms: CoreLogarithms) -> None:
    """Both signs, infinities and NaN."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(1 << 12).astype(np.float32) * np.float32(30.0)
    x[:4] = np.inf, -np.inf, np.nan, 0.0
    *_, plus = logarithms(x)
    with np.errstate(all="ignore"):
        assert np.array_equal(plus, softplus(x), equal_nan=True)
