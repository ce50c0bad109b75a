"""The arithmetic of embeddings: exact, and whatever the chunks, the same."""

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from contract.errors import UnsupportedModel
from harness.host.pooling import Pool, Pooling, pooling_of

Rows = NDArray[np.float32]


def states(tokens: int, seed: int, width: int = 9) -> Rows:
    random = np.random.default_rng(seed)
    scale = 2.0 ** random.integers(-20, 20, (tokens, width))
    return (random.standard_normal((tokens, width)) * scale).astype(np.float32)


def pooled(rows: Rows, pooling: Pooling, cuts: list[int], dimensions: int | None = None) -> Rows:
    pool = Pool(pooling, len(rows))
    bounds = sorted({pool.rows_from, *(c for c in cuts if c > pool.rows_from), len(rows)})
    for start, stop in pairwise(bounds):
        pool(start, rows[start:stop])
    return pool.vector(dimensions)


def by_definition(rows: Rows, pooling: Pooling, dimensions: int | None) -> list[float]:
    """The same in Python's own numbers: every operation once, each sum of squares exact."""
    columns = rows.astype(np.float64).T.tolist()
    if pooling is Pooling.MEAN:
        numbers = []
        for column in columns:
            total = column[0]
            for value in column[1:]:
                total += value
            numbers.append(total / len(rows))
    else:
        numbers = [column[0 if pooling is Pooling.FIRST else -1] for column in columns]
    numbers = numbers[:dimensions]
    squares = sum((Fraction(x * x) for x in numbers), Fraction())
    length = math.sqrt(float(squares))
    return [float(np.float32(x / length)) for x in numbers]


@given(
    st.integers(1, 12),
    st.integers(0, 2**32),
    st.sampled_from(Pooling),
    st.lists(st.integers(1, 11)),
    st.sampled_from([None, 1, 4]),
)
def test_chunks_change_nothing(tokens, seed, pooling, cuts, dimensions):
    rows = states(tokens, seed)
    cuts = [cut for cut in cuts if cut < tokens]
    vector = pooled(rows, pooling, cuts, dimensions)
    assert vector.dtype == np.float32
    assert vector.tolist() == by_definition(rows, pooling, dimensions)


def test_other_additions_give_other_bits():
    """The control: a mean in binary32 is another one somewhere."""
    different = 0
    for seed in range(50):
        rows = states(40, seed)
        mean = rows.mean(axis=0).astype(np.float64)
        other = (mean / np.sqrt((mean * mean).sum())).astype(np.float32)
        different += other.tobytes() != pooled(rows, Pooling.MEAN, []).tobytes()
    assert different


def test_additions_are_by_position_and_squares_are_summed_exactly():
    """Numbers of which another order, or sums that round on the way, would make others."""
    rows = np.array([[2.0**60, 1], [1, 1], [-(2.0**60), 1]], np.float32)
    assert pooled(rows, Pooling.MEAN, []).tolist() == [0, 1]
    tie = [2.0**-28, 2.0**-52, 5 * 2.0**-80, 0]
    columns = [[1] * 4, *[[2.0**-27] * 4] * 40, tie]
    rows = np.array(columns, np.float32).T
    assert pooled(rows, Pooling.MEAN, [])[-1] == 2.0**-30
    numbers = rows.astype(np.float64).sum(axis=0) / 4
    rounded = numbers / np.sqrt((numbers * numbers).sum())
    assert rounded.astype(np.float32)[-1] == 2.0**-30 * (1 + 2.0**-23)


def test_only_rows_that_are_wanted_need_be_computed():
    assert [Pool(pooling, 7).rows_from for pooling in Pooling] == [0, 0, 6]


def test_nothing_and_too_much():
    assert pooled(np.zeros((3, 4), np.float32), Pooling.MEAN, []).tolist() == [0.0] * 4
    broken = np.ones((2, 3), np.float32)
    broken[1, 1] = np.inf
    for pooling in (Pooling.MEAN, Pooling.LAST):
        with pytest.raises(ValueError, match="not finite"):
            pooled(broken, pooling, [])
    assert (
        pooled(broken, Pooling.FIRST, []).tolist()
        == pooled(np.ones((1, 3), np.float32), Pooling.MEAN, []).tolist()
    )


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(None, Pooling.MEAN), (1, Pooling.MEAN), (2, Pooling.FIRST), (3, Pooling.LAST), (4, None),
     (True, None), ("last", None)],
)  # fmt: skip
def test_the_file_says_how(kind, pooling):
    metadata = {} if kind is None else {"qwen3.pooling_type": kind}
    model = SimpleNamespace(
        config=SimpleNamespace(architecture="qwen3"),
        file=SimpleNamespace(metadata=metadata, path=Path("m.gguf")),
    )
    if pooling is None:
        with pytest.raises(UnsupportedModel, match="makes no embedding"):
            pooling_of(model)  # type: ignore[arg-type]
    else:
        assert pooling_of(model) is pooling  # type: ignore[arg-type]
