"""What ``self_test.k`` is given and has to answer: by that a device is judged before it is trusted
with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Traits
from accel.packets.samples import Float32, sample_pairs
from contract.errors import TierUnavailable

RESULTS = (
    *("divide", "root", "contraction", "difference", "regrouping"),
    *("half", "narrowing", "signed", "mixed"),
)
"""Columns of what ``kernels/self_test.k`` writes."""
INTEGERS = ("narrowing", "signed", "mixed")
TINY = 2048
"""Samples at the end that are subnormal. Sums and products of them may be flushed (rule R0), but a
tier divides in integers where a division would: what a token is can depend on it."""
JUDGED_TINY = ("divide", "root")

NEWER_HINT = "choose another device or a newer driver"
ALL_NATIVE = Traits(divide=True, root=True, half=True, dot=True)

Found = dict[str, NDArray[np.float32] | NDArray[np.int32]]
Answer = Callable[[Traits], Found]
"""What a device makes of the samples with kernels for such traits."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What the device computes with: pairs of floats, and words whose low halves are binary16."""

    a: Float32
    b: Float32
    words: NDArray[np.uint32]

    @property
    def expected(self) -> Found:
        """The results of numpy, each operation rounded once."""
        a, b = self.a, self.b
        halves = self.words.astype(np.uint16).view(np.float16)
        packed, other = self.words.view(np.int8).astype(np.int32), a.view(np.int8).astype(np.int32)
        unsigned = a.view(np.uint8).astype(np.int32)
        most = np.float32(np.finfo(np.float16).max)
        return {
            "divide": a / b,
            "root": np.sqrt(a),
            "contraction": a * b + a,
            "difference": a - (b - np.float32(1)),
            "regrouping": (a + b) - a,
            "half": halves.astype(np.float32),
            "narrowing": np.minimum(b, most).astype(np.float16).view(np.uint16).astype(np.int32),
            "signed": (packed * other).reshape(-1, 4).sum(axis=1, dtype=np.int32),
            "mixed": (packed * unsigned).reshape(-1, 4).sum(axis=1, dtype=np.int32),
        }


def samples() -> Samples:
    """Pairs spread over many exponents, then subnormal ones; every fourth binary16 number of both
    signs in words whose upper bytes take the extremes."""
    a, b = sample_pairs()
    tiny = np.random.default_rng(21).integers(1, 1 << 23, TINY, dtype=np.uint32).view(np.float32)
    a, b = np.concatenate([a, tiny]), np.concatenate([b, np.abs(b[:TINY]) + np.float32(1)])
    low = np.resize(np.arange(0, 1 << 16, 4, dtype=np.uint32), len(a))
    upper = np.resize(np.array([0x8080, 0x7F7F, 0x80FF, 0x0001], np.uint32), len(a))
    return Samples(a, b, low | upper << np.uint32(16))


def columns(words: NDArray[np.int32]) -> Found:
    """Results by name, from int32[samples, results]."""
    return {
        name: column if name in INTEGERS else column.view(np.float32)
        for name, column in zip(RESULTS, np.ascontiguousarray(words.T), strict=True)
    }


def right(found: Found, expected: Found) -> dict[str, bool]:
    """Whether all judged values are ==; of NaN only that it is one."""
    judged = {name: slice(None if name in JUDGED_TINY else -TINY) for name in expected}
    return {
        name: bool(
            np.array_equal(
                found[name][judged[name]],
                requested[judged[name]],
                equal_nan=name not in INTEGERS,
            )
        )
        for name, requested in expected.items()
    }


def traits_of(answer: Answer, tier: str, device: str, has_dot: bool) -> Traits:
    """What the device does as the exact arithmetic wants it; integers do the rest.

    Raises TierUnavailable where no remedy helps.
    """
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
    """Which kernels a device with such ``traits`` runs."""
    own = {"division": traits.divide, "root": traits.root, "binary16": traits.half}
    integers = [name for name, native in own.items() if not native]
    products = "packed dot products" if traits.dot else "products without packed dot products"
    if traits.matrix:
        products += " and matrix units"
    return f"{products}, {', '.join(integers) or 'nothing'} in integers"
