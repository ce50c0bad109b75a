"""What a device is asked once before it is trusted with a model."""

from __future__ import annotations

import numpy as np

from accel.cuda.device import TIER
from accel.cuda.launcher import Arguments, LaunchShape, start_kernel
from accel.cuda.memory import Memory
from accel.cuda.program import Modules, tuned_source
from accel.packets.samples import Float32, sample_pairs
from contract.errors import TierUnavailable

BLOCK = 128


def check_arithmetic(memory: Memory, modules: Modules) -> None:
    """Raise TierUnavailable unless the device divides, takes roots and rounds products as numpy.

    Raises CudaError when the device does not even do that much.
    """
    a, b = sample_pairs()
    found = _computed(memory, modules, a, b)
    for what, got, expected in zip(
        ("divides", "takes square roots", "multiplies and adds"),
        found,
        (a / b, np.sqrt(a), a * b + a),
        strict=True,
    ):
        if not np.array_equal(got, expected):
            raise TierUnavailable(
                TIER, f"the device {what} inexactly", "choose another device or a newer driver"
            )


def _computed(memory: Memory, modules: Modules, a: Float32, b: Float32) -> list[Float32]:
    given = [memory.adopt("self-test", values.view(np.uint8)) for values in (a, b)]
    results = [memory.allocate("self-test", a.nbytes) for _ in range(3)]
    function = modules.function(tuned_source("self_test.cu", {}), "arithmetic")
    places = (np.uint64(allocation.address) for allocation in (*given, *results))
    shape = LaunchShape(function, (-(-len(a) // BLOCK), 1, 1), (BLOCK, 1, 1))
    arguments = Arguments(*places, np.uint32(len(a)))
    start_kernel(memory.context, memory.stream, shape, arguments)
    found = [memory.mirrors.read(r, 0, r.nbytes).view(np.float32) for r in results]
    for allocation in (*given, *results):
        memory.free(allocation)
    return found
