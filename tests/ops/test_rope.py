"""ROPE against scalar rotations of single pairs."""

import numpy as np
import pytest

from reference.exact.rotary import rotary_table
from reference.ops.rope import rope

F = np.float32
ROTATION_ERROR = 3e-7
"""Against binary64, relative to the pair's length: table, two products and a sum rounded."""


def query_at(*positions: int) -> np.ndarray:
    """Query records of slot 0 at the given positions."""
    return np.array([(0, 0, position, 0) for position in positions], np.int32)


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize(("head_dim", "pairs"), [(16, 8), (40, 20), (80, 16), (8, 1)])
def test_scalar_rule(neox, head_dim, pairs):
    """Every channel of every head, those past the pairs untouched."""
    rng = np.random.default_rng(head_dim)
    heads, positions = 3, (0, 1, 63, 64, 200)
    x = rng.standard_normal((len(positions), heads * head_dim), dtype=np.float32)
    table = rotary_table(256, 10_000.0, 2 * pairs)
    got = rope(
        x=x, rope_table=table, query=query_at(*positions), heads=heads, head_dim=head_dim, neox=neox
    )
    for token, position in enumerate(positions):
        for head in range(heads):
            row = x[token, head * head_dim : (head + 1) * head_dim]
            expected = row.copy()
            for pair in range(pairs):
                i, j = (pair, pair + pairs) if neox else (2 * pair, 2 * pair + 1)
                cosine, sine = table[position, 0, pair], table[position, 1, pair]
                expected[i] = F(F(row[i] * cosine) - F(row[j] * sine))
                expected[j] = F(F(row[i] * sine) + F(row[j] * cosine))
            got_row = got[token, head * head_dim : (head + 1) * head_dim]
            assert got_row.tolist() == expected.tolist()


def test_against_complex_rotation():
    """In binary64 a pair is a complex number turned by position * base^(-2m/D)."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((50, 64), dtype=np.float32)
    table = rotary_table(50, 500_000.0, 64)
    got = rope(
        x=x, rope_table=table, query=query_at(*range(50)), heads=1, head_dim=64, neox=1
    ).astype(np.float64)
    frequency = 500_000.0 ** (-2.0 * np.arange(32) / 64)
    turn = np.exp(1j * np.arange(50)[:, None] * frequency)
    exact = (x[:, :32] + 1j * x[:, 32:].astype(np.float64)) * turn
    error = np.abs(got[:, :32] + 1j * got[:, 32:] - exact)
    assert (error <= ROTATION_ERROR * np.abs(exact)).all()


def test_position_zero_changes_nothing():
    """cos 0 = 1 and sin 0 = 0 exactly."""
    x = np.random.default_rng(1).standard_normal((1, 32), dtype=np.float32)
    table = rotary_table(1, 10_000.0, 16)
    assert (rope(x=x, rope_table=table, query=query_at(0), heads=2, head_dim=16, neox=0) == x).all()


def test_operand_is_not_changed():
    """The rotation is not in place."""
    x = np.ones((1, 16), np.float32)
    rope(
        x=x, rope_table=rotary_table(8, 10_000.0, 16), query=query_at(5), heads=1, head_dim=16,
        neox=1,
    )  # fmt: skip
    assert (x == 1).all()
