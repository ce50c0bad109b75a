"""Tests of a device before it runs a model: its arithmetic and its layout of packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from accel.opencl.device import Device, import_binding
from accel.opencl.driver import TIER
from accel.opencl.program import BuildOptions, build_program, self_test_files
from accel.packets.packet import PACKET
from accel.packets.samples import sample_pairs
from contract.arrays import Array, Floats
from contract.errors import TierUnavailable

LAYOUT_FIELDS = (
    "op",
    "wait",
    "everyone",
    "split_columns",
    "dtype",
    "layout",
    "counted",
    "operand",
    "stride",
    "size",
    "real",
)
"""The fields whose offsets the kernel ``packet_layout`` reports, in that order."""


class SelfTest:
    """The self-test program of one device, built with one set of options."""

    def __init__(
        self, context: Any, queue: Any, device: Device, options: BuildOptions, cache: Path | None
    ) -> None:
        self._cl = import_binding()
        self._context = context
        self._queue = queue
        self._program = build_program(
            context, device, self_test_files(), options.text(device), cache
        )

    def arithmetic(self, a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
        """a / b, sqrt(a) and a * b + a as the device computes them."""
        results = [np.empty_like(a) for _ in range(3)]
        self._run("divide_and_root", len(a), (a, b), results)
        return results[0], results[1], results[2]

    def layout(self) -> list[int]:
        """Bytes of a packet, then the offset of each of LAYOUT_FIELDS."""
        offsets = np.zeros(1 + len(LAYOUT_FIELDS), np.uint32)
        self._run("packet_layout", 1, (), [offsets])
        return offsets.tolist()

    def reads_host_addresses(self) -> bool:
        """Whether the device reads a word at a host address; the program must be built for that."""
        source, target = np.array([0x5EEDF00D], np.uint32), np.zeros(1, np.uint32)
        kernel = self._cl.Kernel(self._program, "copy_word")
        kernel.set_args(np.uint64(source.ctypes.data), np.uint64(target.ctypes.data))
        self._cl.enqueue_nd_range_kernel(self._queue, kernel, (1,), None)
        self._queue.finish()
        return bool(target[0] == source[0])

    def _run(self, name: str, size: int, inputs: tuple[Array, ...], outputs: list[Any]) -> None:
        cl = self._cl
        read = [
            cl.Buffer(self._context, cl.READ_ONLY | cl.COPY_HOST_PTR, hostbuf=x) for x in inputs
        ]
        written = [cl.Buffer(self._context, cl.WRITE_ONLY, x.nbytes) for x in outputs]
        kernel = cl.Kernel(self._program, name)
        kernel.set_args(*read, *written)
        cl.enqueue_nd_range_kernel(self._queue, kernel, (size,), None)
        for host, buffer in zip(outputs, written, strict=True):
            cl.enqueue_copy(self._queue, host, buffer)


def native_arithmetic(test: SelfTest) -> tuple[bool, bool]:
    """Whether the device's own division and square root are correctly rounded. Raises
    TierUnavailable when it fuses products and sums, which cannot be avoided."""
    a, b = sample_pairs()
    quotient, root, product = test.arithmetic(a, b)
    if not np.array_equal(product, a * b + a):
        raise TierUnavailable(
            TIER,
            "the device's compiler fuses a * b + c against its options",
            "choose another device or a newer driver",
        )
    return bool(np.array_equal(quotient, a / b)), bool(np.array_equal(root, np.sqrt(a)))


def check_layout(test: SelfTest) -> None:
    """Raise AssertionError if the compiler's layout of a packet differs from numpy's."""
    fields = PACKET.fields
    assert fields is not None
    expected = [PACKET.itemsize, *(fields[name][1] for name in LAYOUT_FIELDS)]
    if test.layout() != expected:
        raise AssertionError(f"packet layout is {test.layout()} on the device, {expected} here")
