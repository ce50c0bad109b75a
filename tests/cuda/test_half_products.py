"""Products of prompts in binary16: where they run, and their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.device import Device
from accel.cuda.half_products import HALF_TOKENS, halves_are_faster
from contract import dtypes
from contract.dtypes import DType
from reference.quant.dot import matmul
from tests.cuda.emulated_step import OLDER
from tests.cuda.product_cases import (
    WIDE,
    check_layer,
    check_product,
    entries,
    layer,
    one_product,
    run,
)

FORM = 400
"""Tokens of a form of prompts; a step may have fewer."""
LAUNCHES = ["unit_pack_fours", "half_groups"]


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(70, 250, 1280), (HALF_TOKENS + 13, 278, 512), (1, 20, 256)]
)
def test_a_prompt_has_the_bits_of_the_definition(
    tokens: int, rows: int, columns: int, folder: Path
) -> None:
    """Two blocks of rows and of tokens, neither full; spans of four units and of one; a broken
    segment, a token of zeros, a segment of very small numbers."""
    case = one_product(dtypes.Q5_K, rows, columns, tokens)
    if tokens > 1:
        case.x[3, 250] = np.inf
        case.x[tokens - 4] = 0
        case.x[tokens - 6, :256] = 1e-30
    assert entries(case, FORM) == LAUNCHES
    check_product(case, folder, FORM)


@pytest.mark.parametrize("period", [2, 3, 256])
def test_the_largest_sums_of_halves(period: int, folder: Path) -> None:
    """Codes, scales, minima and integers as large as they can be, of one sign or of both: partial
    sums reach 2^24."""
    case = one_product(dtypes.Q5_K, 16, 512, 9)
    _, stored = case.matrices["w"]
    stored[:] = 0xFF
    stored.reshape(-1, dtypes.Q5_K.block_bytes).view(np.float16)[:, :2] = 1
    case.x[:] = np.float32(2047 / 1024)
    case.x[:, ::period] *= -1
    case.x[0] = np.float32(2047 / 1024)
    assert entries(case, FORM) == LAUNCHES
    check_product(case, folder, FORM)


@pytest.mark.parametrize("zeros", ["minima", "scales"])
def test_minima_or_scales_of_zero(zeros: str, folder: Path) -> None:
    """Each of both terms by itself."""
    case = one_product(dtypes.Q5_K, 32, 256, 5)
    _, stored = case.matrices["w"]
    of_both = stored.reshape(-1, dtypes.Q5_K.block_bytes).view(np.float16)
    of_both[:, 1 if zeros == "minima" else 0] = 0
    want = matmul(stored, dtypes.Q5_K, case.x)
    assert want.any()
    assert np.array_equal(run(case, folder, FORM)["y"], want)


def test_matrices_of_a_prompt_share_a_launch(folder: Path) -> None:
    """Three matrices with biases of one norm, a pair with its gate, and a product with a residual,
    of rows that fill no block."""
    case = layer(21, dtypes.Q5_K, biases=True, alone=True)
    check_layer(case, True, folder, FORM)
    assert entries(case, FORM) == LAUNCHES * 3


def test_another_code_changes_its_row(folder: Path) -> None:
    case = one_product(dtypes.Q5_K, 16, 256, 3)
    before = run(case, folder, FORM)["y"].copy()
    case.matrices["w"][1][5, -1] ^= 0x10
    after = run(case, folder, FORM)["y"]
    assert np.array_equal(after, matmul(case.matrices["w"][1], dtypes.Q5_K, case.x))
    assert np.argwhere(before != after)[:, 1].tolist() == [5] * 3


@pytest.mark.parametrize(
    ("dtype", "columns", "tokens", "rows", "device", "faster"),
    [
        (dtypes.Q5_K, 4096, 512, (4096,), WIDE, True),
        (dtypes.Q5_K, 4096, 2048, (24576,), WIDE, True),
        (dtypes.Q5_K, 4096, 2048, (4096, 1024), WIDE, True),
        (dtypes.Q5_K, 4096, 512, (4096, 1024), WIDE, False),
        (dtypes.Q5_K, 2304, 777, (1000,), WIDE, False),
        (dtypes.Q5_K, 4096, 384, (4096,), WIDE, False),
        (dtypes.Q4_K, 4096, 512, (4096,), WIDE, False),
        (dtypes.Q6_K, 4096, 512, (4096,), WIDE, False),
        (dtypes.Q5_K, 4096, 512, (4096,), replace(WIDE, shared_bytes=163 << 10), False),
    ],
    ids=str,
)
def test_where_it_is_faster(
    dtype: DType, columns: int, tokens: int, rows: tuple[int, ...], device: Device, faster: bool
) -> None:
    """Of few rows smaller blocks fill more multiprocessors."""
    assert halves_are_faster(dtype, columns, tokens, rows, device) == faster


def test_older_devices_have_no_such_products() -> None:
    case = one_product(dtypes.Q5_K, 150, 512, 70)
    assert entries(case, FORM, OLDER) == ["unit_pack_fours", "unit_matrix"]
