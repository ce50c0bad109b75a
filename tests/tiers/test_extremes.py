"""Operands that parity does not draw: the largest sums, scales of every exponent, long rows, scores
and sinks that break a head, on this processor's kernels and on those for processors without its
vector instructions."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from contract.dtypes import F32, I12, KV_DTYPES, MXFP4, WEIGHT_DTYPES, DType, StorageClass
from contract.opcodes import Opcode
from harness.parity.cases import Case, all_cases
from harness.parity.execute import Example, by_definition, compare
from harness.parity.operands import fill
from harness.parity.shape import OpShape
from reference.matrix import Matrix
from reference.quant import EXPONENT_BIAS, LAYOUTS
from tests.opencl_parts import HALF_OF_THEM

PORTABLE = "opencl-portable"
on_processors = pytest.mark.parametrize("way", ["native", PORTABLE], indirect=True, scope="module")
PAGED = (Opcode.FLASH_ATTN, Opcode.FLASH_ATTN_BATCHED, Opcode.KV_WRITE_BATCHED)
DTYPES = [dtype for dtype in WEIGHT_DTYPES if dtype.name.upper() in HALF_OF_THEM]


def on_processors_in(dtypes: Iterable[DType]) -> pytest.MarkDecorator:
    """A test of each format on this processor, and on others of those that their program has."""
    pairs = [
        pytest.param(way, dtype, id=f"{dtype}-{way}")
        for way in ("native", PORTABLE)
        for dtype in dtypes
        if way == "native" or dtype in DTYPES
    ]
    return pytest.mark.parametrize(("way", "dtype"), pairs, indirect=["way"], scope="module")


def changed(case: Case, **operands: Any) -> Example:
    """A case with other operands."""
    given = {**fill(case), **operands}
    return Example(case, given, by_definition(case, given))


def product(dtype: DType, tokens: int, rows: int, columns: int, kind: str = "normal") -> Case:
    sizes = {"tokens": tokens, "inner": columns, "outputs": rows}
    return Case(Opcode.MATMUL, dtype, OpShape("x".join(map(str, sizes.values())), sizes), kind, 0)


@pytest.mark.parametrize("way", [PORTABLE], indirect=True, scope="module")
def test_portable_kernels_are_the_definitions(tier):
    """Parity has the others: products, rows of tables, attention and pages of every sort."""
    cases = [case for case in all_cases() if case.opcode in PAGED and case.dtype in KV_DTYPES][::23]
    cases += [
        case
        for case in all_cases()
        if case.opcode in (Opcode.MATMUL, Opcode.EMBED) and case.dtype in DTYPES
    ][::5]
    assert [str(case) for case in cases if compare(tier, case)] == []


@on_processors_in(WEIGHT_DTYPES)
def test_long_rows_and_many_tokens(tier, dtype):
    """More columns than a worker rearranges at a time, the last span and segment short; a token
    that is broken among many."""
    short = 256 if dtype.block_elements == 256 else 288
    for case in (
        *(product(dtype, tokens, 35, 9216 + short) for tokens in (1, 5)),
        *(product(dtype, 100, 33, 1536), product(dtype, 40, 20, 512, "inf")),
    ):
        assert compare(tier, case) == {}, str(case)


@on_processors_in(dtype for dtype in WEIGHT_DTYPES if dtype.storage is not StorageClass.FLOAT)
def test_the_largest_sums(tier, dtype):
    """Every integer at its extreme: no sum leaves int32 and no saturating instruction saturates."""
    x = np.full((4, 512), 2047.0, np.float32) * np.array([[1], [-1], [1], [-1]], np.float32)
    x[2, ::2] *= -1
    blocks = np.full((2, dtype.row_bytes(512)), 0xFF, np.uint8)
    blocks[1] = 0
    parts = LAYOUTS[dtype].parts(blocks)
    for name in LAYOUTS[dtype].floats or ("e",):
        parts[name] = 1.0 if LAYOUTS[dtype].floats else EXPONENT_BIAS
    if dtype.name == "q6_k":
        parts["scales"] = -128
        # With sixteen alike, errors of 2^16 would add up to 0 modulo 2^32.
        parts["scales"][..., -1] = -127
    weight = Matrix(dtype, (2, 512), blocks)
    for rows in (x[:1], x[1:2], x[2:3], x):
        known = changed(product(dtype, len(rows), 2, 512), x=rows, weight=weight)
        assert compare(tier, known) == {}


@on_processors
def test_every_exponent(tier):
    """MXFP4's scales from 0 over 2^-126 to 2^127; the largest overflow, no result is subnormal."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    weight, case = Matrix(MXFP4, (256, 32), blocks), product(MXFP4, 6, 256, 32, "inf")
    x = np.float32(2.0**90) * rng.standard_normal((6, 32)).astype(np.float32)
    known = changed(case, x=x, weight=weight)
    assert not known.expected["y"][:, :2].any()
    assert np.isinf(known.expected["y"]).any()
    assert compare(tier, known) == {}


def attended(runs: tuple[tuple[int, int, int], ...], dtype: DType = F32, **given: Any) -> Case:
    """Attention of the tokens of ``runs``; of one token a run by the opcode for few."""
    opcode = Opcode.FLASH_ATTN_BATCHED if any(run[2] > 1 for run in runs) else Opcode.FLASH_ATTN
    sizes = {"heads": 6, "kv_heads": 3, "head_dim": 32, "scale": 0.125} | given
    return Case(opcode, dtype, OpShape(f"{opcode.name}-{runs}", sizes, runs), "huge", 0)


FEW, MANY = ((0, 89, 1), (1, 1099, 1)), ((0, 60, 9), (1, 1070, 30))
BROKEN: Mapping[str, Mapping[str, Any]] = {
    "sinks": {"sinks": np.array([0.5, -30.0, 4000.0, np.nan, np.inf, -np.inf], np.float32)},
    "scores": {"scale": 2.0**15},
    "windows": {"window": 1030, "soft_cap": 5.0},
}


@on_processors
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("runs", [FEW, MANY], ids=["few", "many"])
def test_what_breaks_a_head(tier, runs, broken):
    """Weak, strong and broken sinks, scores beyond 2^20, of which some are in a window."""
    for dtype in (F32, I12):
        known = broken_heads(runs, broken, dtype)
        assert np.isnan(known.expected["y"]).any()
        assert np.isfinite(known.expected["y"]).any()
        assert compare(tier, known) == {}


@cache
def broken_heads(runs: tuple[tuple[int, int, int], ...], broken: str, dtype: DType) -> Example:
    """Queries with a NaN and a large number: the definition takes longer than tiers, once for all
    of them."""
    given = dict(BROKEN[broken])
    sinks = given.pop("sinks", np.zeros(6, np.float32))
    case = attended(runs, dtype, **given)
    rng = np.random.default_rng(3)
    tokens = sum(run[2] for run in runs)
    q = rng.standard_normal((tokens, 6 * 32)).astype(np.float32)
    q[0, 40], q[-1, 7] = np.nan, 2.0**40
    known = changed(Case(case.opcode, dtype, case.shape, "normal", 0), q=q, sinks=sinks)
    return Example(case, known.operands, known.expected)


PLAIN_NORM = OpShape(
    "plain", {"tokens": 5, "width": 896, "eps": 0.0, "groups": 1}, absent=frozenset(("weight",))
)


@on_processors
@pytest.mark.parametrize("kind", ["normal", "tiny", "denormal", "inf", "zeros"])
def test_a_norm_without_weight_and_epsilon(tier, kind):
    """No tier invents a direction for a vector of zeros: it is NaN."""
    case = Case(Opcode.RMS_NORM, None, PLAIN_NORM, "inf" if kind == "zeros" else kind, 0)
    zeros = {"x": np.zeros((5, 896), np.float32)} if kind == "zeros" else {}
    known = changed(case, **zeros)
    assert np.isnan(known.expected["y"]).all() == (kind == "zeros")
    assert compare(tier, known) == {}
