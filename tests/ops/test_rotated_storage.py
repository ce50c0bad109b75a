"""Rule R13 against formulations of its own: the rotation, the codes, and the bytes of a page."""

import re
from importlib import resources

import numpy as np
import pytest

from contract.dtypes import F16, I3R, I4R, DType
from reference.exact.attention_rows import row_integers
from reference.exact.coded_rows import CodedRows, coded, decoded, rotated, rotated_back, signs
from reference.exact.kv_storage import integers, page_view, store
from reference.exact.philox import philox
from reference.ops.flash_attn_batched import flash_attn_batched
from tests.ops.paged import softmax_attention

SIZES = (32, 64, 96, 128, 192, 320, 512)
"""Heads of one block, and of 3, 3 and 5 blocks."""


def hadamard(size: int) -> np.ndarray:
    """The Walsh-Hadamard matrix: entry (i, j) is -1 to the number of bits that i and j share."""
    i = np.arange(size)
    shared = np.bitwise_count(i[:, None] & i)
    return np.where(shared % 2, -1.0, 1.0)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_the_product_with_a_matrix(size):
    """Blocks are the largest power of two that divides the head, and rows keep their length."""
    x = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    block = size & -size
    matrix = np.kron(np.eye(size // block), hadamard(block)) / np.sqrt(block)
    expected = (x * signs(size)).astype(np.float64) @ matrix
    assert np.abs(rotated(x) - expected).max() < 1e-5
    assert np.abs(rotated_back(rotated(x)) - x).max() < 2e-6
    assert np.abs(np.linalg.norm(rotated(x), axis=1) / np.linalg.norm(x, axis=1) - 1).max() < 1e-5


def test_a_row_that_is_one_channel_is_spread_over_its_block():
    x = np.zeros(96, np.float32)
    x[40] = 8.0
    y = rotated(x)
    assert (np.abs(y[32:64]) == np.abs(y[32])).all()
    assert not y[:32].any()
    assert not y[64:].any()


@pytest.mark.parametrize("value", [1e-45, 2.0**-65, -(2.0**-64) * 0.99])
def test_what_is_too_small_counts_as_zero(value):
    assert not rotated(np.full(32, value, np.float32)).any()
    assert not rotated_back(np.full(32, value, np.float32)).any()
    assert rotated(np.full(32, 2.0**-64, np.float32)).any()


@pytest.mark.parametrize("kernel", ["opencl/kernels/rotate_heads.cl", "kernels/rotate_heads.k"])
def test_kernels_hold_the_signs(kernel):
    words = [f"{word:08x}" for n in range(5) for word in philox((0, 0), (n, 0, 0, 0))]
    text = resources.files("accel").joinpath(*kernel.split("/")).read_text()
    assert [w for w in re.findall("0x([0-9a-f]{8})u", text) if w != "3f3504f3"] == words[:18]


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_codes_are_the_best_of_six_scales(bits):
    """Against a search over all codes and scales of a group, one after the other."""
    rng = np.random.default_rng(bits)
    m = np.rint(rng.standard_normal((6, 32)) * [[1], [9], [100], [400], [600], [0]]).astype(
        np.int32
    )
    m[4, 0] = 2047
    top, made = 2**bits - 1, decoded(coded(m, bits), bits)
    assert np.abs(made).max() < 2048
    assert coded(m, bits).scale.max() < 256
    for group, found in zip(m, made, strict=True):
        largest = min(int(np.ceil(np.abs(group).max() / top)), 2048 // top, 255)
        errors = []
        for i in range(6):
            levels = (largest - largest * i // 16) * np.arange(-top, top + 1, 2)
            errors.append(int(((group[:, None] - levels) ** 2).min(axis=1).sum()))
        assert ((group - found) ** 2).sum() == min(errors)


def test_an_integer_between_two_codes_takes_the_lower_one():
    m = np.zeros((1, 32), np.int32)
    m[0, :3] = 15, -15, 2
    made = coded(m, 4)
    assert made.scale.tolist() == [[1]]
    assert made.code[0, 0, :4].tolist() == [15, 0, 8, 7]
    assert decoded(CodedRows(made.code, made.scale), 4)[0, :4].tolist() == [15, -15, 1, -1]


def test_bytes_of_a_page_of_i3r():
    """Where codes of 4 and of 3 bits, scales and exponents of one token are."""
    k, v = np.random.default_rng(2).standard_normal((2, 1, 1, 64)).astype(np.float32)
    kv = page_view(np.zeros(32 * I3R.row_bytes(64), np.uint8), I3R, (1, 2, 16, 1, 64))
    store(kv, np.zeros(1, np.int32), np.array([5], np.int32), k, v)
    page = np.frombuffer(kv.tobytes(), np.uint8)
    keys, values = row_integers(rotated(k[0, 0]), 10), row_integers(rotated(v[0, 0]), 10)
    key, value = coded(keys.m, 4), coded(values.m, 3)
    for group in range(2):
        low = key.code[group, :16] | key.code[group, 16:] << 4
        assert page[5 * 32 + 16 * group :][:16].tolist() == low.tolist()
        code, octets = value.code[group], page[512 + 128 * group + 5 :: 16][:8].astype(int)
        assert [octets[i % 8] >> i // 8 * 2 & 3 for i in range(32)] == (code & 3).tolist()
        top = int.from_bytes(page[768 + 64 * group + 4 * 5 :][:4].tobytes(), "little")
        assert [top >> i & 1 for i in range(32)] == (code >> 2).tolist()
        assert page[896 + 2 * 5 + group] == key.scale[group]
        assert page[928 + 16 * group + 5] == value.scale[group]
    assert page[960:].view(np.int8)[[5, 21]].tolist() == [keys.exponent, values.exponent]
    assert len(page) == 992


def test_bytes_of_a_page():
    """Where the codes, fifth bits, scales and exponents of one token are; nothing else moves."""
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 1, 1, 64)).astype(np.float32)
    kv = page_view(np.full(2 * 32 * I4R.row_bytes(64), 0x55, np.uint8), I4R, (2, 2, 16, 1, 64))
    store(kv, np.array([1], np.int32), np.array([5], np.int32), k, v)
    page = np.frombuffer(kv[1, 0].tobytes(), np.uint8)
    assert len(page) == 16 * (2 * 19 * 2 + 2)
    keys, values = row_integers(rotated(k[0, 0]), 10), row_integers(rotated(v[0, 0]), 10)
    key, value = coded(keys.m, 5), coded(values.m, 4)
    for group in range(2):
        codes = page[5 * 32 + 16 * group :][:16]
        assert (
            codes.tolist()
            == (key.code[group, :16] & 15 | (key.code[group, 16:] & 15) << 4).tolist()
        )
        fifth = int.from_bytes(page[1024 + 8 * 5 + 4 * group :][:4].tobytes(), "little")
        assert [fifth >> i & 1 for i in range(32)] == (key.code[group] >> 4).tolist()
        codes = page[512 + 256 * group + 5 :: 16][:16]
        assert codes.tolist() == (value.code[group, :16] | value.code[group, 16:] << 4).tolist()
        assert page[1152 + 2 * 5 + group] == key.scale[group]
        assert page[1184 + 16 * group + 5] == value.scale[group]
    exponents = page[1216:].view(np.int8)
    assert (exponents[5], exponents[16 + 5]) == (keys.exponent, values.exponent)
    touched = np.ones(len(page), bool)
    touched[np.flatnonzero(page == 0x55)] = False
    assert touched.sum() <= 2 * (32 + 2 + 1) + 8
    assert (np.frombuffer(kv[0, 0].tobytes(), np.uint8) == 0x55).all()


@pytest.mark.parametrize("dtype", [I4R, I3R], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**44])
def test_a_broken_row_breaks_those_who_see_it(bad, dtype):
    rows = np.ones((2, 1, 32), np.float32)
    rows[1, 0, 3] = bad
    kv = page_view(np.zeros(32 * dtype.row_bytes(32), np.uint8), dtype, (1, 2, 16, 1, 32))
    store(kv, np.zeros(2, np.int32), np.arange(2, dtype=np.int32), rows, np.ones_like(rows))
    assert integers(kv).broken[0, 0, :2, 0].tolist() == [False, True]
    query = np.array([(0, 0, 0, 0), (0, 0, 1, 0)], np.int32)
    table, sizes = np.zeros((1, 1), np.int32), {"heads": 1, "kv_heads": 1, "head_dim": 32}
    y = flash_attn_batched(
        q=np.ones((2, 32), np.float32), kv=kv, page_table=table, query=query, scale=0.2, **sizes
    )
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


def error_of(dtype: DType, head_dim: int) -> float:
    """The root of the mean square of attention's error, one channel of 32 of the keys being
    thirty times the others."""
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 48, 1, head_dim)).astype(np.float32)
    q = rng.standard_normal((1, head_dim)).astype(np.float32)
    k[..., ::32] *= 30
    q[..., ::32] /= 30
    kv = page_view(
        np.zeros(3 * 32 * dtype.row_bytes(head_dim), np.uint8), dtype, (3, 2, 16, 1, head_dim)
    )
    positions = np.arange(48, dtype=np.int32)
    store(kv, positions // 16, positions % 16, k, v)
    y = flash_attn_batched(
        q=q, kv=kv, page_table=np.arange(3, dtype=np.int32)[None],
        query=np.array([(0, 0, 47, 0)], np.int32),
        heads=1, kv_heads=1, head_dim=head_dim, scale=head_dim**-0.5,
    )  # fmt: skip
    exact = softmax_attention(q[0], k[:, 0], v[:, 0], head_dim**-0.5, 0.0, -np.inf)
    return float(np.sqrt(((y[0] - exact) ** 2).mean()))


@pytest.mark.parametrize("head_dim", [64, 96])
def test_attention_is_close_to_binary64(head_dim, monkeypatch):
    """F16 is closer, and without the rotation outliers among the keys cost much more."""
    error = error_of(I4R, head_dim)
    assert error_of(F16, head_dim) < error < error_of(I3R, head_dim) < 0.2
    monkeypatch.setattr("reference.exact.kv_storage.rotated", lambda x: x)
    monkeypatch.setattr("reference.ops.flash_attn_batched.rotated", lambda x: x)
    monkeypatch.setattr("reference.ops.flash_attn_batched.rotated_back", lambda x: x)
    assert error_of(I4R, head_dim) > 1.3 * error
