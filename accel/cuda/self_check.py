"""Tests a device's arithmetic once before a model runs on it."""

from __future__ import annotations

from functools import partial

from accel.cuda.driver import TIER
from accel.cuda.launcher import start_packet
from accel.cuda.memory import Memory
from accel.cuda.program import Modules, plain_source
from accel.kernels.device_probe import NEWER_HINT, SELF_TEST, results_of, right, samples
from contract.errors import TierUnavailable

TESTED = {
    "divide": "divides",
    "root": "takes square roots",
    "contraction": "multiplies and adds",
    "half": "widens binary16",
    "signed": "multiplies packed bytes",
    "mixed": "multiplies packed bytes of both kinds",
}
"""What an error says of a device with wrong results, by the name of the results."""


def check_arithmetic(memory: Memory, modules: Modules) -> None:
    """Raise TierUnavailable unless the device computes the kernels' basic operations as numpy does.
    Raises CudaError when the device cannot compute at all."""
    function = modules.function(plain_source(SELF_TEST), SELF_TEST.entry)
    found = results_of(memory, partial(start_packet, memory.context, memory.stream, function))
    expected = samples().expected
    for name, good in right(found, {name: expected[name] for name in TESTED}).items():
        if not good:
            raise TierUnavailable(TIER, f"the device {TESTED[name]} inexactly", NEWER_HINT)
