"""The primitives of ``exact.k`` against numpy: what the self-test of a device asks."""

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.kernels.source import Traits
from accel.packets.packet import PACKET
from tests.kernels.processor import ProcessorModules

RESULTS = 9
SAMPLES = 1 << 14
EDGES = np.array(
    (
        *(0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x477FE000, 0x477FEFFF, 0x477FF000),
        *(0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    ),
    np.uint32,
)
"""Bits of zero, subnormals, one, binary16's limits and halves of its smallest, infinity, NaN."""


def samples() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint32]]:
    """Any bits, positive and negative, and every pair of edges."""
    rng = np.random.default_rng(1)
    signed = np.concatenate([EDGES, EDGES | np.uint32(1 << 31)])
    left, right = (part.reshape(-1) for part in np.meshgrid(signed, signed))
    more = rng.integers(0, 1 << 32, (2, SAMPLES), np.uint32)
    a, b = np.concatenate([left, more[0]]), np.concatenate([right, more[1]])
    words = rng.integers(0, 1 << 32, len(a), np.uint32)
    words[: 1 << 11] = np.arange(1 << 11) * 32
    return a.view(np.float32), b.view(np.float32), words


def answered(traits: Traits) -> NDArray[np.uint32]:
    """uint32[samples, RESULTS] as a processor computes them."""
    a, b, words = samples()
    results = np.zeros((len(a), RESULTS), np.uint32)
    packet = np.zeros(1, PACKET)
    packet["operand"][0, :4] = [array.ctypes.data for array in (a, b, words, results)]
    packet["size"][0, 0] = len(a)
    ProcessorModules(traits).launch("self_test", packet, 3)
    return results


def expected() -> NDArray[np.uint32]:
    """The same by numpy, every operation rounded once."""
    a, b, words = samples()
    left, right = words.view(np.int8).reshape(-1, 4), a.view(np.int8).reshape(-1, 4)
    limit = np.float32(65504.0)
    with np.errstate(all="ignore"):
        floats = (
            a / b,
            np.sqrt(a),
            a * b + a,
            a - (b - np.float32(1.0)),
            (a + b) - a,
            words.astype(np.uint16).view(np.float16).astype(np.float32),
        )
        halves = np.clip(b, -limit, limit).astype(np.float16).view(np.uint16)
    halves[np.isnan(b)] = 0x7E00
    signed = (left.astype(np.int32) * right).sum(axis=1, dtype=np.int32)
    mixed = (left.astype(np.int32) * right.view(np.uint8)).sum(axis=1, dtype=np.int32)
    bits = [column.view(np.uint32) for column in (*floats, signed, mixed)]
    return np.stack([*bits[:6], halves.astype(np.uint32), *bits[6:]], axis=1)


def same(got: NDArray[np.uint32], requested: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Equal columns, every NaN being alike; NaN and zero keep their bits only as integers."""
    equal = got == requested
    floats = slice(0, 6)
    x, y = got[:, floats].view(np.float32), requested[:, floats].view(np.float32)
    equal[:, floats] |= (x == y) | (np.isnan(x) & np.isnan(y))
    return equal.all(axis=0)


@pytest.mark.parametrize(
    "traits", [Traits(), Traits(divide=False, root=False, half=False)], ids=["native", "integers"]
)
def test_primitives_equal_numpy(traits):
    """Subnormals, infinities, NaN, ties and overflow; by the device and in integers."""
    assert same(answered(traits), expected()).all()


def test_a_wrong_primitive_is_noticed(monkeypatch):
    """A root of integers that is one too large fails, and nothing else."""
    from accel.kernels import source

    stored = source._file
    right, wrong = "AS_F32(TO_U32(c + (", "AS_F32(TO_U32(c + 1 + ("
    assert right in stored("exact.k")
    monkeypatch.setattr(source, "_file", lambda name: stored(name).replace(right, wrong))
    found = same(answered(Traits(root=False)), expected())
    assert found.tolist() == [True, False] + [True] * 7
