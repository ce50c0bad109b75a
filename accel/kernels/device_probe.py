"""The samples of ``self_test.k`` and their right results, by which a device's arithmetic is tested
before a model runs on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import GROUP_SIZE, Module, Traits
from accel.packets.binding import lone_packet
from accel.packets.device_op import pieces
from accel.packets.samples import sample_pairs
from accel.packets.tier import A, DeviceMemory
from contract.arrays import Floats, Ints, Records
from contract.errors import TierUnavailable

RESULTS = (
    *("divide", "root", "contraction", "difference", "regrouping"),
    *("half", "narrowing", "signed", "mixed"),
)
"""The columns that ``self_test.k`` writes."""
INTEGERS = ("narrowing", "signed", "mixed")
TINY = 2048
"""Number of subnormal samples at the end. Sums and products of them may be flushed (rule R0), but
where a device divides inexactly a tier divides in integers, and the token may depend on that."""
JUDGED_TINY = ("divide", "root")

MEBIBYTE = 1 << 20
NEWER_HINT = "choose another device or a newer driver"
ALL_NATIVE = Traits(divide=True, root=True, half=True, dot=True)

SELF_TEST = Module("self_test")

Found = dict[str, Floats | Ints]
Answer = Callable[[Traits], Found]
"""Computes a device's results for the samples, with kernels for these traits."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The inputs: pairs of floats, and words whose low halves are binary16."""

    a: Floats
    b: Floats
    words: NDArray[np.uint32]

    @property
    def expected(self) -> Found:
        """The results of numpy, each operation rounded once."""
        a, b = self.a, self.b
        halves = self.words.astype(np.uint16).view(np.float16)
        packed, other = self.words.view(np.int8).astype(np.int32), a.view(np.int8).astype(np.int32)
        unsigned = a.view(np.uint8).astype(np.int32)
        limit = np.float32(np.finfo(np.float16).max)
        return {
            "divide": a / b,
            "root": np.sqrt(a),
            "contraction": a * b + a,
            "difference": a - (b - np.float32(1)),
            "regrouping": (a + b) - a,
            "half": halves.astype(np.float32),
            "narrowing": np.minimum(b, limit).astype(np.float16).view(np.uint16).astype(np.int32),
            "signed": (packed * other).reshape(-1, 4).sum(axis=1, dtype=np.int32),
            "mixed": (packed * unsigned).reshape(-1, 4).sum(axis=1, dtype=np.int32),
        }


def samples() -> Samples:
    """Pairs spread over many exponents, then subnormal ones; every fourth binary16 number of both
    signs, in words whose upper bytes include the extremes."""
    a, b = sample_pairs()
    tiny = np.random.default_rng(21).integers(1, 1 << 23, TINY, dtype=np.uint32).view(np.float32)
    a, b = np.concatenate([a, tiny]), np.concatenate([b, np.abs(b[:TINY]) + np.float32(1)])
    low = np.resize(np.arange(0, 1 << 16, 4, dtype=np.uint32), len(a))
    upper = np.resize(np.array([0x8080, 0x7F7F, 0x80FF, 0x0001], np.uint32), len(a))
    return Samples(a, b, low | upper << np.uint32(16))


def columns(words: Ints) -> Found:
    """The results by name, from int32[samples, results]."""
    return {
        name: column if name in INTEGERS else column.view(np.float32)
        for name, column in zip(RESULTS, np.ascontiguousarray(words.T), strict=True)
    }


def results_of(memory: DeviceMemory[A], launch: Callable[[Records, int], None]) -> Found:
    """The device's results for the samples; ``launch`` runs the kernel of SELF_TEST with PACKET[1]
    and a number of work-groups, and waits for it."""
    given = samples()
    count = len(given.a)
    buffers: list[A] = []
    try:
        for array in (given.a, given.b, given.words):
            buffers.append(memory.adopt("self-test", array.view(np.uint8)))
        buffers.append(memory.allocate("self-test", 4 * len(RESULTS) * count))
        packet = lone_packet([buffer.address for buffer in buffers], (count,))
        launch(packet, pieces(count, GROUP_SIZE))
        words = memory.read(buffers[-1], 0, 4 * len(RESULTS) * count).view(np.int32)
        return columns(words.reshape(count, -1))
    finally:
        for buffer in buffers:
            memory.free(buffer)


def right(found: Found, expected: Found) -> dict[str, bool]:
    """Whether all tested values are equal; a NaN equals any NaN."""
    judged = {name: slice(None if name in JUDGED_TINY else -TINY) for name in expected}
    return {
        name: bool(
            np.array_equal(
                found[name][judged[name]], requested[judged[name]], equal_nan=name not in INTEGERS
            )
        )
        for name, requested in expected.items()
    }


def traits_of(answer: Answer, tier: str, device: str, has_dot: bool) -> Traits:
    """The operations that the device computes exactly; integers compute the others. Raises
    TierUnavailable if integers do not help."""
    expected = samples().expected
    native = replace(ALL_NATIVE, dot=has_dot)
    first = right(answer(native), expected)
    traits = Traits(
        divide=first["divide"],
        root=first["root"],
        half=first["half"],
        dot=has_dot and first["signed"] and first["mixed"],
    )
    wrong = [name for name, right in first.items() if not right]
    if traits != native:
        wrong = [name for name, right in right(answer(traits), expected).items() if not right]
    if wrong:
        reason = f"{device} does not compute exactly: {', '.join(wrong)}"
        raise TierUnavailable(tier, reason, NEWER_HINT)
    return traits


def kernels_of(traits: Traits) -> str:
    """A text naming the kernels that a device with these ``traits`` runs."""
    own = {"division": traits.divide, "root": traits.root, "binary16": traits.half}
    integers = [name for name, native in own.items() if not native]
    products = "packed dot products" if traits.dot else "products without packed dot products"
    if traits.matrix:
        products += " and matrix units"
    return f"{products}, {', '.join(integers) or 'nothing'} in integers"


class ProbedTier(AbstractContextManager["ProbedTier"], Protocol):
    """An open tier with the result of its self-test."""

    @property
    def traits(self) -> Traits:
        """The operations that the device computes exactly itself."""


def device_line(about: str, missing: Sequence[str], open_tier: Callable[[], ProbedTier]) -> str:
    """``about`` a device, then what it is ``missing``, or which kernels its tier runs, or why the
    tier cannot be opened."""
    if missing:
        return f"{about}; lacks {', '.join(missing)}"
    try:
        with open_tier() as tier:
            return f"{about}; kernels: {kernels_of(tier.traits)}"
    except TierUnavailable as error:
        return f"{about}; {error.reason}"
